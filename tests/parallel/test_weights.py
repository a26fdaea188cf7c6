"""A rank's parts of a checkpoint: what is read, what divides, what a stage asks for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.checkpoints.folder import TensorFolder
from layerzero.formats.errors import FormatError
from layerzero.parallel import FolderWeights, Layout, TensorGroup, shard_weights, stage_weights
from layerzero.parallel import weights as weights_module

safetensors = pytest.importorskip("safetensors.torch", reason="checkpoints need safetensors")

ATTENTION = "model.layers.0.self_attn"
Q, K, OUT, BIAS = (
    f"{ATTENTION}.{name}" for name in ("q_proj.weight", "k_proj.weight", "o_proj.weight", "o_proj.bias")
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four weights of one layer: eight heads of two, two of them for keys."""
    tensors = {Q: torch.randn(16, 6), K: torch.randn(4, 6), OUT: torch.randn(6, 16), BIAS: torch.randn(6)}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_the_parts_of_all_ranks_are_the_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of what makes heads, columns of what takes them, a bias once; the rest of a tensor is not read."""
    get = FolderWeights(folder)
    whole = {name: get(name, shape) for name, shape in ((Q, (16, 6)), (OUT, (6, 16)), (BIAS, (6,)))}
    monkeypatch.setattr(TensorFolder, "tensor", unread)
    parts = [shard_weights(get, TensorGroup(rank, 4)) for rank in range(4)]
    assert torch.equal(torch.cat([part(Q, (4, 6)) for part in parts]), whole[Q])
    assert torch.equal(torch.cat([part(OUT, (6, 4)) for part in parts], 1), whole[OUT])
    monkeypatch.undo()
    assert torch.equal(torch.stack([part(BIAS, (6,)) for part in parts]).sum(0), whole[BIAS])
    assert parts[1](OUT, (6, 4)).is_contiguous()


def unread(folder: TensorFolder, name: str) -> Tensor:
    """A whole tensor, which no part needs."""
    raise AssertionError(f"all of {name} was read")


def test_fewer_key_heads_than_ranks_are_repeated(folder: Path) -> None:
    """Two key heads over four ranks: neighbours have the same one, which their query heads ask."""
    get = FolderWeights(folder)
    parts = [shard_weights(get, TensorGroup(rank, 4), kv_heads=2)(K, (2, 6)) for rank in range(4)]
    whole = get(K, (4, 6))
    assert [torch.equal(part, whole[2 * (n // 2) : 2 * (n // 2) + 2]) for n, part in enumerate(parts)] == [
        True
    ] * 4
    with pytest.raises(ValueError, match="ranks needs a divisor or a multiple of 3 kv_heads, got 4"):
        shard_weights(get, TensorGroup(0, 4), kv_heads=3)


def test_sizes_that_do_not_divide_are_refused(folder: Path) -> None:
    """By the weight's name, its axis and what would do."""
    get = FolderWeights(folder)
    with pytest.raises(ValueError, match=r"q_proj.weight needs axis 0 of a multiple of 3 .*, got 16"):
        get.part(Q, (16, 6), 0, 0, 3)
    with pytest.raises(FormatError, match=r"q_proj.weight needs shape \(20, 6\), got \(16, 6\)"):
        shard_weights(get, TensorGroup(0, 4))(Q, (5, 6))
    with pytest.raises(FormatError, match=r"needs the tensor model\.other\.weight, got none"):
        get("model.other.weight", (1,))
    with pytest.raises(ValueError, match="ranks needs a divisor of the model's 8 heads, got 3"):
        TensorGroup(0, 3).split("heads", 8)


def test_a_digest_is_of_what_the_files_hold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number changes it, and so does one in a block of a file that is too large to count whole."""
    before = FolderWeights(folder).digest
    assert before == FolderWeights(folder).digest and before.startswith(folder.name)
    monkeypatch.setattr(weights_module, "WHOLE_BYTES", 0)
    monkeypatch.setattr(weights_module, "BLOCK_BYTES", 4)
    sampled = FolderWeights(folder).digest
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    changed = FolderWeights(folder).digest
    monkeypatch.undo()
    assert len({before, sampled, changed, FolderWeights(folder).digest}) == 4


def test_a_stage_asks_for_its_own_layers() -> None:
    """Layers count from 0 in every stage, and a stage ends with the norm that the next one begins with."""
    asked: list[str] = []

    def get(name: str, shape: tuple[int, ...]) -> Any:
        asked.append(name)
        return torch.zeros(shape)

    def layout(stage: int) -> Any:
        made = SimpleNamespace(stage=stage, stages=2, first=stage == 0, last=stage == 1)
        made.layers = lambda count: Layout.layers(made, count)  # type: ignore[arg-type]
        return made

    for stage in range(2):
        piece = stage_weights(get, layout(stage), 5, like=torch.empty(0), tied=False)
        for name in ("embed_tokens", "layers.1.mlp.up_proj", "norm"):
            piece(f"model.{name}.weight", (1,))
        assert piece("lm_head.weight", (1,)).numel() == stage
    assert asked == [
        "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight",
        "model.layers.2.input_layernorm.weight", "model.layers.3.mlp.up_proj.weight", "model.norm.weight",
        "lm_head.weight",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="pp needs 1 to 1 stages, one layer each at least, got 2"):
        layout(0).layers(1)

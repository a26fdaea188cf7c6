"""A default device other than the tensors' changes nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import layerzero as lz
from layerzero.actors.group import step_message
from layerzero.actors.rpc.tensors import TensorPayload
from layerzero.checkpoints import writing
from layerzero.kvcache import KVCacheSpec, PagedCache
from layerzero.speculative import generation
from layerzero.tokenization.tokens import EncodeOptions
from tests.checkpoints.writers import WRITERS, save
from tests.tokenization.made import trained


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    """New tensors go to the meta device, where reading one is an error."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_a_seed_is_drawn_where_it_can_be_read() -> None:
    """Sampling without a seed draws one, whatever the default device."""
    assert lz.sync.sample_topk(torch.randn(3, 50, device="cpu"), 5).device.type == "cpu"


def test_ragged_attention_stays_on_its_tensors() -> None:
    """Every kernel that takes sequences of several lengths gives CPU results for CPU tensors."""
    q = torch.randn(5, 2, 32, device="cpu")
    cuts = torch.tensor([0, 2, 5], dtype=torch.int32, device="cpu")
    call = (q, q, q, cuts)
    kernels = [c.kernel for c in lz.select("ragged_attention", *call, is_causal=True).trace if c.accepted]
    assert kernels
    for kernel in kernels:
        out = lz.sync.ragged_attention(*call, is_causal=True, backend=kernel)
        ran = lz.last_selection()
        assert ran is not None
        assert (out.device.type, ran.kernel) == ("cpu", kernel)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_quantized_checkpoint_is_read_where_it_lies(kind: str, tmp_path: Path) -> None:
    """Every convention's tensors are of the CPU, whatever is made beside them."""
    with torch.device("cpu"):
        tensors, said, numbers = WRITERS[kind]()
        folder = save(tmp_path, tensors, said)
    checkpoint = lz.load_quantized(folder)
    found = checkpoint.dequantized(checkpoint.quantized[0])
    torch.testing.assert_close(found, numbers, rtol=2e-7, atol=0)


@pytest.mark.parametrize(("form", "method"), [("int4", "gptq"), ("mxfp4", "nearest")])
def test_a_model_is_rounded_where_it_lies(form: str, method: str, tmp_path: Path) -> None:
    """By products of rows and to the nearest; what is written is read."""
    source = tmp_path / "plain"
    source.mkdir()
    weight, rows = (torch.randn(16, 256, device="cpu") for _ in range(2))
    save_file({"a.weight": weight}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    grams = {"a.weight": (rows.T @ rows).double()}
    writing.quantize_folder(source, tmp_path / "out", form, method=method, grams=grams, tokens=16)
    found = lz.load_quantized(tmp_path / "out").dequantized("a.weight")
    assert (found - load_file(source / "model.safetensors")["a.weight"]).abs().max() < 1.0
    with torch.device("cpu"):
        writing.quantize_folder(source, tmp_path / "usual", form, method=method, grams=grams, tokens=16)
        torch.testing.assert_close(found, lz.load_quantized(tmp_path / "usual").dequantized("a.weight"))


@pytest.mark.parametrize("graphs", [False, True])
def test_pages_are_found_where_they_are(graphs: bool) -> None:
    """Positions, slots and tables of prompts and next tokens, with and without memory that stays."""
    cache = PagedCache(KVCacheSpec(1, 4), pages=8, page_size=4)
    sequence = cache.sequence(8)

    def step(metadata: Any, ids: Tensor) -> Tensor:
        parts = metadata.positions, metadata.slot_mapping, metadata.seq_lens
        assert all(part.is_cpu for part in (*parts, metadata.block_tables))
        out: Tensor = (ids + metadata.positions)[metadata.logits_indices]
        return out

    buckets: Any = {"buckets": (2,), "prefill_buckets": (8,)} if graphs else {}
    runner = lz.StepRunner(step, cache, max_model_len=16, max_num_seqs=2, **buckets)
    drawn = [runner([sequence.extend(count)], torch.arange(count, device="cpu")) for count in (5, 1)]
    assert [token.tolist() for token in drawn] == [[8], [5]]


def test_tokens_are_on_the_cpu() -> None:
    """Those of nothing, of the cache, and rows side by side."""
    tokenizer = lz.Tokenizer(trained(), namespace="a", cache=lz.PromptCache())
    options = EncodeOptions(special_tokens=False, offsets=True)
    (empty,) = tokenizer.encode_rows([""], [options])
    assert empty.ids.is_cpu and empty.offsets is not None and empty.offsets.is_cpu
    assert tokenizer.cache is not None
    tokenizer.cache.keep("key", empty)
    found = tokenizer.cache.find("key")
    assert found is not None and found.ids.is_cpu
    for side in ("left", "right"):
        padded = tokenizer.pad(tokenizer.encode(["a", "a b"]), pad_id=0, side=side)
        assert padded.ids.is_cpu and padded.mask.sum(-1).tolist() == [3, padded.ids.shape[1]]


def test_drafts_are_verified_on_the_cpu() -> None:
    """Texts of two models of the CPU; and the mask of a tree."""

    class Model:
        """It continues any token with the one after it."""

        def __init__(self) -> None:
            self.length = 0

        async def forward(self, tokens: Tensor) -> Tensor:
            self.length += len(tokens)
            return torch.eye(8, device="cpu")[(tokens + 1) % 8]

        def rollback(self, length: int) -> None:
            self.length = length

    async def main() -> list[int]:
        text = generation.generate(Model(), Model(), [1, 2], max_tokens=5, temperature=0.0)
        return [token async for token in text]

    assert asyncio.run(main()) == [3, 4, 5, 6, 7]
    assert lz.tree_mask([-1, 0]).tolist() == [[True, False], [True, True]]


def test_rows_of_a_rotation_are_where_they_came_from() -> None:
    """Every kernel of the CPU writes its results on the CPU."""
    q, tables = torch.randn(3, 2, 8, device="cpu"), torch.ones(2, 4, 4, device="cpu")
    call = q, q, torch.arange(3, device="cpu"), *tables
    kernels = [each.kernel for each in lz.select("rope", *call).trace if each.accepted]
    assert len(kernels) > 1
    for kernel in kernels:
        assert all(turned.is_cpu for turned in lz.sync.rope(*call, backend=kernel))


def test_what_other_processes_send_is_on_the_device_that_is_asked_for() -> None:
    """Results of calls, and tensors of a step's message."""
    tensor = torch.arange(4, device="cpu")
    assert TensorPayload.pack(tensor).unpack("cpu").tolist() == [0, 1, 2, 3]
    (found,) = step_message.unpack(step_message.pack([tensor], "a test"), "cpu")
    assert found.tolist() == [0, 1, 2, 3]

"""GPUs as data: the map that ships, a user's own before it, and what it makes of a choice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.ops import table as ops_table
from layerzero.spec import gpu_map as module
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.gpu_map import efficiency_on, gpu_map, preferred_on, read_gpu_map
from layerzero.spec.hardware import generation_of, hypothetical_gpu, mma_family_of


@pytest.fixture(autouse=True)
def unread() -> Iterator[None]:
    """No test sees what another one's file said."""
    caches = (gpu_map, efficiency_on, preferred_on)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    """The file that the variable names."""
    path = tmp_path / "gpus.toml"
    path.write_text("version = 1\n" + text)
    monkeypatch.setenv(module.VARIABLE, str(path))
    return path


def prefill(tokens: int) -> lz.Selection:
    """What a B200 would run for a prompt of that many tokens, 32 heads over 8, nothing measured."""
    with torch.device("meta"):
        q = torch.empty(1, 32, tokens, 128, dtype=torch.bfloat16)
        k = torch.empty(1, 8, tokens, 128, dtype=torch.bfloat16)
    return lz.dry_run("attention", q, k, k, is_causal=True, hardware="b200")


def test_blackwell_runs_a_prompt_as_the_published_figures_say() -> None:
    """FlashAttention-4 from 2,048 tokens up; below, where its host's share counts, torch's own."""
    for tokens in (2048, 4096, 16_384):
        chosen = prefill(tokens)
        assert (
            chosen.kernel == "flash_attn_4.attention.blackwell" and "preferred on this hardware" in chosen.why
        )
    assert prefill(512).kernel.startswith("torch.attention.sdpa")
    published = efficiency_on("flash_attn_4.attention.blackwell", 100)
    assert published is not None and published.flops == 0.71 and "1613 TFLOP/s" in published.source
    assert efficiency_on("flash_attn_4.attention.dense", 90) is None
    assert efficiency_on("flash_attn_4.attention.blackwell", 120) is None


def test_a_policy_goes_before_what_a_family_prefers() -> None:
    """Avoided, or another preferred, it is not taken."""
    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True):
        with lz.prefer("torch.attention.sdpa", op="attention"):
            assert prefill(8192).kernel == "torch.attention.sdpa"
        with lz.disable("flash_attn_4"):
            assert prefill(8192).kernel != "flash_attn_4.attention.blackwell"


def test_every_preferred_kernel_and_op_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ships names ops and families that are known, in ranges that do not overlap."""
    monkeypatch.delenv(module.VARIABLE, raising=False)
    known = gpu_map()
    assert {row.op for row in known.preferred} <= set(ops_table.names())
    families = {row.name for row in known.family}
    assert {row.family for row in known.preferred} | {row.family for row in known.efficiency} <= families
    for rows in (known.generation, known.family, known.tensor_cores, known.roof):
        ends = sorted(row.sm for row in rows)
        assert all(low[1] < high[0] for low, high in itertools.pairwise(ends))


def test_a_user_s_rows_go_before_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of a later year, other roofs and another preferred kernel, without a line of code."""
    overlay(
        tmp_path, monkeypatch,
        """
capabilities = [130]
[[family]]
name = "tcgen05"
sm = [130, 139]
[[generation]]
name = "BLACKWELL"
sm = [130, 139]
[[roof]]
sm = [130, 130]
half = 5e15
bandwidth = 2e13
[[preferred]]
family = "tcgen05"
op = "attention"
kernels = ["torch.attention.sdpa_cudnn"]
source = "ours"
""",
    )  # fmt: skip
    later = hypothetical_gpu(130)
    assert later.peak_flops["bfloat16"] == 5e15 and later.bandwidth == 2e13
    assert mma_family_of(130).value == "tcgen05" and generation_of(135).name == "BLACKWELL"
    assert mma_family_of(90).value == "wgmma" and hypothetical_gpu(90).bandwidth == 4.3e12
    assert preferred_on("attention", 100)[0] == "torch.attention.sdpa_cudnn"
    assert prefill(2048).kernel == "torch.attention.sdpa_cudnn"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[roof]]\nsm = [90]\nhalf = 1.0\nbandwidth = 1.0\n", "roof"),
        ("[[roof]]\nsm = [99, 90]\nhalf = 1.0\nbandwidth = 1.0\n", "a range in order"),
        ("[[roof]]\nsm = [90, 90]\nhalf = -1.0\nbandwidth = 1.0\n", "half"),
        ("[[rooves]]\nsm = [90, 90]\n", "rooves"),
        ("[[efficiency]]\nfamily = 'wgmma'\nkernel = 'x.*'\nflops = 1.5\n", "flops"),
        ("nonsense", "TOML|Expected|expected"),
    ],
)
def test_what_is_no_map_is_refused_by_file_and_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    """The variable, the file and the field stand in the error."""
    path = overlay(tmp_path, monkeypatch, text)
    with pytest.raises(ConfigurationError, match=says) as caught:
        gpu_map()
    assert module.VARIABLE in str(caught.value) and str(path) in str(caught.value)


def test_another_version_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    """A map of a later release is not guessed at."""
    (tmp_path / "gpus.toml").write_text("version = 2\n")
    with pytest.raises(ConfigurationError, match="version needs 1, got 2"):
        read_gpu_map(tmp_path / "gpus.toml")
    with pytest.raises(ConfigurationError, match="nowhere"):
        read_gpu_map(tmp_path / "nowhere.toml")

"""vLLM's build of FlashAttention-3: found without importing vLLM, refused where its operator has changed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from layerzero.backends.flash_attn import vllm

# The operator's arguments in vLLM 0.26.0.
OPTIONAL = """k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k
    max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale
    k_descale v_descale scheduler_metadata pack_gqa s_aux cp_tot_seqused_k"""
NEEDED = """q k v softmax_scale is_causal window_size_left window_size_right softcap is_rotary_interleaved
    num_splits sm_margin cp_world_size cp_rank"""
NAMES: dict[str, bool] = {str(name): name in OPTIONAL.split() for name in f"{NEEDED} {OPTIONAL}".split()}


def test_what_no_call_sets_is_filled_in_the_operators_order() -> None:
    """Every argument stands in its place; what must be given and no call sets has its constant."""
    filled = vllm.arguments(NAMES)
    assert list(filled) == list(NAMES)
    set_here = {name: value for name, value in filled.items() if value is not None}
    assert set_here == {
        "is_rotary_interleaved": True, "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
    }  # fmt: skip


def test_an_optional_argument_of_a_later_release_is_left_out() -> None:
    """A later release may take more."""
    assert vllm.arguments({**NAMES, "sink": True})["sink"] is None


def test_an_argument_that_nobody_knows_is_refused_by_name() -> None:
    """One that must be given is not guessed."""
    with pytest.raises(ImportError, match="wants tile_size, which this adapter does not know"):
        vllm.arguments({**NAMES, "tile_size": False})


def test_an_argument_that_is_gone_is_named() -> None:
    """What our calls rely on is there."""
    with pytest.raises(ImportError, match=r"takes no page_table"):
        vllm.arguments({name: optional for name, optional in NAMES.items() if name != "page_table"})


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a package named vllm whose import raises."""
    if "vllm" in sys.modules:
        pytest.skip("vllm is imported in this process already")
    folder = tmp_path / "vllm"
    (folder / "vllm_flash_attn").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('vllm was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return folder


def test_the_extension_is_found_without_importing_the_engine(installed: Path) -> None:
    """The package's own module never runs."""
    built = installed / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    built.touch()
    assert vllm.extension() == built
    assert "vllm" not in sys.modules


def test_a_build_without_the_extension_says_so(installed: Path) -> None:
    """A CPU build has none."""
    with pytest.raises(ImportError, match=r"no vllm_flash_attn/_vllm_fa3_C.* in vllm: .*vllm"):
        vllm.extension()


def test_offsets_of_equal_sequences_are_made_once() -> None:
    """Dense operands go in as sequences of one length."""
    offsets = vllm._uniform_cu_seqlens(3, 5, torch.device("cpu"))
    assert offsets.tolist() == [0, 5, 10, 15] and offsets.dtype == torch.int32
    assert vllm._uniform_cu_seqlens(3, 5, torch.device("cpu")) is offsets

"""xFormers' operators: masks as the split kernel needs them, and what its import stands in the way of."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest
import torch

from layerzero.backends import availability, xformers
from layerzero.ops.attention import masks
from layerzero.ops.attention.arguments import AttentionArgs
from layerzero.spec.reasons import Reason


def test_a_mask_for_the_split_kernel_has_no_infinity() -> None:
    """A block of keys that are all hidden would give NaN; hidden keys still weigh nothing."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 24, 2, 16)
    mask = torch.rand(2, 1, 5, 24) > 0.4
    mask[..., :16] = False
    mask[..., 20] = True
    bias = xformers._finite_bias(AttentionArgs(q, k, k, mask))
    assert bias is not None and bias.shape == (2, 2, 2, 5, 24)
    assert torch.isfinite(bias).all()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / 4
    whole = masks.additive_bias(q.transpose(1, 2), k.transpose(1, 2), mask, False, None, None, q.dtype)
    assert whole is not None
    torch.testing.assert_close((scores + bias.flatten(1, 2)).softmax(-1), (scores + whole).softmax(-1))


def test_rows_of_a_mask_start_at_whole_vectors() -> None:
    """Eight elements apart, however many keys there are."""
    q, k = torch.randn(1, 5, 4, 16), torch.randn(1, 11, 4, 16)
    bias = xformers._bias(AttentionArgs(q, k, k, torch.randn(5, 11)))
    assert bias.shape == (1, 4, 5, 11)
    assert bias.stride(2) == 16 and bias.stride(3) == 1


def test_flash_attention_4_alone_stands_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import would fail over a module that is not there; the reason says what is missing."""
    found = importlib.util.find_spec

    def spec(name: str, *more: Any) -> Any:
        if name == "flash_attn":
            return object()
        return None if name == "flash_attn.flash_attn_interface" else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", spec)
    xformers._fmha.cache_clear()
    with pytest.raises(ImportError, match="needs flash-attn beside flash-attn-4, or neither"):
        xformers._fmha()


@pytest.mark.parametrize(
    ("installed", "refused"),
    [({"flash-attn-4"}, True), ({"flash-attn-4", "flash-attn"}, False), (set(), False)],
)
def test_kernels_are_not_offered_beside_flash_attention_4_alone(
    installed: set[str], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said from metadata, before anything is imported or loaded."""
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("flash-attn", "flash-attn-4"):
            if name not in installed:
                raise importlib.metadata.PackageNotFoundError(name)
            return "1.0"
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    for kernel in xformers.KERNELS:
        beside = [r for r in availability(kernel) if r.field == "flash-attn"]
        assert [r.reason for r in beside] == ([Reason.BACKEND_MISSING] if refused else [])

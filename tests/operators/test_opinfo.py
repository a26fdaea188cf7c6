"""torch's own sample inputs, through `torch.ops.layerzero`: numbers and gradients of what torch has too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_opinfo import info, samples

OPERATORS = torch.ops.layerzero
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def agree(got: Tensor, wanted: Tensor, *leaves: Tensor | None) -> None:
    """The same numbers, and the same gradients of the leaves where they are not rounded."""
    torch.testing.assert_close(got, wanted)
    asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    if asked and got.numel() and got.dtype is torch.float64:
        weights = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(0))
        ours, theirs = (torch.autograd.grad((out * weights).sum(), asked) for out in (got, wanted))
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)


def leaf(value: Any, dtype: torch.dtype) -> Any:
    """A tensor as a leaf of its own; anything else as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().clone().requires_grad_(dtype is torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norms(name: str, dtype: torch.dtype) -> None:
    """Over several axes laid flat."""
    ran = 0
    for sample in samples(f"nn.functional.{name}", dtype):
        shape, *vectors = sample.args
        default = torch.finfo(dtype).eps if name == "rms_norm" else 1e-5
        eps = sample.kwargs.get("eps", default)
        if eps is None or eps < 0:
            continue
        x, vectors = leaf(sample.input, dtype), [leaf(v, dtype) for v in vectors]
        flat = x.flatten(-len(shape))
        ours = [None if v is None else v.flatten() for v in vectors]
        got = getattr(OPERATORS, name)(flat, *ours, eps=eps)
        agree(
            got.reshape(x.shape), info(f"nn.functional.{name}").op(x, shape, *vectors, eps=eps), x, *vectors
        )
        ran += 1
    assert ran >= 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype) -> None:
    """Every sample."""
    ran = 0
    for sample in samples("nn.functional.linear", dtype):
        given = [leaf(value, dtype) for value in (sample.input, *sample.args)]
        agree(OPERATORS.linear(*given), torch.nn.functional.linear(*given), *given)
        ran += 1
    assert ran >= 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: torch.dtype) -> None:
    """Every sample with the options that the op has."""
    ran = 0
    for sample in samples("nn.functional.embedding", dtype):
        if set(sample.kwargs) - {"padding_idx"}:
            continue
        weight = leaf(sample.input, dtype)
        got = OPERATORS.embedding(sample.args[0], weight, **sample.kwargs)
        agree(got, torch.nn.functional.embedding(sample.args[0], weight, **sample.kwargs), weight)
        ran += 1
    assert ran >= 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype: torch.dtype) -> None:
    """Samples of four axes without dropout: masks, causal, grouped heads."""
    ran = 0
    for sample in samples("nn.functional.scaled_dot_product_attention", dtype):
        options = dict(sample.kwargs)
        if options.pop("dropout_p", 0.0) or sample.input.dim() != 4:
            continue
        given = [leaf(value, dtype) for value in (sample.input, *sample.args[:2])]
        mask = options.pop("attn_mask", sample.args[2] if len(sample.args) > 2 else None)
        grouped = options.pop("enable_gqa", False)
        causal = options.pop("is_causal", False)
        if given[0].shape[0] != given[1].shape[0] or (causal and given[0].shape[2] != given[1].shape[2]):
            continue  # torch broadcasts batches, and aligns causal at the first key
        q, k, v = given
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, 0.0, causal, enable_gqa=grouped, **options
        )
        agree(OPERATORS.attention(*given, mask, causal, **options), wanted, *given)
        ran += 1
    assert ran >= 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cross_entropy(dtype: torch.dtype) -> None:
    """Samples of rows with classes by number."""
    ran = 0
    for sample in samples("nn.functional.cross_entropy", dtype):
        target, options = sample.args[0], dict(sample.kwargs)
        if sample.input.dim() != 2 or target.is_floating_point():
            continue
        logits = leaf(sample.input, dtype)
        wanted = torch.nn.functional.cross_entropy(logits, target, **options)
        if not wanted.isfinite().all():
            continue
        agree(OPERATORS.cross_entropy(logits, target, **options), wanted, logits)
        ran += 1
    assert ran >= 4

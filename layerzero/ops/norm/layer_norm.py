"""Layer normalisation over the last axis, also with the residual sum before it."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.ops.norm.checks import register_norm, widen
from layerzero.ops.signature import SignedCall, op_signature


@op_signature()
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> SignedCall:
    """Shift and scale each row of `x` to mean 0 and variance 1, times `weight`, plus `bias`.

    Args: x (..., C), any float dtype; weight and bias (C,) or None; eps is added to the variance.
    Returns: x's shape and dtype; mean and (biased) variance are taken in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1607.06450.
    """
    raise NotImplementedError


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) * rsqrt(variance + eps) * weight + bias, in float32 at least.

    What rounding the mean left over is taken off a second time, so that a large mean costs no digits.
    """
    wide = widen(x)
    centred = wide - wide.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.to(out.dtype)
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.to(x.dtype)


LAYER_NORM = register_norm(layer_norm, layer_norm_reference, vectors=("weight", "bias"))


@op_signature()
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> SignedCall:
    """Add `residual` to `x` and normalise the sum to mean 0 and variance 1; both are returned.

    Args: x and residual (..., C) of one shape and dtype; weight and bias (C,) or None.
    Returns: (normed, x + residual), each of x's shape and dtype; the sum that is normalised is the one
        returned, rounded to x's dtype.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1607.06450, with the residual stream of post-norm transformers.
    """
    raise NotImplementedError


ADD_LAYER_NORM = register_norm(
    add_layer_norm, layer_norm_reference, vectors=("weight", "bias"), residual=True
)

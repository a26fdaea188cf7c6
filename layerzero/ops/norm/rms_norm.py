"""Root mean square normalisation over the last axis, also with the residual sum before it."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.ops.norm.checks import register_norm, widen
from layerzero.ops.signature import SignedCall, op_signature


@op_signature()
def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> SignedCall:
    """Scale each row of `x` to unit root mean square, times `weight`.

    Args: x (..., C), any float dtype; weight (C,) or None; eps is added to the mean square.
    Returns: x's shape and dtype; the mean is taken in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1910.07467.
    """
    raise NotImplementedError


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight, in float32 at least."""
    wide = widen(x)
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.to(out.dtype)
    return out.to(x.dtype)


RMS_NORM = register_norm(rms_norm, rms_norm_reference, vectors=("weight",))


@op_signature()
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6
) -> SignedCall:
    """Add `residual` to `x` and normalise the sum; both are returned.

    Args: x and residual (..., C) of one shape and dtype; weight (C,) or None.
    Returns: (normed, x + residual), each of x's shape and dtype; the sum that is normalised is the one
        returned, rounded to x's dtype, so that fused and separate kernels agree.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1910.07467, with the residual stream of pre-norm transformers.
    """
    raise NotImplementedError


ADD_RMS_NORM = register_norm(add_rms_norm, rms_norm_reference, vectors=("weight",), residual=True)

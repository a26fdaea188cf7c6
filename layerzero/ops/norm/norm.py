"""Normalisation over the last axis: rms_norm and layer_norm, each also with the residual sum before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.op import NO_SHAPE, Args, Op, SignedCall, register, signature_of
from layerzero.spec.call_spec import CallSpec, OutputSpec, WorkEstimate


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> SignedCall:
    """Scale each row of `x` to unit root mean square, times `weight`.

    Args: x (..., C), any float dtype; weight (C,) or None; eps is added to the mean square.
    Returns: x's shape and dtype; the mean is taken in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1910.07467.
    """
    args = (x, weight, eps)
    try:
        return (
            "rms_norm", x.shape, x.stride(), x.dtype, x.device, x.requires_grad, signature_of(weight), eps,
        ), args  # fmt: skip
    except NO_SHAPE:
        _check_rms_norm(args)  # names the operand that is no tensor
        raise


def _check_rms_norm(args: Args) -> CallSpec:
    x, weight, eps = args
    checks.need_rows("x", x)
    _check_weights(x, eps, weight=weight)
    return _describe_norm("rms_norm", x, [t for t in (x, weight) if t is not None], _features(weight, None))


def _check_weights(x: Tensor, eps: Any, **vectors: Any) -> None:
    """Each given vector is (C,) and on x's device; eps is a number that is not negative."""
    for name, vector in vectors.items():
        if vector is not None:
            checks.need_vector(name, vector, x.shape[-1], "x's last axis")
            checks.need_same_device("x", x, **{name: vector})
    checks.need_number("eps", eps, low=0.0)


def _features(weight: Tensor | None, bias: Tensor | None) -> frozenset[str]:
    return frozenset(
        name for name, holds in (("no_weight", weight is None), ("bias", bias is not None)) if holds
    )


def _describe_norm(op: str, x: Tensor, tensors: Sequence[Tensor], features: frozenset[str]) -> CallSpec:
    width = x.shape[-1]
    return CallSpec(
        op=op,
        platform=x.device.type,
        device=str(x.device),
        dtype=checks.dtype_name(x.dtype),
        dtypes=tuple(checks.dtype_name(t.dtype) for t in tensors),
        dims={"N": x.numel() // width, "C": width},
        features=features,
        contiguous=checks.is_plain_contiguous(tensors),
        last_stride1=checks.last_stride_is_one(tensors),
        alignment=checks.alignment_of(tensors),
    )


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight, in float32 at least."""
    wide = _widen(x)
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.to(out.dtype)
    return out.to(x.dtype)


def _widen(x: Tensor) -> Tensor:
    """Dense rows in float32 at least: torch sums rows in another order where a column is dense instead."""
    return (x if x.dtype == torch.float64 else x.float()).contiguous()


def _norm_work(spec: CallSpec) -> WorkEstimate:
    """Five operations an element; rows are read and written once, the weight is read once."""
    n, c = spec.dim("N"), spec.dim("C")
    return WorkEstimate(flops=5.0 * n * c, bytes=float((2 * n * c + c) * checks.dtype_bytes(spec.dtype)))


def _like_x(args: Args) -> tuple[OutputSpec, ...]:
    return (OutputSpec(tuple(args[0].shape), checks.dtype_name(args[0].dtype)),)


def _empty_like_x(args: Args) -> Tensor | None:
    return torch.empty_like(args[0]) if args[0].numel() == 0 else None


RMS_NORM = register(
    Op(
        name="rms_norm",
        build=rms_norm,
        check=_check_rms_norm,
        reference=rms_norm_reference,
        outputs=_like_x,
        work=_norm_work,
        operands=(0, 1),
        exact_dims=frozenset({"C"}),
        empty=_empty_like_x,
        batching=RowBatching(),
    )
)


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
    args = (x, residual, weight, eps)
    try:
        return (
            "add_rms_norm", x.shape, x.stride(), x.dtype, x.device, x.requires_grad,
            residual.shape, residual.stride(), residual.dtype, residual.device, residual.requires_grad,
            signature_of(weight), eps,
        ), args  # fmt: skip
    except NO_SHAPE:
        check_add_rms_norm(args)
        raise


def _check_residual(x: Tensor, residual: Tensor) -> None:
    checks.need_rows("x", x)
    checks.need_tensor("residual", residual)
    if residual.shape != x.shape:
        raise ValueError(f"residual needs x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
    if residual.dtype != x.dtype:
        expected_dtype, got = checks.dtype_name(x.dtype), checks.dtype_name(residual.dtype)
        raise TypeError(f"residual needs x's dtype {expected_dtype}, got {got}")
    checks.need_same_device("x", x, residual=residual)


def check_add_rms_norm(args: Args) -> CallSpec:
    """Validate and describe a residual sum with its norm."""
    x, residual, weight, eps = args
    _check_residual(x, residual)
    _check_weights(x, eps, weight=weight)
    tensors = [t for t in (x, residual, weight) if t is not None]
    return _describe_norm("add_rms_norm", x, tensors, _features(weight, None))


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum in x's dtype, then `rms_norm_reference` of it."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def _add_norm_work(spec: CallSpec) -> WorkEstimate:
    """Two operands are read, two results written."""
    n, c = spec.dim("N"), spec.dim("C")
    return WorkEstimate(flops=6.0 * n * c, bytes=float((4 * n * c + c) * checks.dtype_bytes(spec.dtype)))


def _empty_pair(args: Args) -> tuple[Tensor, Tensor] | None:
    x = args[0]
    return (torch.empty_like(x), torch.empty_like(x)) if x.numel() == 0 else None


ADD_RMS_NORM = register(
    Op(
        name="add_rms_norm",
        build=add_rms_norm,
        check=check_add_rms_norm,
        reference=add_rms_norm_reference,
        outputs=lambda args: _like_x(args) * 2,
        work=_add_norm_work,
        operands=(0, 1, 2),
        exact_dims=frozenset({"C"}),
        empty=_empty_pair,
        castable=False,  # the sum that is normed is the one returned
        batching=RowBatching(row_operands=(0, 1)),
    )
)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> SignedCall:
    """Shift and scale each row of `x` to mean 0 and variance 1, times `weight`, plus `bias`.

    Args: x (..., C), any float dtype; weight and bias (C,) or None; eps is added to the variance.
    Returns: x's shape and dtype; mean and (biased) variance are taken in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1607.06450.
    """
    args = (x, weight, bias, eps)
    try:
        return (
            "layer_norm", x.shape, x.stride(), x.dtype, x.device, x.requires_grad,
            signature_of(weight), signature_of(bias), eps,
        ), args  # fmt: skip
    except NO_SHAPE:
        _check_layer_norm(args)
        raise


def _check_layer_norm(args: Args) -> CallSpec:
    x, weight, bias, eps = args
    checks.need_rows("x", x)
    _check_weights(x, eps, weight=weight, bias=bias)
    tensors = [t for t in (x, weight, bias) if t is not None]
    return _describe_norm("layer_norm", x, tensors, _features(weight, bias))


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) * rsqrt(variance + eps) * weight + bias, in float32 at least.

    What rounding the mean left over is taken off a second time, so that a large mean costs no digits.
    """
    wide = _widen(x)
    centred = wide - wide.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.to(out.dtype)
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.to(x.dtype)


LAYER_NORM = register(
    Op(
        name="layer_norm",
        build=layer_norm,
        check=_check_layer_norm,
        reference=layer_norm_reference,
        outputs=_like_x,
        work=_norm_work,
        operands=(0, 1, 2),
        exact_dims=frozenset({"C"}),
        empty=_empty_like_x,
        batching=RowBatching(),
    )
)


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
    args = (x, residual, weight, bias, eps)
    try:
        return (
            "add_layer_norm", x.shape, x.stride(), x.dtype, x.device, x.requires_grad,
            residual.shape, residual.stride(), residual.dtype, residual.device, residual.requires_grad,
            signature_of(weight), signature_of(bias), eps,
        ), args  # fmt: skip
    except NO_SHAPE:
        _check_add_layer_norm(args)
        raise


def _check_add_layer_norm(args: Args) -> CallSpec:
    x, residual, weight, bias, eps = args
    _check_residual(x, residual)
    _check_weights(x, eps, weight=weight, bias=bias)
    tensors = [t for t in (x, residual, weight, bias) if t is not None]
    return _describe_norm("add_layer_norm", x, tensors, _features(weight, bias))


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum in x's dtype, then `layer_norm_reference` of it."""
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps), total


ADD_LAYER_NORM = register(
    Op(
        name="add_layer_norm",
        build=add_layer_norm,
        check=_check_add_layer_norm,
        reference=add_layer_norm_reference,
        outputs=lambda args: _like_x(args) * 2,
        work=_add_norm_work,
        operands=(0, 1, 2, 3),
        exact_dims=frozenset({"C"}),
        empty=_empty_pair,
        castable=False,  # the sum that is normed is the one returned
        batching=RowBatching(row_operands=(0, 1)),
    )
)

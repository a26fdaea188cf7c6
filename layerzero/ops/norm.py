"""Normalisation over the last axis: rms_norm, add_rms_norm, layer_norm."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.batching import Rows
from layerzero.ops.op import Args, Call, Op, register
from layerzero.ops.request import OutSpec, Request, Work


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Call:
    """Scale each row of `x` to unit root mean square, times `weight`.

    Args: x (..., C), any float dtype; weight (C,) or None; eps is added to the mean square.
    Returns: x's shape and dtype; the mean is taken in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1910.07467.
    """
    return (
        "rms_norm", x.shape, x.stride(), x.dtype, x.device, x.requires_grad, _sig(weight), eps,
    ), (x, weight, eps)  # fmt: skip


def _sig(tensor: Tensor | None) -> tuple[object, ...] | None:
    if tensor is None:
        return None
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def _check_rms_norm(args: Args) -> Request:
    x, weight, eps = args
    checks.need_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x needs a last axis of at least 1, got shape {tuple(x.shape)}")
    if weight is not None:
        checks.need_tensor("weight", weight, rank=1)
        if weight.shape[0] != x.shape[-1]:
            raise ValueError(f"weight needs {x.shape[-1]} elements like x's last axis, got {weight.shape[0]}")
        checks.need_same_device("x", x, weight=weight)
    checks.need_number("eps", eps, low=0.0)
    width = x.shape[-1]
    tensors = [x] if weight is None else [x, weight]
    return Request(
        op="rms_norm",
        platform=x.device.type,
        device=str(x.device),
        dtype=checks.dtype_name(x.dtype),
        dtypes=tuple(checks.dtype_name(t.dtype) for t in tensors),
        dims={"N": x.numel() // width, "C": width},
        features=frozenset() if weight is not None else frozenset({"no_weight"}),
        contiguous=checks.is_plain_contiguous(tensors),
        last_stride1=checks.last_stride_is_one(tensors),
        alignment=checks.alignment_of(tensors),
    )


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight, in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.to(out.dtype)
    return out.to(x.dtype)


def _norm_work(request: Request) -> Work:
    n, c = request.dim("N"), request.dim("C")
    width = 8 if request.dtype == "float64" else 4 if request.dtype == "float32" else 2
    return Work(flops=5.0 * n * c, bytes=float((2 * n * c + c) * width))


RMS_NORM = register(
    Op(
        name="rms_norm",
        build=rms_norm,
        check=_check_rms_norm,
        reference=rms_norm_reference,
        outputs=lambda args: (OutSpec(tuple(args[0].shape), checks.dtype_name(args[0].dtype)),),
        work=_norm_work,
        operands=(0, 1),
        exact=frozenset({"C"}),
        empty=lambda args: torch.empty_like(args[0]) if args[0].numel() == 0 else None,
        batching=Rows(),
    )
)

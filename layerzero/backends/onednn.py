"""oneDNN's own linear with its activation fused, which torch carries but `F.linear` does not take.

For float32 on the CPU torch's `F.linear` runs its BLAS; the operator that inductor emits for fused linears
runs oneDNN instead. With AVX-512 it is the faster one of the two, with AVX2 alone the slower one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.spec.kernel import Kernel, loading

# How the operator names what follows the product: (attribute, algorithm). Its relu makes 0 of NaN.
_FUSED = {
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}


def _operator() -> Callable[..., Tensor]:
    """The fused operator of this torch.

    Raises: ImportError: torch was built without oneDNN, or has renamed the operator.
    """
    if not torch.backends.mkldnn.is_available():
        raise ImportError("this torch was built without oneDNN")
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is None:
        raise ImportError("this torch has no fused oneDNN linear")
    default: Callable[..., Tensor] = operator.default
    return default


def _dense(bias: Tensor | None) -> Tensor | None:
    """`bias` as it reads: the operator reads a view's memory as if it were dense."""
    return None if bias is None else bias.contiguous()


def _apart(weight: Tensor) -> Tensor:
    """`weight` with rows that do not overlap: the operator has no description of such that do."""
    return weight if weight.is_contiguous() or not checks.overlaps(weight) else weight.contiguous()


@loading(_operator)
def _linear(fused: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return fused(x, _apart(weight), _dense(bias), "none", [], "")


@loading(_operator)
def _mlp(fused: Callable[..., Tensor], *args: Any) -> Tensor:
    x, w_up, w_down, b_up, b_down, activation = args
    attribute, algorithm = _FUSED[activation]
    hidden = fused(x, _apart(w_up), _dense(b_up), attribute, [], algorithm)
    return fused(hidden, _apart(w_down), _dense(b_down), "none", [], "")


_kernel = functools.partial(
    Kernel.of,
    measured="an estimate for where no table says more: behind torch's linear on an AMD EPYC with AVX2 alone",
    source="torch.ops.mkldnn._linear_pointwise, probed with torch 2.13 on AMD EPYCs: "
    "without AVX-512 there is no primitive for bfloat16",
    platforms="cpu",
    dtypes="float32 bfloat16",
    half_isa="avx512f avx512bw",
    gradient=False,
    autocast=False,
    tie_break_order=30,
)

KERNELS: tuple[Kernel, ...] = (
    _kernel("onednn.linear.fused", _linear, (0.72, 0.7, 2.5), features="bias"),
    _kernel("onednn.mlp.fused", _mlp, (0.65, 0.65, 8.0), features="bias act_gelu act_gelu_tanh act_silu"),
)

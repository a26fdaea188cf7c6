"""Products with weights that stay the same: each is laid out in panels once, and the panels are kept.

The arithmetic is that of `products.cpp`, in float32 for half precision too, whose results are rounded once. A
matrix library packs a weight anew in every call; beside a few rows that is a large part of the work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from layerzero.backends.native import compiled, load_module
from layerzero.backends.native.products import ACTIVATIONS, LIBRARY, in_panels
from layerzero.native import is_product
from layerzero.ops.linear.kept_weights import MEMORY_SHARE, PackedWeights
from layerzero.ops.linear.mlp import GATES, PLAIN, activate
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.hardware import host_free_bytes
from layerzero.spec.kernel import Kernel


@functools.cache
def packed_weights() -> PackedWeights:
    """The panels of this process."""
    native = load_module(LIBRARY)
    return PackedWeights(native.pack, int(MEMORY_SHARE * host_free_bytes()), 4, [], native.equal)


def _linear() -> Callable[..., Tensor]:
    native, panels = load_module(LIBRARY).linear_kept, packed_weights()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The kernel refuses what was changed behind torch's back: it is laid out anew, once.
        for lookup in (panels.of, panels.repack):
            packed = lookup(weight)
            if packed is None:
                break
            out: Tensor | None = native(x, weight, packed, bias)
            if out is not None:
                return out
        return functional.linear(x, weight, bias)

    return is_product(linear, _grouped(panels))


def _grouped(panels: PackedWeights) -> Callable[..., Tensor | None]:
    native = load_module(LIBRARY).linear_grouped

    def grouped(x: Tensor, counts: list[int], weights: list[Tensor]) -> Tensor | None:
        packed = [panels.of(weight) for weight in weights]
        if any(each is None for each in packed):
            return None
        out: Tensor | None = native(x, counts, weights, packed)
        return out

    return grouped


def _rms_norm_linear() -> Callable[..., Any]:
    native, panels, linear = load_module(LIBRARY).norm_linear_kept, packed_weights(), _linear()

    def rms_norm_linear(
        x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        for look in (panels.of, panels.repack):
            packed = look(weight)
            if packed is None:
                break
            out: Tensor | None = native(x, norm_weight, weight, packed, bias, eps)
            if out is not None:
                return out
        return linear(functional.rms_norm(x, x.shape[-1:], norm_weight, eps), weight, bias)

    return rms_norm_linear


def _mlp() -> Callable[..., Any]:
    native, panels, linear = load_module(LIBRARY).mlp_kept, packed_weights(), _linear()

    def mlp(
        x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor | None, b_down: Tensor | None, activation: str
    ) -> Tensor:
        if activation in ACTIVATIONS:
            which = ACTIVATIONS.index(activation)
            for look in (panels.of, panels.repack):
                up, down = look(w_up), look(w_down)
                if up is None or down is None:
                    break
                out: Tensor | None = native(x, w_up, w_down, up, down, b_up, b_down, which)
                if out is not None:
                    return out
        return linear(activate(linear(x, w_up, b_up), activation), w_down, b_down)

    return mlp


def _linear_workspace(request: CallSpec) -> int:
    """The weight in panels, and rows in float32 where those given or asked for are not."""
    inner, width = request.dim("K"), request.dim("C")
    return 4 * inner * in_panels(width) + _copy_bytes(request, inner, width)


def _mlp_workspace(request: CallSpec) -> int:
    """Both weights in panels, the hidden rows, with their gates where they have some, and rows in float32."""
    hidden, width, rows = request.dim("F"), request.dim("C"), request.dim("N")
    gates = 2 if any(f"act_{name}" in request.features for name in GATES) else 0
    up = in_panels(hidden) * (2 if gates else 1)
    between = (1 + gates) * rows * in_panels(hidden)
    return 4 * (up * width + in_panels(width) * hidden + between) + _copy_bytes(request, width, width)


def _copy_bytes(request: CallSpec, in_width: int, out_width: int) -> int:
    """Bytes of operands and results that are not dense float32."""
    if request.dtype != "float32":
        return 4 * request.dim("N") * (in_width + out_width)
    return 0 if request.contiguous else 4 * request.dim("N") * in_width


_kernel = functools.partial(
    compiled,
    measured="an estimate: before torch's from two rows on, beside it for one, on an AMD EPYC with AVX2",
    source="by construction; run against float64 on an AMD EPYC with AVX2",
    cpu_vendors="amd",
    isa="avx2 fma",
    dtypes="float32 bfloat16 float16",
    autocast=False,
)
_ACTIVATED = " ".join(f"act_{name}" for name in (*GATES, *PLAIN))

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "native.linear.packed", _linear, (0.85, 0.6, 4.0), features="bias", workspace_bytes=_linear_workspace
    ),
    _kernel(
        "native.rms_norm_linear.packed", _rms_norm_linear, (0.85, 0.6, 4.0), features="bias no_weight",
        workspace_bytes=lambda request: _linear_workspace(request) + 4 * request.dim("N") * request.dim("K"),
    ),
    _kernel(
        "native.mlp.packed", _mlp, (0.85, 0.6, 8.0), features=f"bias {_ACTIVATED}",
        workspace_bytes=_mlp_workspace,
    ),
)  # fmt: skip

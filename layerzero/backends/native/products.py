"""Products of rows with a weight on the CPU: C++ of this project, compiled on the user's machine.

`products.cpp` says how they work. A weight is laid out anew at every call, so nothing is remembered of one
that may change, and a row's bits are its own in every batch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.native import compiled, load_module
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel, loading

LIBRARY = "layerzero_products"
# As the order of `Activation` there.
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
# Rows of a block and the threads' share of them: hidden rows that are in work at one time, at most.
BLOCK = 48


@loading(lambda: load_module(LIBRARY).linear)
def _linear(native: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    native(out.view(-1, weight.shape[0]), x.view(-1, weight.shape[1]), weight, bias)
    return out


@loading(lambda: load_module(LIBRARY).mlp)
def _mlp(native: Any, *args: Any) -> Tensor:
    x, w_up, w_down, b_up, b_down, activation = args
    out = torch.empty_like(x)
    width = x.shape[-1]
    which = ACTIVATIONS.index(activation)
    native(out.view(-1, width), x.view(-1, width), w_up, w_down, b_up, b_down, which)
    return out


def in_panels(columns: int) -> int:
    """Columns in whole panels, which are 32 wide at most."""
    return -(-columns // 32) * 32


def _mlp_room(request: CallSpec) -> int:
    """Both weights in panels, and the hidden rows that are in work."""
    hidden, width = request.dim("F"), request.dim("C")
    rows = min(request.dim("N"), BLOCK * torch.get_num_threads())
    return 4 * (in_panels(hidden) * (width + rows) + in_panels(width) * hidden)


# Laying a weight out costs as much as reading it slowly: little beside hundreds of rows, much beside a few.
_MEASURED = "an estimate: {} torch's from a few hundred rows on, behind it below, on an AMD EPYC with AVX2"
_kernel = functools.partial(
    compiled,
    source="by construction; run against float64 and bitwise in batches on an AMD EPYC with AVX2",
    cpu_vendors="amd",
    isa="avx2 fma",
    dtypes="float32",
    contiguous=True,
    autocast=False,
    batch_invariant=True,
)

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "native.linear.panels", _linear, (0.8, 0.03, 20.0), _MEASURED.format("beside"),
        features="bias", workspace_bytes=lambda request: 4 * in_panels(request.dim("C")) * request.dim("K"),
    ),
    _kernel(
        "native.mlp.panels", _mlp, (0.82, 0.03, 40.0), _MEASURED.format("faster than"),
        features="bias act_gelu act_gelu_tanh act_relu act_silu", workspace_bytes=_mlp_room,
    ),
)  # fmt: skip

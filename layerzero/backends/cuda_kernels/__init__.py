"""CUDA C++ kernels of this project, for what neither a library nor Triton does at the speed of the memory.

`decode` reads keys and values of eight bits; `products` multiplies rows by weights of four-bit codes, as they
lie in a checkpoint's order. torch's NVRTC compiles them when they are first needed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from layerzero.spec.kernel import Kernel


def _from(module: str, function: str) -> Callable[[], Callable[..., Any]]:
    return lambda: getattr(importlib.import_module(f"{__name__}.{module}"), function)


def _compiling(module: str) -> dict[str, Any]:
    unit, compile_for = _from(module, "unit"), _from(module, "compile_for")
    return {"compile_key": lambda request: unit()(request), "compile": lambda request: compile_for()(request)}


_RECORD = "an estimate: ordered by benchmarks/results/quantized_h200.json"
_kernel = functools.partial(
    Kernel.of,
    source="our own source; run on one H200, torch 2.11",
    measured=_RECORD,
    platforms="cuda",
    torch_min="2.10",
    gradient=False,
    graph_safe=True,
    slow_import=True,
    last_stride1=True,
    alignment=16,
    tie_break_order=34,
)
_CODES = "kv_float8_e4m3fn kv_float8_e5m2 kv_int8"
_product = functools.partial(
    _kernel,
    load=_from("products", "quantized_linear"),
    **_compiling("products"),
    efficiency=(0.62, 0.5, 12.0),
    # The tiles of many rows are instructions of this generation alone.
    sm_min=90,
    sm_max=90,
)

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "cuda.paged_attention.codes", _from("decode", "paged_attention"), (0.1, 0.9, 35.0),
        **_compiling("decode"), sm_min=90,
        features=f"causal gqa scale {_CODES} kv_scale_per_tensor kv_scale_per_head kv_scale_per_token",
        only_with=_CODES, layouts="NHD HND", dtypes="float16 bfloat16",
        limits=("D in [128]", "D == Dv else HEAD_DIMS_DIFFER", "G <= 8"),
    ),
    _product(
        "cuda.quantized_linear.four_bits", dtypes="float16 bfloat16",
        features="quant_int4 quant_nvfp4 scale_per_group scale_per_row zero_point tensor_scale bias "
        "inputs_float",
        limits=("K % 128 == 0", "S % 128 == 0 when quant_int4"),
    ),
    # float16 has not the range of its scales.
    _product(
        "cuda.quantized_linear.mxfp4", dtypes="bfloat16",
        features="quant_mxfp4 scale_per_group bias inputs_float", limits=("K % 128 == 0",),
    ),
)  # fmt: skip

"""torch's own functions around eight-bit codes: quantize, dequantize and products with quantized weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.formats import unpack_pairs
from layerzero.ops.linear.linear import contiguous_if_odd
from layerzero.ops.quantize import kept_codes
from layerzero.ops.quantize.operands import FORMAT_FEATURES, INPUT_FEATURES, PART_FEATURES, SCALE_FEATURES
from layerzero.ops.quantize.quantize import FORMAT_OF, dequantize_reference, numbers, quantize_reference
from layerzero.ops.quantize.quantized_linear import rounded_rows
from layerzero.spec.kernel import Kernel


def dequantized_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, inputs: str, format: str | None,
    zero_point: Tensor | None, tensor_scale: Tensor | None, block_size: int,
) -> Tensor:  # fmt: skip
    """The weight's numbers, in x's dtype where x is not rounded, then `torch.nn.functional.linear`."""
    kind = x.dtype if x.dtype == torch.float64 else torch.float32
    wide = numbers(weight, scale, format, zero_point, tensor_scale, block_size, kind)
    if inputs != "float":
        rows = rounded_rows(x, inputs, weight.dtype, format, block_size)
        return functional.linear(rows, wide, None if bias is None else bias.to(kind)).to(x.dtype)
    shift = None if bias is None else bias.to(x.dtype)
    rows = x if x.is_contiguous() else contiguous_if_odd(x)
    return functional.linear(rows, wide.to(x.dtype), shift)


def exact_products(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    """`torch._int_mm`: int8 by int8 into int32, scaled afterwards."""
    codes, spread = quantize_reference(x, "int8", "row", 0, None)
    sums = torch._int_mm(codes.view(-1, codes.shape[-1]), weight.t())  # pyright: ignore[reportPrivateImportUsage]
    return _shifted(sums.float() * spread.view(-1, 1) * scale.view(-1), bias, x)


def int8_weight_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    """`torch._weight_int8pack_mm`: int8 weights widened in registers."""
    rows = x.reshape(-1, x.shape[-1])
    # The scales stay out of the product, which would round them to x's dtype.
    ones = x.new_ones(weight.shape[0])
    product = torch._weight_int8pack_mm(rows, weight.contiguous(), ones)  # pyright: ignore[reportPrivateImportUsage]
    return _shifted(product.float() * scale.view(-1), bias, x)


def scaled_mm_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    """`torch._scaled_mm` on the tensor cores: a scale for each row of x and of the weight."""
    codes, spread = quantize_reference(x, FORMAT_OF[weight.dtype], "row", 0, None)
    rows = codes.view(-1, codes.shape[-1])
    columns = scale.view(1, -1).contiguous()
    out: Tensor = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        rows, weight.contiguous().t(), spread.view(-1, 1), columns, out_dtype=torch.bfloat16
    )
    return _shifted(out, bias, x)


@functools.cache
def torch_layout() -> kept_codes.KeptCodes:
    """The layout of torch's product, and the scales that it reads beside zero points of nothing."""

    def scales_and_shifts(scale: Tensor) -> Tensor:
        by_group = scale.t().bfloat16()
        return torch.stack((by_group, torch.zeros_like(by_group)), -1).contiguous()

    def panels(weight: Tensor) -> Tensor:
        codes = unpack_pairs(weight).int()
        return torch._convert_weight_to_int4pack_for_cpu(codes, 1)  # pyright: ignore[reportPrivateImportUsage]

    return kept_codes.keep(panels, scales_and_shifts)


def int4pack_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    """`torch._weight_int4pack_mm_for_cpu`: codes widened in registers, scales rounded to bfloat16."""
    panels, factors = torch_layout().of(weight, scale)
    width, inner = weight.shape[0], x.shape[-1]
    out: Tensor = torch._weight_int4pack_mm_for_cpu(  # pyright: ignore[reportPrivateImportUsage]
        x.reshape(-1, inner), panels.view(width, -1), inner // scale.shape[1], factors
    )
    return (out if bias is None else out + bias).view(*x.shape[:-1], width)


def _shifted(out: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Rows of products plus the bias, in x's dtype and leading shape."""
    shifted = out if bias is None else out + bias.to(out.dtype)
    return shifted.to(x.dtype).view(*x.shape[:-1], out.shape[1])


_HERE = "run on torch 2.13, AMD EPYC with AVX-512"
_H200 = "benchmarks/results/rows_h200.json"
_kernel = functools.partial(Kernel.of, gradient=False, tie_break_order=40)
# int8 by int8 into int32, whatever the operands' dtype.
_int8 = functools.partial(
    _kernel,
    load=lambda: exact_products,
    features="quant_int8 scale_per_tensor scale_per_row bias inputs_quantized inputs_int8",
    dtypes="float32 bfloat16 float16",
    mixed_dtypes=True,
)

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "torch.quantize.native", lambda: quantize_reference, (0.05, 0.15, 22.0),
        "an estimate: six passes over the rows", source=f"torch's elementwise functions; {_HERE}",
        features=f"{FORMAT_FEATURES} {SCALE_FEATURES} scale_given tensor_scale", batch_invariant=True,
        default=True,
    ),
    _kernel(
        "torch.dequantize.native", lambda: dequantize_reference, (0.05, 0.4, 8.0),
        "an estimate: two passes over the rows", source=f"torch's elementwise functions; {_HERE}",
        features=f"{FORMAT_FEATURES} {PART_FEATURES}", batch_invariant=True, default=True,
    ),
    _kernel(
        "torch.quantized_linear.widened", lambda: dequantized_linear, (0.55, 0.12, 12.0),
        "an estimate: the weight is written and read again in x's dtype", source=f"by construction; {_HERE}",
        features=f"{FORMAT_FEATURES} {PART_FEATURES} {INPUT_FEATURES} bias", mixed_dtypes=True, default=True,
    ),
    _int8(
        "torch.quantized_linear.int_mm", efficiency=(0.95, 0.5, 30.0),
        measured="an estimate: below float32's time on an AMD EPYC with AVX-512",
        source=f"torch._int_mm; {_HERE}; with one column of weights it reads the wrong ones",
        platforms="cpu", limits=("K >= 2",), batch_invariant=True,
    ),
    _int8(
        "torch.quantized_linear.int_mm_cuda", efficiency=(0.28, 0.5, 115.0), measured=_H200,
        source="ATen/native/cuda/Blas.cpp: more than 16 rows, inner and outer sizes of 8; tried with 32",
        platforms="cuda", sm_min=80, alignment=16, limits=("N >= 17", "K % 32 == 0", "C % 32 == 0"),
        graph_safe=True,
    ),
    _kernel(
        "torch.quantized_linear.scaled_mm", lambda: scaled_mm_linear, (0.5, 0.6, 90.0), _H200,
        source="ATen/native/cuda/Blas.cpp: scales by row on both sides need 9.0; sizes of 16, tried with 32",
        platforms="cuda", sm_min=90, features="quant_fp8_e4m3 scale_per_row bias inputs_quantized",
        limits=("K % 32 == 0", "C % 32 == 0"), dtypes="bfloat16", alignment=16, graph_safe=True,
    ),
    _kernel(
        "torch.quantized_linear.int8pack", lambda: int8_weight_linear, (0.4, 0.9, 8.0),
        "an estimate: below bfloat16's time for one row on an AMD EPYC with AVX-512",
        source=f"torch._weight_int8pack_mm; {_HERE}; inner sizes that are no multiple of 16 read past the "
        "rows; loads of 32 bytes of a row, 16 of the weight, that end the process at other addresses",
        platforms="cpu", isa="avx512f", contiguous=True, alignment=32, limits=("K % 32 == 0",),
        features="quant_int8 scale_per_tensor scale_per_row bias inputs_float",
        dtypes="bfloat16 float16", mixed_dtypes=True,
    ),
    _kernel(
        "torch.quantized_linear.int4pack", lambda: int4pack_linear, (0.5, 0.8, 10.0),
        "an estimate: before native.quantized_linear.codes for one row on an AMD EPYC with AVX-512, behind "
        "it from a few rows on where that has AMX",
        source=f"torch._weight_int4pack_mm_for_cpu; {_HERE}; other sizes are refused, rows of float16 and "
        "float32 take a hundred times as long",
        platforms="cpu", isa="avx512f", contiguous=True, limits=("S in [32, 64, 128, 256]", "C % 16 == 0"),
        features="quant_int4 scale_per_group scale_16bit bias inputs_float", dtypes="bfloat16",
        mixed_dtypes=True, batch_invariant=True, workspace_bytes=kept_codes.workspace,
    ),
)  # fmt: skip

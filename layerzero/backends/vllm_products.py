"""Marlin's and Machete's products as vLLM ships them (`vllm`): rows of sixteen bits, weights in codes.

The extension is loaded by itself, as that of its FlashAttention-3. Codes and scales are laid out once for a
weight and kept on its GPU, as `ops/linear/kept_weights.py` says; nothing is compared at a call, since that
would wait for the device. Scales are rounded to the rows' dtype. A capture that comes before the first call
lays them out in its own graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from layerzero._util.libraries import extension_of
from layerzero.formats.table import format_of
from layerzero.ops.captures import is_capturing, keep_if_captured
from layerzero.ops.linear.kept_weights import MEMORY_SHARE, PackedWeights
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.hardware import free_memory
from layerzero.spec.kernel import LAST_CHOICE, Kernel

# The arguments of vLLM 0.26.0's operators, in their order.
OPERATORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gptq_marlin_repack": ("b_q_weight", "perm", "size_k", "size_n", "num_bits", "is_a_8bit"),
        "marlin_gemm": (
            "a", "c_or_none", "b_q_weight", "b_bias_or_none", "b_scales", "a_scales", "global_scale",
            "b_zeros_or_none", "g_idx_or_none", "perm_or_none", "workspace", "b_type_id", "size_m", "size_n",
            "size_k", "is_k_full", "use_atomic_add", "use_fp32_reduce", "is_zp_float",
        ),
        "machete_prepack_B": ("B", "a_type", "b_type", "group_scales_type"),
        "machete_mm": (
            "A", "B", "b_type", "out_type", "group_scales", "group_zeros", "group_size", "channel_scales",
            "token_scales", "schedule",
        ),
    }
)  # fmt: skip


def type_id(
    exponent: int, mantissa: int, signed: bool, bias: int = 0, finite: bool = False, nan: int = 1
) -> int:
    """A type of elements as the operators number it: vllm/scalar_type.py, `ScalarType.id`."""
    return exponent | mantissa << 8 | signed << 16 | bias << 17 | finite << 49 | nan << 50


# By format: whole numbers around 8 and 128, and floats without infinities.
_TYPES: Mapping[str, int] = MappingProxyType(
    {
        "int4": type_id(0, 4, False, 8),
        "int8": type_id(0, 8, False, 128),
        "fp8_e4m3": type_id(4, 3, True, 0, True, 2),
        "mxfp4": type_id(2, 1, True, 0, True, 0),
    }
)
_SHIFTED_INT4 = type_id(0, 4, False)
_PROCESSORS = 160  # of a card, at most: a B200 has 148
# Where Marlin's threads want the scales of 64 and of 32 columns, and the zero points of 8.
_BY_GROUP = [row + 8 * column for row in range(8) for column in range(8)]
_BY_COLUMN = [2 * row + place for row in range(4) for place in (0, 1, 8, 9, 16, 17, 24, 25)]
_ZEROS, _BYTES = [0, 2, 4, 6, 1, 3, 5, 7], [0, 2, 1, 3]
# What moves a float8's exponent to that of the rows' dtype.
_EXPONENT = {torch.float16: 2.0**8, torch.bfloat16: 2.0**120}


@functools.cache
def operators() -> Any:
    """`torch.ops._C` with the extension's products.

    Raises: ImportError: vllm is not installed, was built without them, or their arguments are others.
    """
    if not hasattr(torch.ops._C, "marlin_gemm"):
        torch.ops.load_library(str(extension_of("vllm", "_C_stable_libtorch*.so")))
    for name in OPERATORS:
        need_arguments(name, getattr(torch.ops._C, name).default._schema)
    return torch.ops._C


def need_arguments(name: str, schema: Any) -> None:
    """Refuse an operator whose arguments are not those that are known here.

    Raises: ImportError: by name, with both.
    """
    names = tuple(each.name for each in schema.arguments)
    if names != OPERATORS[name]:
        raise ImportError(f"vllm's {name} needs {', '.join(OPERATORS[name])}, got {', '.join(names)}")


def marlin_codes(weight: Tensor, bits: int, flip: int) -> Tensor:
    """Codes (C, K) in Marlin's tiles, (K / 16, 2 C) or (K / 16, 4 C) int32; those of int8 count from 0."""
    words = _words(weight, flip)
    width, inner = words.shape[0], words.shape[1] * 32 // bits
    perm = torch.empty(0, dtype=torch.int32, device=weight.device)
    packed: Tensor = operators().gptq_marlin_repack(words.t().contiguous(), perm, inner, width, bits, False)
    return packed


def marlin_scales(scale: Tensor, dtype: torch.dtype, form: str, width: int, block: int) -> Tensor:
    """Scales (G, C) in the order of Marlin's threads, in the rows' `dtype` or as powers of two.

    `width` is of those that all columns share, else 0.
    """
    if scale.dim() == 0:
        by_group = scale.expand(1, width)
    else:
        by_group = scale.t().repeat_interleave(block, 1)[:, :width] if block else scale.t()
    if form == "mxfp4":
        exponents = arrange(arrange(by_group.view(torch.uint8), _BY_GROUP), _BYTES)
        return exponents.view(torch.float8_e8m0fnu)
    rounded = in_range(by_group, dtype, _EXPONENT[dtype] if form == "fp8_e4m3" else 1.0)
    return arrange(rounded, _BY_GROUP if by_group.shape[0] > 1 else _BY_COLUMN)


def marlin_zero_points(zero_point: Tensor) -> Tensor:
    """Zero points (C, G) as words of eight columns, (G, C / 8)."""
    ordered: Tensor = arrange(arrange(zero_point.t(), _BY_GROUP), _ZEROS).int().unflatten(1, (-1, 8))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=zero_point.device)
    return (ordered << shifts).sum(-1, dtype=torch.int32)


def machete_codes(weight: Tensor, dtype: torch.dtype, kind: int, flip: int) -> Tensor:
    """Codes (C, K) as Machete's tiles have them beside rows of `dtype`, (K / 8, C) or (K / 4, C) int32."""
    packed: Tensor = operators().machete_prepack_B(_words(weight, flip).t(), dtype, kind, dtype)
    return packed


def machete_scales(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales by group and column, (G, C) in the rows' `dtype`."""
    return in_range(scale.t(), dtype).contiguous()


def in_range(scale: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """Scales times a power of two in `dtype`.

    Raises: ValueError: one is subnormal or infinite there.
    """
    rounded = scale.to(dtype) * factor
    info, sizes = torch.finfo(dtype), (scale.float() * factor).abs()
    if not is_capturing() and bool(((sizes < info.tiny) | (sizes > info.max)).any()):
        low, high = info.tiny / factor, info.max / factor
        raise ValueError(f"scale needs numbers from {low:.1e} to {high:.1e} beside rows of {dtype}")
    return rounded


def _words(weight: Tensor, flip: int) -> Tensor:
    """Codes (C, K) as int32 (C, K * bits / 32), the first place in the low bits."""
    codes = weight.contiguous().view(torch.uint8)
    return (codes ^ flip if flip else codes).view(torch.int32)


def arrange(columns: Tensor, order: list[int]) -> Tensor:
    """Columns (G, C) in an order that repeats; without an index, which a capture could not copy to a GPU."""
    places = columns.unflatten(1, (-1, len(order))).unbind(-1)
    return torch.stack([places[place] for place in order], -1).flatten(1)


_SHARING: dict[torch.device, list[PackedWeights]] = {}


@functools.cache
def _kept(device: torch.device, lay_out: Callable[..., Tensor], *options: Any) -> PackedWeights:
    def settled(part: Tensor) -> Tensor:
        panels = lay_out(part, *options)
        if part.is_cuda:  # whichever stream reads them next
            torch.cuda.current_stream(part.device).synchronize()
        return panels

    limit = int(MEMORY_SHARE * free_memory(device))
    return PackedWeights(settled, limit, 4, _SHARING.setdefault(device, []))


def laid_out(part: Tensor, lay_out: Callable[..., Tensor], *options: Any) -> Tensor:
    """What `lay_out` makes of a weight's part: once, or for this call where it is not kept."""
    cache = _kept(part.device, lay_out, *options)
    panels = cache.ready(part) if is_capturing() else cache.of(part)
    if panels is None:
        return lay_out(part, *options)
    keep_if_captured(panels)
    return panels


def marlin_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, inputs: str, format: str | None,
    zero_point: Tensor | None, tensor_scale: Tensor | None, block_size: int,
) -> Tensor:  # fmt: skip
    """Rows times codes; what its threads lock is made for each call, so that streams do not meet in it."""
    form, rows = format_of(weight.dtype, format), x.reshape(-1, x.shape[-1]).contiguous()
    (count, inner), width = rows.shape, weight.shape[0]
    spread = width if scale.dim() == 0 or block_size else 0
    codes = laid_out(weight, marlin_codes, form.element.bits, 0x80 if form.name == "int8" else 0)
    scales = laid_out(scale, marlin_scales, x.dtype, form.name, spread, block_size)
    zeros = None if zero_point is None else laid_out(zero_point, marlin_zero_points)
    locks = torch.zeros(_processors(x.device), dtype=torch.int32, device=x.device)
    kind = _TYPES[form.name] if zeros is None else _SHIFTED_INT4
    out: Tensor = operators().marlin_gemm(
        rows, None, codes, None, scales, None, None, zeros, None, None, locks, kind, count, width, inner,
        True, False, True, False,
    )  # fmt: skip
    return _shifted(out, bias, x)


def machete_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, inputs: str, format: str | None,
    *_: Any,
) -> Tensor:  # fmt: skip
    """Rows times whole numbers of four or eight bits."""
    form, rows = format_of(weight.dtype, format), x.reshape(-1, x.shape[-1]).contiguous()
    kind, groups = _TYPES[form.name], scale.shape[1]
    codes = laid_out(weight, machete_codes, x.dtype, kind, 0x80 if form.name == "int8" else 0)
    scales = laid_out(scale, machete_scales, x.dtype)
    size = rows.shape[1] // groups if groups > 1 else -1
    out: Tensor = operators().machete_mm(rows, codes, kind, None, scales, None, size, None, None, None)
    return _shifted(out, bias, x)


def _shifted(out: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return (out if bias is None else out + bias).view(*x.shape[:-1], out.shape[1])


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _loading(product: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        operators()
        return product

    return load


def _workspace(request: CallSpec) -> int:
    """The codes and scales a second time, and as much while they are laid out."""
    columns, inner = request.dim("C"), request.dim("K")
    return 2 * columns * (inner + 4 * max(1, inner // request.dim("S", inner)))


_kernel = functools.partial(
    Kernel.of,
    measured="no figure, though timed (benchmarks/results/quantized_tiles_h200.json): behind every other "
    "kernel, for in inference mode its layout of a weight is made at every call",
    source="vllm 0.26.0: the schemas and vllm/model_executor/layers/quantization/utils; captured on an H200",
    platforms="cuda",
    torch_min="2.11",
    dtypes="float16 bfloat16",
    gradient=False,
    graph_safe=True,
    slow_import=True,
    last_stride1=True,
    alignment=16,
    workspace_bytes=_workspace,
    tie_break_order=39,
    distributions=("vllm>=0.26",),
)
_marlin = functools.partial(
    _kernel,
    load=_loading(marlin_linear),
    efficiency=LAST_CHOICE,
    sm_min=80,
    # Beside them sums of parts in float32: tiles of 64 rows by 256 columns, one a processor.
    workspace_bytes=lambda request: _workspace(request) + _PROCESSORS * 64 * 256 * 4,
)
_COMMON = "scale_16bit bias inputs_float"
_TILES = ("K % 128 == 0", "C % 64 == 0", "N >= 1")

KERNELS: tuple[Kernel, ...] = (
    _marlin(
        "vllm_marlin.quantized_linear.integers",
        features=f"quant_int4 quant_int8 scale_per_row scale_per_group zero_point {_COMMON}",
        limits=(*_TILES, "S in [32, 64, 128] when scale_per_group"),
    ),
    _marlin(
        "vllm_marlin.quantized_linear.fp8",
        features=f"quant_fp8_e4m3 scale_per_tensor scale_per_row scale_per_group scale_per_block {_COMMON}",
        limits=(*_TILES, "S in [128] when scale_per_group", "S in [128] when scale_per_block"),
    ),
    # float16 has not the range of its scales.
    _marlin(
        "vllm_marlin.quantized_linear.mxfp4", dtypes="bfloat16",
        features="quant_mxfp4 scale_per_group bias inputs_float", limits=_TILES,
    ),
    _kernel(
        "vllm_machete.quantized_linear.integers", _loading(machete_linear), LAST_CHOICE,
        features=f"quant_int4 quant_int8 scale_per_row scale_per_group {_COMMON}", sm_min=90, sm_max=90,
        limits=("K % 64 == 0", "C % 128 == 0", "N >= 1", "S in [64, 128] when scale_per_group"),
    ),
)  # fmt: skip

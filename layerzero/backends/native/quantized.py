"""Products with quantized weights on the CPU: codes are laid out in panels once, and read as they are packed.

`quantized.cpp` says how they work. Laid-out codes and scales are kept like the panels of `packed.py`: they
follow changes that torch counts, and of the codes that a call reads one byte a panel is compared.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.native import compiled, load_module
from layerzero.formats.table import format_of
from layerzero.ops.linear.experts import ExpertsArgs, all_choices
from layerzero.ops.linear.kept_weights import MEMORY_SHARE, PackedWeights
from layerzero.ops.linear.mlp import GATES
from layerzero.ops.quantize.operands import EXPERT_FEATURES, FORMAT_FEATURES, INPUT_FEATURES, PART_FEATURES
from layerzero.ops.quantize.quantized_linear import rounded_rows
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.hardware import host_free_bytes
from layerzero.spec.kernel import Kernel, loading

# As the order of `Kind` there.
KINDS = {"int4": 0, "int8": 1, "mxfp4": 2, "nvfp4": 2, "nf4": 3, "fp8_e4m3": 4, "mxfp8": 4, "fp8_e5m2": 5}
# Those whose codes are whole numbers times a scale.
WHOLE = frozenset({"int4", "int8", "mxfp4", "nvfp4"})
# Above every level of instructions, which the module numbers from AVX2 up.
ANY_LEVEL = 9


@functools.cache
def library() -> Any:
    """The compiled module, compiling it first where this user has not yet; takes up to a minute.

    Raises: BackendNotAvailableError: no compiler, a compile error, a cache folder that others can write, or a
        CPU without AVX2, FMA and F16C.
    """
    module = load_module("layerzero_quantized")
    if module.use_level(ANY_LEVEL) == 0:
        raise BackendNotAvailableError("native code: needs a CPU with AVX2, FMA and F16C", backend="native")
    return module


def lay_out_scales(scale: Tensor) -> Tensor:
    """Scales or zero points (..., C, G) as float32 (..., panels, G, 16); one for all as (1, 1, 16)."""
    wide = scale.float().resolve_neg()
    if wide.dim() == 0:
        return wide.expand(1, 1, 16).contiguous()
    padded = functional.pad(wide, (0, 0, 0, -wide.shape[-2] % 16), value=1.0)
    panels: Tensor = padded.unflatten(-2, (-1, 16)).transpose(-1, -2).contiguous()
    return panels


def lay_out_blocks(scale: Tensor) -> Tensor:
    """Scales of blocks (..., rows of blocks, G) as float32 (..., rows of blocks, G, 16)."""
    return scale.float().resolve_neg().unsqueeze(-1).expand(*scale.shape, 16).contiguous()


class _Kept(NamedTuple):
    """What is remembered of weights, by how it is laid out."""

    nibbles: PackedWeights
    signed: PackedWeights
    floats: PackedWeights
    scales: PackedWeights
    blocks: PackedWeights

    def codes(self, weight: Tensor) -> PackedWeights:
        """Where the codes of a weight are kept."""
        if weight.dtype == torch.uint8:
            return self.nibbles
        return self.signed if weight.dtype == torch.int8 else self.floats


@functools.cache
def kept_weights() -> _Kept:
    """The panels of this process."""
    pack, limit = library().pack, int(MEMORY_SHARE * host_free_bytes())
    sharing: list[PackedWeights] = []

    return _Kept(
        PackedWeights(lambda weight: pack(weight, False, False), limit, 1, sharing),
        PackedWeights(lambda weight: pack(weight, True, True), limit, 1, sharing),
        PackedWeights(lambda weight: pack(weight, True, False), limit, 1, sharing),
        PackedWeights(lay_out_scales, limit, 4, sharing),
        PackedWeights(lay_out_blocks, limit, 64, sharing),
    )


@dataclass(frozen=True, slots=True)
class NativeWeight:
    """A weight (..., C, K) as the module reads it, and how to call it."""

    codes: Tensor | dict[int, Tensor]  # by matrix
    scale: Tensor
    zero: Tensor | None
    columns: int
    kind: int
    group: int
    scale_every: int
    factors: list[float]

    def multiply(self, x: Tensor, bias: Tensor | None, whole_inputs: bool, matrix: int = 0) -> Tensor:
        """x (N, K) times one matrix's transpose, in float32."""
        many = self.scale.dim() > 3
        scale = self.scale[matrix] if many else self.scale
        zero = None if self.zero is None else self.zero[matrix] if many else self.zero
        factor = self.factors[matrix if len(self.factors) > 1 else 0]
        out: Tensor = library().linear(
            x, self.codes[matrix], scale, zero, bias, self.columns, self.kind, self.group, self.scale_every,
            factor, whole_inputs,
        )  # fmt: skip
        return out


def laid_out(
    weight: Tensor, scale: Tensor, format: str | None, zero_point: Tensor | None, tensor_scale: Tensor | None,
    block_size: int, matrices: Sequence[int] = (0,),
) -> NativeWeight:  # fmt: skip
    """Panels of the matrices of a weight that a call reads, made now where it is new or was changed.

    Where a weight is not kept its matrices are laid out for this call alone: a row has the same bits.
    """
    cache, form = kept_weights(), format_of(weight.dtype, format)
    spread = (cache.blocks if block_size else cache.scales).of_or_made(scale)
    groups = spread.shape[-2]
    return NativeWeight(
        codes=_codes_of(weight, form.packed == 1, matrices),
        scale=spread,
        zero=None if zero_point is None else cache.scales.of_or_made(zero_point),
        columns=weight.shape[-2],
        kind=KINDS[form.name],
        group=block_size if block_size else weight.shape[-1] * form.packed // groups,
        scale_every=block_size // 16 if block_size else int(scale.dim() > 0),
        factors=[1.0] if tensor_scale is None else tensor_scale.reshape(-1).tolist(),
    )


def _codes_of(weight: Tensor, wide: bool, matrices: Sequence[int]) -> Tensor | dict[int, Tensor]:
    cache, by_matrix = kept_weights().codes(weight), weight if weight.dim() == 3 else weight.unsqueeze(0)
    panels, same, signed = cache.of(weight), library().same, weight.dtype == torch.int8
    if panels is not None and not all(same(panels[m], by_matrix[m], wide, signed) for m in matrices):
        panels = cache.repack(weight)  # changed behind torch's back
    return {m: cache.lay_out(by_matrix[m])[0] for m in matrices} if panels is None else panels


def whole_inputs(inputs: str, form: str, block_size: int) -> bool:
    """Whether rows meet the weight as whole numbers of one scale each."""
    if form not in WHOLE:
        return False
    return inputs == "int8" or (inputs == "dynamic" and form == "int8" and not block_size)


@loading(library)
def _quantized_linear(_: Any, x: Tensor, *args: Any) -> Tensor:
    weight, scale, bias, inputs, format, zero_point, tensor_scale, block_size = args
    packed = laid_out(weight, scale, format, zero_point, tensor_scale, block_size)
    whole = whole_inputs(inputs, format_of(weight.dtype, format).name, block_size)
    rows = x if whole or inputs == "float" else rounded_rows(x, inputs, weight.dtype, format, block_size)
    out = packed.multiply(rows.reshape(-1, x.shape[-1]), bias, whole)
    return out.to(x.dtype).view(*x.shape[:-1], packed.columns)


@loading(library, ExpertsArgs)
def _fused_experts(module: Any, call: ExpertsArgs) -> Tensor:
    """Two products an expert over the rows that chose it; answers are added in the order of choices."""
    x, inputs, form, block_size, count = call.x, call.inputs, call.format, call.block_size, len(call.w_up)
    whole = whole_inputs(inputs, format_of(call.w_up.dtype, form).name, block_size)
    rows = x.reshape(-1, x.shape[-1]).float()
    chosen, weights = all_choices(call.experts, call.scores.float(), count, call.first_expert, call.shared)
    parts = rows.new_zeros(chosen.numel(), rows.shape[1])
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten() + 1, minlength=count + 1).tolist()
    score, begin = weights.flatten(), counts[0]
    needed = [expert for expert, count in enumerate(counts[1:]) if count]
    up, down = (
        laid_out(weight, scale, form, zero, second, block_size, needed)
        for weight, (scale, zero, second) in (
            (call.w_up, call.parts("up")),
            (call.w_down, call.parts("down")),
        )
        if scale is not None
    )

    def rounded(part: Tensor) -> Tensor:
        if whole or inputs == "float":
            return part
        return rounded_rows(part, inputs, call.w_up.dtype, form, block_size)

    for expert in needed:
        places = order[begin : begin + counts[expert + 1]]
        begin += counts[expert + 1]
        weight, part = score[places].unsqueeze(1), rows[places // chosen.shape[1]]
        hidden = module.gated(
            up.multiply(rounded(part * weight if call.weighed == "inputs" else part), None, whole, expert),
            tuple(GATES).index(call.activation), call.gate == "second",
        )  # fmt: skip
        answer = down.multiply(rounded(hidden), None, whole, expert)
        parts[places] = answer if call.weighed == "inputs" else answer * weight
    by_row = parts.view(*chosen.shape, rows.shape[1])
    total = by_row[:, 0]
    for place in range(1, chosen.shape[1]):  # one after the other, whatever is beside a row
        total = total + by_row[:, place]
    return total.to(x.dtype).view(x.shape)


def _linear_workspace(request: CallSpec) -> int:
    """The codes in panels with scales in float32, rows in float32 and in digits."""
    rows, columns, inner = request.dim("N"), -(-request.dim("C") // 16) * 16, request.dim("K")
    groups = max(1, inner // max(1, request.dim("S")))
    return columns * (inner + 8 * groups) + rows * (8 * inner + 4 * columns) + 64 * inner


_QUANTIZED = f"{FORMAT_FEATURES} {PART_FEATURES} {INPUT_FEATURES}"
_kernel = functools.partial(
    compiled,
    measured="an estimate: ordered by benchmarks/results/quantized_cpu.json",
    source="by construction; run against float64 and bitwise in batches on an Intel Xeon, every level",
    isa="avx2 fma",
    dtypes="float32 bfloat16 float16",
    mixed_dtypes=True,
    autocast=False,
    batch_invariant=True,
    limits=("S % 8 == 0 when scale_per_group", "S % 16 == 0 when scale_per_block"),
)

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "native.quantized_linear.codes", _quantized_linear, (0.6, 0.6, 15.0),
        features=f"{_QUANTIZED} bias", workspace_bytes=_linear_workspace,
    ),
    _kernel(
        "native.fused_experts.codes", _fused_experts, (0.5, 0.5, 60.0),
        features=f"{_QUANTIZED} {EXPERT_FEATURES}",
    ),
)  # fmt: skip

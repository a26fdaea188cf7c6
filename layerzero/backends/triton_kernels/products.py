"""Products of rows as they are with quantized weights: codes become numbers on their way to the units.

A program makes a tile of the result's columns for all its rows: the weight is the first operand, so that its
numbers go from registers into the matrix units. Codes of four bits lie in pairs along K: even and odd places
meet the even and odd places of the rows in a product each. Scales that are exact in sixteen bits beside their
codes (MXFP4, NVFP4) multiply them; all others multiply the sums of their group in float32. Where columns are
too few for the device, K is cut in parts that a second launch adds in a fixed order.
"""

# Triton's functions are no Python to a type checker: constants and pointers in, nothing declared.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportOperatorIssue=false, reportArgumentType=false

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerzero.backends.triton_kernels.paged import processors
from layerzero.formats.elements import table_of
from layerzero.formats.table import format_of

# Four bytes hold eight codes; pairs of bytes are spread to halves of a word, and a half's four bits become
# the last bits of a number with a known exponent, from which that number without them is taken.
_SPREAD = """
    .reg .b32 first, second, base;
    prmt.b32 first, $4, 0, 0x4140;
    prmt.b32 second, $4, 0, 0x4342;
"""
_HALVES = (("$0", "first", 0), ("$1", "second", 0), ("$2", "first", 4), ("$3", "second", 4))


def _integers(kind: str, one: int, middle: int) -> str:
    """Codes 0 to 15 less 8; `one` is the bits of a number whose last bit counts 1, `middle` of it plus 8."""
    lines = [f"mov.b32 base, {middle | middle << 16:#x};"]
    for out, half, shift in _HALVES:
        lines += [f"shr.b32 {out}, {half}, {shift};"]
        lines += [f"lop3.b32 {out}, {out}, 0x000f000f, {one | one << 16:#x}, 0xea;"]
        lines += [f"sub.rn.{kind}x2 {out}, {out}, base;"]
    return "{" + _SPREAD + "\n".join(lines) + "}"


def _e2m1(kind: str, to_exponent: int, factor: int) -> str:
    """A sign and three bits shifted to where the exponent ends, times a power of two (`factor`'s bits)."""
    magnitude = 0x7 << to_exponent
    lines = [".reg .b32 sign;", f"mov.b32 base, {factor | factor << 16:#x};"]
    for out, half, shift in _HALVES:
        to_sign = 12 - shift
        lines += [f"shl.b32 sign, {half}, {to_sign};", "and.b32 sign, sign, 0x80008000;"]
        move = f"shl.b32 {out}, {half}, {to_exponent - shift};" if to_exponent >= shift else (
            f"shr.b32 {out}, {half}, {shift - to_exponent};"
        )  # fmt: skip
        lines += [move, f"lop3.b32 {out}, {out}, {magnitude | magnitude << 16:#x}, sign, 0xea;"]
        lines += [f"mul.rn.{kind}x2 {out}, {out}, base;"]
    return "{" + _SPREAD + "\n".join(lines) + "}"


_INT4_BF16 = tl.constexpr(_integers("bf16", 0x4300, 0x4308))
_INT4_F16 = tl.constexpr(_integers("f16", 0x6400, 0x6408))
_E2M1_BF16 = tl.constexpr(_e2m1("bf16", 6, 0x7E80))
_E2M1_F16 = tl.constexpr(_e2m1("f16", 9, 0x7400))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _pair(codes, table_ptr, KIND: tl.constexpr, TO: tl.constexpr, ASM: tl.constexpr):
    """The numbers of the even and of the odd places of packed codes, without scales."""
    if ASM and KIND == "int4":
        if tl.bfloat16 == TO:
            even, odd = tl.inline_asm_elementwise(
                _INT4_BF16, "=r,=r,=r,=r,r", [codes], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            even, odd = tl.inline_asm_elementwise(
                _INT4_F16, "=r,=r,=r,=r,r", [codes], (tl.float16, tl.float16), is_pure=True, pack=4
            )
    elif ASM and KIND == "e2m1":
        if tl.bfloat16 == TO:
            even, odd = tl.inline_asm_elementwise(
                _E2M1_BF16, "=r,=r,=r,=r,r", [codes], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            even, odd = tl.inline_asm_elementwise(
                _E2M1_F16, "=r,=r,=r,=r,r", [codes], (tl.float16, tl.float16), is_pure=True, pack=4
            )
    else:
        even = tl.load(table_ptr + (codes & 15).to(tl.int32)).to(TO)
        odd = tl.load(table_ptr + (codes >> 4).to(tl.int32)).to(TO)
    return even, odd


@triton.jit
def _number(scale):
    """Scales as float32; the code of a power of two is its exponent."""
    if scale.dtype == tl.uint8:
        wide = scale.to(tl.int32)
        bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
        return bits.to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def _spread_scale(scale_ptr, columns, first, inside, scale_row, TO: tl.constexpr, GROUPS: tl.constexpr):
    """The scales (columns, GROUPS) of a tile from group `first` on, as numbers of the product's type."""
    groups = first + tl.arange(0, GROUPS)
    scale = tl.load(
        scale_ptr + columns[:, None] * scale_row + groups[None, :], mask=inside[:, None], other=0.0
    )
    return _number(scale).to(TO)


@triton.jit
def multiply_tile(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, second_ptr, table_ptr, columns, lines, is_column, is_line, part,
    x_row, codes_row, scale_row,
    INNER: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr,
    FOLDED: tl.constexpr, ZERO: tl.constexpr, SECOND: tl.constexpr, SPLITS: tl.constexpr, ASM: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The sums (BN, BM) over a part of K: the weight's rows `columns` times the rows `lines` of `x_ptr`."""
    long_columns, long_lines = columns.to(tl.int64), lines.to(tl.int64)
    TO: tl.constexpr = x_ptr.dtype.element_ty
    TILES: tl.constexpr = INNER // BK
    PART: tl.constexpr = TILES // SPLITS
    sums = tl.zeros((BN, BM), tl.float32)
    scale_columns = long_columns // BLOCK
    for tile in range(part * PART, part * PART + PART):
        start = tile * BK
        if PACKED:
            places = tl.arange(0, BK // 2)
            codes = tl.load(
                codes_ptr + long_columns[:, None] * codes_row + (start // 2 + places)[None, :],
                mask=is_column[:, None], other=0,
            )  # fmt: skip
            pairs = tl.load(
                x_ptr.to(tl.pointer_type(tl.int32)) + long_lines[:, None] * (x_row // 2)
                + (start // 2 + places)[None, :],
                mask=is_line[:, None], other=0,
            )  # fmt: skip
            x_even = (pairs & 0xFFFF).to(tl.int16).to(TO, bitcast=True)
            x_odd = (pairs >> 16).to(tl.int16).to(TO, bitcast=True)
            even, odd = _pair(codes, table_ptr, KIND, TO, ASM)
            if ZERO:
                zero = tl.load(
                    zero_ptr + scale_columns * scale_row + start // GROUP, mask=is_column, other=8
                )  # fmt: skip
                shift = 8.0 - zero.to(tl.float32)
                even += shift.to(TO)[:, None]
                odd += shift.to(TO)[:, None]
            if FOLDED:
                GROUPS: tl.constexpr = BK // GROUP
                spread = _spread_scale(
                    scale_ptr, scale_columns, start // GROUP, is_column, scale_row, TO, GROUPS
                )[:, :, None]  # fmt: skip
                even = tl.reshape(tl.reshape(even, (BN, GROUPS, GROUP // 2)) * spread, (BN, BK // 2))
                odd = tl.reshape(tl.reshape(odd, (BN, GROUPS, GROUP // 2)) * spread, (BN, BK // 2))
            product = tl.dot(even, tl.trans(x_even))
            product = tl.dot(odd, tl.trans(x_odd), product)
        else:
            places = start + tl.arange(0, BK)
            codes = tl.load(
                codes_ptr + long_columns[:, None] * codes_row + places[None, :],
                mask=is_column[:, None], other=0.0,
            )  # fmt: skip
            x = tl.load(
                x_ptr + long_lines[:, None] * x_row + places[None, :], mask=is_line[:, None], other=0.0
            )
            numbers = codes.to(TO)
            if FOLDED:
                GROUPS_: tl.constexpr = BK // GROUP
                spread = _spread_scale(
                    scale_ptr, scale_columns, start // GROUP, is_column, scale_row, TO, GROUPS_
                )[:, :, None]  # fmt: skip
                numbers = tl.reshape(tl.reshape(numbers, (BN, GROUPS_, GROUP)) * spread, (BN, BK))
            product = tl.dot(numbers, tl.trans(x))
        if FOLDED or GROUP >= INNER:
            sums += product
        else:
            scale = tl.load(scale_ptr + scale_columns * scale_row + start // GROUP, mask=is_column, other=0.0)
            sums += product * _number(scale)[:, None]
    if not FOLDED and GROUP >= INNER:
        scale = tl.load(scale_ptr + scale_columns * scale_row, mask=is_column, other=0.0)
        sums *= _number(scale)[:, None]
    if SECOND:
        sums *= tl.load(second_ptr)
    return sums


@triton.jit
def _product(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, second_ptr, table_ptr, bias_ptr, out_ptr,
    rows, width, x_row, codes_row, scale_row,
    INNER: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr,
    FOLDED: tl.constexpr, ZERO: tl.constexpr, SECOND: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr,
    ASM: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    column_tile, row_tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = column_tile * BN + tl.arange(0, BN)
    lines = row_tile * BM + tl.arange(0, BM)
    is_column, is_line = columns < width, lines < rows
    sums = multiply_tile(
        x_ptr, codes_ptr, scale_ptr, zero_ptr, second_ptr, table_ptr, columns, lines, is_column, is_line,
        part, x_row, codes_row, scale_row,
        INNER, GROUP, BLOCK, KIND, PACKED, FOLDED, ZERO, SECOND, SPLITS, ASM, BN, BM, BK,
    )  # fmt: skip
    if BIAS and SPLITS == 1:
        sums += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    place = (part.to(tl.int64) * rows + lines)[None, :] * width + columns[:, None]
    tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=is_column[:, None] & is_line[None, :])


@triton.jit
def _add_parts(
    parts_ptr, bias_ptr, out_ptr, count, width, BIAS: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr
):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = places < count
    total = tl.zeros((TILE,), tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + part * count + places, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + places % width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=inside)


_FOLDED = frozenset({"mxfp4", "mxfp8", "nvfp4"})


class Tiles(NamedTuple):
    """How a product is cut: columns, rows and K of a tile, and what runs one."""

    columns: int
    rows: int
    inner: int
    warps: int
    stages: int


def tiles_of(rows: int, inner: int, group: int, folded: bool) -> Tiles:
    """The tile for so many rows: a group of K at a time, unless its scales go into the numbers."""
    depth = next(size for size in (128, 64, 32, 16) if inner % size == 0 and (folded or group % size == 0))
    if rows <= 16:
        return Tiles(64, 16, depth, 4, 4)
    if rows <= 64:
        return Tiles(64, triton.next_power_of_2(rows), depth, 4, 4)
    return Tiles(128, 128, depth, 8, 3)


def splits_of(programs: int, tiles: int, processors: int) -> int:
    """Into how many parts K is cut: a power of two that divides its tiles, 1 where programs are enough."""
    splits = 1
    while programs * splits * 2 <= 2 * processors and tiles % (splits * 2) == 0 and tiles // splits >= 16:
        splits *= 2
    return splits


class PackedWeight(NamedTuple):
    """What kernels take of a quantized weight (..., rows, K): its parts, steps between rows, constants."""

    parts: tuple[Tensor | None, ...]  # codes, scales, zero points, the second scale, what codes stand for
    steps: tuple[int, int]  # between rows of codes and rows of scales
    constants: dict[str, Any]

    @classmethod
    def of(
        cls, x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, tensor_scale: Tensor | None,
        format: str | None, block_size: int,
    ) -> PackedWeight:  # fmt: skip
        """Of a weight beside rows like `x`."""
        form = format_of(weight.dtype, format)
        weight = weight if weight.stride(-1) == 1 else weight.contiguous()
        if scale.dim() > 1 and scale.shape[-1] > 1 and scale.stride(-1) != 1:
            scale = scale.contiguous()
        if zero_point is not None and zero_point.stride() != scale.stride():  # the same steps find both
            scale, zero_point = scale.contiguous(), zero_point.contiguous()
        inner = weight.shape[-1] * form.packed
        group, scale_row, block = _scale_layout(scale, inner, block_size)
        constants = {
            "INNER": inner, "GROUP": group, "BLOCK": block, "KIND": form.element.name,
            "PACKED": form.packed == 2, "ZERO": zero_point is not None, "SECOND": tensor_scale is not None,
            # float16 has not the range of a power of two in eight bits.
            "FOLDED": form.name in _FOLDED and (form.two_level or x.dtype == torch.bfloat16),
            "ASM": not INTERPRETED,
        }  # fmt: skip
        if scale.dtype == torch.float8_e8m0fnu:  # exponents are read as the bytes that they are
            scale = scale.view(torch.uint8)
        values = table_of(form.element, torch.float32, x.device) if form.packed == 2 else None
        parts = (weight, scale, zero_point, tensor_scale, values)
        return cls(parts, (weight.stride(-2), scale_row), constants)

    def cut(self, rows: int) -> Tiles:
        """The tile of a product with so many rows."""
        return tiles_of(rows, *(self.constants[name] for name in ("INNER", "GROUP", "FOLDED")))


def even_rows(x: Tensor) -> Tensor:
    """`x` (..., K) as rows of which pairs of numbers can be read at once."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.contiguous() if rows.stride(0) % 2 or rows.stride(1) != 1 else rows


def quantized_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, inputs: str = "float",
    format: str | None = None, zero_point: Tensor | None = None, tensor_scale: Tensor | None = None,
    block_size: int = 0,
) -> Tensor:  # fmt: skip
    """Rows times a quantized weight; `inputs` is "float" alone."""
    rows = even_rows(x)
    operand = PackedWeight.of(x, weight, scale, zero_point, tensor_scale, format, block_size)
    bias = None if bias is None else bias.contiguous()
    (count, inner), width = rows.shape, weight.shape[0]
    cut = operand.cut(count)
    grid = (triton.cdiv(width, cut.columns), triton.cdiv(count, cut.rows))
    parts = splits_of(grid[0] * grid[1], inner // cut.inner, processors(x.device))
    out = torch.empty((count, width), dtype=x.dtype, device=x.device)
    sums = out if parts == 1 else torch.empty((parts, count, width), dtype=torch.float32, device=x.device)
    _product[(*grid, parts)](
        rows, *operand.parts, bias, sums, count, width, rows.stride(0), *operand.steps,
        BIAS=bias is not None, SPLITS=parts, BN=cut.columns, BM=cut.rows, BK=cut.inner, **operand.constants,
        num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if parts > 1:
        add_parts(sums, bias, out)
    return out.view(*x.shape[:-1], width)


def add_parts(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write to `out` (rows, C) the sum of `parts` (parts, rows, C) in their order, and `bias` (C,)."""
    count, width = out.numel(), out.shape[1]
    _add_parts[(triton.cdiv(count, 1024),)](
        parts, bias, out, count, width, BIAS=bias is not None, SPLITS=parts.shape[0], TILE=1024, num_warps=4
    )


def _scale_layout(scale: Tensor, inner: int, block_size: int) -> tuple[int, int, int]:
    """(numbers along K that share a scale, the step to the next row of scales, rows that share one)."""
    if scale.dim() < 2:
        return inner, 0, 1
    if block_size:
        return min(block_size, inner), scale.stride(-2), block_size
    return inner // scale.shape[-1], scale.stride(-2), 1

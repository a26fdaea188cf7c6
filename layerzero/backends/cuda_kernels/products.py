"""Rows of sixteen bits times weights of four-bit codes, in CUDA C++: products.cu and wide_products.cu."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.backends.cuda_kernels.compiled import HALF, function, multiprocessors, or_any
from layerzero.formats.table import format_of
from layerzero.spec.call_spec import CallSpec

# By format: the element, and how its scales are stored.
_KINDS: Mapping[str, tuple[int, int]] = MappingProxyType({"int4": (0, 0), "mxfp4": (1, 1), "nvfp4": (1, 2)})
_CHUNK = 128
_WIDE_THREADS, _COPY_THREADS, _ADD_THREADS = 256, 128, 256


class Tile(NamedTuple):
    """Rows that a block has at once, turns of rows and of codes on their way, and chunks of K in a turn.

    With float32 scales and bfloat16, scales are rounded to bfloat16, as are their products with codes.
    """

    rows: int
    row_stages: int
    code_stages: int
    chunks: int
    columns: int = 128

    @property
    def shared(self) -> int:
        """Bytes: rows and codes of all turns on their way, behind the barriers; the sums at the end."""
        turn = self.row_stages * 2 * _CHUNK * self.rows + self.code_stages * self.columns * _CHUNK // 2
        return 128 + self.chunks * turn


_TILES = (Tile(16, 3, 3, 2), Tile(32, 3, 3, 2), Tile(64, 3, 3, 2), Tile(128, 4, 3, 1), Tile(256, 3, 3, 1))
# Where scales are not folded into numbers: float16 has not their range.
_EXACT_TILES = (Tile(32, 4, 6, 2), Tile(64, 5, 6, 1))
# Chosen by trials on an H200: chunks in a part of K, blocks of few rows at once, a short and a long side.
_LEAST_CHUNKS, _LEAST_CHUNKS_OF_FEW, _BLOCKS_AT_ONCE, _SHORT, _LONG = 8, 48, 4, 4224, 8192


def _adder(device: torch.device, dtype: torch.dtype) -> Any:
    return function(device, ("join.cu",), "add_parts", HALF=HALF[dtype])


class ThinTile(NamedTuple):
    """A block for few rows: tiles of 8 rows, strips of 16 columns, warps that share K, chunks on their way.

    A multiprocessor is to hold `blocks` of them.
    """

    tiles: int
    strips: int
    warps: int
    ahead: int
    blocks: int

    @property
    def rows(self) -> int:
        """Rows that a block has at once."""
        return 8 * self.tiles

    @property
    def columns(self) -> int:
        """Columns of the result that a block makes."""
        return 16 * self.strips


def _few(
    device: torch.device, form: str, dtype: torch.dtype, group: int, cut: ThinTile, *, zeros: bool
) -> Any:
    kind, scale = _KINDS[form]
    return function(
        device, ("codes.cuh", "products.cu"), "product", KIND=kind, SCALE=scale, HALF=HALF[dtype],
        GROUP=group, TILES=cut.tiles, STRIPS=cut.strips, WARPS=cut.warps, AHEAD=cut.ahead,
        BLOCKS=cut.blocks, ZEROS=int(zeros),
    )  # fmt: skip


def _arrange(device: torch.device, rows: int) -> Any:
    return function(device, ("arrange.cu",), "arrange", HALF=1, ROWS=rows)


def _wide(
    device: torch.device, form: str, dtype: torch.dtype, group: int, tile: Tile, *, whole: bool, zeros: bool
) -> Any:  # fmt: skip
    kind, scale = _KINDS[form]
    return function(
        device, ("codes.cuh", "wide_products.cu"), "product", tile.shared,
        KIND=kind, SCALE=scale, HALF=HALF[dtype], GROUP=group, ROWS=tile.rows, KGROUPS=tile.chunks,
        ROW_STAGES=tile.row_stages, CODE_STAGES=tile.code_stages, FOLDED=int(dtype == torch.bfloat16),
        WHOLE=int(whole), ZEROS=int(zeros),
    )  # fmt: skip


def plan_of(form: str, rows: int, width: int, inner: int, dtype: torch.dtype) -> ThinTile | Tile:
    """The block for rows, columns and K: a `ThinTile` for few rows, else a tile. By trials (H200)."""
    if rows <= 8:
        if inner > _LONG or (form == "nvfp4" and width >= _LONG):
            return ThinTile(1, 2, 8, 1, 2)
        return ThinTile(1, 2, 4, 1, 3) if width >= _LONG else ThinTile(1, 1, 8, 1, 2)
    if rows <= 16 and max(width, inner) <= _SHORT:
        return ThinTile(2, 2, 8, 1, 1)
    if rows <= 16 and dtype != torch.bfloat16:
        return ThinTile(2, 2, 4, 1, 2)
    return tile_of(rows, inner, dtype)


def tile_of(rows: int, inner: int, dtype: torch.dtype) -> Tile:
    """The smallest tile that holds the rows, else the largest; turns of one chunk where they are odd."""
    tiles = _TILES if dtype == torch.bfloat16 else _EXACT_TILES
    tile = next((tile for tile in tiles if rows <= tile.rows), tiles[-1])
    return tile._replace(chunks=1) if inner // _CHUNK % 2 else tile


def parts_of(blocks: int, chunks: int, processors: int, is_few: bool) -> int:
    """Into how many parts K is cut: as long as all blocks run at once; for few rows only a long K."""
    if is_few:
        return max(1, min(_BLOCKS_AT_ONCE * processors // blocks, chunks // _LEAST_CHUNKS_OF_FEW))
    return max(1, min(processors // blocks, chunks // _LEAST_CHUNKS))


def _asked(request: CallSpec) -> tuple[str, torch.dtype, ThinTile | Tile]:
    """Format, type and block of a request."""
    dtype = getattr(torch, request.dtype)
    form = next((name for name in _KINDS if f"quant_{name}" in request.features), "")
    return form, dtype, plan_of(form, request.dim("N"), request.dim("C"), request.dim("K"), dtype)


def unit(request: CallSpec) -> str:
    """What is compiled together."""
    form, dtype, plan = _asked(request)
    whole = request.dim("S") == request.dim("K")
    return f"{dtype} {form} {request.dim('S')} {whole} {'zero_point' in request.features} {plan}"


def compile_for(request: CallSpec) -> None:
    """Compile what a request needs."""
    device, group = torch.device(request.device), request.dim("S")
    form, dtype, plan = _asked(request)
    zeros = "zero_point" in request.features
    _adder(device, dtype)
    if isinstance(plan, ThinTile):
        _few(device, form, dtype, group, plan, zeros=zeros)
        return
    _arrange(device, plan.rows)
    _wide(device, form, dtype, group, plan, whole=group == request.dim("K"), zeros=zeros)


def steady(scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scales whose groups lie side by side, and zero points with their steps."""
    others = zero_point is not None and zero_point.stride() != scale.stride()
    if others or (scale.shape[1] > 1 and scale.stride(1) != 1):
        return scale.contiguous(), None if zero_point is None else zero_point.contiguous()
    return scale, zero_point


def quantized_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, inputs: str, format: str | None,
    zero_point: Tensor | None, tensor_scale: Tensor | None, block_size: int,
) -> Tensor:  # fmt: skip
    """Rows as they are times codes; `inputs` is "float", `block_size` 0."""
    form = format_of(weight.dtype, format).name
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(0) % 8 or rows.stride(1) != 1:
        rows = rows.contiguous()
    if weight.stride(0) % 16 or weight.stride(1) != 1:
        weight = weight.contiguous()
    scale, zero_point = steady(scale, zero_point)
    bias = None if bias is None else bias.contiguous()
    count, inner = rows.shape
    width, group, chunks = weight.shape[0], inner // scale.shape[1], inner // _CHUNK
    if count == 0:
        return x.new_empty((*x.shape[:-1], width))
    flags, zeros = [int(part is not None) for part in (tensor_scale, bias)], zero_point is not None
    others = [or_any(part, scale) for part in (zero_point, tensor_scale, bias)]
    plan = plan_of(form, count, width, inner, x.dtype)
    blocks, lines = -(-width // plan.columns), -(-count // plan.rows)
    parts = parts_of(blocks * lines, chunks, multiprocessors(x.device), isinstance(plan, ThinTile))
    out = torch.empty((count, width), dtype=x.dtype, device=x.device)
    sums = out if parts == 1 else torch.empty((parts, count, width), dtype=torch.float32, device=x.device)
    sizes, steps = [count, width, inner], [weight.stride(0), scale.stride(0)]
    if isinstance(plan, ThinTile):
        _few(x.device, form, x.dtype, group, plan, zeros=zeros)(
            grid=(blocks, parts, lines), block=(32 * plan.warps, 1, 1),
            args=[rows, weight, scale, *others, sums, *sizes, rows.stride(0), *steps, *flags, parts],
        )  # fmt: skip
    else:
        image = torch.empty((lines, chunks, plan.rows, _CHUNK), dtype=x.dtype, device=x.device)
        _arrange(x.device, plan.rows)(
            grid=(chunks, lines, plan.rows * 16 // _WIDE_THREADS), block=(_WIDE_THREADS, 1, 1),
            args=[rows, image, count, inner, rows.stride(0)],
        )  # fmt: skip
        _wide(x.device, form, x.dtype, group, plan, whole=group == inner, zeros=zeros)(
            grid=(blocks, parts, lines), block=(_WIDE_THREADS * plan.chunks + _COPY_THREADS, 1, 1),
            args=[image, weight, scale, *others, sums, *sizes, *steps, *flags, parts],
        )  # fmt: skip
    if parts > 1:
        _adder(x.device, x.dtype)(
            grid=(-(-count * width // _ADD_THREADS), 1, 1), block=(_ADD_THREADS, 1, 1),
            args=[sums, others[2], out, count * width, width, flags[1], parts],
        )  # fmt: skip
    return out.view(*x.shape[:-1], width)

"""Rows of sixteen bits times weights of four-bit codes, in CUDA C++ (products.cu, wide_products.cu)."""

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
_FEW_ROWS, _WIDE_COLUMNS, _CHUNK = 16, 128, 128
_WIDE_THREADS, _ADD_THREADS = 256, 256


class Tile(NamedTuple):
    """Rows that a block has at once; its turns on their way, and how many chunks of K are a turn."""

    rows: int
    stages: int
    chunks: int

    @property
    def shared(self) -> int:
        """Bytes: rows and codes of all turns on their way, behind the barriers."""
        return 128 + self.stages * self.chunks * _CHUNK * (2 * self.rows + _WIDE_COLUMNS // 2)


_TILES = (Tile(32, 6, 2), Tile(64, 8, 1), Tile(128, 5, 1))
# Chosen by trials on an H200: chunks in a part of K, blocks of few rows at once, a K that wants more warps.
_LEAST_CHUNKS, _LEAST_CHUNKS_OF_FEW, _BLOCKS_AT_ONCE, _LONG = 8, 48, 4, 8192


def _adder(device: torch.device, dtype: torch.dtype) -> Any:
    return function(device, ("join.cu",), "add_parts", HALF=HALF[dtype])


class Cut(NamedTuple):
    """A block for few rows: tiles of 8 rows, strips of 16 columns, warps that share K, chunks on their way.

    A multiprocessor is to hold `blocks` of them.
    """

    tiles: int
    strips: int
    warps: int
    ahead: int
    blocks: int


def _few(device: torch.device, form: str, dtype: torch.dtype, group: int, cut: Cut) -> Any:
    kind, scale = _KINDS[form]
    return function(
        device, ("codes.cuh", "products.cu"), "product", KIND=kind, SCALE=scale, HALF=HALF[dtype],
        GROUP=group, TILES=cut.tiles, STRIPS=cut.strips, WARPS=cut.warps, AHEAD=cut.ahead,
        BLOCKS=cut.blocks,
    )  # fmt: skip


def _wide(device: torch.device, form: str, dtype: torch.dtype, group: int, name: str, tile: Tile) -> Any:
    kind, scale = _KINDS[form]
    return function(
        device, ("codes.cuh", "wide_products.cu"), name, tile.shared if name == "product" else 0,
        KIND=kind, SCALE=scale, HALF=HALF[dtype], GROUP=group, ROWS=tile.rows, STAGES=tile.stages,
        KGROUPS=tile.chunks,
    )  # fmt: skip


def tile_of(rows: int, inner: int) -> Tile:
    """The smallest tile that holds the rows, else the largest; turns of one chunk where they are odd."""
    tile = next((tile for tile in _TILES if rows <= tile.rows), _TILES[-1])
    return tile._replace(chunks=1) if inner // _CHUNK % 2 else tile


def cut_of(rows: int, inner: int) -> Cut:
    """The block for few rows: more rows are read for more columns, and a long K has more warps."""
    if rows > 8:
        return Cut(2, 2, 8, 1, 2)
    if rows > 4:
        return Cut(1, 2, 4, 1, 4) if inner <= _LONG else Cut(1, 2, 8, 1, 2)
    return Cut(1, 1, 8, 1, 4)


def parts_of(blocks: int, chunks: int, processors: int, is_few: bool) -> int:
    """Into how many parts K is cut: as long as all blocks run at once; for few rows only a long K."""
    if is_few:
        return max(1, min(_BLOCKS_AT_ONCE * processors // blocks, chunks // _LEAST_CHUNKS_OF_FEW))
    return max(1, min(processors // blocks, chunks // _LEAST_CHUNKS))


def unit(request: CallSpec) -> str:
    """What is compiled together."""
    rows = request.dim("N")
    size = (
        f"{cut_of(rows, request.dim('K'))}"
        if rows <= _FEW_ROWS
        else f"wide {tile_of(rows, request.dim('K'))}"
    )
    form = next((name for name in _KINDS if f"quant_{name}" in request.features), "")
    return f"{request.dtype} {form} {request.dim('S')} {size}"


def compile_for(request: CallSpec) -> None:
    """Compile what a request needs."""
    device, dtype, rows = torch.device(request.device), getattr(torch, request.dtype), request.dim("N")
    form = next(name for name in _KINDS if f"quant_{name}" in request.features)
    _adder(device, dtype)
    if rows <= _FEW_ROWS:
        _few(device, form, dtype, request.dim("S"), cut_of(rows, request.dim("K")))
        return
    for name in ("arrange", "product"):
        _wide(device, form, dtype, request.dim("S"), name, tile_of(rows, request.dim("K")))


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
    flags = [int(part is not None) for part in (zero_point, tensor_scale, bias)]
    others = [or_any(part, scale) for part in (zero_point, tensor_scale, bias)]
    is_few = count <= _FEW_ROWS
    cut, tile = cut_of(count, inner), tile_of(count, inner)
    columns = 16 * cut.strips if is_few else _WIDE_COLUMNS
    blocks, lines = -(-width // columns), -(-count // (8 * cut.tiles if is_few else tile.rows))
    parts = parts_of(blocks * lines, chunks, multiprocessors(x.device), is_few)
    out = torch.empty((count, width), dtype=x.dtype, device=x.device)
    sums = out if parts == 1 else torch.empty((parts, count, width), dtype=torch.float32, device=x.device)
    sizes, steps = [count, width, inner], [weight.stride(0), scale.stride(0)]
    if is_few:
        _few(x.device, form, x.dtype, group, cut)(
            grid=(blocks, parts, lines), block=(32 * cut.warps, 1, 1),
            args=[rows, weight, scale, *others, sums, *sizes, rows.stride(0), *steps, *flags, parts],
        )  # fmt: skip
    else:
        image = torch.empty((lines, chunks, tile.rows, _CHUNK), dtype=x.dtype, device=x.device)
        _wide(x.device, form, x.dtype, group, "arrange", tile)(
            grid=(chunks, lines, 1), block=(_WIDE_THREADS, 1, 1),
            args=[rows, image, count, inner, rows.stride(0)],
        )  # fmt: skip
        _wide(x.device, form, x.dtype, group, "product", tile)(
            grid=(blocks, parts, lines), block=(_WIDE_THREADS * tile.chunks, 1, 1), shared_mem=tile.shared,
            args=[image, weight, scale, *others, sums, *sizes, *steps, *flags, parts],
        )  # fmt: skip
    if parts > 1:
        _adder(x.device, x.dtype)(
            grid=(-(-count * width // _ADD_THREADS), 1, 1), block=(_ADD_THREADS, 1, 1),
            args=[sums, others[2], out, count * width, width, flags[2], parts],
        )  # fmt: skip
    return out.view(*x.shape[:-1], width)

"""Calls over codes as calls over numbers, for kernels that read none: what is written, and how."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import host_copies, kv_formats
from layerzero.ops.attention.arguments import AttentionArgs, RaggedArgs
from layerzero.ops.op import Args, Decoding
from layerzero.spec.call_spec import CallSpec

_KEYS = frozenset({*kv_formats.CODE_FEATURES, *kv_formats.SCALE_FEATURES})


def _decode_operands(args: Args) -> Args:
    """q, k and v in the result's dtype."""
    ragged = len(args) == len(RaggedArgs._fields)
    call: Any = (RaggedArgs if ragged else AttentionArgs)._make(args)
    heads = 1 if ragged or call.layout == "BHSD" else 2
    return tuple(call._replace(**kv_formats.decoded_operands(call, heads, kv_formats.number_dtype(call.q))))


def _operand_numbers(spec: CallSpec) -> int:
    """Keys and values, and queries where they are codes."""
    batch, widths = max(spec.dim("B"), 1) if "Sk" in spec.dims else 1, spec.dim("D") + spec.dim("Dv")
    written = spec.dim("S", spec.dim("Sk")) * spec.dim("Hk") * widths
    if spec.dtype in kv_formats.CODE_NAMES:
        written += spec.dim("T", spec.dim("Sq")) * spec.dim("Hq") * spec.dim("D")
    return batch * written


OPERAND_DECODING = Decoding(_KEYS, _decode_operands, _operand_numbers)


def pages_decoding(*, queries: int, scales: int) -> Decoding:
    """The decoding of an op over pages: pools are behind `queries` arguments, scales from `scales` on."""
    pools, tables = queries, queries + 2

    def decode(args: Args) -> Args:
        """The pages that the tables name, one behind the other in a pool of their own."""
        size_axis = 1 if args[pools].dim() == 3 or args[10] == "NHD" else 2
        heads = None if args[pools].dim() == 3 else 3 - size_axis
        block_tables, lengths = args[tables : tables + 2]
        (batch, width), device = block_tables.shape, block_tables.device
        # A row's pages behind its length, where a table may hold anything, are page 0.
        starts = torch.arange(width, device=device) * args[pools].shape[size_axis]
        pages = torch.where(starts < lengths.unsqueeze(1), block_tables, 0).flatten().long()
        numbers = [
            _page_numbers(args[pools + at], args[scales + at], pages, heads, args[0].dtype) for at in (0, 1)
        ]
        new_tables = _own_tables(batch, width, args[0].device)
        head = (*args[:pools], *numbers, new_tables)
        return (*head, *args[tables + 1 : scales], None, None, *args[scales + 2 :])

    return Decoding(_KEYS, decode, _page_elements, lambda spec: {"N": max(spec.dim("B") * spec.dim("M"), 1)})


def _page_numbers(
    pool: Tensor, scale: Tensor, pages: Tensor, heads: int | None, dtype: torch.dtype
) -> Tensor:
    codes = pool.view(torch.uint8).index_select(0, pages).view(pool.dtype)
    page_scale = scale if scale.dim() < 2 else scale.index_select(0, pages)
    return kv_formats.decode(codes, page_scale, heads, dtype)


def _own_tables(batch: int, width: int, device: torch.device) -> Tensor:
    """Tables (B, M) of a pool that holds row after row; kept with their host copy outside of a capture."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.arange(batch * width, dtype=torch.int32, device=device).view(batch, width)
    return _kept_tables(batch, width, device)


@functools.lru_cache(maxsize=64)
def _kept_tables(batch: int, width: int, device: torch.device) -> Tensor:
    rows = torch.arange(batch * width, dtype=torch.int32, device="cpu").view(batch, width)
    return host_copies.to_device_with_host_copy(rows, device)


def _page_elements(spec: CallSpec) -> int:
    widths = spec.dim("D", spec.dim("C")) + spec.dim("Dv", spec.dim("R"))
    return max(spec.dim("B"), 1) * spec.dim("M") * spec.dim("P") * max(spec.dim("Hk"), 1) * widths

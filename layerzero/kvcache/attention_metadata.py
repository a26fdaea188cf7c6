"""Attention metadata of a forward pass over pages: slots, block tables and lengths of many sequences."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from layerzero.kvcache.block_tables import BlockTables, PagedSequence, TokenRange
from layerzero.ops.host_copies import attach_host_copy, to_device_with_host_copy


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The places of the rows (T,) of B sequences: what a forward needs beside the rows themselves.

    positions (T,) int64 in their sequences and slot_mapping (T,) int64 in the pool, as `append_kv` takes
    them. block_tables (B, M) and seq_lens (B,) with these rows counted, int32, as `paged_attention` takes
    them. cu_seqlens_q (B + 1,) int32 of each sequence's rows, or None where each has one. logits_indices
    picks each sequence's last row.
    """

    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    logits_indices: Tensor | slice


class MetadataBuilder:
    """Makes `AttentionMetadata`; what the last step had already is used again.

    The layers of one step ask for the same token ranges, and a batch that stays keeps its block tables: they
    are made anew where a sequence joins, leaves or gets another page, and where the longest one needs a wider
    table.
    """

    __slots__ = ("_block_tables", "_cached_metadata", "_cached_tables", "_device", "_size")

    def __init__(self, block_tables: BlockTables, page_size: int, device: torch.device) -> None:
        self._block_tables, self._size, self._device = block_tables, page_size, device
        self._cached_metadata: tuple[list[TokenRange], Hashable, AttentionMetadata] | None = None
        self._cached_tables: tuple[list[PagedSequence], Hashable, Tensor] | None = None

    def build(self, ranges: Sequence[TokenRange]) -> AttentionMetadata:
        """The metadata of the tokens of `ranges`, one range after the other."""
        ranges, key = list(ranges), (self._stream(), self._block_tables.version)
        last = self._cached_metadata
        if last is not None and last[0] == ranges and last[1] == key:
            return last[2]
        with torch.inference_mode(False):
            metadata = self._build(ranges)
        self._cached_metadata = (ranges, key, metadata)
        return metadata

    def _stream(self) -> Hashable:
        """The current CUDA stream: another one would not wait for what was sent on it."""
        return torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else None

    def _build(self, ranges: list[TokenRange]) -> AttentionMetadata:
        sequences = [span.sequence for span in ranges]
        query_lens = [span.count for span in ranges]
        cu_seqlens_q: Tensor | None = None
        logits_indices: Tensor | slice = slice(None)
        if max(query_lens) == 1:
            size, positions = self._size, [span.start for span in ranges]
            slot_mapping = [
                s.pages[n // size] * size + n % size for s, n in zip(sequences, positions, strict=True)
            ]
            seq_lens = [start + 1 for start in positions]
        else:
            positions = [place for span in ranges for place in range(span.start, span.end)]
            slot_mapping, seq_lens = self.slot_mapping(ranges), [span.end for span in ranges]
            ends = list(accumulate(query_lens))
            offsets = torch.tensor([0, *ends], dtype=torch.int32, device="cpu")
            cu_seqlens_q = to_device_with_host_copy(offsets, self._device)
            last = torch.tensor(ends, device="cpu") - 1
            logits_indices = to_device_with_host_copy(last, self._device)
        position_tensor, slot_tensor, seq_lens_tensor = self._to_device(positions, slot_mapping, seq_lens)
        block_tables = self.block_tables(sequences, -(-max(seq_lens) // self._size))
        return AttentionMetadata(
            position_tensor, slot_tensor, block_tables, seq_lens_tensor, cu_seqlens_q, logits_indices
        )

    def slot_mapping(self, ranges: Sequence[TokenRange]) -> list[int]:
        """The slots in the pool of all tokens, page by page."""
        size = self._size
        slot_mapping: list[int] = []
        for span in ranges:
            position, end, pages = span.start, span.end, span.sequence.pages
            while position < end:
                until = min(end, position - position % size + size)
                first = pages[position // size] * size + position % size
                slot_mapping += range(first, first + until - position)
                position = until
        return slot_mapping

    def _to_device(
        self, positions: list[int], slot_mapping: list[int], seq_lens: list[int]
    ) -> tuple[Tensor, ...]:
        """All three on the device, in one transfer; each begins where sixteen bytes do."""
        gap = [0] * (len(slot_mapping) % 2)
        numbers = array("q", [*positions, *gap, *slot_mapping, *gap])
        numbers.frombytes(array("i", seq_lens + [0] * (len(seq_lens) % 2)).tobytes())
        count, padded = len(slot_mapping), len(slot_mapping) + len(gap)
        tensors = (
            torch.frombuffer(numbers, dtype=torch.int64, count=count),
            torch.frombuffer(numbers, dtype=torch.int64, count=count, offset=8 * padded),
            torch.frombuffer(numbers, dtype=torch.int32, count=len(seq_lens), offset=16 * padded),
        )
        if self._device.type == "cpu":
            return tensors
        on_target = to_device_with_host_copy(torch.frombuffer(numbers, dtype=torch.int64), self._device)
        ends = on_target[2 * padded :].view(torch.int32)[: len(seq_lens)]
        return on_target[:count], on_target[padded : padded + count], attach_host_copy(ends, tensors[2])

    def block_tables(self, sequences: list[PagedSequence], width: int) -> Tensor:
        """The page tables (B, width) of `sequences` on the device."""
        cache_key = self._stream(), width, self._block_tables.version
        cached = self._cached_tables
        if cached is not None and cached[0] == sequences and cached[1] == cache_key:
            return cached[2]
        if any(sequence.block_tables is not self._block_tables for sequence in sequences):
            raise ValueError("ranges needs those of this cache's sequences, got another cache's")
        picked = self._block_tables.gather([sequence.row for sequence in sequences], width)
        on_cpu = self._device.type == "cpu"
        block_tables = picked if on_cpu else to_device_with_host_copy(picked, self._device)
        self._cached_tables = (sequences, cache_key, block_tables)
        return block_tables

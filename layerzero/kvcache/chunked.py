"""Each sequence as a list of chunks of one size: growing never copies, forks share the full chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerzero.kvcache.protocol import DenseCache, KVCacheSpec
from layerzero.ops import checks

Chunk = tuple[Tensor, Tensor]


@dataclass(slots=True)
class _ChunkedSequence:
    length: int = 0
    chunks: list[Chunk] = field(default_factory=list)


class ChunkedCache(DenseCache[_ChunkedSequence]):
    """Chunks of `chunk` tokens, allocated as they are needed; reading joins them."""

    __slots__ = ("_chunk",)

    def __init__(self, spec: KVCacheSpec, *, chunk: int = 64) -> None:
        super().__init__(spec)
        self._chunk = checks.need_int("chunk", chunk, low=1)

    def new(self) -> int:
        """A sequence without tokens."""
        return self._add(_ChunkedSequence())

    def fork(self, sequence: int) -> int:
        """A sequence over the same full chunks and a copy of the last one."""
        source = self._sequences.get(sequence)
        chunks = list(source.chunks)
        if source.length % self._chunk:
            last, chunks[-1] = chunks[-1], self._empty()
            for copy, source_chunk in zip(chunks[-1], last, strict=True):
                copy.copy_(source_chunk)
        return self._add(_ChunkedSequence(source.length, chunks))

    def append(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Write tokens behind the sequence's, into new chunks where the last is full."""
        count = self.spec.check(keys, values)
        state = self._sequences.get(sequence)
        done = 0
        while done < count:
            entry, slot = divmod(state.length, self._chunk)
            if entry == len(state.chunks):
                state.chunks.append(self._empty())
            step = min(self._chunk - slot, count - done)
            for chunk, new in zip(state.chunks[entry], (keys, values), strict=True):
                chunk[slot : slot + step].copy_(new[done : done + step])
            state.length += step
            done += step
        if count:
            self.version += 1

    def _empty(self) -> Chunk:
        spec = self.spec
        keys = spec.zeros(self._chunk, spec.num_kv_heads, spec.head_dim)
        return keys, spec.zeros(self._chunk, spec.num_kv_heads, spec.head_dim_v)

    def read(self, sequence: int) -> tuple[Tensor, Tensor]:
        """The sequence's chunks joined: a copy, a view where one chunk holds all."""
        state = self._sequences.get(sequence)
        if len(state.chunks) == 1:
            keys, values = state.chunks[0]
        else:
            chunks = state.chunks or [self._empty()]
            keys, values = (torch.cat([chunk[part] for chunk in chunks]) for part in (0, 1))
        return keys[: state.length], values[: state.length]

    def allocated_bytes(self) -> int:
        """Bytes of all chunks, shared ones once."""
        chunks = {id(keys) for state in self._sequences.values() for keys, _ in state.chunks}
        return len(chunks) * self._chunk * self.spec.token_bytes

"""Caches of dense tensors: each sequence in one block that doubles when it is full, or in chunks of one size.

Blocks serve any attention kernel as they are; growing by chunks never copies, and forks share the full ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from layerzero.formats.errors import FormatError
from layerzero.kvcache.protocol import KVCacheSpec, Sequences
from layerzero.ops import checks
from layerzero.spec.reasons import Reason

Chunk = tuple[Tensor, Tensor]


class DenseSequence(Protocol):
    """What a dense cache keeps of a sequence: how many tokens it has, and where they are."""

    length: int


D = TypeVar("D", bound=DenseSequence)


class DenseCache(Generic[D]):
    """What caches have in common that keep each sequence's tokens in memory of its own."""

    __slots__ = ("_sequences", "spec", "version")

    def __init__(self, spec: KVCacheSpec) -> None:
        if spec.is_coded:
            needs, got = "None for a cache without pages", str(spec.pool_dtype).removeprefix("torch.")
            raise FormatError("pool_dtype", needs, got, Reason.KV_DTYPE_MISMATCH)
        self.spec = spec
        self.version = 0
        self._sequences: Sequences[D] = Sequences()

    def _zeros(self, tokens: int) -> Chunk:
        """Keys and values of so many tokens."""
        spec = self.spec
        keys = spec.zeros(tokens, spec.num_kv_heads, spec.head_dim)
        return keys, spec.zeros(tokens, spec.num_kv_heads, spec.head_dim_v)

    def _add(self, state: D) -> int:
        self.version += 1
        return self._sequences.add(state)

    def length(self, sequence: int) -> int:
        """The sequence's tokens."""
        return self._sequences.get(sequence).length

    def free(self, sequence: int) -> None:
        """Forget the sequence; memory that forks share or views use stays alive."""
        self._sequences.pop(sequence)
        self.version += 1


@dataclass(slots=True)
class _ContiguousSequence:
    keys: Tensor
    values: Tensor
    length: int = 0


class ContiguousCache(DenseCache[_ContiguousSequence]):
    """Blocks that start with room for `capacity` tokens; growing and forking copy."""

    __slots__ = ("_capacity",)

    def __init__(self, spec: KVCacheSpec, *, capacity: int = 64) -> None:
        super().__init__(spec)
        self._capacity = checks.need_int("capacity", capacity, low=1)

    def _block(self, capacity: int, like: _ContiguousSequence | None = None) -> _ContiguousSequence:
        """An empty block, or one that holds what `like` holds."""
        block = _ContiguousSequence(*self._zeros(capacity))
        if like is not None:
            block.length = like.length
            block.keys[: like.length].copy_(like.keys[: like.length])
            block.values[: like.length].copy_(like.values[: like.length])
        return block

    def new(self) -> int:
        """A sequence without tokens."""
        return self._add(self._block(self._capacity))

    def fork(self, sequence: int) -> int:
        """A copy of the sequence."""
        source = self._sequences.get(sequence)
        return self._add(self._block(source.keys.shape[0], source))

    def append(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Write tokens behind the sequence's; a full block moves to one twice its size."""
        count = self.spec.check(keys, values)
        block = self._sequences.get(sequence)
        if not count:
            return
        end = block.length + count
        if end > block.keys.shape[0]:
            wider = self._block(max(end, 2 * block.keys.shape[0]), block)
            block.keys, block.values = wider.keys, wider.values
        block.keys[block.length : end].copy_(keys)
        block.values[block.length : end].copy_(values)
        block.length = end
        self.version += 1

    def read(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Views of the sequence's keys and values."""
        block = self._sequences.get(sequence)
        return block.keys[: block.length], block.values[: block.length]

    def allocated_bytes(self) -> int:
        """Bytes of all blocks, their unused ends included."""
        return sum(block.keys.shape[0] for block in self._sequences.values()) * self.spec.token_bytes


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
            last, chunks[-1] = chunks[-1], self._zeros(self._chunk)
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
                state.chunks.append(self._zeros(self._chunk))
            step = min(self._chunk - slot, count - done)
            for chunk, new in zip(state.chunks[entry], (keys, values), strict=True):
                chunk[slot : slot + step].copy_(new[done : done + step])
            state.length += step
            done += step
        if count:
            self.version += 1

    def read(self, sequence: int) -> tuple[Tensor, Tensor]:
        """The sequence's chunks joined: a copy, a view where one chunk holds all."""
        state = self._sequences.get(sequence)
        if len(state.chunks) == 1:
            keys, values = state.chunks[0]
        else:
            chunks = state.chunks or [self._zeros(self._chunk)]
            keys, values = (torch.cat([chunk[part] for chunk in chunks]) for part in (0, 1))
        return keys[: state.length], values[: state.length]

    def allocated_bytes(self) -> int:
        """Bytes of all chunks, shared ones once."""
        chunks = {id(keys) for state in self._sequences.values() for keys, _ in state.chunks}
        return len(chunks) * self._chunk * self.spec.token_bytes

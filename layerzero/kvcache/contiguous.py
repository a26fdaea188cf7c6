"""Each sequence in one block that doubles when it is full: dense keys for any attention kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from layerzero.kvcache.protocol import DenseCache, KVCacheSpec
from layerzero.ops import checks


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
        spec = self.spec
        keys = spec.zeros(capacity, spec.num_kv_heads, spec.head_dim)
        block = _ContiguousSequence(keys, spec.zeros(capacity, spec.num_kv_heads, spec.head_dim_v))
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

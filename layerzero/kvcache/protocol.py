"""What every cache can do, and what its tokens look like."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from layerzero.formats.errors import FormatError
from layerzero.ops import checks, kv_formats
from layerzero.spec.errors import LayerZeroError
from layerzero.spec.reasons import Reason

T = TypeVar("T")


class UnknownSequenceError(LayerZeroError, KeyError):
    """The cache never gave out such a sequence."""

    def __str__(self) -> str:
        return str(self.args[0])


class FreedSequenceError(LayerZeroError, ValueError):
    """The sequence was freed before: its keys and values may be another sequence's by now."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """One token's keys and values: `num_kv_heads` heads of `head_dim`, values of `head_dim_v`, in `dtype`.

    A `PagedCache` keeps them in `pool_dtype`, by default as they are: float8_e4m3fn, float8_e5m2 and int8 are
    codes, whose scales are shared by `scale_granularity`: a tensor, a head, or each token's head.
    """

    num_kv_heads: int
    head_dim: int
    head_dim_v: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    pool_dtype: torch.dtype | None = None
    scale_granularity: str = "token"

    def __post_init__(self) -> None:
        checks.need_int("num_kv_heads", self.num_kv_heads, low=1)
        checks.need_int("head_dim", self.head_dim, low=1)
        checks.need_int("head_dim_v", self.head_dim_v, low=0)
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype needs a torch.dtype, got {type(self.dtype).__name__}: {self.dtype!r}")
        stored = self.pool_dtype
        if stored not in (None, self.dtype, *kv_formats.CODE_DTYPES):
            codes = ", ".join(checks.dtype_name(dtype) for dtype in kv_formats.CODE_DTYPES)
            raise FormatError("pool_dtype", f"dtype or one of {codes}", stored, Reason.KV_DTYPE_MISMATCH)
        checks.need_choice("scale_granularity", self.scale_granularity, kv_formats.GRANULARITIES)
        if not self.head_dim_v:
            object.__setattr__(self, "head_dim_v", self.head_dim)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for every mode to write: what is made in inference mode is not written outside of it."""
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)

    @property
    def is_coded(self) -> bool:
        """Whether pages hold codes."""
        return self.pool_dtype in kv_formats.CODE_DTYPES

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value, as a dense cache keeps them."""
        return self.num_kv_heads * (self.head_dim + self.head_dim_v) * self.dtype.itemsize

    @property
    def pooled_token_bytes(self) -> int:
        """Bytes of one token's key and value in pages, with the scales that are its own."""
        if not self.is_coded:
            return self.token_bytes
        scale_bytes = 8 if self.scale_granularity == "token" else 0
        return self.num_kv_heads * (self.head_dim + self.head_dim_v + scale_bytes)

    def check(self, keys: Tensor, values: Tensor) -> int:
        """The number of tokens in `keys` (S, heads, width) and `values` (S, heads, value_width).

        Raises: ValueError, TypeError: shape, dtype or device differ, nothing is converted on the way; a
            gradient is asked for.
        """
        expected_device = torch.device(self.device)
        for name, tensor, width in (("keys", keys, self.head_dim), ("values", values, self.head_dim_v)):
            checks.need_tensor(name, tensor, rank=3)
            if tensor.shape[1:] != (self.num_kv_heads, width):
                raise ValueError(
                    f"{name} needs shape (S, {self.num_kv_heads}, {width}), got {tuple(tensor.shape)}"
                )
            if tensor.dtype != self.dtype:
                needed, got = checks.dtype_name(self.dtype), checks.dtype_name(tensor.dtype)
                raise TypeError(f"{name} needs dtype {needed} like the cache, got {got}; convert it first")
            device = tensor.device
            if device.type != expected_device.type or expected_device.index not in (None, device.index):
                raise ValueError(f"{name} needs to be on {self.device}, got {device}")
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{name} needs not to require grad, or torch.no_grad(): a cache is written in place"
                )
        checks.need_like("values", "{} tokens", values.shape[0], keys.shape[0], "keys")
        return int(keys.shape[0])


class KVCache(Protocol):
    """Keys and values of many growing sequences; a sequence is an int that `new` or `fork` gave.

    `version` rises with every change, so that a caller that remembers something of a cache can tell that it
    is old.
    """

    spec: KVCacheSpec

    @property
    def version(self) -> int:
        """Rises with every change."""
        ...

    def new(self) -> int:
        """A sequence without tokens."""
        ...

    def fork(self, sequence: int) -> int:
        """A sequence that begins with the other's tokens and goes its own way from there."""
        ...

    def append(self, sequence: int, keys: Tensor, values: Tensor) -> None:
        """Put tokens (S, heads, width) behind the sequence's."""
        ...

    def free(self, sequence: int) -> None:
        """Give the sequence's memory back; the sequence cannot be used again."""
        ...

    def length(self, sequence: int) -> int:
        """The sequence's tokens."""
        ...

    def read(self, sequence: int) -> tuple[Tensor, Tensor]:
        """All keys (S, heads, width) and values (S, heads, value_width) in order; maybe views."""
        ...

    def allocated_bytes(self) -> int:
        """Bytes of keys and values that live sequences occupy, shared ones once."""
        ...


class Sequences(Generic[T]):
    """The live sequences of a cache by number; `next` is the one that `add` gives, and none comes again."""

    __slots__ = ("_live", "next")

    def __init__(self) -> None:
        self._live: dict[int, T] = {}
        self.next = 0

    def add(self, state: T) -> int:
        """A new number for `state`."""
        number = self.next
        self.next += 1
        self._live[number] = state
        return number

    def get(self, sequence: int) -> T:
        """The state of a live sequence.

        Raises: FreedSequenceError: it was freed. UnknownSequenceError: there never was one.
        """
        state = self._live.get(sequence)
        if state is not None:
            return state
        if isinstance(sequence, int) and 0 <= sequence < self.next:
            raise FreedSequenceError(
                f"sequence {sequence} needs to be live, got one that was freed", sequence=sequence
            )
        raise UnknownSequenceError(
            f"sequence needs one that this cache gave, got {sequence!r}", sequence=sequence
        )

    def get_many(self, sequences: Iterable[int]) -> list[T]:
        """The states of live sequences; the same errors as `get`."""
        live = self._live
        states = [live.get(sequence) for sequence in sequences]
        if None in states:
            return [self.get(sequence) for sequence in sequences]
        return states  # type: ignore[return-value]

    def pop(self, sequence: int) -> T:
        """Forget a live sequence; the same errors as `get`."""
        state = self.get(sequence)
        del self._live[sequence]
        return state

    def values(self) -> list[T]:
        """Every live state."""
        return list(self._live.values())

    def numbers(self) -> list[int]:
        """Every live number."""
        return list(self._live)

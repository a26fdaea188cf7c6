"""What a call asks, as values: no tensor, no device handle, nothing that cannot be written down."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

# Axes, one legend for every op: B batch, H heads (Hq query, Hk key), Sq query tokens, Sk key tokens,
# D head size, Dv value head size, N rows (tokens of a flat tensor), C row width, K input width of a
# matrix, V vocabulary, G query heads per key head, P page size.


class CallSpec(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One call reduced to what can decide between kernels.

    `dims` are sizes by axis name; `features` are what the call needs beyond the plain op (`"causal"`,
    `"mask_bool"`, `"lse"`, ...); `modes` are what surrounds it (`"grad"`, `"deterministic"`,
    `"batch_invariant"`, `"capture"`, `"autocast"`). `alignment` is the largest power of two, at most
    64, that divides every operand's address, in bytes, and with gaps between its rows theirs.
    """

    op: str
    platform: str = "cpu"
    device: str = "cpu"
    dtype: str = "float32"
    dtypes: tuple[str, ...] = ()
    dims: Mapping[str, int] = {}
    features: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()
    layout: str = ""
    contiguous: bool = True
    last_stride1: bool = True
    alignment: int = 64

    def dim(self, name: str, default: int = 0) -> int:
        """The size along axis `name`."""
        return self.dims.get(name, default)

    def replace(self, **changes: object) -> CallSpec:
        """A copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)


class WorkEstimate(msgspec.Struct, frozen=True):
    """What an op must do at least: floating point operations and bytes moved to and from memory."""

    flops: float
    bytes: float


class OutputSpec(msgspec.Struct, frozen=True):
    """Shape and dtype of one output, as a reference would give them."""

    shape: tuple[int, ...]
    dtype: str

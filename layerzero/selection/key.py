"""The key of a request: exact where exactness decides, one bit for every bound on a size, sizes on a grid.

Bits are compiled from what the registered kernels and the policy really ask of sizes, so that two requests
with one key get one verdict by construction. The grid only feeds the cost estimate, which is computed for
the grid point itself: that is what makes a remembered choice equal to a fresh one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from layerzero.ops.op import Op
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.condition import Condition, parse_limit
from layerzero.spec.kernel import Kernel

GRID_VERSION = 1
# The features that do not change how long a kernel takes.
INVISIBLE = frozenset({"scale", "scale_not_positive", "rows_nonempty"})


def grid(size: int) -> int:
    """The nearest point at or above `size` on the fixed grid 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ...

    Example:
        >>> [grid(size) for size in (5, 65, 100)]
        [6, 96, 128]
    """
    if size <= 4:
        return size
    top = 1 << (size - 1).bit_length()
    middle = top * 3 // 4
    return middle if size <= middle else top


class KeyBuilder:
    """Reduces requests of one op; made anew whenever kernels or policy change."""

    __slots__ = ("_conditions", "_exact", "_limits")

    def __init__(self, op: Op, kernels: Iterable[Kernel], conditions: Iterable[Condition]) -> None:
        texts = dict.fromkeys(text for kernel in kernels for text in kernel.capability.limits)
        self._limits = tuple(map(parse_limit, texts))
        self._conditions = tuple(conditions)
        self._exact = op.exact_dims

    def key(self, request: CallSpec) -> Hashable:
        """A tuple of built-in values; requests with equal keys get equal verdicts and equal costs."""
        dims = request.dims
        bits = 0
        for limit in self._limits:
            bits = bits << 1 | limit.holds(dims)
        for condition in self._conditions:
            bits = bits << 1 | condition.holds(request)
        return (
            request.op,
            request.device,
            request.dtype,
            request.dtypes,
            tuple(sorted(request.features)),
            tuple(sorted(request.modes)),
            request.layout,
            request.contiguous,
            request.last_stride1,
            request.alignment,
            bits,
            tuple(sorted(self._sizes(dims).items())),
        )

    def bucket(self, request: CallSpec) -> CallSpec:
        """The request with its sizes on the grid: what costs are estimated for."""
        return request.replace(dims=self._sizes(request.dims))

    def _sizes(self, dims: Mapping[str, int]) -> dict[str, int]:
        return {name: size if name in self._exact else grid(size) for name, size in dims.items()}

"""One comparison tree out of many ranges, as a closure: from a call's sizes to what stands for them.

The ranges are the leaves of a decision tree, so some axis can always be cut between them. Ranges that
overlap, or that no cut tells apart, are refused: a file that holds them was not written by the solver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

V = TypeVar("V")
Ranges = Mapping[str, tuple[int, int]]
Lookup = Callable[[Mapping[str, int]], V | None]


class Entry(msgspec.Struct, Generic[V], frozen=True):
    """What stands for the sizes of `ranges`, both ends included."""

    ranges: dict[str, tuple[int, int]]
    value: V


def compile_lookup(entries: Sequence[Entry[V]]) -> Lookup[V]:
    """A function of sizes by axis: the value of the entry that they lie in, None outside of all.

    It raises KeyError where an axis that it compares is missing.

    Raises: ValueError: no entry, other axes, a range that ends before it begins, or no cut tells them apart.
    """
    if not entries:
        raise ValueError("ranges need at least one entry, got none")
    axes = tuple(sorted(entries[0].ranges))
    for entry in entries:
        if tuple(sorted(entry.ranges)) != axes:
            raise ValueError(f"ranges need the axes {', '.join(axes)}, got {', '.join(sorted(entry.ranges))}")
        for axis, (first, last) in entry.ranges.items():
            if first > last:
                raise ValueError(f"{axis} needs a range, got {first}..{last}")
    return _compiled(list(entries), {}, axes)


def _compiled(
    entries: list[Entry[V]], bounds: dict[str, tuple[int, int]], axes: tuple[str, ...]
) -> Lookup[V]:
    """The comparisons that are left where sizes are `known` to lie within ranges."""
    if len(entries) == 1:
        return _leaf(entries[0], bounds)
    axis, at = _best_cut(entries, axes)
    low: list[Entry[V]] = []
    high: list[Entry[V]] = []
    for entry in entries:
        (low if entry.ranges[axis][1] <= at else high).append(entry)
    first, last = bounds.get(axis, _ALL)
    below = _compiled(low, {**bounds, axis: (first, at)}, axes)
    above = _compiled(high, {**bounds, axis: (at + 1, last)}, axes)

    def compare(sizes: Mapping[str, int]) -> V | None:
        return below(sizes) if sizes[axis] <= at else above(sizes)

    return compare


_ALL = (-(1 << 62), 1 << 62)


def _leaf(entry: Entry[V], bounds: Mapping[str, tuple[int, int]]) -> Lookup[V]:
    """The entry's value, once what the way to it has not compared holds."""
    value, open_checks = entry.value, []
    for axis, (first, last) in sorted(entry.ranges.items()):
        from_, to = bounds.get(axis, _ALL)
        if from_ < first or to > last:
            open_checks.append((axis, first, last))
    if not open_checks:
        return lambda sizes: value
    checks = tuple(open_checks)

    def check(sizes: Mapping[str, int]) -> V | None:
        for axis, first, last in checks:
            if not first <= sizes[axis] <= last:
                return None
        return value

    return check


def _best_cut(entries: Sequence[Entry[V]], axes: Sequence[str]) -> tuple[str, int]:
    """The axis and the size up to which half of the entries lie, as nearly as a clean cut allows."""
    half, best_cut = len(entries) / 2, None
    for axis in axes:
        ordered = sorted(entry.ranges[axis] for entry in entries)
        end = ordered[0][1]
        for count, (first, last) in enumerate(ordered[1:], 1):
            if first > end:
                apart = abs(count - half)
                if best_cut is None or apart < best_cut[0]:
                    best_cut = (apart, axis, end)
            end = max(end, last)
    if best_cut is None:
        overlapping = "; ".join(str(dict(entry.ranges)) for entry in entries[:2])
        raise ValueError(f"ranges need to differ in one size, got {overlapping}")
    return best_cut[1], best_cut[2]

"""Calls that one decision tree may answer: alike in all but their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from layerzero.selection.key import INVISIBLE, grid
from layerzero.spec.call_spec import CallSpec


class Family(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What calls have in common beside their sizes; `axes` are the names of these."""

    op: str
    dtype: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    layout: str = ""
    contiguous: bool = True
    capture: bool = False


def family_of(request: CallSpec) -> Family:
    """The family of a request; features that change no time are no part of it."""
    return Family(
        op=request.op,
        dtype=request.dtype,
        axes=tuple(sorted(request.dims)),
        dtypes=tuple(sorted(set(request.dtypes))),
        features=tuple(sorted(request.features - INVISIBLE)),
        layout=request.layout,
        contiguous=request.contiguous,
        capture="capture" in request.modes,
    )


def grid_below(size: int) -> int:
    """The largest point of the key's grid that is smaller than the grid point `size`.

    Example:
        >>> [grid_below(size) for size in (1, 6, 16)]
        [0, 4, 12]
    """
    below = size - 1
    if below <= 4:
        return max(below, 0)
    top = 1 << (below.bit_length() - 1)
    middle = top * 3 // 2
    return middle if below >= middle else top


def grid_points(first: int, last: int) -> list[int]:
    """The points of the key's grid that stand for the sizes from `first` to `last`.

    Example:
        >>> grid_points(5, 16)
        [6, 8, 12, 16]
    """
    points = [grid(first)]
    while points[-1] < last:
        points.append(grid(points[-1] + 1))
    return points


def ends_of(points: Iterable[Mapping[str, int]]) -> dict[str, tuple[int, int]]:
    """The least and the largest size along each axis."""
    every = list(points)
    return {axis: (min(p[axis] for p in every), max(p[axis] for p in every)) for axis in every[0]}

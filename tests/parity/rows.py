"""One row of the ladder, and what a table of them shows that no single row does: red flags."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

# A difference above this is no rounding, whatever a row allows.
FAR = 1.0
# So many layers or checkpoints in a row, each so many times as far off as the one before it.
GROWING, GROWTH = 3, 4.0
# So many times as far off as the median of the other layers.
WORSE = 50.0
# Differences below this are rounding, whatever they do.
NOISE = 1e-6
_LAYER = re.compile(r"layer (\d+) output")


@dataclass(frozen=True)
class Row:
    """One comparison: what, where from, the largest absolute difference, and what is allowed."""

    what: str
    where: str
    difference: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.difference < self.allowed  # a NaN does not


def largest(got: Tensor, want: Tensor) -> float:
    """The largest absolute difference of two tensors; infinite where their shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    return (got.detach().double() - want.detach().double()).abs().max().item()


def red_flags(rows: Sequence[Row]) -> list[str]:
    """What is wrong beyond single bounds, in words; empty where nothing is.

    A difference above 1 or that is no number; differences that grow from layer to layer; and one layer that
    is far worse than the others of its model.
    """
    flags = [
        f"{row.what} ({row.where}) is {row.difference:.3g} apart" for row in rows if not row.difference <= FAR
    ]
    for where, series in _by_layer(rows):
        flags += [f"{words} ({where})" for words in (*_growth(series), *_outliers(series))]
    return flags


def _by_layer(rows: Sequence[Row]) -> Iterator[tuple[str, list[float]]]:
    """The differences of a model's layers, in their order."""
    places: dict[str, dict[int, float]] = {}
    for row in rows:
        found = _LAYER.fullmatch(row.what)
        if found:
            places.setdefault(row.where, {})[int(found[1])] = row.difference
    for where, layers in places.items():
        yield where, [layers[index] for index in sorted(layers)]


def _growth(series: list[float]) -> Iterator[str]:
    grown = 0
    for index in range(1, len(series)):
        before, now = max(series[index - 1], NOISE), series[index]
        grown = grown + 1 if now > GROWTH * before else 0
        if grown == GROWING:
            first = index - GROWING
            yield f"differences grow {GROWTH:g} times a layer or more from layer {first} on"


def _outliers(series: list[float]) -> Iterator[str]:
    for index, value in enumerate(series):
        # What comes behind a bad layer is bad as well: it is worse than those before it.
        before = series[:index]
        usual = max(statistics.median(before), NOISE) if before else NOISE
        if len(before) >= 2 and value > WORSE * usual and series[index - 1] <= WORSE * usual:
            yield f"layer {index} is {value / usual:.0f} times as far off as the layers before it"
            return

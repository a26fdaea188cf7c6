"""A value between places where it was measured: near places count most, and places that stand together share.

Kriging with an unknown level: values are alike by `alike(distance)`, and a little of each is noise. What a
crowd of places says counts about as one place would, so a dense corner of a grid does not outvote the rest.
Plain arithmetic, so that nothing depends on the caller's torch modes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

# The octaves over which likeness falls to a third, the share of noise, and how freely the level may lie.
# Set by leaving out one measured bucket in turn; half or twice of each changes little.
LENGTH = 6.0
NOISE = 0.05
LEVEL = 1.0

LowerTriangle = list[list[float]]


def covariance(distance: float) -> float:
    """How much two values have in common that stand so far apart, in octaves."""
    return LEVEL + math.exp(-distance / LENGTH)


def cholesky(positions: Sequence[Sequence[float]], shared_rows: Sequence[list[float]] = ()) -> LowerTriangle:
    """The places' likeness as a lower triangle whose product with its transpose it is (Cholesky).

    A row depends on the places before it alone: `begun` are the rows of the first positions, where known.
    """
    rows: LowerTriangle = list(shared_rows)
    for position in positions[len(rows) :]:
        row: list[float] = []
        for other, other_position in zip(rows, positions, strict=False):
            row.append(
                (covariance(math.dist(position, other_position)) - sum(map(mul, row, other)))
                / other[len(row)]
            )
        variance = covariance(0.0) + NOISE - sum(map(mul, row, row))
        row.append(math.sqrt(variance))
        rows.append(row)
    return rows


def cholesky_solve(factor: LowerTriangle, values: Sequence[float]) -> list[float]:
    """What each place adds: the value anywhere is the sum of these times `alike` of the distances to it."""
    forward: list[float] = []
    for row, value in zip(factor, values, strict=True):
        forward.append((value - sum(map(mul, row, forward))) / row[-1])
    weights = [0.0] * len(forward)
    residual = forward
    for number in range(len(forward) - 1, -1, -1):
        row = factor[number]
        weights[number] = residual[number] / row[number]
        residual = [
            value - weights[number] * share for value, share in zip(residual, row[:number], strict=False)
        ]
    return weights

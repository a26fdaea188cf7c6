"""A value between points where it was measured: near points count most, and points close together share.

Kriging with an unknown level: two values share `covariance(distance)`, and a little of each is noise.
A cluster of points counts about as one point would, so a dense corner of a grid does not outvote the rest.
On numpy, so that nothing depends on the caller's torch modes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# The octaves over which the covariance falls to a third, the share of noise, how freely the level may vary.
# Set by leaving out one measured bucket in turn; half or twice of each changes little.
LENGTH = 6.0
NOISE = 0.05
LEVEL = 1.0


def covariance(distances: ArrayLike) -> Floats:
    """How much two values have in common at so many octaves between them."""
    return np.asarray(LEVEL + np.exp(np.asarray(distances, np.float64) / -LENGTH))


def covariance_matrix(positions: Sequence[Sequence[float]]) -> Floats:
    """The covariances (n, n) of points at `positions` (n, axes), with the noise of each on the diagonal."""
    points = np.asarray(positions, np.float64).reshape(len(positions), -1)
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    return covariance(distances) + NOISE * np.eye(len(points))

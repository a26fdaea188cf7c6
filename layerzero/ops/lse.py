"""The base of a log-sum-exp: natural in our ops, 2 in some libraries and published definitions."""

from __future__ import annotations

import math

from torch import Tensor

LN_2 = math.log(2.0)


def from_base_2(lse: Tensor) -> Tensor:
    """A log-sum-exp of base 2, as FlashInfer gives it unless asked, as the natural one of our ops."""
    return lse * LN_2


def to_base_2(lse: Tensor) -> Tensor:
    """Our natural log-sum-exp as one of base 2."""
    return lse / LN_2

"""A sequential sign test: is one of two timed things slower, whatever the machine does beside?

Rounds are paired: both are timed back to back, so that what slows the machine slows both. A round says only
whether the ratio is above the limit; how far above does not count, so that no single disturbed round decides.
Wald's sequential test (1945) then stops as soon as one answer is likely enough: above the limit in at most
`RARELY` of the rounds, or in at least `MOSTLY`.
"""

from __future__ import annotations

import math
from typing import Final, Literal

Answer = Literal["slower", "as fast", "undecided"]
RARELY: Final = 0.4
MOSTLY: Final = 0.6
# How often either answer may be wrong.
MISTAKES: Final = 0.001


class SignTest:
    """Rounds above a limit, counted until they say enough."""

    def __init__(self, rarely: float = RARELY, mostly: float = MOSTLY, mistakes: float = MISTAKES) -> None:
        """Raises: ValueError: not 0 < rarely < mostly < 1, or mistakes is not between 0 and 0.5."""
        if not 0 < rarely < mostly < 1:
            raise ValueError(f"rarely and mostly need 0 < rarely < mostly < 1, got {rarely} and {mostly}")
        if not 0 < mistakes < 0.5:
            raise ValueError(f"mistakes needs a number between 0 and 0.5, got {mistakes}")
        self._above = math.log(mostly / rarely)
        self._below = math.log((1 - mostly) / (1 - rarely))
        self._bound = math.log((1 - mistakes) / mistakes)
        self._evidence = 0.0
        self.rounds = 0
        self.above = 0

    def add(self, is_above: bool) -> None:
        """Count one round."""
        self.rounds += 1
        self.above += is_above
        self._evidence += self._above if is_above else self._below

    @property
    def answer(self) -> Answer:
        """What the rounds so far say."""
        if self._evidence >= self._bound:
            return "slower"
        return "as fast" if self._evidence <= -self._bound else "undecided"

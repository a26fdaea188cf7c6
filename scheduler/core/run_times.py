"""How long a device runs a batch by the tokens in it: a line through the last batches."""

from __future__ import annotations

from typing import Final

NEWEST: Final = 1 / 16  # weight of the newest batch


class RunTimes:
    """Seconds over tokens: least squares, in which each batch counts less than the one after it."""

    __slots__ = ("_mean_s", "_mean_tokens", "_together", "_variance")

    def __init__(self) -> None:
        self._mean_tokens = self._mean_s = self._variance = self._together = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A batch of `tokens` took `seconds`."""
        if not self._mean_s:
            self._mean_tokens, self._mean_s = float(tokens), seconds
            return
        more, longer = tokens - self._mean_tokens, seconds - self._mean_s
        self._mean_tokens += NEWEST * more
        self._mean_s += NEWEST * longer
        self._variance = (1 - NEWEST) * (self._variance + NEWEST * more * more)
        self._together = (1 - NEWEST) * (self._together + NEWEST * more * longer)

    def of(self, tokens: int) -> float:
        """What a batch of `tokens` is expected to take, in seconds; 0 where none is known.

        More tokens never take less; fewer than usual take a quarter of the usual time at least.
        """
        slope = max(self._together / self._variance, 0.0) if self._variance > 0.0 else 0.0
        return max(self._mean_s + slope * (tokens - self._mean_tokens), 0.25 * self._mean_s)

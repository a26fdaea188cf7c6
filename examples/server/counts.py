"""What fronts count, in memory that all processes of a server share: any front tells of all."""

from __future__ import annotations

from typing import Any

OUTCOMES = ("done", "rejected", "failed", "cancelled")
NAMES = (
    *OUTCOMES, "active", "tokens", "prompt_cache_hits", "ready", "engine_restarts", "front_restarts",
)  # fmt: skip


class Counts:
    """Rows of numbers by name: `add` changes one row, `total` is over all.

    One process writes each row, so there is no lock, which a killed process would keep. `numbers` are
    `len(NAMES)` for each row; by default one row of this process.
    """

    def __init__(self, numbers: Any = None, row: int = 0) -> None:
        self._numbers: Any = [0] * len(NAMES) if numbers is None else numbers
        self._at = {name: row * len(NAMES) + place for place, name in enumerate(NAMES)}

    def add(self, name: str, count: int = 1) -> None:
        """Count so many more."""
        self._numbers[self._at[name]] += count

    def clear(self, *names: str) -> None:
        """Begin again with what a process that is gone had under way."""
        for name in names:
            self._numbers[self._at[name]] = 0

    def total(self, name: str) -> int:
        """The sum over all rows."""
        return int(sum(self._numbers[NAMES.index(name) :: len(NAMES)]))

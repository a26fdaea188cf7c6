"""Which calls run at once: those that so few others may share a batch with that it would cost more than it saves.

A batch saves where many calls meet. Its queue, its turn and its callers' waking cost about as much as a few
small calls, so where few meet (a model with one caller, an adapter of one request, the last requests of a
crowd) each call is cheaper by itself. How many may meet is seen from who calls: the callers of a group's
last `WINDOW` calls, however those calls ran. What one call takes is measured. Both are known in either case, so
nothing is tried out, and a group goes back to batches within a window of when others join it.

Nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final

from layerzero.scheduler.core.pending_call import Batch, Caller

# Microseconds of one core, by benchmarks/traffic.py: what a call pays for its way through the queue beside
# running at once, and a batch beside its kernel.
CALL_US: Final = 2.5
BATCH_US: Final = 40.0
WINDOW: Final = 32  # calls between two looks at a group,
WINDOW_OF_ONE: Final = 8  # or so many, where one caller makes them all
TIMED: Final = 3  # calls at once of each window that are timed
FEW: Final = 16  # callers of a group, of which one window runs at once to see what a call takes
TRUSTED: Final = 8  # batches of one size, after which what they took counts
OUTLIER: Final = 4.0  # times what is usual; what is beyond is somebody else's time
NEWEST: Final = 0.25  # weight of the newest in running means
MAX_GROUPS: Final = 8192


class GroupCosts:
    """What a group's calls cost and who makes them.

    `alone_us` is what one call takes by itself, as measured; `untimed` how many of the next calls at once are
    to be timed.
    """

    __slots__ = ("_callers", "_calls", "_fastest_us", "_of_expected", "_timed", "alone_us", "untimed")

    def __init__(self) -> None:
        self.alone_us: float | None = None
        # What batches take of what is expected of their calls one by one, and how many did, by bits of size.
        self._of_expected: dict[int, tuple[float, int]] = {}
        self.untimed = TIMED
        self._fastest_us = float("inf")
        self._timed = False
        self._callers: set[int] = set()  # numbers only: nobody is kept alive
        self._calls = 0

    def expected_us(self, size: int, expected_us: float) -> float:
        """What a batch of calls that are expected to take so long one by one takes, as others of its size did."""
        share, seen = self._of_expected.get(size.bit_length(), (1.0, 0))
        return expected_us * share if seen >= TRUSTED else expected_us

    def batch_ran(self, size: int, expected_us: float, took_us: float) -> None:
        """A batch took so long, of calls that were expected to take `expected_us` one by one."""
        if expected_us > 0.0:
            bits, share = size.bit_length(), took_us / expected_us
            usual, seen = self._of_expected.get(bits, (share, 0))
            usual += NEWEST * (min(share, OUTLIER * usual) - usual)
            self._of_expected[bits] = usual, seen + 1
        if self.alone_us is None or (not self._timed and took_us < self.alone_us):
            self.alone_us = took_us  # the most that one call can take; those that run at once tell more

    def call_ran(self, took_us: float) -> None:
        """One of the calls to be timed took so long."""
        self.untimed -= 1
        self._fastest_us = min(self._fastest_us, took_us)
        if not self.untimed:
            self.alone_us, self._fastest_us, self._timed = self._fastest_us, float("inf"), True

    def called(self, callers: Iterable[int], calls: int) -> bool:
        """Note who called; whether a window is full."""
        self._callers.update(callers)
        self._calls += calls
        return self._calls >= WINDOW or (self._calls >= WINDOW_OF_ONE and len(self._callers) < 2)

    def pays_at_once(self, live: int, limit_us: float) -> bool:
        """Whether the calls to come run at once, by the window that is full; `live` callers are there at all."""
        sharing = min(len(self._callers), live)
        self._callers.clear()
        self._calls, self.untimed = 0, TIMED
        alone_us = self.alone_us
        if alone_us is None or alone_us >= limit_us:
            return False
        if not self._timed:  # a window of a few callers' calls tells what one takes
            return sharing <= FEW
        # At best a batch of all of them takes as long as one call.
        return (sharing - 1) * alone_us <= sharing * CALL_US + BATCH_US


class AtOnce:
    """The groups of one batcher whose calls run at once: by batch key, by op where calls have none."""

    __slots__ = ("groups", "limit_us", "live")

    def __init__(self, limit_us: float) -> None:
        self.groups: dict[Hashable, GroupCosts] = {}
        self.live = 0  # callers that there are
        self.limit_us = limit_us  # calls that take as long never run at once

    def batch_ran(self, batch: Batch) -> None:
        """A batch of a group has ended."""
        queue, calls = batch.queue, batch.calls
        costs = queue.costs
        if costs is None:
            costs = queue.costs = GroupCosts()
        size = len(calls)
        costs.batch_ran(size, batch.one_by_one_us, batch.ran_us)
        callers = [id(call.caller) for call in calls[:WINDOW]] if not queue.solo else ()
        if costs.called(callers, size) and costs.pays_at_once(self.live, self.limit_us):
            if len(self.groups) >= MAX_GROUPS:  # of callers that came once and never again
                self.groups.clear()
            self.groups[queue.key] = costs

    def call_ran(self, key: Hashable, costs: GroupCosts, caller: Caller) -> None:
        """A call of a group has run at once."""
        if costs.called((id(caller),), 1) and not costs.pays_at_once(self.live, self.limit_us):
            self.groups.pop(key, None)

"""Which calls run at once: those that so few others may join that a batch would cost more than it saves.

A batch saves where many calls meet. Its queue, its turn and its callers' waking cost about as much as a few
small calls, so where few meet (a model with one caller, an adapter of one request, the last requests of a
batch) each call is cheaper by itself. How many may meet is seen from who has called and is still there,
however those calls ran; what one call takes is measured. So nothing is tried out, and a group goes back to
batches with the first call of one caller too many.

Nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

from layerzero.scheduler.core.pending_call import Batch, Caller, PendingCall
from layerzero.scheduler.core.round_robin import BatchQueue

# Microseconds of one core, estimates from profiles of one machine: what a call pays for its way through the
# queue beside running at once, and a batch beside its kernel. benchmarks/traffic.py shows what follows.
CALL_US: Final = 2.5
BATCH_US: Final = 40.0
WINDOW: Final = 32  # queued calls between two looks at a group,
WINDOW_OF_ONE: Final = 2  # or so many, where one caller makes them all
FORGOTTEN: Final = 4096  # calls after which who has called is seen anew
MOST_SEEN: Final = 64  # callers of a group that are distinguished
FEW: Final = 16  # callers of a group, of which some calls run at once to see what one takes
TIMED: Final = 3  # calls for that
TRUSTED: Final = 8  # batches of one size, after which what they took counts
OUTLIER: Final = 4.0  # times what is usual; what is beyond is another call's time
NEWEST: Final = 0.25  # weight of the newest in running means
MAX_GROUPS: Final = 8192


@dataclass(slots=True, eq=False)
class GroupCosts:
    """What a group's calls cost and who makes them.

    `alone_us` is what one call takes by itself, as far as it is known, `untimed` how many of the next calls
    at once are to be timed, `queued` how many have queued since the last look at who shares the group,
    `until_anew` how many calls remain until who makes them, and what one takes, is seen anew. Up to
    `unlooked` callers, those that have left counted, no look is needed at who is still there.
    """

    alone_us: float = float("inf")
    untimed: int = TIMED
    callers: set[int] = field(default_factory=set)  # numbers only: no caller is kept alive
    queued: int = 0  # calls since the last look
    until_anew: int = FORGOTTEN
    unlooked: int = 0  # none while calls are to be timed
    _fastest_us: float = float("inf")
    timed: bool = False
    # What batches take of what is expected of their calls one by one, and how many did, by bits of size.
    _of_expected: dict[int, tuple[float, int]] = field(default_factory=dict)

    def expected_us(self, size: int, one_by_one_us: float) -> float:
        """What a batch takes of calls that are expected to take so long one by one, as others of its size."""
        share, seen = self._of_expected.get(size.bit_length(), (1.0, 0))
        return one_by_one_us * share if seen >= TRUSTED else one_by_one_us

    def batch_ran(self, size: int, one_by_one_us: float, took_us: float) -> None:
        """A batch took so long, of calls that were expected to take `one_by_one_us` one by one."""
        if one_by_one_us > 0.0:
            bits, share = size.bit_length(), took_us / one_by_one_us
            usual, seen = self._of_expected.get(bits, (share, 0))
            self._of_expected[bits] = usual + NEWEST * (min(share, OUTLIER * usual) - usual), seen + 1
        if not self.timed:
            self.alone_us = min(self.alone_us, took_us)  # the most that one call can take

    def call_ran(self, took_us: float) -> None:
        """One of the calls to be timed took so long."""
        self.untimed -= 1
        self._fastest_us = min(self._fastest_us, took_us)
        if not self.untimed:
            self.alone_us, self._fastest_us, self.timed = self._fastest_us, float("inf"), True
            spared_us = self.alone_us - CALL_US
            most = MOST_SEEN if spared_us <= 0.0 else (BATCH_US + self.alone_us) / spared_us
            self.unlooked = int(min(most, MOST_SEEN))

    def few_enough(self, live: set[int], limit_us: float) -> bool:
        """Whether so few of those that are there share the group that each call had better run at once."""
        self.callers &= live
        sharing, alone_us = len(self.callers), self.alone_us
        if alone_us >= limit_us:
            return False
        if not self.timed:
            return sharing <= FEW
        # At best a batch of all of them takes as long as one call.
        return (sharing - 1) * alone_us <= sharing * CALL_US + BATCH_US

    def called(self, calls: int) -> None:
        """Count calls; now and then it is seen anew who makes them, and what one takes."""
        self.until_anew -= calls
        if self.until_anew <= 0:
            self.until_anew, self.untimed, self.unlooked = FORGOTTEN, TIMED, 0
            self.callers.clear()


def numbers_of(calls: list[PendingCall]) -> list[int]:
    """Of those who made the calls; each has a caller from when it is queued."""
    return [call.caller.number for call in calls if call.caller is not None]


class ImmediateGroups:
    """The groups of one batcher whose calls run at once: by batch key, by op where calls have none."""

    __slots__ = ("groups", "limit_us", "live")

    def __init__(self, inline_limit_us: float, max_inline_us: float) -> None:
        self.groups: dict[Hashable, GroupCosts] = {}
        self.live: set[int] = set()  # the callers that there are
        self.set_limits(inline_limit_us, max_inline_us)

    def set_limits(self, inline_limit_us: float, max_inline_us: float) -> None:
        """Calls that take as long as `inline_limit_us` never run at once; none does where nothing may run
        inline."""
        self.limit_us = inline_limit_us if max_inline_us else 0.0
        self.groups.clear()

    def batch_ran(self, batch: Batch, queue: BatchQueue) -> None:
        """A batch of a group has ended."""
        if batch.one_by_one_us == float("inf"):  # however short, it waits for others: never on the loop
            return
        calls = batch.calls
        costs = queue.costs
        if costs is None:
            costs = queue.costs = GroupCosts()
        size = len(calls)
        costs.batch_ran(size, batch.one_by_one_us, batch.ran_us)
        if size >= MOST_SEEN:  # it cannot be worth a look
            costs.queued = 0
            return
        costs.called(size)
        costs.queued += size
        callers = costs.callers
        if not queue.solo and len(callers) < MOST_SEEN:
            callers.update(numbers_of(calls))
        few = costs.queued >= WINDOW_OF_ONE and len(callers) <= FEW and len(callers & self.live) <= 1
        if costs.queued < WINDOW and not few:
            return
        costs.queued = 0
        if costs.few_enough(self.live, self.limit_us):
            if len(self.groups) >= MAX_GROUPS:  # of callers that came once and never again
                self.groups.clear()
            self.groups[queue.key] = costs

    def call_ran(self, key: Hashable, costs: GroupCosts, caller: Caller) -> None:
        """A call of a group has run at once."""
        costs.called(1)
        if caller.number not in costs.callers:
            costs.callers.add(caller.number)
            if len(costs.callers) > costs.unlooked:
                self._look(key, costs)

    def timed(self, key: Hashable, costs: GroupCosts, took_us: float) -> None:
        """A call of a group that was to be timed has run at once, and took so long."""
        costs.call_ran(took_us)
        if not costs.untimed:
            self._look(key, costs)

    def _look(self, key: Hashable, costs: GroupCosts) -> None:
        """Go back to batches where more share the group, or one call takes longer, than was known."""
        if not costs.few_enough(self.live, self.limit_us):
            costs.queued = 0
            self.groups.pop(key, None)

"""The order of service: slots in the order in which they first appeared, round and round.

A slot is a group seen after the same caller's previous group: attention has one group in every layer of a
model, and only what came before tells the layers apart. Slots are remembered up to a bound.

A new slot is right behind the one its caller came from, so that the order is the program's also where
several callers first showed it at once, each from another place: in the order of first sight their slots
would alternate, and the sweep would move all of them in step without letting any two meet. Where callers part
(an expert for each, an adapter) it is behind all branches in which others still wait, and where they meet
again the group waits for those that are ahead of it in this round and come to it next: once, so that groups
which come from each other in a ring do not wait forever.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Hashable, Set
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Final

from layerzero.scheduler.core.pending_call import PendingCall
from layerzero.scheduler.core.run_times import RunTimes

if TYPE_CHECKING:
    from layerzero.scheduler.core.at_once import GroupCosts
    from layerzero.scheduler.core.families import WeightFamily


@dataclass(slots=True, eq=False, repr=False)
class BatchQueue:
    """The waiting pending calls of one compatibility class, one line a priority; a dict is an ordered set.

    A `solo` group serves an op's calls that batch with nothing: one pending call a batch. `busy` are its
    slots with calls. Of its batches on a device that answers early: `launched_at` of the last, the time
    between two, how long one runs, in seconds, how long by its tokens, and the number of the last one run.
    """

    key: Hashable
    solo: bool
    by_priority: tuple[dict[PendingCall, None], ...] = field(default_factory=lambda: ({}, {}, {}))
    count: int = 0
    tokens: int = 0
    bytes: int = 0
    points: dict[BatchQueue | None, ProgramPoint] = field(default_factory=dict)
    followers: dict[ProgramPoint, None] = field(default_factory=dict)  # places to which its callers went
    waits_in: int | None = None  # the round in which it began to wait for others of its callers
    costs: GroupCosts | None = None  # None until the first batch that is looked at
    family: WeightFamily | None = None  # of queues whose calls differ in their weights alone
    together: bool = False  # whether it is the one in which calls of a family wait
    small: tuple[int, int] = (0, 0)  # batches since the last large one or the last look, and their calls
    met: float = 0.0  # calls that its small batches have in the mean; 0 where they are not the rule
    looked: int = 0  # the family's batches at the last look
    active_points: dict[ProgramPoint, None] = field(default_factory=dict)
    top: int = -1  # the last place in the order among those, as far as the sweep has seen them
    launched_at: float | None = None
    period_s: float = 0.0
    run_s: float = 0.0
    run_times: RunTimes = field(default_factory=RunTimes)
    last_run: int = 0
    hold: tuple[str, float] | None = None  # what its calls wait for, and since when
    heirs: float | None = None  # share of the callers that ended behind it whose place others took
    # Turns were waited in vain for the callers of its last batches: none is for so many, of so many next.
    unwaited: int = 0
    vain: int = 0


@dataclass(slots=True, eq=False)
class ProgramPoint:
    """A place in a model's program, how many pending calls wait there and when it was last used."""

    queue: BatchQueue
    predecessor: BatchQueue | None
    order: int
    last_used: int
    count: int = 0
    in_heap: bool = False  # whether one of the sweep's heaps has it


_NONE: Final[frozenset[BatchQueue]] = frozenset()
_GAP: Final = 1 << 512  # between places: 512 times something may be put behind one before all are renumbered
_MOST_BRANCHES: Final = 256  # of one place, that a new place is held against
_GROWTH: Final = 1.5  # of what is remembered, between two searches for what may be forgotten

Heap = list[tuple[int, ProgramPoint]]


@dataclass(slots=True, eq=False)
class RoundRobin:
    """Which slot is next; `active_points` are those with pending calls, `activated` those that got some.

    `limit` bounds how many slots are remembered that have no pending calls. Of those that have, a heap holds
    what this round still reaches, another the next round's; an entry whose slot has no pending calls any more
    is dropped when it is met.
    """

    limit: int
    activated: list[ProgramPoint] = field(default_factory=list)
    queues: dict[Any, BatchQueue] = field(default_factory=dict)
    solo_queues: dict[Any, BatchQueue] = field(default_factory=dict)
    active_points: dict[ProgramPoint, None] = field(default_factory=dict)
    rounds: int = 0
    size: int = 0
    _prune_at: int = 0
    _this_round: Heap = field(default_factory=list)
    _next_round: Heap = field(default_factory=list)
    _orders: list[int] = field(default_factory=list)  # of every slot, ascending
    _reached: int = -1
    _current: ProgramPoint | None = None
    _remaining: int = 0

    def __post_init__(self) -> None:
        self._prune_at = self.limit

    def add_point(
        self,
        queue: BatchQueue,
        predecessor: BatchQueue | None,
        last_used: int,
        after: ProgramPoint | None = None,
    ) -> ProgramPoint:
        """Remember a slot that was not seen before: the one next to `after`, or the last of the order."""
        if self.size >= self._prune_at:
            self._prune(queue)
            # What has pending calls stays: searched again at the next slot, all would be looked at for each
            # slot.
            self._prune_at = max(self.limit, int(self.size * _GROWTH))
        order = self._order_after(self._last_branch(after))
        point = queue.points[predecessor] = ProgramPoint(queue, predecessor, order, last_used)
        if predecessor is not None:
            predecessor.followers[point] = None
        insort(self._orders, order)
        self.size += 1
        return point

    def _last_branch(self, after: ProgramPoint | None) -> ProgramPoint | None:
        """`after`, or the last of those beside it, come from the same place, at which others still wait."""
        if after is None or after.predecessor is None:
            return after
        last, beside = after, after.predecessor.followers
        for point in beside if len(beside) <= _MOST_BRANCHES else ():
            if point.count and point.order > last.order:
                last = point
        return last

    def _order_after(self, after: ProgramPoint | None) -> int:
        """A place between `after` and what follows it, or behind all."""
        orders = self._orders
        for _ in range(2):
            following = len(orders) if after is None else bisect_right(orders, after.order)
            if after is None or following == len(orders):
                break
            between = (after.order + orders[following]) // 2
            if after.order < between < orders[following]:
                return between
            self._renumber()  # no number is left between the two
            orders = self._orders
        return orders[-1] + _GAP if orders else 0

    def next_queue(self, deferred: Set[BatchQueue] = _NONE) -> BatchQueue | None:
        """The group to serve: the current one's while pending calls from when it was reached wait, else the
        next.

        Groups in `held` are passed over; None where no other waits.
        """
        current = self._current
        if current is not None and self._remaining > 0 and current.count and current.queue not in deferred:
            return current.queue
        self._push_activated()
        point = self._first_ready(deferred)
        if point is None:
            self._this_round += self._next_round
            self._next_round.clear()
            reached, self._reached = self._reached, -1
            heapify(self._this_round)
            point = self._first_ready(deferred)
            if point is None:
                self._reached = reached
                return None
            self.rounds += 1
        self._current = point
        point.queue.waits_in = None
        self._reached = point.order
        self._remaining = point.queue.count
        return point.queue

    def _push_activated(self) -> None:
        """Put what came to have pending calls into the heaps."""
        for point in self.activated:
            if not point.count:
                continue
            queue = point.queue
            if point.order > queue.top:
                queue.top = point.order
            if not point.in_heap:
                point.in_heap = True
                heappush(
                    self._this_round if point.order > self._reached else self._next_round,
                    (point.order, point),
                )
        self.activated.clear()

    def _first_ready(self, deferred: Set[BatchQueue]) -> ProgramPoint | None:
        """The first slot with pending calls that are not held which this round still reaches."""
        this_round, passed = self._this_round, []
        first: ProgramPoint | None = None
        while this_round:
            order, point = this_round[0]
            ready = point.count and order > self._reached and point.queue not in deferred
            if ready and not self._waits(point, deferred):
                first = point
                break
            heappop(this_round)
            if not point.count:
                point.in_heap = False
            elif order <= self._reached:
                heappush(self._next_round, (order, point))
            else:
                passed.append((order, point))
        for entry in passed:
            heappush(this_round, entry)
        return first

    def _waits(self, point: ProgramPoint, deferred: Set[BatchQueue]) -> bool:
        """Whether a group waits for calls ahead in this round whose callers came to it next before now.

        In the round after that it waits for no caller.
        """
        queue = point.queue
        sources, active = queue.points, self.active_points
        if len(sources) < 2 or queue.solo:
            return False
        if queue.waits_in not in (None, self.rounds):
            return False
        order = point.order
        if len(sources) < len(active):
            for source in sources:
                if (
                    source is not None
                    and source.top > order
                    and source is not queue
                    and source not in deferred
                ):
                    queue.waits_in = self.rounds
                    return True
            return False
        for other in active:
            source = other.queue
            if other.order > order and source in sources and source is not queue and source not in deferred:
                queue.waits_in = self.rounds
                return True
        return False

    def _reorder(self) -> None:
        """Order everything anew: places have changed, or slots are gone."""
        for _, point in (*self._this_round, *self._next_round):
            point.in_heap = False
        self._this_round.clear()
        self._next_round.clear()
        for queue in self.all_queues():
            queue.top = -1
        self.activated[:] = self.active_points

    def on_batch_taken(self, queue: BatchQueue, count: int) -> None:
        """`count` pending calls of `group` were taken; those that came after the sweep reached it wait a
        round."""
        if self._current is not None and self._current.queue is queue:
            self._remaining -= count

    def all_queues(self) -> list[BatchQueue]:
        """Each queue once; several keys may lead to one."""
        return list(dict.fromkeys([*self.queues.values(), *self.solo_queues.values()]))

    def _prune(self, keep: BatchQueue) -> None:
        """Drop the half of the idle slots used longest ago, and the groups that this leaves without any."""
        idle = [point for queue in self.all_queues() for point in queue.points.values() if not point.count]
        idle.sort(key=lambda slot: slot.last_used)
        for point in idle[: max(len(idle) // 2, 1)]:
            del point.queue.points[point.predecessor]
            if point.predecessor is not None:
                del point.predecessor.followers[point]
            self.size -= 1
            if point is self._current:
                self._current = None
        for queues in (self.queues, self.solo_queues):
            for key in [k for k, queue in queues.items() if not queue.points and queue is not keep]:
                del queues[key]
        self._orders = sorted(point.order for queue in self.all_queues() for point in queue.points.values())
        self._reorder()

    def _renumber(self) -> None:
        """Number the places anew, in their order."""
        points = [point for queue in self.all_queues() for point in queue.points.values()]
        points.sort(key=lambda slot: slot.order)
        self._reached = (bisect_right(self._orders, self._reached) - 1) * _GAP
        for number, point in enumerate(points):
            point.order = number * _GAP
        self._orders = [point.order for point in points]
        self._reorder()

"""Calls that differ in their weights alone and wait in one queue: those of which few meet by themselves.

An adapter of a few requests, an expert, layers that each caller goes through in an order of its own: each
weight's group is small, and each of its batches costs what a large one costs. Such calls run as one batch, in
which the rows of each weight are a product of their own. For that the keys of these groups lead to one queue.
A group whose batches are large keeps its own; all get theirs back where the calls that meet share a weight
anyway, or are so few that they may cost less at once.

Nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from layerzero.scheduler.core.at_once import BATCH_US, numbers_of
from layerzero.scheduler.core.pending_call import PendingCall
from layerzero.scheduler.core.round_robin import BatchQueue, RoundRobin

if TYPE_CHECKING:
    from layerzero.scheduler.core.at_once import ImmediateGroups

LARGE: Final = 16  # calls of a batch that needs no others, where none wait together
WINDOW: Final = 32  # calls, in batches that may need others, between two looks at a queue
MORE: Final = 3.0  # times as many callers as meet by themselves that need to be there
APART: Final = 2.0  # weights of a batch in the mean, below which nothing is gained
LOOK: Final = 8  # batches of a family's queue between two looks at it
NEWEST: Final = 0.25  # weight of the newest in running means
QUEUE_US: Final = 1.25  # what a call pays for its way through the queue, compiled, in a batch of many
REST: Final = 256  # batches of a family after which it is tried again
LIFE: Final = 8192  # and after which it is seen anew how many meet by themselves
MAX_CALLERS: Final = 4096  # of a family that are distinguished
MAX_FAMILIES: Final = 1024
MAX_KEYS: Final = 4096  # that lead to one queue


@dataclass(slots=True, eq=False)
class WeightFamily:
    """Queues whose calls differ in their weights alone: `together` is the one in which they wait, if they do.

    `callers` are those of batches that were looked at, each with the number of the family's batch.
    """

    key: Hashable
    together: BatchQueue | None = None
    callers: dict[int, int] = field(default_factory=dict)
    batches: int = 0
    keys: int = 0  # that lead to `together`
    parts: float = 0.0  # weights of its batches, in the mean,
    size: float = 0.0  # and their calls
    rests_until: int = 0  # batches
    ends: int = 0


class Families:
    """The families of one batcher."""

    __slots__ = ("_families", "_round_robin")

    def __init__(self, round_robin: RoundRobin) -> None:
        self._round_robin = round_robin
        self._families: dict[Hashable, WeightFamily] = {}

    def of(self, key: Hashable) -> WeightFamily | None:
        """The family of a group, by its key; None where the calls of every batch share their weights."""
        key = getattr(key, "family", None)
        if key is None:
            return None
        family = self._families.get(key)
        if family is None:
            if len(self._families) >= MAX_FAMILIES:
                self._families.clear()  # what is queued knows its own
            family = self._families[key] = WeightFamily(key)
        return family

    def batch_ran(self, queue: BatchQueue, calls: list[PendingCall], at_once: ImmediateGroups | None) -> None:
        """A batch of a queue that has a family has ended."""
        family, size = queue.family, len(calls)
        assert family is not None
        family.batches += 1
        if size >= LARGE and family.together is None:
            queue.small, queue.met = (0, 0), 0.0
            return
        if queue.together and family.batches % LOOK:
            return
        if len(family.callers) >= MAX_CALLERS:
            family.callers.clear()
        family.callers.update(dict.fromkeys(numbers_of(calls), family.batches))
        if queue.together:
            self._look_at_all(family, calls, at_once)
            return
        batches, seen = queue.small[0] + 1, queue.small[1] + size
        queue.small = batches, seen
        if seen >= WINDOW:
            queue.small, queue.met = (0, 0), seen / batches
            if at_once is None or queue.key not in at_once.groups:  # those are timed first
                callers = {caller for caller, batch in family.callers.items() if batch > queue.looked}
                queue.looked = family.batches
                self._look(family, queue, callers, at_once)

    def timed(self, key: Hashable, at_once: ImmediateGroups) -> None:
        """It is known what a call takes of a group whose calls run at once."""
        queue = self._round_robin.queues.get(key)
        if queue is None or queue.family is None or queue.together or not queue.met:
            return
        others = [other for other in self._round_robin.all_queues() if other.family is queue.family]
        callers = set().union(*(other.costs.callers for other in others if other.costs is not None))
        self._look(queue.family, queue, callers, at_once)

    def _look(
        self, family: WeightFamily, queue: BatchQueue, callers: set[int], at_once: ImmediateGroups | None
    ) -> None:
        """Let a family wait together where that pays for this queue of it, with these callers."""
        queues = self._round_robin.queues
        if family.batches < family.rests_until or queues.get(queue.key) is not queue:
            return
        number = len(callers if at_once is None else callers & at_once.live)
        if not _pays(queue, number):
            return
        if family.keys >= MAX_KEYS:
            self._part(family)
            return
        joining = [queue]
        if family.together is None or queues.get(family.key) is not family.together:
            family.together = queues[family.key] = BatchQueue(family.key, False, family=family, together=True)
            family.keys, family.parts, family.size = 0, MORE, float(number)
            family.ends = family.batches + LIFE
            joining = [q for key, q in queues.items() if q.key == key and q.family is family and q.met]
            joining = [q for q in joining if _pays(q, number)]
        for member in joining:
            # The queue itself is its key until its calls wait there again.
            queues[member], queues[member.key] = member, family.together
            family.keys += 1
            if at_once is not None:
                at_once.groups.pop(member.key, None)

    def _look_at_all(
        self, family: WeightFamily, calls: list[PendingCall], at_once: ImmediateGroups | None
    ) -> None:
        """End it where calls that meet share a weight, or so few meet that they may cost less at once.

        And now and then: callers that wait in one queue are not held for those that are behind them.
        """
        family.parts += NEWEST * (len({call.batch_key for call in calls}) - family.parts)
        family.size += NEWEST * (len(calls) - family.size)
        over = family.parts < APART or family.batches >= family.ends
        if over or (at_once is not None and family.size < LARGE):
            self._part(family)

    def _part(self, family: WeightFamily) -> None:
        """Give every group of a family its own queue back, for some time."""
        queues, together = self._round_robin.queues, family.together
        family.together, family.rests_until = None, family.batches + REST
        for key in [key for key, queue in queues.items() if queue is together and key is not family.key]:
            del queues[key]
        for member in [key for key in queues if isinstance(key, BatchQueue) and key.family is family]:
            member.small, member.met = (0, 0), 0.0
            if member.key not in queues:
                queues[member.key] = queues.pop(member)


def _pays(queue: BatchQueue, callers: int) -> bool:
    """Whether a batch of so many costs less than several of those that meet here, or than calls at once."""
    if callers < MORE * queue.met:
        return False
    costs = queue.costs
    if costs is None or not costs.timed:  # its calls wait in any case
        return True
    return costs.alone_us * (1.0 - 1.0 / queue.met) > QUEUE_US + BATCH_US / callers

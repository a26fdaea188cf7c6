"""The order of service: slots in the order in which they first appeared, round and round.

A slot is a group seen after the same caller's previous group: attention has one group in every layer of a
model, and only what came before tells the layers apart. Slots are remembered up to a bound.

A new slot stands right behind the one its caller came from, so that the order is the program's also where
several callers first showed it at once, each from another place: in the order of first sight their slots
would alternate, and the sweep would move all of them in step without letting any two meet.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Set
from heapq import heapify, heappop, heappush
from typing import Any, Final

from layerzero.scheduler.core.pending_call import Ticket


class Group:
    """The waiting tickets of one compatibility class, one line a priority; a dict is an ordered set.

    A `solo` group serves an op's calls that batch with nothing: one ticket a batch. `busy` are its slots
    with tickets. Of its batches on a device that answers early: `launched_at` of the last, the time between
    two, and how long one runs, in seconds.
    """

    __slots__ = (
        "busy", "bytes", "count", "key", "launched_at", "lines", "period_s", "run_s", "slots", "solo",
        "tokens",
    )  # fmt: skip

    def __init__(self, key: Any, solo: bool) -> None:
        self.key = key
        self.solo = solo
        self.lines: tuple[dict[Ticket, None], ...] = ({}, {}, {})
        self.count = self.tokens = self.bytes = 0
        self.slots: dict[Group | None, Slot] = {}
        self.busy: dict[Slot, None] = {}
        self.launched_at: float | None = None
        self.period_s = self.run_s = 0.0


class Slot:
    """A place in a model's program, how many tickets wait there and when it was last used."""

    __slots__ = ("before", "count", "group", "ordered", "place", "used")

    def __init__(self, group: Group, before: Group | None, place: int, used: int) -> None:
        self.group = group
        self.before = before
        self.place = place
        self.used = used
        self.count = 0
        self.ordered = False  # whether one of the sweep's heaps has it


_NONE: Final[frozenset[Group]] = frozenset()
_GAP: Final = 1 << 512  # between places: 512 times something may be put behind one before all are renumbered
_GROWTH: Final = 1.5  # of what is remembered, between two searches for what may be forgotten

Heap = list[tuple[int, Slot]]


class Sweep:
    """Which slot is next; `pending` holds those with tickets, `arrived` those that came to have some.

    `limit` bounds how many slots are remembered that have no tickets. Of those that have, a heap holds what
    this round still reaches, another the next round's; an entry whose slot has no tickets any more goes when
    it is met.
    """

    __slots__ = (
        "_ahead", "_behind", "_full_at", "_owed", "_place", "_places", "_serving", "arrived", "groups",
        "limit", "pending", "rounds", "size", "solos",
    )  # fmt: skip

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._full_at = limit
        self.arrived: list[Slot] = []
        self._ahead: Heap = []
        self._behind: Heap = []
        self.groups: dict[Any, Group] = {}
        self.solos: dict[Any, Group] = {}
        self.pending: dict[Slot, None] = {}
        self.rounds = 0
        self.size = 0
        self._places: list[int] = []  # of every slot, ascending
        self._place = -1
        self._serving: Slot | None = None
        self._owed = 0

    def new_slot(self, group: Group, before: Group | None, used: int, behind: Slot | None = None) -> Slot:
        """Remember a slot that was not seen before: the one next to `behind`, or the last of the order."""
        if self.size >= self._full_at:
            self._forget(group)
            # What has tickets stays: searched again at the next slot, all would be looked at for each slot.
            self._full_at = max(self.limit, int(self.size * _GROWTH))
        place = self._place_behind(behind)
        slot = group.slots[before] = Slot(group, before, place, used)
        insort(self._places, place)
        self.size += 1
        return slot

    def _place_behind(self, behind: Slot | None) -> int:
        """A place between `behind` and what follows it, or behind all."""
        places = self._places
        for _ in range(2):
            following = len(places) if behind is None else bisect_right(places, behind.place)
            if behind is None or following == len(places):
                break
            between = (behind.place + places[following]) // 2
            if behind.place < between < places[following]:
                return between
            self._spread()  # no number is left between the two
            places = self._places
        return places[-1] + _GAP if places else 0

    def next_group(self, held: Set[Group] = _NONE) -> Group | None:
        """The group to serve: the current one's while tickets from when it was reached wait, else the next.

        Groups in `held` are passed over; None where no other waits.
        """
        serving = self._serving
        if serving is not None and self._owed > 0 and serving.count and serving.group not in held:
            return serving.group
        self._order()
        after = self._first(held)
        if after is None:
            self._ahead += self._behind
            self._behind.clear()
            reached, self._place = self._place, -1
            heapify(self._ahead)
            after = self._first(held)
            if after is None:
                self._place = reached
                return None
            self.rounds += 1
        self._serving = after
        self._place = after.place
        self._owed = after.group.count
        return after.group

    def _order(self) -> None:
        """Put what came to have tickets into the heaps."""
        for slot in self.arrived:
            if not slot.ordered and slot.count:
                slot.ordered = True
                heappush(self._ahead if slot.place > self._place else self._behind, (slot.place, slot))
        self.arrived.clear()

    def _first(self, held: Set[Group]) -> Slot | None:
        """The first slot with tickets that are not held which this round still reaches."""
        ahead, passed = self._ahead, []
        first: Slot | None = None
        while ahead:
            place, slot = ahead[0]
            if slot.count and place > self._place and slot.group not in held:
                first = slot
                break
            heappop(ahead)
            if not slot.count:
                slot.ordered = False
            elif place <= self._place:
                heappush(self._behind, (place, slot))
            else:
                passed.append((place, slot))
        for entry in passed:
            heappush(ahead, entry)
        return first

    def _reorder(self) -> None:
        """Order everything anew: places have changed, or slots are gone."""
        for _, slot in (*self._ahead, *self._behind):
            slot.ordered = False
        self._ahead.clear()
        self._behind.clear()
        self.arrived[:] = self.pending

    def served(self, group: Group, count: int) -> None:
        """`count` tickets of `group` were taken; those that came after the sweep reached it wait a round."""
        if self._serving is not None and self._serving.group is group:
            self._owed -= count

    def all_groups(self) -> list[Group]:
        return [*self.groups.values(), *self.solos.values()]

    def _forget(self, keep: Group) -> None:
        """Drop the half of the idle slots used longest ago, and the groups that this leaves without any."""
        idle = [slot for group in self.all_groups() for slot in group.slots.values() if not slot.count]
        idle.sort(key=lambda slot: slot.used)
        for slot in idle[: max(len(idle) // 2, 1)]:
            del slot.group.slots[slot.before]
            self.size -= 1
            if slot is self._serving:
                self._serving = None
        for groups in (self.groups, self.solos):
            for key in [k for k, group in groups.items() if not group.slots and group is not keep]:
                del groups[key]
        self._places = sorted(slot.place for group in self.all_groups() for slot in group.slots.values())
        self._reorder()

    def _spread(self) -> None:
        """Number the places anew, in their order."""
        slots = [slot for group in self.all_groups() for slot in group.slots.values()]
        slots.sort(key=lambda slot: slot.place)
        self._place = (bisect_right(self._places, self._place) - 1) * _GAP
        for number, slot in enumerate(slots):
            slot.place = number * _GAP
        self._places = [slot.place for slot in slots]
        self._reorder()

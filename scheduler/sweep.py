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
from typing import Any, Final

from layerzero.scheduler.ticket import Ticket


class Group:
    """The waiting tickets of one compatibility class, one line a priority; a dict is an ordered set.

    A `solo` group serves an op's calls that batch with nothing: one ticket a batch. `busy` are its slots
    with tickets; `held_at` is since when its tickets wait for callers that are away.
    """

    __slots__ = ("busy", "bytes", "count", "held_at", "key", "lines", "slots", "solo", "tokens")

    def __init__(self, key: Any, solo: bool) -> None:
        self.key = key
        self.solo = solo
        self.lines: tuple[dict[Ticket, None], ...] = ({}, {}, {})
        self.count = self.tokens = self.bytes = 0
        self.slots: dict[Group | None, Slot] = {}
        self.busy: list[Slot] = []
        self.held_at: float | None = None


class Slot:
    """A place in a model's program, how many tickets wait there and when it was last used."""

    __slots__ = ("before", "count", "group", "place", "used")

    def __init__(self, group: Group, before: Group | None, place: float, used: int) -> None:
        self.group = group
        self.before = before
        self.place = place
        self.used = used
        self.count = 0


_NONE: Final[frozenset[Group]] = frozenset()


class Sweep:
    """Which slot is next; `pending` holds those with tickets, `limit` bounds how many are remembered."""

    __slots__ = (
        "_owed", "_place", "_places", "_serving", "groups", "limit", "pending", "rounds", "size", "solos",
    )  # fmt: skip

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.groups: dict[Any, Group] = {}
        self.solos: dict[Any, Group] = {}
        self.pending: dict[Slot, None] = {}
        self.rounds = 0
        self.size = 0
        self._places: list[float] = []  # of every slot, ascending
        self._place = -1.0
        self._serving: Slot | None = None
        self._owed = 0

    def new_slot(self, group: Group, before: Group | None, used: int, behind: Slot | None = None) -> Slot:
        """Remember a slot that was not seen before: the one next to `behind`, or the last of the order."""
        if self.size >= self.limit:
            self._forget(group)
        place = self._place_behind(behind)
        slot = group.slots[before] = Slot(group, before, place, used)
        insort(self._places, place)
        self.size += 1
        return slot

    def _place_behind(self, behind: Slot | None) -> float:
        """A place between `behind` and what follows it, or behind all."""
        places = self._places
        for _ in range(2):
            following = len(places) if behind is None else bisect_right(places, behind.place)
            if behind is None or following == len(places):
                break
            between = (behind.place + places[following]) / 2
            if behind.place < between < places[following]:
                return between
            self._spread()  # no number is left between the two
            places = self._places
        return places[-1] + 1.0 if places else 0.0

    def next_group(self, held: Set[Group] = _NONE) -> Group | None:
        """The group to serve: the current one's while tickets from when it was reached wait, else the next.

        Groups in `held` are passed over; None where no other waits.
        """
        serving = self._serving
        if serving is not None and self._owed > 0 and serving.count and serving.group not in held:
            return serving.group
        place = self._place
        after: Slot | None = None
        first: Slot | None = None
        for slot in self.pending:
            if held and slot.group in held:
                continue
            if slot.place > place:
                if after is None or slot.place < after.place:
                    after = slot
            elif first is None or slot.place < first.place:
                first = slot
        if after is None:
            if first is None:
                return None
            after = first
            self.rounds += 1
        self._serving = after
        self._place = after.place
        self._owed = after.group.count
        return after.group

    def served(self, group: Group, count: int) -> None:
        """`count` tickets of `group` were taken; those that came after the sweep reached it wait a round."""
        group.held_at = None
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

    def _spread(self) -> None:
        """Number the places anew, in their order."""
        slots = [slot for group in self.all_groups() for slot in group.slots.values()]
        slots.sort(key=lambda slot: slot.place)
        self._place = bisect_right(self._places, self._place) - 1.0
        for number, slot in enumerate(slots):
            slot.place = float(number)
        self._places = [slot.place for slot in slots]

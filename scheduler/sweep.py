"""The order of service: slots in the order in which they first appeared, round and round.

A slot is a group seen after the same caller's previous group: attention has one group in every layer of a
model, and only what came before tells the layers apart. Slots are remembered up to a bound.
"""

from __future__ import annotations

from typing import Any

from layerzero.scheduler.ticket import Ticket


class Group:
    """The waiting tickets of one compatibility class, one line a priority; a dict is an ordered set.

    A `solo` group serves an op's calls that batch with nothing: one ticket a batch. `busy` are its slots
    with tickets.
    """

    __slots__ = ("busy", "bytes", "count", "key", "lines", "slots", "solo", "tokens")

    def __init__(self, key: Any, solo: bool) -> None:
        self.key = key
        self.solo = solo
        self.lines: tuple[dict[Ticket, None], ...] = ({}, {}, {})
        self.count = self.tokens = self.bytes = 0
        self.slots: dict[Group | None, Slot] = {}
        self.busy: list[Slot] = []


class Slot:
    """A place in a model's program, how many tickets wait there and when it was last used."""

    __slots__ = ("before", "count", "group", "place", "used")

    def __init__(self, group: Group, before: Group | None, place: int, used: int) -> None:
        self.group = group
        self.before = before
        self.place = place
        self.used = used
        self.count = 0


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
        self._places = 0
        self._place = -1
        self._serving: Slot | None = None
        self._owed = 0

    def new_slot(self, group: Group, before: Group | None, used: int) -> Slot:
        """Remember a slot that was not seen before, as the last of the order."""
        if self.size >= self.limit:
            self._forget(group)
        self._places += 1
        slot = group.slots[before] = Slot(group, before, self._places, used)
        self.size += 1
        return slot

    def next_group(self) -> Group:
        """The group to serve: the current one's while tickets from when it was reached wait, else the next.

        Only for a sweep with a pending slot.
        """
        serving = self._serving
        if serving is not None and self._owed > 0 and serving.count:
            return serving.group
        place = self._place
        after: Slot | None = None
        first: Slot | None = None
        for slot in self.pending:
            if slot.place > place:
                if after is None or slot.place < after.place:
                    after = slot
            elif first is None or slot.place < first.place:
                first = slot
        if after is None:
            after = first
            self.rounds += 1
        assert after is not None, "a sweep is asked for a group only while one waits"
        self._serving = after
        self._place = after.place
        self._owed = after.group.count
        return after.group

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

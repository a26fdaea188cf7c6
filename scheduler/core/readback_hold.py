"""Who is expected back: callers whose rows a device still computes or copies, and what waits for them.

On a device that answers later than it is asked, a lane that runs whatever waits walks with its callers in
crowds: one waits for its results while the other's batch is launched, and each costs a pass of the weights.
So a group is held while callers are away that stood where its own tickets come from. What it holds would
have stood behind them in the device's line; a hold ends with a deadline, and with a bound of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from layerzero.scheduler.core.limits import Caps
from layerzero.scheduler.core.round_robin import Group, Slot


class Expected:
    """Callers and launched batches that are away, each with the group that it was in last.

    `until` is when the first hold that `held` has told of ends by itself; infinite without one.
    """

    __slots__ = ("_away", "_caps", "until")

    def __init__(self, caps: Caps) -> None:
        self._caps = caps
        self._away: dict[object, Group] = {}
        self.until = math.inf

    def __len__(self) -> int:
        return len(self._away)

    def leave(self, who: object, last: Group) -> None:
        """Expect `who` to come back from where `last` was called."""
        self._away[who] = last

    def back(self, who: object) -> None:
        """Expect `who` no more; it may never have been expected, or too long."""
        self._away.pop(who, None)

    def held(self, pending: Iterable[Slot], now: float) -> set[Group]:
        """The groups with tickets in `pending` that wait for who is away.

        Who has kept a group waiting for as long as the limits allow is not expected any longer.
        """
        self.until = math.inf
        found: set[Group] = set()
        sources = set(self._away.values())
        for slot in pending:
            group = slot.group
            if group in found or group.solo or not any(source in group.slots for source in sources):
                continue
            if self._full(group):
                continue
            if group.held_at is None:
                group.held_at = now
            until = group.held_at + self._caps.hold_s
            if now >= until:
                self._away = {who: last for who, last in self._away.items() if last not in group.slots}
                sources = set(self._away.values())
                continue
            found.add(group)
            self.until = min(self.until, until)
        return found

    def _full(self, group: Group) -> bool:
        caps = self._caps
        return group.count >= caps.items or group.tokens >= caps.tokens or group.bytes >= caps.max_bytes

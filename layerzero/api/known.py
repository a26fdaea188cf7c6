"""What the awaited ops have found out about calls, kept where the compiled twin finds it in one step.

A memo holds, for one op, everything between a call's arguments and its ticket: plan, group, size, modes. It
belongs to one generation of one device of the process's runtime; another runtime, policy or health verdict
empties it. Calls that more than bits describe (scopes, subclasses, autocast, modes that see every operation,
CUDA streams beside the default one) never enter it.
"""

from __future__ import annotations

import inspect
from typing import Any

from layerzero.actors.local import LocalDevice
from layerzero.api.scope import SCOPE
from layerzero.dispatch import REHEARSAL, LaneFacts, Plan
from layerzero.native import HOT
from layerzero.ops.op import Args, Op
from layerzero.runtime import ACTIVE
from layerzero.scheduler.ticket import Ticket


class Known:
    """One op's memo while the compiled twin is there, else None."""

    __slots__ = ("_op", "memo")

    def __init__(self, op: Op) -> None:
        self._op = op
        self.memo: Any = None
        HOT.on_ready(self.adopt)
        ACTIVE.on_change(self.forget)

    def adopt(self, module: Any) -> None:
        """Begin a memo of the compiled twin, or go without."""
        if module is None:
            self.memo = None
            return
        parameters = tuple(inspect.signature(self._op.build).parameters.values())
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters):
            return
        self.memo = module.Memo(
            self._op,
            tuple(p.name for p in parameters),
            # Only whether there is one matters: what it is stands in the full arguments.
            tuple(... if p.default is p.empty else None for p in parameters),
            sum(p.kind is not p.KEYWORD_ONLY for p in parameters),
            ACTIVE,
            SCOPE,
            REHEARSAL,
        )

    def forget(self) -> None:
        """Keep nothing alive that belonged to a runtime which is gone."""
        if self.memo is not None:
            self.memo.forget()

    def remember(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        full: Args,
        device: LocalDevice,
        plan: Plan,
        ticket: Ticket,
        *,
        usual: bool,
    ) -> bool:
        """Keep a call that the current policy governs (`usual`: nothing in it asks for more than that).

        Whether it can be found again.
        """
        lane: LaneFacts | None = plan.lane
        modes, snapshot = ticket.modes
        if self.memo is None or not usual or snapshot is not None or SCOPE.get() is not None:
            return False
        if lane is None or lane.shared is None:
            return False
        if device.capture() is not modes or ACTIVE.devices.get(device.device) is not device:
            return False
        remembered: bool = self.memo.remember(
            args, kwargs, full, lane.shared, (ACTIVE.devices, device, device.snapshot, device.fronts.by_loop),
            plan, ticket.group, ticket.modes, lane.tokens, lane.bytes, plan.expected_us,
        )  # fmt: skip
        return remembered

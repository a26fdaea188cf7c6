"""What is known about calls, kept where the compiled twin finds it in one step.

For a blocking op these are the plans of one generation (`KnownPlans`). For an awaited op a memo holds
everything between a call's arguments and its ticket: plan, group, size, modes. Both belong to one generation
of a device of the process's runtime; another runtime, policy or health verdict empties them. Calls that more
than bits describe (scopes, subclasses, autocast, modes that see every operation, CUDA streams beside the
default one) never enter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.scope import SCOPE
from layerzero.native import HOT, UNUSED
from layerzero.ops.op import Args, Op
from layerzero.runtime import ACTIVE
from layerzero.scheduler.core.pending_call import Ticket
from layerzero.selection.dispatch import REHEARSAL, LaneFacts, Plan, Snapshot


def _parameters(op: Op) -> tuple[tuple[str, ...], tuple[Any, ...], int] | None:
    """Names, what has a default, and how many may be positional; None where the twin cannot bind them."""
    parameters = tuple(inspect.signature(op.build).parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters):
        return None
    return (
        tuple(p.name for p in parameters),
        # Only whether there is one matters: what it is stands in the full arguments.
        tuple(... if p.default is p.empty else None for p in parameters),
        sum(p.kind is not p.KEYWORD_ONLY for p in parameters),
    )


class KnownPlans:
    """One op's plans of blocking calls while the compiled twin is there, else None.

    `last` notes a thread's last plan, `recover` goes on where a kernel raised.
    """

    __slots__ = ("_last", "_op", "_recover", "plans")

    def __init__(self, op: Op, last: Any, recover: Callable[..., Any]) -> None:
        self._op = op
        self._last = last
        self._recover = recover
        self.plans: Any = None
        HOT.on_ready(self.adopt)
        ACTIVE.on_change(self.forget)

    def adopt(self, module: Any) -> None:
        """Begin with the compiled twin, or go without."""
        parameters = _parameters(self._op)
        if module is None or parameters is None:
            self.plans = None
            return
        self.plans = module.Plans(*parameters, ACTIVE, SCOPE, REHEARSAL, self._last, self._recover)

    def forget(self) -> None:
        """Keep nothing alive that belonged to a runtime which is gone."""
        if self.plans is not None:
            self.plans.forget()

    def remember(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], full: Args, device: LocalDevice,
        snapshot: Snapshot, plan: Plan,
    ) -> None:  # fmt: skip
        """Keep the plan of a call that the current policy governs; the first one has the twin loaded soon."""
        if self.plans is not None:
            self.plans.remember(args, kwargs, full, ACTIVE.devices, device, snapshot, plan)
        elif not HOT.requested:
            HOT.requested = True
            if HOT.state == UNUSED:
                device.load_behind(HOT.start)


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
        parameters = _parameters(self._op)
        if module is None or parameters is None:
            self.memo = None
            return
        self.memo = module.Memo(self._op, *parameters, ACTIVE, SCOPE, REHEARSAL)

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

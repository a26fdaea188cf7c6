"""The awaitable ops: run at once for a lone caller, through the device's lane for everybody else."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from layerzero.actors.local import LocalDevice
from layerzero.api.calls import LAST, checked_build, device_here, named, snapshot_here
from layerzero.api.scope import SCOPE
from layerzero.dispatch import Plan, Snapshot
from layerzero.ops.op import Args, Op
from layerzero.runtime import ACTIVE
from layerzero.scheduler.modes import bars_queueing, restore
from layerzero.scheduler.ticket import Ticket


def awaited(op: Op) -> Callable[..., Any]:
    """The op as a coroutine function with the signature of `op.build`, plus what concerns its waiting.

    `backend=` as in the blocking op; `priority=` 0 (first) to 2; `timeout=` seconds until it must have
    started, else DeadlineExceededError.
    """
    build, name, active, scoped, last = op.build, op.name, ACTIVE, SCOPE.get, LAST

    async def call(
        *args: Any, backend: str | None = None, priority: int = 1, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        snapshot: Snapshot | None = None
        try:
            signature, full = build(*args, **kwargs)
            device = active.devices[full[0].device]
            if backend is not None or scoped() is not None:
                device, snapshot, plan, full = _planned(op, args, kwargs, backend)
            else:
                plan = device.snapshot.tables[name].hot[device.mode()][signature]
        except (KeyError, AttributeError, TypeError):
            device, snapshot, plan, full = _planned(op, args, kwargs, backend)
        front = device.fronts.current()
        if plan.expected_us < device.inline_limit_us and front.may_inline():
            front.charge(plan.expected_us)
            last.plan = plan
            try:
                return plan.call(*full)
            except Exception as error:
                result, last.plan = device.recover(plan, full, error, snapshot)
                return result
        if bars_queueing() is not None or "capture" in plan.request.modes:
            result, last.plan = device.launch_planned(op, full, snapshot)
            return result
        ticket = _ticket(op, device, plan, full, snapshot, priority)
        if timeout is not None:
            ticket.deadline = front.loop.time() + timeout
        modes = ticket.modes[0]
        front.submit(ticket)
        result, last.plan = await ticket
        restore(modes)
        return result

    return named(call, op)


def _planned(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None
) -> tuple[LocalDevice, Snapshot | None, Plan, Args]:
    """Device, governing snapshot (None: the current one), plan and arguments of an unusual call."""
    signature, full = checked_build(op, args, kwargs)
    device = device_here(full)
    snapshot = snapshot_here(device, op.name, backend)
    plan = device.plan(op, signature, full, device.mode(), snapshot)
    return device, None if snapshot is device.snapshot else snapshot, plan, full


def _ticket(
    op: Op,
    device: LocalDevice,
    plan: Plan,
    args: Args,
    snapshot: Snapshot | None,
    priority: int,
) -> Ticket:
    """The ticket of a call: its group is None where it must run alone."""
    modes = device.capture()
    group: Hashable | None = None
    tokens, size = 1, 0
    batching = op.batching
    if batching is not None:
        if plan.lane is None:
            plan.lane = batching.size(args)
        tokens, size = plan.lane
        if plan.joins:
            rule = batching.group(args)
            if rule is not None:
                if op.guard is not None:
                    op.guard(args)
                group = (op.name, rule, modes, snapshot)
    return Ticket(op, args, group, plan.expected_us, tokens, size, priority, None, (modes, snapshot))

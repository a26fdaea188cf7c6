"""The awaitable ops: run at once for a lone caller, through the device's lane for everybody else."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch._C import _set_grad_enabled as set_grad_enabled

from layerzero.actors.local import LocalDevice
from layerzero.api.calls import LAST, checked_build, device_here, named, snapshot_here
from layerzero.api.scope import SCOPE
from layerzero.dispatch import LaneFacts, Plan, Snapshot
from layerzero.ops.checks import need_number
from layerzero.ops.op import Args, Op
from layerzero.runtime import ACTIVE
from layerzero.scheduler.modes import Modes, bars_queueing, restore
from layerzero.scheduler.ticket import Ticket


def awaited(op: Op) -> Callable[..., Any]:
    """The op as a coroutine function with the signature of `op.build`, plus what concerns its waiting.

    `backend=` as in the blocking op; `priority=` 0 (first) to 2; `timeout=` seconds until it must have
    started, else DeadlineExceededError.
    """
    build, name, active, scoped, last = op.build, op.name, ACTIVE, SCOPE.get, LAST

    async def call(
        *args: Any,
        backend: str | None = None,
        priority: int = 1,
        timeout: float | None = None,  # noqa: ASYNC109  the lane cancels queued calls by it
        **kwargs: Any,
    ) -> Any:
        snapshot: Snapshot | None = None
        try:
            signature, full = build(*args, **kwargs)
            device = active.devices[full[0].device]
            modes = device.capture()
            if backend is not None or scoped() is not None:
                device, snapshot, plan, full = _planned(op, args, kwargs, backend)
            elif device.capturing is None:
                plan = device.snapshot.tables[name].hot[modes.bits & device.counted][signature]
            else:
                plan = device.snapshot.tables[name].hot[device.mode()][signature]
        except (KeyError, AttributeError, TypeError):
            device, snapshot, plan, full = _planned(op, args, kwargs, backend)
            modes = device.capture()
        front = device.fronts.current()
        if (
            front.alone is not None
            and plan.expected_us < device.inline_limit_us
            and (front.may_inline() or await front.rested())
        ):
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
        ticket = _ticket(op, device, plan, full, modes, snapshot, priority)
        if timeout is not None:
            ticket.deadline = front.loop.time() + need_number("timeout", timeout, low=0.0)
        front.submit(ticket)
        if modes.grad is not front.ambient_grad and not modes.inference:
            return await _away(ticket, modes, front.ambient_grad)
        result, last.plan = await ticket
        if device.capture() is not modes:
            restore(modes)
        return result

    return named(call, op)


async def _away(ticket: Ticket, modes: Modes, ambient: bool) -> Any:
    """Await a ticket under another grad mode than the loop's: the mode leaves with its caller."""
    set_grad_enabled(ambient)
    try:
        result, LAST.plan = await ticket
    finally:
        set_grad_enabled(modes.grad)
    restore(modes)
    return result


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
    modes: Modes,
    snapshot: Snapshot | None,
    priority: int,
) -> Ticket:
    """The ticket of a call: its group is None where it must run alone."""
    lane = plan.lane
    if lane is None:
        lane = plan.lane = _lane_facts(op, args)
    group: Hashable | None = None
    if plan.joins and op.batching is not None and device.batches(op):
        if op.guard is not None and not op.guard_joined:
            op.guard(args)
        shared = lane.shared
        if shared is None:
            group = _group(op, args, modes, snapshot)
        else:
            where: Hashable
            if len(shared) == 1:
                where = (modes, snapshot, args[shared[0]].data_ptr())
            else:
                where = (modes, snapshot, *[args[position].data_ptr() for position in shared])
            group = lane.groups.get(where, _UNKNOWN)
            if group is _UNKNOWN:
                group = _remember(lane, where, _group(op, args, modes, snapshot))
    return Ticket(
        op, args, group, plan.expected_us, lane.tokens, lane.bytes, priority, None, (modes, snapshot)
    )


class Group:
    """A compatibility class of calls, one object each, so that lanes compare and hash it as a pointer."""

    __slots__ = ("key",)

    def __init__(self, key: Hashable) -> None:
        self.key = key

    def __repr__(self) -> str:
        return f"Group({self.key!r})"


_GROUPS: dict[Hashable, Group] = {}
_MAX_GROUPS = 65_536
_MAX_REMEMBERED = 1024
_UNKNOWN: Any = object()


def _group(op: Op, args: Args, modes: Modes, snapshot: Snapshot | None) -> Hashable | None:
    assert op.batching is not None
    rule = op.batching.group(args)
    if rule is None:
        return None
    key = (op.name, rule, modes, snapshot)
    if len(_GROUPS) >= _MAX_GROUPS:
        _GROUPS.clear()  # calls that wait under the old objects run apart from later ones, nothing worse
    return _GROUPS.setdefault(key, Group(key))


def _remember(lane: LaneFacts, where: Hashable, group: Hashable | None) -> Hashable | None:
    if len(lane.groups) >= _MAX_REMEMBERED:
        lane.groups.clear()
    lane.groups[where] = group
    return group


def _lane_facts(op: Op, args: Args) -> LaneFacts:
    batching = op.batching
    if batching is None:
        return LaneFacts(1, 0, None)
    return LaneFacts(*batching.size(args), batching.shared(args))

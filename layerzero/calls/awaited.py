"""The awaitable ops: run at once for a lone caller, through the device's lane for everybody else."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor

from layerzero._util import log
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.blocking import LAST, checked_build, device_here, named, snapshot_here
from layerzero.calls.call_cache import Known
from layerzero.calls.scope import SCOPE
from layerzero.ops.checks import need_choice, need_number
from layerzero.ops.op import Args, Op
from layerzero.runtime import ACTIVE
from layerzero.scheduler.core.pending_call import TICKETS, Ticket
from layerzero.scheduler.loop_driver import QUEUE, Front
from layerzero.scheduler.streams import come_back, leave
from layerzero.scheduler.task_modes import CARRYING
from layerzero.scheduler.torch_modes import Modes, bars_queueing, restore
from layerzero.selection.dispatch import CAPTURE, LaneFacts, Plan, Snapshot
from layerzero.spec.settings import BATCHING


def awaited(op: Op) -> Callable[..., Any]:
    """The op as a coroutine function with the signature of `op.build`, plus what concerns its waiting.

    `backend=` as in the blocking op; `priority=` 0 (first) to 2; `timeout=` seconds until it must have
    started, else DeadlineExceededError; `batching=` "off", "rows" or "all" in place of the settings' own.
    """
    known, last, queue = Known(op), LAST, QUEUE
    unknown = _unknown(op, known)
    guard = None if op.guard_joined else op.guard

    async def call(
        *args: Any,
        backend: str | None = None,
        priority: int = 1,
        timeout: float | None = None,  # noqa: ASYNC109  the lane cancels queued calls by it
        batching: str | None = None,
        **kwargs: Any,
    ) -> Any:
        memo = known.memo if backend is None and batching is None else None
        ticket = None if memo is None else memo.find(args, kwargs)
        if ticket is None:
            return await unknown(args, kwargs, backend, priority, timeout, batching)
        front = ticket.front
        if (
            front.alone is not None
            and ticket.expected_us < front.inline_limit_us
            and (front.may_inline() or await front.rested())
        ):
            front.charge(ticket.expected_us)
            return _at_once(ticket.plan, ticket.args, None)
        if guard is not None:
            ticket.args = guard(ticket.args)
        if priority != 1 or timeout is not None:
            hurry(ticket, priority, timeout)
        if not queue.known(front, ticket):
            front.submit(ticket)
        modes = ticket.modes[0]
        if modes.grad is not front.ambient_grad and not modes.inference and not CARRYING.here():
            return await away(ticket, modes, front)
        result, last.plan = await ticket
        if not ticket.unchanged():
            restore(modes)
        return result

    return named(call, op, WAITING_DOC)


WAITING_DOC = """    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
"""


def _unknown(op: Op, known: Known) -> Callable[..., Any]:
    """The op for a call that no memo knows: every step in Python."""
    build, name, active, scoped, last = op.build, op.name, ACTIVE, SCOPE.get, LAST
    forward: Any = torch.autograd.forward_ad

    async def call(
        args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None, priority: int,
        timeout: float | None, batching: str | None,  # noqa: ASYNC109
    ) -> Any:  # fmt: skip
        snapshot: Snapshot | None = None
        try:
            signature, full = build(*args, **kwargs)
            device = active.devices[full[0].device]
            modes = device.capture()
            own = backend is not None or batching is not None or scoped() is not None
            if own or forward._current_level >= 0:
                raise KeyError("a call of its own kind")  # found below, as one whose signature is new
            if device.capturing is None:
                plan = device.snapshot.tables[name].hot[modes.bits & device.counted][signature]
            else:
                bits = device.mode()
                plan = device.snapshot.tables[name].hot[bits][signature]
                if bits & CAPTURE:
                    return _at_once(plan, full, None)
        except (KeyError, AttributeError, TypeError):
            device, snapshot, plan, full = _planned(op, args, kwargs, backend, batching)
            if "capture" in plan.request.modes:
                return _at_once(plan, full, snapshot)
            modes = device.capture()
        front = device.fronts.current()
        if (
            front.alone is not None
            and plan.expected_us < device.inline_limit_us
            and (front.may_inline() or await front.rested())
        ):
            front.charge(plan.expected_us)
            return _at_once(plan, full, snapshot)
        if bars_queueing() is not None:
            result, last.plan = device.launch_planned(op, full, snapshot)
            return result
        ticket = _ticket(op, device, plan, full, modes, snapshot, priority, batching)
        _say_alone(device, ticket, plan)
        if device.spans is None:  # else every call is told of, and none is remembered
            known.remember(
                args, kwargs, full, device, plan, ticket, usual=backend is None and batching is None
            )
        if timeout is not None:
            ticket.deadline = front.loop.time() + need_number("timeout", timeout, low=0.0)
        if device.spans is None:
            return await _queued(device, ticket, modes, front)
        with device.spans.waiting(name, ticket.args) as answered:
            result = await _queued(device, ticket, modes, front)
            answered(last.plan)
        return result

    return call


RUNS_ALONE = "op.runs_alone"
FOR_WEIGHTS = (
    "weights require a gradient, so that no call shares a launch: await it under torch.no_grad(), or freeze "
    "them with requires_grad_(False), or open the runtime with Settings(inference=True)"
)
_SAID_ALONE: WeakSet[LocalDevice] = WeakSet()  # one word for each: a server that forgot it would only be slow


def _say_alone(device: LocalDevice, ticket: Ticket, plan: Plan) -> None:
    """Log once where a call runs alone for the gradient of its weights, while its rows want none."""
    if ticket.group is not None or "grad" not in plan.request.modes or device in _SAID_ALONE:
        return
    rows = ticket.args[0]
    if isinstance(rows, Tensor) and not rows.requires_grad:
        _SAID_ALONE.add(device)
        log.warning(RUNS_ALONE, op=plan.op.name, why=FOR_WEIGHTS)


async def _queued(device: LocalDevice, ticket: Ticket, modes: Modes, front: Front) -> Any:
    """Submit a ticket and await its result, in the modes that its caller had."""
    front.submit(ticket)
    if modes.stream != front.ambient_stream or parts(modes, front):
        return await away(ticket, modes, front)
    result, LAST.plan = await ticket
    if device.capture() is not modes:
        restore(modes)
    return result


def _at_once(plan: Plan, args: Args, snapshot: Snapshot | None) -> Any:
    """Run a plan on this thread, the next kernels in its order where it fails."""
    LAST.plan = plan
    try:
        return plan.call(*args)
    except Exception as error:
        result, LAST.plan = device_here(args).recover(plan, args, error, snapshot)
        return result


def hurry(ticket: Ticket, priority: int, timeout: float | None) -> None:
    """Give a ticket another priority than 1, or a deadline."""
    if priority not in (0, 1, 2):
        raise ValueError(f"priority needs 0, 1 or 2, got {priority!r}")
    ticket.priority = priority
    if timeout is not None:
        ticket.deadline = ticket.front.loop.time() + need_number("timeout", timeout, low=0.0)


def parts(modes: Modes, front: Front) -> bool:
    """Whether a caller's grad mode would stay behind where it waits: a task of before the runtime's own."""
    return modes.grad is not front.ambient_grad and not modes.inference and not CARRYING.here()


async def away(ticket: Ticket, modes: Modes, front: Front) -> Any:
    """Await a ticket under another grad mode or stream than the loop's: they leave with their caller."""
    leave(modes, front)
    try:
        result, LAST.plan = await ticket
    finally:
        come_back(modes, front)
    restore(modes)
    return result


def _planned(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None, batching: str | None
) -> tuple[LocalDevice, Snapshot | None, Plan, Args]:
    """Device, governing snapshot (None: the current one), plan and arguments of an unusual call."""
    if batching is not None:
        need_choice("batching", batching, BATCHING)
    signature, full = checked_build(op, args, kwargs)
    device = device_here(full)
    current = device.snapshot
    snapshot = snapshot_here(device, op.name, backend)
    # Asked before planning: a generation that begins meanwhile does not make this caller's policy its own.
    shared = snapshot is current or snapshot is device.snapshot
    plan = device.plan(op, signature, full, device.mode(), snapshot)
    return device, None if shared else snapshot, plan, full


def _ticket(
    op: Op,
    device: LocalDevice,
    plan: Plan,
    args: Args,
    modes: Modes,
    snapshot: Snapshot | None,
    priority: int,
    batching: str | None,
) -> Ticket:
    """The ticket of a call: its group is None where it must run alone."""
    lane = plan.lane
    if lane is None:
        lane = plan.lane = _lane_facts(op, args)
    group: Hashable | None = None
    if op.guard is not None and not op.guard_joined:
        args = op.guard(args)
    if plan.joins and op.batching is not None and device.batches(op, batching) and _told_by_memory(args):
        shared = lane.shared
        if shared is None:
            group = _group(op, args, modes.anywhere, snapshot)
        else:
            where: Hashable
            if len(shared) == 1:
                where = (modes.anywhere, snapshot, args[shared[0]].data_ptr())
            else:
                where = (modes.anywhere, snapshot, *[args[position].data_ptr() for position in shared])
            group = lane.groups.get(where, _UNKNOWN)
            if group is _UNKNOWN:
                group = _remember(lane, where, _group(op, args, modes.anywhere, snapshot))
    return TICKETS.kind(
        op, args, group, plan.expected_us, lane.tokens, lane.bytes, priority, None, (modes, snapshot)
    )


_PLAIN: Final[frozenset[type]] = frozenset({Tensor, torch.nn.Parameter})


def _told_by_memory(args: Args) -> bool:
    """Whether address, shape and strides say what each tensor holds, and rows of others may stand beside it.

    A subclass may hold its values elsewhere, and would make its neighbours' outputs its own kind; a negative
    view shares its memory with what it negates.
    """
    for value in args:
        if isinstance(value, Tensor) and (value.__class__ not in _PLAIN or value.is_neg()):
            return False
    return True


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

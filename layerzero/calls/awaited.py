"""The awaitable ops: run at once for a lone caller, through the device's batcher for everybody else."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor

from layerzero._util import log
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.blocking import LAST, checked_build, context_device, context_snapshot, with_signature_of
from layerzero.calls.call_cache import AwaitedCallCache
from layerzero.calls.scope import SCOPE
from layerzero.ops.checks import need_choice, need_number
from layerzero.ops.op import Args, Op
from layerzero.runtime import ACTIVE
from layerzero.scheduler.core.pending_call import PENDING_CALL, PendingCall
from layerzero.scheduler.loop_driver import FAST_QUEUE, LoopDriver
from layerzero.scheduler.streams import resume_modes, suspend_modes
from layerzero.scheduler.task_modes import TASK_MODES
from layerzero.scheduler.torch_modes import Modes, must_run_inline, restore
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.modes import CAPTURE
from layerzero.selection.plan import BatchFacts, Plan
from layerzero.spec.settings import BATCHING


def awaitable(op: Op) -> Callable[..., Any]:
    """The op as a coroutine function with the signature of `op.build`, plus what concerns its waiting.

    `backend=` as in the blocking op; `priority=` 0 (first) to 2; `timeout=` seconds until it must have
    started, else DeadlineExceededError; `batching=` "off", "rows" or "all" in place of the settings' own.
    """
    cache, last, queue = AwaitedCallCache(op), LAST, FAST_QUEUE
    unknown = _uncached(op, cache)
    guard = None if op.validate_values_per_batch else op.validate_values

    async def call(
        *args: Any,
        backend: str | None = None,
        priority: int = 1,
        timeout: float | None = None,  # noqa: ASYNC109  the batcher cancels queued calls by it
        batching: str | None = None,
        **kwargs: Any,
    ) -> Any:
        memo = cache.entries if backend is None and batching is None else None
        pending = None if memo is None else memo.find(args, kwargs)
        if pending is None:
            return await unknown(args, kwargs, backend, priority, timeout, batching)
        driver = pending.driver
        if (
            driver.sole_caller is not None
            and pending.expected_us < driver.inline_limit_us
            and (driver.may_inline() or await driver.yield_once())
        ):
            driver.add_inline_us(pending.expected_us)
            return _run_inline(pending.plan, pending.args, None)
        if guard is not None:
            pending.args = guard(pending.args)
        if priority != 1 or timeout is not None:
            set_priority(pending, priority, timeout)
        if not queue.try_submit(driver, pending):
            driver.submit(pending)
        modes = pending.modes[0]
        if modes.grad is not driver.ambient_grad and not modes.inference and not TASK_MODES.is_isolated():
            return await await_with_modes(pending, modes, driver)
        result, last.plan = await pending
        if not pending.unchanged():
            restore(modes)
        return result

    return with_signature_of(call, op, WAITING_DOC)


WAITING_DOC = """    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
"""


def _uncached(op: Op, cache: AwaitedCallCache) -> Callable[..., Any]:
    """The op for a call that no memo knows: every step in Python."""
    build, name, active, scoped, last = op.build, op.name, ACTIVE, SCOPE.get, LAST
    forward: Any = torch.autograd.forward_ad

    async def call(
        args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None, priority: int,
        timeout: float | None, batching: str | None,  # noqa: ASYNC109
    ) -> Any:  # fmt: skip
        snapshot: DispatchState | None = None
        try:
            signature, full = build(*args, **kwargs)
            device = active.devices[full[0].device]
            modes = device.capture_modes()
            is_special = backend is not None or batching is not None or scoped() is not None
            if is_special or forward._current_level >= 0:
                raise KeyError("a call of its own kind")  # found below, as one whose signature is new
            if device.capturing is None:
                plan = device.snapshot.tables[name].by_signature[modes.bits & device.mode_mask][signature]
            else:
                bits = device.mode()
                plan = device.snapshot.tables[name].by_signature[bits][signature]
                if bits & CAPTURE:
                    return _run_inline(plan, full, None)
        except (KeyError, AttributeError, TypeError):
            device, snapshot, plan, full = _plan_special(op, args, kwargs, backend, batching)
            if "capture" in plan.request.modes:
                return _run_inline(plan, full, snapshot)
            modes = device.capture_modes()
        driver = device.loop_drivers.current()
        if (
            driver.sole_caller is not None
            and plan.expected_us < device.inline_limit_us
            and (driver.may_inline() or await driver.yield_once())
        ):
            driver.add_inline_us(plan.expected_us)
            return _run_inline(plan, full, snapshot)
        if must_run_inline() is not None:
            result, last.plan = device.launch_planned(op, full, snapshot)
            return result
        pending = _new_call(op, device, plan, full, modes, snapshot, priority, batching)
        _warn_runs_alone(device, pending, plan)
        if device.spans is None:  # else every call is told of, and none is remembered
            cache.remember(
                args, kwargs, full, device, plan, pending, is_plain=backend is None and batching is None
            )
        if timeout is not None:
            pending.deadline = driver.loop.time() + need_number("timeout", timeout, low=0.0)
        if device.spans is None:
            return await _submit_and_await(device, pending, modes, driver)
        with device.spans.waiting(name, pending.args) as answered:
            result = await _submit_and_await(device, pending, modes, driver)
            answered(last.plan)
        return result

    return call


RUNS_ALONE = "op.runs_alone"
WHY_ALONE = (
    "weights require a gradient, so that no call shares a launch: await it under torch.no_grad(), or freeze "
    "them with requires_grad_(False), or open the runtime with Settings(inference=True)"
)
_WARNED_ALONE: WeakSet[LocalDevice] = (
    WeakSet()
)  # one word for each: a server that forgot it would only be slow


def _warn_runs_alone(device: LocalDevice, pending: PendingCall, plan: Plan) -> None:
    """Log once where a call runs alone for the gradient of its weights, while its rows want none."""
    if pending.batch_key is not None or "grad" not in plan.request.modes or device in _WARNED_ALONE:
        return
    rows = pending.args[0]
    if isinstance(rows, Tensor) and not rows.requires_grad:
        _WARNED_ALONE.add(device)
        log.warning(RUNS_ALONE, op=plan.op.name, why=WHY_ALONE)


async def _submit_and_await(
    device: LocalDevice, pending: PendingCall, modes: Modes, driver: LoopDriver
) -> Any:
    """Submit a pending call and await its result, in the modes that its caller had."""
    driver.submit(pending)
    if modes.stream != driver.ambient_stream or modes_differ(modes, driver):
        return await await_with_modes(pending, modes, driver)
    result, LAST.plan = await pending
    if device.capture_modes() is not modes:
        restore(modes)
    return result


def _run_inline(plan: Plan, args: Args, snapshot: DispatchState | None) -> Any:
    """Run a plan on this thread, the next kernels in its order where it fails."""
    LAST.plan = plan
    try:
        return plan.call(*args)
    except Exception as error:
        result, LAST.plan = context_device(args).recover(plan, args, error, snapshot)
        return result


def set_priority(pending: PendingCall, priority: int, timeout: float | None) -> None:
    """Give a pending call another priority than 1, or a deadline."""
    if priority not in (0, 1, 2):
        raise ValueError(f"priority needs 0, 1 or 2, got {priority!r}")
    pending.priority = priority
    if timeout is not None:
        pending.deadline = pending.driver.loop.time() + need_number("timeout", timeout, low=0.0)


def modes_differ(modes: Modes, driver: LoopDriver) -> bool:
    """Whether a caller's grad mode would stay behind where it waits: a task of before the runtime's own."""
    return modes.grad is not driver.ambient_grad and not modes.inference and not TASK_MODES.is_isolated()


async def await_with_modes(pending: PendingCall, modes: Modes, driver: LoopDriver) -> Any:
    """Await a pending call under another grad mode or stream than the loop's: they leave with their
    caller."""
    suspend_modes(modes, driver)
    try:
        result, LAST.plan = await pending
    finally:
        resume_modes(modes, driver)
    restore(modes)
    return result


def _plan_special(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None, batching: str | None
) -> tuple[LocalDevice, DispatchState | None, Plan, Args]:
    """Device, governing snapshot (None: the current one), plan and arguments of an unusual call."""
    if batching is not None:
        need_choice("batching", batching, BATCHING)
    signature, full = checked_build(op, args, kwargs)
    device = context_device(full)
    current = device.snapshot
    snapshot = context_snapshot(device, op.name, backend)
    # Asked before planning: a generation that begins meanwhile does not make this caller's policy its own.
    shared = snapshot is current or snapshot is device.snapshot
    plan = device.plan(op, signature, full, device.mode(), snapshot)
    return device, None if shared else snapshot, plan, full


def _new_call(
    op: Op,
    device: LocalDevice,
    plan: Plan,
    args: Args,
    modes: Modes,
    snapshot: DispatchState | None,
    priority: int,
    batching: str | None,
) -> PendingCall:
    """The pending call of a call: its group is None where it must run alone."""
    facts = plan.batch_facts
    if facts is None:
        facts = plan.batch_facts = _batch_facts(op, args)
    batch_key: Hashable | None = None
    if op.validate_values is not None and not op.validate_values_per_batch:
        args = op.validate_values(args)
    if (
        plan.can_batch
        and op.batching is not None
        and device.batches(op, batching)
        and _is_plain_strided(args)
    ):
        shared = facts.shared_positions
        if shared is None:
            batch_key = _batch_key(op, args, modes.without_stream, snapshot)
        else:
            addresses: Hashable
            if len(shared) == 1:
                addresses = (modes.without_stream, snapshot, args[shared[0]].data_ptr())
            else:
                addresses = (
                    modes.without_stream,
                    snapshot,
                    *[args[position].data_ptr() for position in shared],
                )
            batch_key = facts.batch_keys.get(addresses, _UNKNOWN)
            if batch_key is _UNKNOWN:
                batch_key = _remember_key(
                    facts, addresses, _batch_key(op, args, modes.without_stream, snapshot)
                )
    return PENDING_CALL.cls(
        op,
        args,
        batch_key,
        plan.expected_us,
        facts.tokens,
        facts.size_bytes,
        priority,
        None,
        (modes, snapshot),
    )


_PLAIN: Final[frozenset[type]] = frozenset({Tensor, torch.nn.Parameter})


def _is_plain_strided(args: Args) -> bool:
    """Whether address, shape and strides say what each tensor holds, and rows of others may stand beside it.

    A subclass may hold its values elsewhere, and would make its neighbours' outputs its own kind; a negative
    view shares its memory with what it negates.
    """
    for value in args:
        if isinstance(value, Tensor) and (value.__class__ not in _PLAIN or value.is_neg()):
            return False
    return True


class BatchKey:
    """A compatibility class of calls, one object each, so that batchers compare and hash it as a pointer."""

    __slots__ = ("key",)

    def __init__(self, key: Hashable) -> None:
        self.key = key

    def __repr__(self) -> str:
        return f"Group({self.key!r})"


_BATCH_KEYS: dict[Hashable, BatchKey] = {}
_MAX_BATCH_KEYS = 65_536
_MAX_REMEMBERED = 1024
_UNKNOWN: Any = object()


def _batch_key(op: Op, args: Args, modes: Modes, snapshot: DispatchState | None) -> Hashable | None:
    assert op.batching is not None
    rule = op.batching.batch_key(args)
    if rule is None:
        return None
    key = (op.name, rule, modes, snapshot)
    if len(_BATCH_KEYS) >= _MAX_BATCH_KEYS:
        _BATCH_KEYS.clear()  # calls that wait under the old objects run apart from later ones, nothing worse
    return _BATCH_KEYS.setdefault(key, BatchKey(key))


def _remember_key(facts: BatchFacts, addresses: Hashable, batch_key: Hashable | None) -> Hashable | None:
    if len(facts.batch_keys) >= _MAX_REMEMBERED:
        facts.batch_keys.clear()
    facts.batch_keys[addresses] = batch_key
    return batch_key


def _batch_facts(op: Op, args: Args) -> BatchFacts:
    batching = op.batching
    if batching is None:
        return BatchFacts(1, 0, None)
    return BatchFacts(*batching.batch_cost(args), batching.shared_operands(args))

"""The one path of an awaited call, of an op or of a batched function.

A call is found in its target's cache, or described by the target. A caller that is alone runs it on its own
thread; every other call becomes a `PendingCall` in the queue of its event loop's driver, and the caller goes
on under its own modes when the call has ended. The compiled `Call` (native/calls.h) is the same path for a
call that its cache knows; whatever else it meets, it hands to this one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Coroutine
from types import FunctionType
from typing import Any, NamedTuple, Protocol, cast

from layerzero._util.strict_yaml import quote
from layerzero.calls.blocking import LAST
from layerzero.ops.checks import need_number
from layerzero.ops.op import Args
from layerzero.scheduler.core.pending_call import PendingCall
from layerzero.scheduler.fast_queue import FAST_QUEUE
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.modes.streams import resume_modes, suspend_modes
from layerzero.scheduler.modes.task_modes import TASK_MODES
from layerzero.scheduler.modes.torch_modes import Modes, must_run_inline, restore
from layerzero.scheduler.scheduled_device import ScheduledDevice
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.plan import Plan


class NewCall(NamedTuple):
    """A call that no cache knows, before it is queued; names as in `PendingCall`.

    `driver` is None where the call may not wait (under graph capture), `plan` None for a batched function,
    `modes` None where they are read when the call is queued, `kind` what its target needs to queue it.
    """

    device: ScheduledDevice
    driver: LoopDriver | None
    args: Args
    expected_us: float
    plan: Plan | None = None
    modes: Modes | None = None
    snapshot: DispatchState | None = None
    kind: tuple[Any, ...] = ()


class Cache(Protocol):
    """What knows calls: `find(args, kwargs)` returns a pending call with its driver, or None.

    `call(args, kwargs)` returns the compiled coroutine of a call; it is None where there is none.
    """

    @property
    def call(self) -> Callable[..., Any] | None: ...

    @property
    def find(self) -> Callable[..., Any]: ...


class Target(Protocol):
    """What is awaited: an op, or a batched function."""

    name: str

    def describe(
        self, args: Args, kwargs: dict[str, Any], backend: str | None, batching: str | None
    ) -> NewCall:
        """A call that is not in the cache.

        Raises: ValueError, TypeError: an argument is wrong. NoKernelFoundError: no kernel may and can run it.
        """
        ...

    def new_call(
        self, call: NewCall, args: Args, kwargs: dict[str, Any], backend: str | None, batching: str | None
    ) -> PendingCall:
        """The pending call of a described one; its batch key is None where it must run alone.

        A call that the process's own policy governs is put into the cache.
        """
        ...

    def run_inline(self, call: NewCall | PendingCall) -> Any:
        """Run a call on this thread; its value."""
        ...


class Awaitable(NamedTuple):
    """How a target is awaited: `call` as people call it, `follow` for a pending call or plain arguments."""

    call: Callable[..., Coroutine[Any, Any, Any]]
    follow: Callable[..., Coroutine[Any, Any, Any]]


def awaitable_call(  # noqa: C901  a helper a step would cost every call a frame
    target: Target, cache: Cache, validate: Callable[[Args], Args] | None = None
) -> Awaitable:
    """What awaits `target`; `validate` checks the values of calls from the cache."""
    last, queue = LAST, FAST_QUEUE

    def call(
        *args: Any,
        backend: str | None = None,
        priority: int = 1,
        timeout: float | None = None,
        batching: str | None = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, Any]:
        compiled = cache.call
        if (
            compiled is not None
            and backend is None
            and priority == 1
            and timeout is None
            and batching is None
        ):
            coroutine: Coroutine[Any, Any, Any] = compiled(args, kwargs)
            return coroutine
        return follow(None, args, kwargs, backend, priority, timeout, batching)

    async def follow(
        cached: PendingCall | None,
        args: Args,
        kwargs: dict[str, Any],
        backend: str | None = None,
        priority: int = 1,
        timeout: float | None = None,  # noqa: ASYNC109  the batcher cancels queued calls by it
        batching: str | None = None,
    ) -> Any:
        if cached is None and backend is batching is None:
            cached = cache.find(args, kwargs)
        subject: Any = target.describe(args, kwargs, backend, batching) if cached is None else cached
        # What a cache knows waits in a loop driver; a read-back is no cached call.
        driver: LoopDriver | None = subject.driver
        if driver is None:
            return target.run_inline(subject)
        if (
            driver.sole_caller is not None
            and subject.expected_us < driver.inline_limit_us
            and (driver.may_inline() or await driver.yield_once())
        ):
            driver.add_inline_us(subject.expected_us)
            return target.run_inline(subject)
        if cached is None:
            if must_run_inline() is not None:
                return target.run_inline(subject)
            pending = target.new_call(subject, args, kwargs, backend, batching)
            elsewhere = driver.foreign or pending.modes.stream != driver.ambient_stream
            if elsewhere or subject.device.kernel_calls.traces_each:
                return await _submit(target, subject, pending, priority, timeout)
        else:
            pending = cached
        if priority != 1 or timeout is not None:
            set_priority(pending, driver, priority, timeout)
        elif _needs_no_queue(driver, pending) and (
            driver.inline.ready() or await driver.inline.share(pending)
        ):
            return driver.inline.run(pending, target.run_inline)
        if validate is not None and cached is not None:
            pending.args = validate(pending.args)
        _ = queue.try_submit(driver, pending) or driver.submit(pending)
        modes = pending.modes
        if modes.grad is not driver.ambient_grad and not modes.inference and not TASK_MODES.is_isolated():
            return await _await_with_modes(pending, modes, driver)
        result, last.plan = await pending
        if not pending.unchanged():
            restore(modes)
        return result

    follow.__name__ = follow.__qualname__ = target.name
    return Awaitable(cast(Any, _marked(cast(FunctionType, call))), follow)


def _marked(call: FunctionType) -> FunctionType:
    """`call`, which returns coroutines, as `inspect.iscoroutinefunction` knows such functions."""
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(call)
    # Nothing can be said of a function before; `types.coroutine` changes flags alike.
    call.__code__ = call.__code__.replace(co_flags=call.__code__.co_flags | inspect.CO_COROUTINE)
    return call


def _needs_no_queue(driver: LoopDriver, pending: PendingCall) -> bool:
    """Whether few others may join the call; `driver.at_once` holds the groups of such calls."""
    groups = driver.at_once
    return bool(groups) and (pending.op if pending.batch_key is None else pending.batch_key) in groups


async def _submit(
    target: Target,
    call: NewCall,
    pending: PendingCall,
    priority: int,
    timeout: float | None,  # noqa: ASYNC109
) -> Any:
    """Queue a call that is traced, or whose caller is on a stream of its own, and await it."""
    driver, spans = call.driver, call.device.spans
    assert driver is not None
    if priority != 1 or timeout is not None:
        set_priority(pending, driver, priority, timeout)
    if spans is None or not spans.calls:
        driver.submit(pending)
        return await _await_with_modes(pending, pending.modes, driver)
    with spans.waiting(target.name, pending.args) as answered:
        driver.submit(pending)
        result = await _await_with_modes(pending, pending.modes, driver)
        answered(LAST.plan)
    return result


def set_priority(pending: PendingCall, driver: LoopDriver, priority: int, timeout: float | None) -> None:
    """Give a pending call another priority than 1, or a deadline `timeout` seconds from this moment.

    Raises: ValueError: a priority outside 0..2, or a negative timeout.
    """
    if not isinstance(priority, int) or not 0 <= priority <= 2:
        raise ValueError(f"priority needs 0, 1 or 2, got {quote(priority)}")
    pending.priority = priority
    if timeout is not None:
        pending.deadline = driver.loop.time() + need_number("timeout", timeout, low=0.0)


async def _await_with_modes(pending: PendingCall, modes: Modes, driver: LoopDriver) -> Any:
    """Await a call whose caller's grad mode or stream is not the loop's: both are put aside meanwhile."""
    leaves = modes.stream != driver.ambient_stream or (
        modes.grad is not driver.ambient_grad and not modes.inference and not TASK_MODES.is_isolated()
    )
    if leaves:
        suspend_modes(modes, driver)
    try:
        result, LAST.plan = await driver.waiting(pending)
    finally:
        if leaves:
            resume_modes(modes, driver)
    restore(modes)
    return result

"""What travels through a batcher: the pending call of one call, the batch of several, and who called.

A pending call is what its caller awaits. It speaks the protocol by which an event loop's task waits for
something (`_asyncio_future_blocking`, `_loop`, `add_done_callback`, `cancel`, `result`), so one object is
the queue entry and the future at once; nothing here imports a loop.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol

from layerzero.native import FAST_PATH
from layerzero.spec.errors import RuntimeClosedError

if TYPE_CHECKING:  # this folder runs without torch
    from layerzero.actors.device.local_device import LocalDevice
    from layerzero.scheduler.core.expected_callers import Launch
    from layerzero.scheduler.core.round_robin import BatchQueue, ProgramPoint
    from layerzero.scheduler.modes.streams import CrossStreamModes
    from layerzero.scheduler.modes.torch_modes import Modes
    from layerzero.selection.dispatch import DispatchState
    from layerzero.selection.plan import Plan

# States of a call. NEW -> WAITING (no room yet) -> QUEUED -> RUNNING -> DONE | FAILED, with the side exits
# CANCELLED, EXPIRED, REJECTED; DETACHED is a running pending call whose caller has gone. To its caller a call
# has ended above RUNNING, to the batcher above DETACHED.
NEW: Final = 0
WAITING: Final = 1
QUEUED: Final = 2
RUNNING: Final = 3
DETACHED: Final = 4
DONE: Final = 5
FAILED: Final = 6
CANCELLED: Final = 7
EXPIRED: Final = 8
REJECTED: Final = 9
STATES: Final = (
    "new", "waiting", "queued", "running", "detached", "done", "failed", "cancelled", "expired", "rejected",
)  # fmt: skip


class Failure:
    """The outcome of a call that raised; any other object is the call's value.

    StopIteration becomes a RuntimeError, as in every coroutine: its awaiter would take it for a result.
    """

    __slots__ = ("context", "error", "traceback")

    def __init__(self, error: BaseException) -> None:
        if isinstance(error, StopIteration):
            stopped, error = error, RuntimeError(f"the call raised {error!r}")
            error.__cause__ = stopped
        self.error = error
        # Several callers may raise one error; each begins from where it came from, not from the last caller.
        self.traceback = error.__traceback__
        self.context = error.__context__


class LateResults:
    """What a function returns for each caller where others finish what it began: stages of a pipeline.

    Its batch makes room for the next one; the callers wait until `end` brings `calls` outcomes.
    """

    __slots__ = ("_calls", "_lock", "_notify", "_outcomes")

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._notify: Callable[[list[Any]], object] | None = None
        self._outcomes: list[Any] | None = None

    def end(self, values: Sequence[Any], error: BaseException | None = None) -> None:
        """From any thread: give each caller its value, or all of them the error; only the first end counts.

        Raises: ValueError: another number of values than of callers.
        """
        if error is None and len(values) != self._calls:
            raise ValueError(f"values needs {self._calls} entries, got {len(values)}")
        outcomes = [(value, None) for value in values] if error is None else [Failure(error)] * self._calls
        with self._lock:
            if self._outcomes is not None:
                return
            self._outcomes = outcomes
            notify = self._notify
        if notify is not None:
            notify(outcomes)

    def notify(self, notify: Callable[[list[Any]], object]) -> None:
        """Call `notify` with the outcomes: here where they are there, else on the thread that brings them."""
        with self._lock:
            self._notify, outcomes = notify, self._outcomes
        if outcomes is not None:
            notify(outcomes)

    @staticmethod
    def among(outcomes: Sequence[Any]) -> LateResults | None:
        """That of a batch with these outcomes; None for most."""
        first = outcomes[0] if outcomes else None
        value = first[0] if type(first) is tuple else None
        return value if isinstance(value, LateResults) else None


class TaskTree:
    """A task that has called or read, and the tasks made in its context since; `ended` are those of them that
    have ended, while another task may take their place."""

    __slots__ = ("_above", "_task", "ended")

    def __init__(self, task: object, above: TaskTree | None) -> None:
        self._task = weakref.ref(task)
        self._above = above
        self.ended: dict[Caller, None] = {}

    @staticmethod
    def begin(task: object) -> TaskTree | None:
        """Have what `task`, which runs, makes from now on in a tree of its own; that which it was made in."""
        if task is None:
            return None
        tree = _TREE.get(None)
        if tree is not None:
            if tree._task() is task:
                return tree._above
            tree._above = None  # a task that each step makes anew holds no chain of those before
        _TREE.set(TaskTree(task, tree))
        return tree


_TREE: Final[ContextVar[TaskTree]] = ContextVar("layerzero_task_tree")
_next_number: Final = count(1).__next__  # of a caller; threads draw no number twice


class Caller:
    """One task that submits calls, one after another; `last_queue` and `point` are the batcher's record of
    its previous call, `launch` of the batch that ran it, `late_s` of how long after that it calls again.
    `tree` is the one it was made in, where that is asked; `number` is no other caller's, before or after."""

    __slots__ = ("__weakref__", "last_queue", "late_s", "launch", "name", "number", "point", "tree")

    def __init__(self, tree: TaskTree | None = None) -> None:
        self.number = _next_number()
        self.last_queue: BatchQueue | None = None
        self.point: ProgramPoint | None = None
        self.launch: Launch | None = None
        self.late_s: float | None = None
        self.tree = tree
        self.name: str | None = None  # what a timeline calls it


class EventLoop(Protocol):
    """What is used of an event loop here."""

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> object: ...


class CallOwner(Protocol):
    """What a pending call waits in: the driver of its event loop, or the read-back of results."""

    @property
    def loop(self) -> EventLoop: ...

    def cancel(self, call: PendingCall, message: object = None) -> bool:
        """Take a call back; False if it has ended."""
        ...


class PendingCall:
    """One call on its way through a batcher.

    `group` is the compatibility class (None runs alone), `expected_us` the cost of the call by itself,
    `tokens` and `bytes` what it adds to a batch, `priority` 0 (first) to 2, `deadline` a time on the
    driver's clock in seconds after which it must not start, `modes` what surrounded the call.

    Raises: ValueError: a priority outside 0..2.
    """

    __slots__ = (
        "__weakref__",
        "_asyncio_future_blocking",
        "_loop",
        "args",
        "batch_key",
        "bytes",
        "caller",
        "context",
        "deadline",
        "device",
        "driver",
        "expected_us",
        "modes",
        "op",
        "plan",
        "point",
        "priority",
        "seq",
        "snapshot",
        "state",
        "submitted_at",
        "tokens",
        "value",
        "wake",
    )  # fmt: skip

    def __init__(
        self,
        op: Any,
        args: tuple[Any, ...],
        batch_key: Hashable | None = None,
        expected_us: float = 0.0,
        tokens: int = 1,
        bytes: int = 0,
        priority: int = 1,
        deadline: float | None = None,
        modes: Any = None,
        snapshot: DispatchState | None = None,
        caller: Caller | None = None,
    ) -> None:
        if priority != 1 and priority not in (0, 2):
            raise ValueError(f"priority needs 0, 1 or 2, got {priority!r}")
        self.op = op
        self.args = args
        self.batch_key = batch_key
        self.expected_us = expected_us
        self.tokens = tokens
        self.bytes = bytes
        self.priority = priority
        self.deadline = deadline
        self.modes = modes
        self.snapshot = snapshot
        self.caller = caller
        self.state: int = NEW
        self.wake: Callable[[Any], object] | None = None
        self._asyncio_future_blocking = False

    # What a batcher writes: `at` and `seq` when it joins, `slot` while it queues, `value` when it ends.
    submitted_at: float
    seq: int
    point: ProgramPoint  # while it queues
    value: Any
    # What a loop driver writes: itself and its loop, which a task reads; what a task writes: its context.
    driver: CallOwner
    _loop: EventLoop
    context: Context
    # torch's modes of its caller; a read-back, which no batch has, has none.
    modes: Modes
    # What an inline run needs: the plan of an op's call, None for a batched function, and the device.
    plan: Plan | None
    device: LocalDevice

    def __await__(self) -> Generator[PendingCall, None, Any]:
        """Wait for the result; an error or a cancellation is raised here.

        Raises: RuntimeError: another task waits already.
        """
        if self.state <= RUNNING:
            if self.wake is not None:
                raise RuntimeError("a call can be awaited by one task only; await a task around it instead")
            self._asyncio_future_blocking = True
            yield self
        return self.value if self.state == DONE else self.result()

    def result(self) -> Any:
        """The value, or the error raised; RuntimeError while neither is there."""
        if self.state == DONE:
            return self.value
        raise self.error()

    def error(self) -> BaseException:
        """The error it ended with, with the traceback of where it was raised first."""
        if self.state <= RUNNING:
            return RuntimeError(f"this call is still {STATES[self.state]}")
        failed: Failure = self.value
        failed.error.__context__ = failed.context  # not what the last caller was handling
        return failed.error.with_traceback(failed.traceback)

    def unchanged(self) -> bool:
        """Whether torch's modes are known to be its own; this class does not look, its compiled twin does."""
        return False

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state > RUNNING

    def cancelled(self) -> bool:
        """Whether its caller took it back."""
        return self.state in (CANCELLED, DETACHED)

    def exception(self) -> BaseException | None:
        """The error it ended with, or None after a value."""
        return None if self.state == DONE else self.error()

    def add_done_callback(self, wake: Callable[[Any], object], *, context: Any = None) -> None:
        """Call `wake(self)` in `context` once it has ended; one waiter only, as `__await__` sees to."""
        if self.state > RUNNING:
            self.driver.loop.call_soon(wake, self, context=context)
            return
        self.wake = wake
        self.context = copy_context() if context is None else context

    def remove_done_callback(self, wake: Callable[[Any], object]) -> int:
        """Forget the waiter; how many there were."""
        if self.wake is None or self.wake != wake:
            return 0
        self.wake = None
        return 1

    def cancel(self, msg: object = None) -> bool:
        """Take the call back: gone if it queues, detached if it runs; False if it has ended."""
        return self.driver.cancel(self, msg)

    def __repr__(self) -> str:
        name = getattr(self.op, "name", self.op)
        return f"<PendingCall {name} {STATES[self.state]}>"


class PendingCallClass:
    """The class to make pending calls of: `PendingCall`, or its compiled twin, which has the same methods."""

    __slots__ = ("cls",)

    def __init__(self) -> None:
        self.cls: type[PendingCall] = PendingCall

    def install(self, module: Any) -> None:
        """Take up the compiled twin, or with None the Python class; pending calls of both may share a
        batch."""
        if module is None:
            self.cls = PendingCall
            return
        for name in ("cancel", "cancelled", "done", "error", "exception", "remove_done_callback", "__repr__"):
            setattr(module.PendingCall, name, vars(PendingCall)[name])
        self.cls = module.PendingCall


PENDING_CALL: Final = PendingCallClass()
FAST_PATH.on_ready(PENDING_CALL.install)


class BatchObserver(Protocol):
    """What a timeline keeps of one batch."""

    def around(self, execute: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """`execute`, timed."""
        ...

    def ended(self, outcomes: list[Any], now_s: float) -> None:
        """The batch has ended, at a time of its loop."""
        ...


class Batch:
    """Calls of one group that run together; `calls` are their arguments, in order."""

    __slots__ = (
        "calls", "expected_us", "is_late", "launch", "modes", "one_by_one_us", "op", "queue", "ran_us",
        "record", "snapshot", "started", "submitted_at", "tokens", "why",
    )  # fmt: skip

    def __init__(self, calls: list[PendingCall], started: float, expected_us: float | None = None) -> None:
        first = calls[0]
        self.op = first.op
        self.modes: Modes | CrossStreamModes = first.modes
        self.snapshot = first.snapshot
        self.queue: BatchQueue | None = None  # that its calls were in
        self.ran_us = 0.0  # what it took where it ran
        self.launch: Launch | None = None  # on a device that answers before it has run
        self.record: BatchObserver | None = None  # of a timeline
        self.is_late = False  # its run has ended, its results come later
        self.tokens = 0
        self.why = ""
        self.submitted_at: float | None = None  # of all its calls, where they came at one time
        self.calls = calls
        self.started = started
        # What its calls are expected to take one by one, and what it is expected to take itself.
        self.one_by_one_us = sum([t.expected_us for t in calls]) if expected_us is None else expected_us
        self.expected_us = self.one_by_one_us

    @property
    def args_list(self) -> list[tuple[Any, ...]]:
        return [call.args for call in self.calls]

    def interrupted(self, error: BaseException) -> list[Any]:
        """The outcomes of a batch that something other than its calls has ended."""
        if not isinstance(error, Exception):  # it ends the program, and no caller by itself
            error = RuntimeClosedError(f"the batch was interrupted by {error!r}")
        return [Failure(error)] * len(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

"""Request coroutines that the loop driver steps itself: no task and no loop callback for each awaited op.

A batch's end sends each spawned caller straight on to its next op. Anything else that a coroutine awaits
(a future, a queue, a sleep, a task) works as in a task; what asks for the current task (`asyncio.timeout`,
task groups, anyio's scopes) does not, and belongs into a task that awaits the spawned call.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from layerzero.scheduler.core.pending_call import PENDING_CALL, RUNNING, PendingCall
from layerzero.scheduler.loop_driver import Cancelled, LoopDriver
from layerzero.scheduler.modes.task_modes import TASK_MODES

T = TypeVar("T")


class SpawnedTask(Generic[T]):
    """A coroutine on its way; await it for its result, or cancel it.

    It begins in the loop's next turn, in a copy of the context of its creation. A cancelled awaiter cancels
    it, as with a task.
    """

    __slots__ = (
        "__weakref__",
        "_awaiting",
        "_context",
        "_coro",
        "_driver",
        "_future",
        "_must_cancel",
        "_send",
        "caller",
    )

    def __init__(self, driver: LoopDriver, coro: Coroutine[Any, Any, T]) -> None:
        self._driver = driver
        self._coro: Any = TASK_MODES.isolate(coro)  # None once it has ended
        self._send = self._coro.send
        self._context = copy_context()
        self._awaiting: Any = None
        self._must_cancel = False
        self._future: Any = driver.loop.create_future()
        try:
            self.caller = driver.add_caller(self._future)
        except BaseException:
            coro.close()
            raise
        self._future.add_done_callback(self._on_future_done)
        driver.loop.call_soon(self._step, None, context=self._context)

    def __await__(self) -> Generator[Any, None, T]:
        value: T = yield from self._future.__await__()
        return value

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        ended: bool = self._future.done()
        return ended

    def cancel(self) -> bool:
        """Raise CancelledError where the coroutine waits; False if it has ended."""
        if self._future.done() and not self._future.cancelled():
            return False
        awaiting = self._awaiting
        if awaiting is None or not awaiting.cancel():
            self._must_cancel = True
        return True

    def _on_future_done(self, future: Any) -> None:
        # Cancelled by who awaited it, while the coroutine still runs.
        if future.cancelled() and self._coro is not None:
            self.cancel()

    def _step(self, _: Any) -> None:
        """Run the coroutine to its next wait."""
        driver = self._driver
        driver.stepping = self.caller
        self._awaiting = None
        try:
            if self._must_cancel:
                self._must_cancel = False
                awaiting = self._coro.throw(Cancelled())
            else:
                awaiting = self._send(None)
        except BaseException as error:
            self._end(error)
            return
        finally:
            driver.stepping = None
        kind = awaiting.__class__
        if (
            (kind is PENDING_CALL.cls or kind is PendingCall)
            and awaiting.wake is None
            and awaiting.state <= RUNNING
        ):
            awaiting.wake = self._step
            awaiting.context = self._context
            self._awaiting = awaiting
        else:
            self._await_foreign(awaiting)
        if self._must_cancel and self._awaiting is not None and self._awaiting.cancel():
            self._must_cancel = False

    def _await_foreign(self, awaiting: Any) -> None:
        """Wait for what is not an op: a loop's future, or a bare yield, which is one turn."""
        if awaiting is None:
            self._driver.loop.call_soon(self._step, None, context=self._context)
            return
        if getattr(awaiting, "_asyncio_future_blocking", None) is None:
            error = RuntimeError(f"a spawned coroutine awaited {awaiting!r}, which no event loop knows")
            self._driver.loop.call_soon(self._fail, error, context=self._context)
            return
        awaiting._asyncio_future_blocking = False
        awaiting.add_done_callback(self._step, context=self._context)
        self._awaiting = awaiting

    def _fail(self, error: BaseException) -> None:
        try:
            self._coro.throw(error)
        except BaseException as raised:
            self._end(raised)
        else:
            self._coro.close()
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """The coroutine has returned or raised: pass it on."""
        self._coro = None
        future = self._future
        if isinstance(error, StopIteration):
            if not future.done():
                future.set_result(error.value)
        elif isinstance(error, Cancelled):
            future.cancel()
        elif not future.done():
            future.set_exception(error)
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error


def spawn(driver: LoopDriver, coro: Coroutine[Any, Any, T]) -> SpawnedTask[T]:
    """Step `coro` from `front`, the running loop's.

    Raises: RuntimeClosedError: the loop driver takes no new callers. RuntimeError: its loop is trio's.
    """
    if driver.foreign:
        raise RuntimeError("spawn steps coroutines of asyncio; under trio start a task in a nursery")
    return SpawnedTask(driver, coro)

"""Request coroutines that the front steps itself: no task and no loop callback for each awaited op.

A batch's end sends each spawned caller straight on to its next op. Anything else that a coroutine awaits
(a future, a queue, a sleep, a task) works as in a task; what asks for the current task (`asyncio.timeout`,
task groups, anyio's scopes) does not, and belongs into a task that awaits the spawned call.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from layerzero.scheduler.core.pending_call import RUNNING, TICKETS, Ticket
from layerzero.scheduler.loop_driver import Cancelled, Front
from layerzero.scheduler.task_modes import CARRYING

T = TypeVar("T")


class Spawned(Generic[T]):
    """A coroutine on its way; await it for its result, or cancel it.

    It begins in the loop's next turn, in a copy of the context of its creation. A cancelled awaiter cancels
    it, as with a task.
    """

    __slots__ = (
        "__weakref__",
        "_context",
        "_coro",
        "_front",
        "_future",
        "_must_cancel",
        "_send",
        "_waits",
        "caller",
    )

    def __init__(self, front: Front, coro: Coroutine[Any, Any, T]) -> None:
        self._front = front
        self._coro: Any = CARRYING.kind(coro)  # None once it has ended
        self._send = self._coro.send
        self._context = copy_context()
        self._waits: Any = None
        self._must_cancel = False
        self._future: Any = front.loop.create_future()
        try:
            self.caller = front.enlist(self._future)
        except BaseException:
            coro.close()
            raise
        self._future.add_done_callback(self._answered)
        front.loop.call_soon(self._step, None, context=self._context)

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
        waits = self._waits
        if waits is None or not waits.cancel():
            self._must_cancel = True
        return True

    def _answered(self, future: Any) -> None:
        # Cancelled by who awaited it, while the coroutine still runs.
        if future.cancelled() and self._coro is not None:
            self.cancel()

    def _step(self, _: Any) -> None:
        """Run the coroutine to its next wait."""
        front = self._front
        front.stepping = self.caller
        self._waits = None
        try:
            if self._must_cancel:
                self._must_cancel = False
                waits = self._coro.throw(Cancelled())
            else:
                waits = self._send(None)
        except BaseException as error:
            self._end(error)
            return
        finally:
            front.stepping = None
        kind = waits.__class__
        if (kind is TICKETS.kind or kind is Ticket) and waits.wake is None and waits.state <= RUNNING:
            waits.wake = self._step
            waits.context = self._context
            self._waits = waits
        else:
            self._wait_foreign(waits)
        if self._must_cancel and self._waits is not None and self._waits.cancel():
            self._must_cancel = False

    def _wait_foreign(self, waits: Any) -> None:
        """Wait for what is not an op: a loop's future, or a bare yield, which is one turn."""
        if waits is None:
            self._front.loop.call_soon(self._step, None, context=self._context)
            return
        if getattr(waits, "_asyncio_future_blocking", None) is None:
            error = RuntimeError(f"a spawned coroutine awaited {waits!r}, which no event loop knows")
            self._front.loop.call_soon(self._fail, error, context=self._context)
            return
        waits._asyncio_future_blocking = False
        waits.add_done_callback(self._step, context=self._context)
        self._waits = waits

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


def spawn(front: Front, coro: Coroutine[Any, Any, T]) -> Spawned[T]:
    """Step `coro` from `front`, the running loop's.

    Raises: RuntimeClosedError: the front takes no new callers.
    """
    return Spawned(front, coro)

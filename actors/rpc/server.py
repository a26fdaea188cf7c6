"""CallServer: runs other people's code beside a LocalDevice, once for each request, until it is drained.

The host of this process serves an in-process port directly, and an actor's port through Ray and the side
channel. Everything that must hold in both cases is here: one execution a request, cancelling, deadlines,
draining, streams, handlers for control messages, the tensors kept for others.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import msgspec

from layerzero._util import log
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.running_kernels import RunningKernel
from layerzero.actors.rpc.client import DeviceState
from layerzero.actors.rpc.connection import Connection, Handler, handler_of
from layerzero.actors.rpc.idempotency_log import AcknowledgedError, IdempotencyLog
from layerzero.actors.rpc.tensors import RemoteTensor, RemoteTensorStore
from layerzero.health.device_faults import lost_device
from layerzero.ops import table as ops_table
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import DeadlineExceededError, DeviceLostError, NoKernelFoundError, UnknownOpError

MAX_RUNNING = 4096
MAX_DECIDED = 4096

Emit = Callable[[Any], Awaitable[None]]
Status = Literal["done", "failed", "cancelled", "stale", "settled", "draining", "cut", "lost"]


class RequestHeader(msgspec.Struct, frozen=True, array_like=True):
    """What travels with a request: its client and number, what the client has settled, for which incarnation.

    `timeout_s` is the backstop on the host; the client has its own clock.
    """

    client: str
    number: int
    ack_watermark: int
    incarnation: str
    acked: tuple[int, ...] = ()
    timeout_s: float | None = None


@dataclass(eq=False, slots=True)
class CallOutcome:
    """How a request ended; `value` is the result or the exception, `detail` the traceback or the reason.

    `packed` is the same as it leaves the process, once it was packed.
    """

    status: Status
    value: Any = None
    detail: str = ""
    packed: CallOutcome | None = None


@dataclass(eq=False, slots=True)
class _ServedCall:
    task: asyncio.Task[CallOutcome] | None = None
    cut: bool = False


class CallServer:
    """Hosts code on one device, on the event loop that made it.

    `incarnation` names this run. `handlers` answers control messages by kind; hosted code adds its own
    with `on`. `journal` is the device's, or None where it is not read.
    """

    def __init__(self, device: LocalDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.incarnation = uuid.uuid4().hex[:16]
        self.state = DeviceState.RUNNING
        self.idempotency_log: IdempotencyLog[_ServedCall] = IdempotencyLog()
        self.tensor_store = RemoteTensorStore(name, self.incarnation)
        self.handlers: dict[str, Handler] = {
            "ping": lambda body, _: body,
            "cancel": lambda body, _: self.cancel(*body),
            "free": lambda body, _: self.tensor_store.free(body),
            "drain": lambda body, _: self.drain(body),
            "decide": lambda body, _: self.rebuild(),
        }
        self._loop = asyncio.get_running_loop()
        self._limit = anyio.Semaphore(MAX_RUNNING)
        self._running: set[asyncio.Task[CallOutcome]] = set()
        self.inherited_requests: Sequence[CallSpec] = ()  # what earlier incarnations decided
        self._new_requests: deque[CallSpec] = deque(maxlen=MAX_DECIDED)
        self._decided_requests: dict[str, CallSpec] = {}  # in the order in which they were decided first

    # -- requests --------------------------------------------------------------------------------

    async def serve(
        self,
        envelope: RequestHeader,
        work: Callable[[], Awaitable[Any]],
        leave: Callable[[], Awaitable[bool]] | None = None,
    ) -> CallOutcome:
        """Run `work` unless this request has run or is running; the outcome of its one execution.

        `leave` is asked before the work begins: its client must know that it may have effects. What was
        refused is over for this incarnation.
        """
        # Sent to a process that is dead: its client decides anew, with what it knows of that one.
        if envelope.incarnation != self.incarnation:
            return CallOutcome("stale", detail=f"incarnation {envelope.incarnation} has ended")
        try:
            entry = self.idempotency_log.find(envelope.client, envelope.number, envelope.ack_watermark)
        except AcknowledgedError as error:
            return CallOutcome("settled", detail=str(error))
        self.idempotency_log.ack(envelope.client, envelope.acked)
        # Only new requests are refused: a copy of one that ran gets its answer while draining, too.
        if entry is None:
            if self.state is not DeviceState.RUNNING:
                return CallOutcome("draining", detail=f"device {self.name!r} is {self.state.value}")
            entry = _ServedCall()
            self.idempotency_log.add(envelope.client, envelope.number, entry)
            task = entry.task = self._loop.create_task(self._execute(entry, envelope, work, leave))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        # A copy whose connection ends must not cancel the one execution that others wait for.
        assert entry.task is not None
        return await asyncio.shield(entry.task)

    async def _execute(
        self,
        entry: _ServedCall,
        envelope: RequestHeader,
        work: Callable[[], Awaitable[Any]],
        leave: Callable[[], Awaitable[bool]] | None,
    ) -> CallOutcome:
        try:
            async with self._limit:
                # Asked behind the wait for a place: the client may have gone elsewhere meanwhile.
                if leave is not None and not await leave():
                    return CallOutcome("stale", detail="its client has left this incarnation of the device")
                with anyio.fail_after(envelope.timeout_s):
                    return CallOutcome("done", await work())
        except asyncio.CancelledError:
            return CallOutcome("cut" if entry.cut else "cancelled")
        except TimeoutError as error:
            # The hosted code's own time limit is an error like any other.
            if envelope.timeout_s is None or isinstance(error, DeadlineExceededError):
                return self._failed(error)
            late = f"the call took longer than timeout_s={envelope.timeout_s:.3g} on {self.name!r}"
            return CallOutcome("failed", DeadlineExceededError(late))
        except (SystemExit, KeyboardInterrupt) as error:
            # Let through, they would end the event loop, and callers that wait here would wait forever.
            message = f"hosted code raised {error!r}; it cannot end its device's process"
            return self._failed(RuntimeError(message).with_traceback(error.__traceback__))
        except Exception as error:
            return self._failed(error)

    def _failed(self, error: Exception) -> CallOutcome:
        text = "".join(traceback.format_exception(error))
        fault = lost_device(error)
        # An ordinary error leaves the device in service; only a broken context ends the process.
        if fault is None:
            return CallOutcome("failed", error, text)
        log.error("device.faulted", device=self.name, fault=fault)
        self.state = DeviceState.DEAD
        if self.device.kernel_calls.running_log is not None:
            self.device.kernel_calls.running_log.mark_suspects()
        lost = DeviceLostError(
            f"device {self.name!r} reported {fault!r}; its process must end", retryable=False
        )
        lost.__cause__ = error
        return CallOutcome("lost", lost, text)

    def cancel(self, client: str, number: int) -> None:
        """Cancel a request, also one that has not arrived yet."""
        for entry in self.idempotency_log.ack(client, (number,)):
            if entry.task is not None:
                entry.task.cancel()

    @property
    def in_flight(self) -> int:
        """Requests that run or wait for a place."""
        return len(self._running)

    async def invoke(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """`fn(*args, **kwargs)` with handles replaced by their tensors; plain functions run on a thread."""
        full, named = self._with_local_tensors(args, kwargs)
        if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__):
            return await fn(*full, **named)
        result = await anyio.to_thread.run_sync(_call, fn, full, named, abandon_on_cancel=True)
        return await result if inspect.isawaitable(result) else result

    async def emit(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], emit: Emit
    ) -> int:
        """Emit the items of the async generator `fn(*args, **kwargs)`; how many there were."""
        full, named = self._with_local_tensors(args, kwargs)
        items = fn(*full, **named)
        if not isinstance(items, AsyncIterator):
            raise TypeError(f"stream needs an async generator function, got {_name_of(fn)}")
        count = 0
        try:
            async for item in items:
                await emit(item)
                count += 1
        finally:
            if (close := getattr(items, "aclose", None)) is not None:
                await close()
        return count

    def _with_local_tensors(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        def local(value: Any) -> Any:
            return self.tensor_store.get(value) if isinstance(value, RemoteTensor) else value

        return [local(value) for value in args], {name: local(value) for name, value in kwargs.items()}

    # -- control ---------------------------------------------------------------------------------

    def on(self, kind: str, handler: Callable[[Any, Connection | None], Any]) -> Callable[[], None]:
        """Answer control messages of `kind` with `handler(body, connection)`; returns what ends that.

        Raises: ValueError: the kind is taken.
        """
        if kind in self.handlers:
            raise ValueError(f"a handler for {kind!r} is registered already")
        self.handlers[kind] = handler
        return lambda: self.handlers.pop(kind, None) and None

    async def handle(self, kind: str, body: Any) -> Any:
        """The answer to a control message that came without a channel."""
        result = handler_of(self.handlers, kind)(body, None)  # type: ignore[arg-type]
        return await result if isinstance(result, Awaitable) else result

    def running_kernels(self) -> list[RunningKernel]:
        """The kernels in flight, longest first; none where no journal is kept. From any thread."""
        journal = self.device.kernel_calls.running_log
        return [] if journal is None else journal.running_kernels()

    # -- decisions -------------------------------------------------------------------------------

    def on_decided(self, request: CallSpec) -> None:
        """The device has decided `request`. From any thread."""
        self._new_requests.append(request)

    def decided_requests(self, received: int = 0) -> list[CallSpec]:
        """What this incarnation has decided, without the first `received` of them. From one thread at a time.

        What was sent may have been lost on the way, so the request says how far its sender has come.
        """
        # Drained here, on one thread: devices decide on many, and a deque is safe for both.
        while self._new_requests and len(self._decided_requests) < MAX_DECIDED:
            request = self._new_requests.popleft()
            self._decided_requests.setdefault(repr(request), request)
        return list(self._decided_requests.values())[received:]

    async def rebuild(self) -> int:
        """Decide anew what earlier incarnations decided, at today's prices; how many still have a kernel."""
        if not self.inherited_requests:
            return 0
        await anyio.to_thread.run_sync(self.device.wait_for_costs)  # else their arrival would undo it
        return self.rebuild_decisions(self.inherited_requests)

    def rebuild_decisions(self, requests: Sequence[CallSpec]) -> int:
        """Decide requests of an earlier incarnation again, plans included; how many still have a kernel."""
        rebuilt_count = 0
        for request in requests:
            try:
                self.device.table(ops_table.get(request.op)).plan_for(request)
                rebuilt_count += 1
            # The new life may have another version, or a kernel less.
            except (NoKernelFoundError, UnknownOpError) as error:
                log.warning("decision.not_rebuilt", op=request.op, why=str(error)[:200])
        return rebuilt_count

    def quarantine(self, kernels: Sequence[str], why: str) -> list[str]:
        """Quarantine kernels, but never the last one that an op has left; those that are now out."""
        quarantined = []
        for kernel_id in kernels:
            kernel = self.device.registry.get(kernel_id)
            if kernel is None:  # a preparation may register it yet
                self.device.health.quarantine(kernel_id, why)
                quarantined.append(kernel_id)
                continue
            blocked = {**self.device.registry.blocked(), **self.device.health.blocked_kernels()}
            others = [k.id for k in self.device.registry.for_op(kernel.op) if k.id != kernel_id]
            # An op that nothing serves is worse than a suspect: that stays, and is logged.
            if kernel_id not in blocked and all(other in blocked for other in others):
                log.error("kernel.kept_as_last", kernel=kernel_id, op=kernel.op, why=why)
                continue
            self.device.health.quarantine(kernel_id, why)
            quarantined.append(kernel_id)
        return quarantined

    # -- the end ---------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Take no new request, let the others end; after `timeout_s` cut them off and return False."""
        self.state = DeviceState.DRAINING
        late = set(self._running)
        if late:
            _, late = await asyncio.wait(late, timeout=timeout_s)
        # Marked before the cancel, so that the answer says who ended it: the drain, not the caller.
        for entry in self.idempotency_log.entries():
            if entry.task in late:
                entry.cut = True
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=5.0)
        return not late


def _call(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return fn(*args, **kwargs)
    except StopIteration as error:  # no future takes it, as no coroutine does
        raise RuntimeError(f"{_name_of(fn)} raised StopIteration") from error


def _name_of(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


_SERVERS: list[CallServer] = []


def current_server() -> CallServer:
    """The host of this process: what hosted code registers handlers with.

    Raises: RuntimeError: no code is hosted in this process.
    """
    if not _SERVERS:
        raise RuntimeError("no device hosts code in this process; call this from code that pool.run runs")
    return _SERVERS[-1]


def install_server(server: CallServer) -> None:
    """Make `server` the one that `current_server` returns."""
    _SERVERS.append(server)


def uninstall_server(server: CallServer) -> None:
    """Forget `server`."""
    if server in _SERVERS:
        _SERVERS.remove(server)

"""Connection: one end of a side channel, which asks, answers, tells and hears.

Half of an asyncio round trip is the asker's own loop: a turn to see the answer, a turn to resume. So a lone
question of a kind that was answered quickly waits for its answer on the spot, at most a millisecond. If that
was in vain, the kind has to show again that it is quick.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any

from layerzero._util import log
from layerzero.actors.rpc.frames import (
    ERRORS,
    UNWRITABLE,
    Challenge,
    Greeting,
    Notification,
    RpcRequest,
    RpcResponse,
)
from layerzero.actors.rpc.message_stream import MAX_FRAME, MessageStream
from layerzero.spec.errors import DeviceLostError

MAX_GREETING = 1024  # before the handshake, when any process may write
MAX_ERROR = 1 << 16  # characters of an error's text
HANDSHAKE_S = 10.0
_QUICK_S = 250e-6
_TURN_S = 1e-3

Handler = Callable[[Any, "Connection"], Any]


class Connection(MessageStream):
    """One end of a channel. `handlers` maps kinds to functions of (body, connection), plain or async.

    `peer` is the name that the other end proved; `closed` is set when the socket has ended, after every frame
    that came before the end was handled: what a process wrote before it died is not lost.
    `on_connect` is called when there is a socket, `on_ready` after the handshake, `on_close` at the end;
    `refused` says what ended it.
    """

    def __init__(
        self,
        handlers: dict[str, Handler],
        *,
        secret: bytes,
        client: str | None,
        on_connect: Callable[[Connection], None] | None = None,
        on_ready: Callable[[Connection], None] | None = None,
        on_close: Callable[[Connection], None] | None = None,
    ) -> None:
        super().__init__()
        self._handlers = handlers
        self._secret = secret
        self._client = client
        self._on_connect = on_connect
        self._on_ready = on_ready
        self._on_close = on_close
        self._nonce = secrets.token_bytes(32) if client is None else b""
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._tasks: set[asyncio.Future[Any]] = set()
        self._handshake_timer: asyncio.TimerHandle | None = None
        self._spin = _SpinPolicy()
        self._context = copy_context()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        late = f"no handshake within {HANDSHAKE_S} s"
        self._handshake_timer = asyncio.get_running_loop().call_later(HANDSHAKE_S, self.refuse, late)
        # The end that is dialled asks first: it gives away nothing before the other has proved itself.
        if self._client is None:
            self._write(Challenge(self._nonce))
        if self._on_connect is not None:
            self._on_connect(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        lost = DeviceLostError(f"the side channel to {self.peer or 'a device'} has ended", retryable=False)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(lost)
                future.exception()  # who waits gets it; who has gone needs no warning
        self._pending.clear()
        if not self.ready.done():
            self.ready.set_exception(lost)
            self.ready.exception()
        # The caller that would get their answers has gone.
        for task in list(self._tasks):
            task.cancel()
        self.closed.set()
        if self._on_close is not None:
            self._on_close(self)

    @property
    def _max_frame(self) -> int:
        return MAX_FRAME if self.ready.done() else MAX_GREETING

    # -- messages --------------------------------------------------------------------------------

    async def request(self, kind: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        """The other end's answer.

        Raises: DeviceLostError: the channel ended first. TimeoutError: `timeout_s` has passed. Otherwise what
            the handler raised.
        """
        number = self._next
        self._next = number + 1
        if self._transport is None or self._transport.is_closing():
            raise DeviceLostError(f"the side channel to {self.peer} has ended", retryable=True)
        # Only where nothing else could arrive out of order, and this kind has been quick before.
        spot = self._poll is not None and not (self._pending or self._reading) and self._spin.may_spin(kind)
        began = time.perf_counter()
        self._write(RpcRequest(number, kind, body))
        data = self._poll_response() if spot else b""
        if data and (answer := self._sole_response(number, data)) is not None:
            self._spin.add_spin(time.perf_counter() - began)
            return _body_of(answer)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        # More than the answer came: it is handled as if the loop had read it.
        if data:
            self._context.run(self.data_received, data)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            self._spin.note_latency(kind, time.perf_counter() - began)
            self._pending.pop(number, None)

    def notify(self, kind: str, body: Any = None) -> None:
        """Send a note; to an ended channel it goes nowhere."""
        if self._transport is not None:
            self._write(Notification(kind, body))

    def on_closed(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the channel has ended; now, if it has already."""
        if self.closed.is_set():
            callback()
        else:
            self._on_close = lambda _: callback()

    def _dispatch(self, message: Any) -> None:
        kind = type(message)
        if not self.ready.done():
            self._handshake(message)
        elif kind is RpcResponse:
            self._resolve(message)
        elif kind is RpcRequest:
            self._serve(message)
        elif kind is Notification:
            handler = self._handlers.get(message.kind)
            if handler is None:
                log.warning("channel.note_unknown", kind=message.kind, peer=self.peer)
                return
            try:
                result = handler(message.body, self)
            except Exception as error:  # it answers no request, and the frames after it are to be read
                log.warning("channel.note_failed", kind=message.kind, peer=self.peer, error=_text(error))
                return
            if isinstance(result, Awaitable):
                self._run_task(result)

    def _handshake(self, message: Any) -> None:
        if self._client is not None and type(message) is Challenge:
            self._write(Greeting(self._client, _proof(self._secret, message.nonce)))
            self._finish_handshake()
        elif self._client is None and type(message) is Greeting:
            # In constant time: the place of the first difference would tell the proof byte by byte.
            if not hmac.compare_digest(message.proof, _proof(self._secret, self._nonce)):
                self.refuse("a proof that does not fit")
                return
            self.peer = message.client
            self._finish_handshake()
        else:
            self.refuse(f"{type(message).__name__} before the handshake")

    def _finish_handshake(self) -> None:
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        self.ready.set_result(None)
        if self._on_ready is not None:
            self._on_ready(self)

    def _resolve(self, answer: RpcResponse) -> None:
        future = self._pending.get(answer.number)
        # Its caller was cancelled or came to its time limit.
        if future is None or future.done():
            return
        try:
            future.set_result(_body_of(answer))
        except Exception as error:
            future.set_exception(error)

    def _serve(self, request: RpcRequest) -> None:
        try:
            result = handler_of(self._handlers, request.kind)(request.body, self)
        except Exception as error:
            self._write(_error_response(request, error))
            return
        if hasattr(result, "__await__"):  # what Awaitable asks, in a third of the time
            self._run_task(self._serve_later(request, result))
        else:
            self._reply(request, result)

    async def _serve_later(self, request: RpcRequest, result: Awaitable[Any]) -> None:
        try:
            value = await result
        except Exception as error:
            self._write(_error_response(request, error))
        else:
            self._reply(request, value)

    def _reply(self, request: RpcRequest, value: Any) -> None:
        try:
            self._write(RpcResponse(request.number, value))
        except UNWRITABLE as error:
            text = f"the answer to {request.kind!r} needs plain values: {error}"
            self._write(_error_response(request, TypeError(text)))

    def _run_task(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _SpinPolicy:
    """Which kinds of questions are answered quickly, and how long they held the loop since its last turn."""

    def __init__(self) -> None:
        self._quick: set[str] = set()
        self._spun_s = 0.0

    def may_spin(self, kind: str) -> bool:
        """Whether the next question may wait on the spot; one that may not gives the loop its turn."""
        if kind not in self._quick:
            return False
        if self._spun_s > _TURN_S:
            self._spun_s = 0.0
            return False
        return True

    def add_spin(self, seconds: float) -> None:
        """The loop had no turn for so long."""
        self._spun_s += seconds

    def note_latency(self, kind: str, seconds: float) -> None:
        """A question had its answer after some turns, also one that had waited on the spot in vain."""
        if seconds < _QUICK_S:
            self._quick.add(kind)
        else:
            self._quick.discard(kind)


def _body_of(answer: RpcResponse) -> Any:
    if answer.error is not None:
        name, text = answer.error
        raise ERRORS.get(name, RuntimeError)(text)
    return answer.body


def handler_of(handlers: dict[str, Handler], kind: str) -> Handler:
    """The handler of requests of a kind.

    Raises: LookupError: there is none; the message lists the kinds that there are.
    """
    handler = handlers.get(kind)
    if handler is None:
        kinds = ", ".join(sorted(handlers)) or "none"
        raise LookupError(f"no handler is registered for {kind!r}; there are: {kinds}")
    return handler


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"layerzero channel 1" + nonce, "sha256")


def _error_response(request: RpcRequest, error: Exception) -> RpcResponse:
    return RpcResponse(request.number, None, (type(error).__name__, _text(error)))


def _text(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text[:MAX_ERROR].encode("utf-8", "replace").decode()

"""Connection: one end of a side channel, which asks, answers, tells and hears.

Half of an asyncio round trip is the asker's own loop: a turn to see the answer, a turn to resume. So a lone
question of a kind that was answered quickly waits for its answer on the spot, at most a millisecond. If that
was in vain, the kind has to show again that it is quick.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import select
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import msgspec

from layerzero._util import log
from layerzero.actors.rpc.frames import (
    ERRORS,
    UNREADABLE,
    UNWRITABLE,
    Challenge,
    Greeting,
    Notification,
    RpcRequest,
    RpcResponse,
    decode,
    encode,
)
from layerzero.spec.errors import DeviceLostError

MAX_FRAME = 16 << 20
MAX_GREETING = 1024  # before the handshake, when anybody may write
MAX_ERROR = 1 << 16  # characters of an error's text
_PREFIX = 4
_HANDSHAKE_S = 10.0
_QUICK_S = 250e-6
_SPIN_MS = 1  # the finest that poll counts in; select is finer, and costs a fifth of a round trip
_TURN_S = 1e-3
_CHUNK = 1 << 16
_GONE = 0 if sys.platform == "win32" else select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)

Handler = Callable[[Any, "Connection"], Any]


class Connection(asyncio.Protocol):
    """One end of a channel. `handlers` maps kinds to functions of (body, connection), plain or async.

    `peer` is the name that the other end proved; `closed` is set when the socket has ended, after every frame
    that came before the end was handled: what a process wrote before it died is not lost. `made` is called
    when there is a socket, `opened` after the handshake, `ended` at the end; `refused` says what ended it.
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
        self._handlers = handlers
        self._secret = secret
        self._client = client
        self._on_connect = on_connect
        self._on_ready = on_ready
        self._on_close = on_close
        self._buffer = bytearray()
        self._nonce = secrets.token_bytes(32) if client is None else b""
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: Any = None
        self._handshake_timer: asyncio.TimerHandle | None = None
        self._file = -1
        self._closed_here = False  # this end wants nothing more of it
        self._poll: Any = None  # tells whether something has come; None where only the transport may read
        self._reading = False
        self._spin = _SpinPolicy()
        self._context = copy_context()
        self.peer = ""
        self.refused = ""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._handshake_timer = asyncio.get_running_loop().call_later(
            _HANDSHAKE_S, self._on_handshake_timeout
        )
        if sys.platform != "win32":
            self._read_without_transport(transport)
        if self._client is None:
            self._write(Challenge(self._nonce))
        if self._on_connect is not None:
            self._on_connect(self)

    def _read_without_transport(self, transport: Any) -> None:
        """Read and write the socket without the transport, which costs each end some microseconds a frame.

        What could not be written at once, and every ending, stays with the transport.
        """
        transport.pause_reading()
        self._file = os.dup(transport.get_extra_info("socket").fileno())
        asyncio.get_running_loop().add_reader(self._file, self._readable)
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN | _GONE)

    def _readable(self) -> None:
        try:
            data = os.read(self._file, _CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            log.debug("channel.broken", peer=self.peer, error=str(error))
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._file)
            self._transport.close()
        elif not self._closed_here:
            self.data_received(data)

    def _read_rest(self) -> None:
        """Handle what had come before a write met the end of the socket."""
        while not self._closed_here:
            try:
                data = os.read(self._file, _CHUNK)
            except OSError:  # nothing more, or broken: the end is known already
                return
            if not data:
                return
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._reading = True
        try:
            self._read(data)
        finally:
            self._reading = False

    def _read(self, data: bytes) -> None:
        buffer = self._buffer
        if not buffer and int.from_bytes(data[:_PREFIX], "big") == len(data) - _PREFIX <= self._max_frame:
            # One frame, as it nearly always is: nothing is copied.
            if (message := self._decoded(memoryview(data)[_PREFIX:])) is not None:
                self._dispatch(message)
            return
        buffer += data
        start = 0
        while len(buffer) - start >= _PREFIX:
            length = int.from_bytes(buffer[start : start + _PREFIX], "big")
            if length > self._max_frame:
                self.refuse(f"a frame of {length} bytes, above {self._max_frame}")
                return
            end = start + _PREFIX + length
            if len(buffer) < end:
                break
            if (message := self._decoded(memoryview(buffer)[start + _PREFIX : end])) is None:
                return
            start = end
            self._dispatch(message)
        if start:
            del buffer[:start]

    @property
    def _max_frame(self) -> int:
        return MAX_FRAME if self.ready.done() else MAX_GREETING

    def _decoded(self, frame: memoryview) -> Any:
        try:
            return decode(frame)
        except UNREADABLE as error:
            frame.release()  # a refusal empties the buffer
            self.refuse(f"a frame that does not decode: {error}")
            return None

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._file >= 0:
            self._read_rest()
            asyncio.get_running_loop().remove_reader(self._file)
            os.close(self._file)
            self._file, self._poll = -1, None
        if self._handshake_timer is not None:
            self._handshake_timer.cancel()
        self._writable.set()
        lost = DeviceLostError(f"the side channel to {self.peer or 'a device'} has ended", retryable=False)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(lost)
                future.exception()  # who waits gets it; who has gone needs no warning
        self._pending.clear()
        if not self.ready.done():
            self.ready.set_exception(lost)
            self.ready.exception()
        for task in list(self._tasks):
            task.cancel()
        self.closed.set()
        if self._on_close is not None:
            self._on_close(self)

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
        spot = self._poll is not None and not (self._pending or self._reading) and self._spin.may_spin(kind)
        began = time.perf_counter()
        self._write(RpcRequest(number, kind, body))
        data = self._poll_response() if spot else b""
        if data and (answer := self._sole_response(number, data)) is not None:
            self._spin.add_spin(time.perf_counter() - began)
            return _body_of(answer)
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        if data:
            self._context.run(self.data_received, data)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            self._spin.note_latency(kind, time.perf_counter() - began)
            self._pending.pop(number, None)

    def _poll_response(self) -> bytes:
        """What comes within a moment; nothing at an end or an error, which the loop meets as well."""
        assert self._poll is not None
        if not self._poll.poll(_SPIN_MS):
            return b""
        try:
            return os.read(self._file, _CHUNK)
        except OSError:
            return b""

    def _sole_response(self, number: int, data: bytes) -> RpcResponse | None:
        """The answer to a question, where it is all that came."""
        if self._buffer or int.from_bytes(data[:_PREFIX], "big") != len(data) - _PREFIX:
            return None
        try:
            message = decode(memoryview(data)[_PREFIX:])
        except UNREADABLE:
            return None  # refused with the rest, by who reads it next
        return message if type(message) is RpcResponse and message.number == number else None

    def notify(self, kind: str, body: Any = None) -> None:
        """Send a note; to an ended channel it goes nowhere."""
        if self._transport is not None:
            self._write(Notification(kind, body))

    @property
    def peer_closed(self) -> bool:
        """Whether this machine knows that the other end has gone, read or not; a cut network tells nobody."""
        if self._transport is None or self._transport.is_closing():
            return True
        return self._poll is not None and any(what & _GONE for _, what in self._poll.poll(0))

    async def writable(self) -> None:
        """Wait until the other end reads; returns at once for an ended channel."""
        await self._writable.wait()

    def on_closed(self, callback: Callable[[], None]) -> None:
        """Call `then` when the channel has ended; now, if it has already."""
        if self.closed.is_set():
            callback()
        else:
            self._on_close = lambda _: callback()

    def close(self) -> None:
        """End the channel; what has come and was not read is dropped."""
        self._closed_here = True
        if self._transport is not None:
            self._transport.close()

    def _write(self, message: msgspec.Struct) -> None:
        if self._transport.is_closing():
            return
        data = encode(message)
        if len(data) > MAX_FRAME:
            raise ValueError(
                f"a message on the side channel needs at most {MAX_FRAME} bytes, got {len(data)}"
            )
        frame = len(data).to_bytes(_PREFIX, "big") + data
        if self._file >= 0 and not self._transport.get_write_buffer_size():
            with suppress(OSError):  # its buffer is full, or its end has come: the transport meets that too
                frame = frame[os.write(self._file, frame) :]
            if not frame:
                return
        self._transport.write(frame)

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
            except Exception as error:  # it is nobody's answer, and the frames behind it are to be read
                log.warning("channel.note_failed", kind=message.kind, peer=self.peer, error=_text(error))
                return
            if isinstance(result, Awaitable):
                self._run_task(_finish(result))

    def _handshake(self, message: Any) -> None:
        if self._client is not None and type(message) is Challenge:
            self._write(Greeting(self._client, _proof(self._secret, message.nonce)))
            self._finish_handshake()
        elif self._client is None and type(message) is Greeting:
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
        if future is None or future.done():
            return
        try:
            future.set_result(_body_of(answer))
        except Exception as error:
            future.set_exception(error)

    def _serve(self, request: RpcRequest) -> None:
        handler = self._handlers.get(request.kind)
        try:
            if handler is None:
                kinds = ", ".join(sorted(self._handlers)) or "none"
                raise LookupError(f"no handler is registered for {request.kind!r}; there are: {kinds}")
            result = handler(request.body, self)
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

    def _run_task(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_handshake_timeout(self) -> None:
        self.refuse(f"no handshake within {_HANDSHAKE_S} s")

    def refuse(self, what: str) -> None:
        """End a channel whose other end does what it may not."""
        if self.peer:  # of strangers, who may be many, the listener tells
            log.warning("channel.refused", peer=self.peer, got=what)
        self.refused = what
        self._closed_here = True
        self._buffer.clear()
        self._transport.abort()


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


async def _finish(result: Awaitable[Any]) -> None:
    await result


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"layerzero channel 1" + nonce, "sha256")


def _error_response(request: RpcRequest, error: Exception) -> RpcResponse:
    return RpcResponse(request.number, None, (type(error).__name__, _text(error)))


def _text(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return text[:MAX_ERROR].encode("utf-8", "replace").decode()

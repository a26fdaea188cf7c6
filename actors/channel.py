"""The side channel: length-prefixed msgpack frames over a unix or TCP socket, for control that must be quick.

A call of a Ray actor takes a millisecond; a frame to the same process takes some twenty microseconds. No code
and no tensor travels here: bodies are plain values. The listener sends a challenge, the dialler proves that
it knows the device's secret, and only then is a frame read.

    frame = 4 bytes, big-endian length of the rest; one msgpack message
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from layerzero import log
from layerzero.errors import DeviceLostError

MAX_FRAME = 16 << 20
_PREFIX = 4
_HANDSHAKE_S = 10.0

Handler = Callable[[Any, "Connection"], Any]


class Challenge(msgspec.Struct, array_like=True, tag="challenge"):
    """The listener's first frame."""

    nonce: bytes


class Greeting(msgspec.Struct, array_like=True, tag="greeting"):
    """The dialler's answer: who it is, and the keyed digest of the nonce."""

    client: str
    proof: bytes


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """A question that wants an `Answer` of the same number."""

    number: int
    kind: str
    body: Any = None


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    """The answer to an `Ask`; `error` is the name of an exception's class and its message, or None."""

    number: int
    body: Any = None
    error: tuple[str, str] | None = None


class Note(msgspec.Struct, array_like=True, tag="note"):
    """A message that wants no answer."""

    kind: str
    body: Any = None


class Address(msgspec.Struct, frozen=True):
    """Where a device's channel listens; `path` is of use on the node of that name only."""

    path: str
    host: str
    port: int
    node: str
    secret: bytes

    def __repr__(self) -> str:
        return f"Address({self.path or self.host}:{self.port})"


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Challenge | Greeting | Ask | Answer | Note).decode
# What an answer's error may name; anything else arrives as a RuntimeError.
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, LookupError, KeyError, RuntimeError, TimeoutError)
}


class Connection(asyncio.Protocol):
    """One end of a channel. `handlers` maps kinds to functions of (body, connection), plain or async.

    `peer` is the name that the other end proved; `closed` is set when the socket has ended, after every frame
    that came before the end was handled: what a process wrote before it died is not lost.
    """

    def __init__(
        self,
        handlers: dict[str, Handler],
        *,
        secret: bytes,
        client: str | None,
        opened: Callable[[Connection], None] | None = None,
        ended: Callable[[Connection], None] | None = None,
    ) -> None:
        self._handlers = handlers
        self._secret = secret
        self._client = client
        self._opened = opened
        self._ended = ended
        self._buffer = bytearray()
        self._nonce = secrets.token_bytes(32) if client is None else b""
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: Any = None
        self._watch: asyncio.TimerHandle | None = None
        self.peer = ""
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._watch = asyncio.get_running_loop().call_later(_HANDSHAKE_S, self._too_slow)
        if self._client is None:
            self._write(Challenge(self._nonce))

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _PREFIX:
            length = int.from_bytes(buffer[start : start + _PREFIX], "big")
            if length > MAX_FRAME:
                self._refuse(f"a frame of {length} bytes, above {MAX_FRAME}")
                return
            end = start + _PREFIX + length
            if len(buffer) < end:
                break
            try:
                message = _decode(memoryview(buffer)[start + _PREFIX : end])
            except msgspec.MsgspecError as error:
                self._refuse(f"a frame that does not decode: {error}")
                return
            start = end
            self._take(message)
        if start:
            del buffer[:start]

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._writable.set()
        lost = DeviceLostError(f"the side channel to {self.peer or 'a device'} has ended", retryable=False)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(lost)
                future.exception()  # who waits gets it; who has gone needs no warning
        self._asked.clear()
        if not self.ready.done():
            self.ready.set_exception(lost)
            self.ready.exception()
        for task in list(self._tasks):
            task.cancel()
        self.closed.set()
        if self._ended is not None:
            self._ended(self)

    # -- messages --------------------------------------------------------------------------------

    async def ask(self, kind: str, body: Any = None) -> Any:
        """The other end's answer.

        Raises: DeviceLostError: the channel ended first. Otherwise what the handler raised.
        """
        number = self._next
        self._next = number + 1
        if self._transport is None or self._transport.is_closing():
            raise DeviceLostError(f"the side channel to {self.peer} has ended", retryable=True)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._write(Ask(number, kind, body))
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    def tell(self, kind: str, body: Any = None) -> None:
        """Send a note; to an ended channel it goes nowhere."""
        if self._transport is not None and not self._transport.is_closing():
            self._write(Note(kind, body))

    async def flushed(self) -> None:
        """Wait until what was written has left this process."""
        # A transport tells nobody when its buffer is empty; it nearly always is.
        while self._transport.get_write_buffer_size() and not self.closed.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.0005)

    async def writable(self) -> None:
        """Wait until the other end reads; returns at once for an ended channel."""
        await self._writable.wait()

    def when_closed(self, then: Callable[[], None]) -> None:
        """Call `then` when the channel has ended; now, if it has already."""
        if self.closed.is_set():
            then()
        else:
            self._ended = lambda _: then()

    def close(self) -> None:
        """End the channel."""
        if self._transport is not None:
            self._transport.close()

    def _write(self, message: msgspec.Struct) -> None:
        data = _encode(message)
        if len(data) > MAX_FRAME:
            raise ValueError(
                f"a message on the side channel needs at most {MAX_FRAME} bytes, got {len(data)}"
            )
        self._transport.write(len(data).to_bytes(_PREFIX, "big") + data)

    def _take(self, message: Any) -> None:
        kind = type(message)
        if not self.ready.done():
            self._handshake(message)
        elif kind is Answer:
            self._resolve(message)
        elif kind is Ask:
            self._serve(message)
        elif kind is Note:
            handler = self._handlers.get(message.kind)
            if handler is None:
                log.warning("channel.note_unknown", kind=message.kind, peer=self.peer)
                return
            result = handler(message.body, self)
            if isinstance(result, Awaitable):
                self._keep(_finish(result))

    def _handshake(self, message: Any) -> None:
        if self._client is not None and type(message) is Challenge:
            self._write(Greeting(self._client, _proof(self._secret, message.nonce)))
            self._settle()
        elif self._client is None and type(message) is Greeting:
            if not hmac.compare_digest(message.proof, _proof(self._secret, self._nonce)):
                self._refuse("a proof that does not fit")
                return
            self.peer = message.client
            self._settle()
        else:
            self._refuse(f"{type(message).__name__} before the handshake")

    def _settle(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self.ready.set_result(None)
        if self._opened is not None:
            self._opened(self)

    def _resolve(self, answer: Answer) -> None:
        future = self._asked.get(answer.number)
        if future is None or future.done():
            return
        if answer.error is None:
            future.set_result(answer.body)
        else:
            name, text = answer.error
            future.set_exception(_ERRORS.get(name, RuntimeError)(text))

    def _serve(self, ask: Ask) -> None:
        handler = self._handlers.get(ask.kind)
        try:
            if handler is None:
                known = ", ".join(sorted(self._handlers)) or "none"
                raise LookupError(f"no handler is registered for {ask.kind!r}; there are: {known}")
            result = handler(ask.body, self)
        except Exception as error:
            self._write(Answer(ask.number, None, (type(error).__name__, _text(error))))
            return
        if isinstance(result, Awaitable):
            self._keep(self._serve_later(ask, result))
        else:
            self._reply(ask, result)

    async def _serve_later(self, ask: Ask, result: Awaitable[Any]) -> None:
        try:
            value = await result
        except Exception as error:
            if not self._transport.is_closing():
                self._write(Answer(ask.number, None, (type(error).__name__, _text(error))))
        else:
            self._reply(ask, value)

    def _reply(self, ask: Ask, value: Any) -> None:
        if self._transport.is_closing():
            return
        try:
            self._write(Answer(ask.number, value))
        except (TypeError, ValueError) as error:
            text = f"the answer to {ask.kind!r} needs plain values: {error}"
            self._write(Answer(ask.number, None, ("TypeError", text)))

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _too_slow(self) -> None:
        self._refuse(f"no handshake within {_HANDSHAKE_S} s")

    def _refuse(self, what: str) -> None:
        log.warning("channel.refused", peer=self.peer, got=what)
        self._buffer.clear()
        self._transport.abort()


async def _finish(result: Awaitable[Any]) -> None:
    await result


def _proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, b"layerzero channel 1" + nonce, "sha256")


def _text(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


class Listener:
    """The listening end of one device: a unix socket in a folder of this user's alone, and a TCP port."""

    def __init__(self, handlers: dict[str, Handler], *, node: str, host: str, secret: bytes) -> None:
        self._handlers = handlers
        self._node = node
        self._host = host
        self._secret = secret
        self._folder = ""
        self._servers: list[asyncio.Server] = []
        self.connections: dict[str, Connection] = {}

    async def open(self) -> Address:
        """Begin to listen, and say where."""
        loop = asyncio.get_running_loop()
        path = ""
        if hasattr(loop, "create_unix_server"):
            self._folder = tempfile.mkdtemp(prefix="lz-")  # 0700
            path = os.path.join(self._folder, "channel")
            self._servers.append(await loop.create_unix_server(self._accept, path))
        tcp = await loop.create_server(self._accept, self._host, 0)
        self._servers.append(tcp)
        port = tcp.sockets[0].getsockname()[1]
        return Address(path, self._host, port, self._node, self._secret)

    def _accept(self) -> Connection:
        return Connection(
            self._handlers, secret=self._secret, client=None, opened=self._opened, ended=self._ended
        )

    def _opened(self, connection: Connection) -> None:
        self.connections[connection.peer] = connection

    def _ended(self, connection: Connection) -> None:
        if self.connections.get(connection.peer) is connection:
            del self.connections[connection.peer]

    def close(self) -> None:
        """Stop listening and end every connection."""
        for server in self._servers:
            server.close()
        for connection in list(self.connections.values()):
            connection.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


async def connect(
    address: Address, *, client: str, node: str, handlers: dict[str, Handler] | None = None
) -> Connection:
    """Dial a device's channel: its unix socket on its own node, else TCP.

    Raises: OSError: nobody listens. DeviceLostError: the handshake failed.
    """
    loop = asyncio.get_running_loop()

    def made() -> Connection:
        return Connection(handlers or {}, secret=address.secret, client=client)

    connection: Connection
    if address.path and address.node == node and os.path.exists(address.path):  # noqa: ASYNC240
        _, connection = await loop.create_unix_connection(made, address.path)
    else:
        _, connection = await loop.create_connection(made, address.host, address.port)
        with suppress(OSError):
            _quick(connection)
    await connection.ready
    connection.peer = f"{address.host}:{address.port}"
    return connection


def _quick(connection: Connection) -> None:
    import socket

    raw = connection._transport.get_extra_info("socket")
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

"""Messages between the process that answers HTTP and the process that draws tokens.

One socket joins them. What one turn of an event loop sends travels as one frame: the tokens of a step are one
write and one read, however many requests they belong to.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from server.protocol import Constraint, Sampling

_LENGTH_BYTES = 4


class Start(msgspec.Struct, array_like=True, tag="start", frozen=True):
    """Draw the tokens of a choice; `so_far` were drawn before, by a process that is gone."""

    number: int
    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    user: str
    constraint: Constraint | None
    ignore_eos: bool
    patient: bool
    so_far: list[int]


class Stop(msgspec.Struct, array_like=True, tag="stop", frozen=True):
    """No client wants more tokens of a choice."""

    number: int


class Query(msgspec.Struct, array_like=True, tag="query", frozen=True):
    """What is the state, or what are the metrics?"""

    number: int
    what: str


class Ready(msgspec.Struct, array_like=True, tag="ready", frozen=True):
    """The model is loaded; a request may have `capacity` tokens for want of pages."""

    capacity: int


class Token(msgspec.Struct, array_like=True, tag="token", frozen=True):
    """One token of a choice, as `Drawn` has it."""

    number: int
    token: int
    logprob: float | None
    likeliest: tuple[tuple[int, float], ...]
    ends: bool
    is_text: bool


class End(msgspec.Struct, array_like=True, tag="end", frozen=True):
    """No more tokens of a choice; `error` has the kind, the message and the seconds until another try."""

    number: int
    error: tuple[str, str, float] | None = None


class Reply(msgspec.Struct, array_like=True, tag="reply", frozen=True):
    """The answer to a query."""

    number: int
    body: Any


ToEngine = Start | Stop | Query
ToFront = Ready | Token | End | Reply


class Pipe(asyncio.Protocol):
    """One end: `receive` gets each message, one of `kind`; `lost` is called when the other end is gone."""

    def __init__(self, kind: Any, receive: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[kind])
        self._encoder = msgspec.msgpack.Encoder()
        self._receive, self._lost = receive, lost
        self._buffer = bytearray()
        self._unsent: list[msgspec.Raw] = []
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            end = begin + int.from_bytes(buffer[start:begin], "little")
            if end > len(buffer):
                break
            for message in self._decoder.decode(memoryview(buffer)[begin:end].toreadonly()):
                self._receive(message)
            start = end
        del buffer[:start]

    def send(self, message: ToEngine | ToFront) -> None:
        """Send a message with the others of this turn; to a process that is gone it goes nowhere.

        Raises: OverflowError, UnicodeEncodeError, RecursionError: it holds what msgpack does not have; the
            others are sent.
        """
        encoded = msgspec.Raw(self._encoder.encode(message))
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(encoded)

    def _flush(self) -> None:
        body = self._encoder.encode(self._unsent)
        self._unsent.clear()
        if not self._transport.is_closing():
            self._transport.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def close(self) -> None:
        """End the connection behind what has been sent."""
        if self._unsent:
            self._flush()
        self._transport.close()


async def readable(file: Any) -> None:
    """Wait until a file or descriptor has something to read, or its end."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(file, wake)
    try:
        await ready
    finally:
        loop.remove_reader(file)


def hand(line: socket.socket, connection: socket.socket) -> None:
    """Hand a connection over to the process at the other end of `line`; this one's copy is to be closed."""
    socket.send_fds(line, [b"+"], [connection.fileno()])


async def connections(line: socket.socket) -> AsyncIterator[socket.socket]:
    """The connections that `hand` sends, until the other end of `line` is closed."""
    while True:
        await readable(line)
        try:
            data, descriptors, _, _ = socket.recv_fds(line, 1, 1)
        except ConnectionResetError:  # ended with something unread
            return
        if not data:
            return
        connection = socket.socket(fileno=descriptors[0])
        connection.setblocking(False)
        yield connection

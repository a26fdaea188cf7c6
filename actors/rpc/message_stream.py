"""MessageStream: msgpack messages over one socket, each way; `Connection` says what they mean."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from contextlib import suppress
from typing import Any

import msgspec

from layerzero._util import log
from layerzero.actors.rpc.frames import UNREADABLE, Notification, RpcResponse, decode, encode
from layerzero.actors.rpc.sockets import LENGTH, frame_bytes

MAX_FRAME = 16 << 20
ITEMS = "items"  # the kind of a note with items of streams: pairs of a stream's number and an item
_NOTE = 32  # bytes around the items of a note, at most
_PREFIX = LENGTH.size
_SPIN_MS = 1  # the finest that poll counts in; select is finer, and costs a fifth of a round trip
_CHUNK = 1 << 16
_GONE = 0 if sys.platform == "win32" else select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class MessageStream(asyncio.Protocol):
    """Splits what a socket brings into messages and calls `_dispatch` for each; `_write` sends one.

    `peer` names the other end in the log; `refused` says what this end ended the stream for.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: Any = None
        self._file = -1
        self._closed_here = False  # this end wants nothing more of it
        self._poll: Any = None  # tells whether something has come; None where only the transport may read
        self._reading = False
        self._items: list[msgspec.Raw] = []  # of this turn of the loop
        self._items_size = 0
        self.peer = ""
        self.refused = ""

    def _dispatch(self, message: Any) -> None:
        raise NotImplementedError

    @property
    def _max_frame(self) -> int:
        return MAX_FRAME

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if sys.platform != "win32":
            self._read_without_transport(transport)

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
        # The transport ends the stream, so that `connection_lost` comes once, however the end was met.
        if not data:
            asyncio.get_running_loop().remove_reader(self._file)
            self._transport.close()
        elif not self._closed_here:
            self.data_received(data)

    def _read_rest(self) -> None:
        """Handle what had come before a write met the end of the socket."""
        with suppress(OSError):  # nothing more, or broken: the end is known already
            while not self._closed_here and (data := os.read(self._file, _CHUNK)):
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
            # Before a byte of it is kept: a length alone must not cost memory.
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
        self._writable.set()

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

    @property
    def peer_closed(self) -> bool:
        """Whether the system knows that the other end has gone; a cut network reports nothing."""
        if self._transport is None or self._transport.is_closing():
            return True
        return self._poll is not None and any(what & _GONE for _, what in self._poll.poll(0))

    async def writable(self) -> None:
        """Wait until the other end reads; returns at once for an ended channel."""
        await self._writable.wait()

    def close(self) -> None:
        """End the channel behind what was sent; what has come and was not read is dropped."""
        self._closed_here = True
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def send_item(self, number: int, item: Any) -> None:
        """Send an item of stream `number` with the others of this turn of the loop: one frame, one write.

        Raises: ValueError, TypeError: it cannot travel, or needs more than a frame; the others go.
        """
        data = encode((number, item))
        if len(data) > MAX_FRAME - _NOTE:
            raise ValueError(f"an item of a stream needs at most {MAX_FRAME - _NOTE} bytes, got {len(data)}")
        if self._items_size + len(data) > MAX_FRAME - _NOTE:
            self._flush()
        if not self._items:
            asyncio.get_running_loop().call_soon(self._flush)
        self._items.append(msgspec.Raw(data))
        self._items_size += len(data)

    def _flush(self) -> None:
        if self._items:
            note = Notification(ITEMS, self._items)
            self._items, self._items_size = [], 0
            self._write(note)

    def _write(self, message: msgspec.Struct) -> None:
        if self._items:  # frames do not overtake one another
            self._flush()
        if self._transport.is_closing():
            return
        data = encode(message)
        if len(data) > MAX_FRAME:
            raise ValueError(
                f"a message on the side channel needs at most {MAX_FRAME} bytes, got {len(data)}"
            )
        frame = frame_bytes(data)
        # Behind what waits in the transport's buffer, or frames would overtake one another.
        if self._file >= 0 and not self._transport.get_write_buffer_size():
            with suppress(OSError):  # its buffer is full, or its end has come: the transport meets that too
                frame = frame[os.write(self._file, frame) :]
            if not frame:
                return
        self._transport.write(frame)

    def refuse(self, what: str) -> None:
        """End a channel whose other end does what it may not."""
        if self.peer:  # of strangers, who may be many, the listener tells
            log.warning("channel.refused", peer=self.peer, got=what)
        self.refused = what
        self._closed_here = True
        self._buffer.clear()
        self._transport.abort()

"""One-to-all frames: rank 0's step messages to the followers, and their reports back.

A follower reports the digest of the ops that it ran in a step, and failures. Rank 0 sends heartbeats to
followers that have read everything: they notice a rank 0 that is frozen, or whose host is gone.
A follower authenticates with a token that rank 0 published in the store, or that both were given; other
connections are closed. Ranks of one host use a Unix socket where possible, at a third of the cost of TCP.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from layerzero.actors.group.step_message import STEP_END_MARK, StepReports, step_end
from layerzero.actors.rpc.sockets import (
    CAN_SEE_HANG_UPS,
    LENGTH,
    abstract_name,
    connect_unix,
    frame_bytes,
    limit_waits,
    listen_unix,
    peek,
    peek_frames,
    read_on,
    receive_exactly,
    receive_frame,
    send_small_frames,
    shut_down,
    unread_bytes,
    wait_for_hang_up,
    wait_for_words,
)
from layerzero.spec.errors import ConsistencyError, DeviceLostError

_HELLO = struct.Struct("!32sI")  # the token and the rank
_MAX_FRAME = 1 << 22
_READ_BYTES = 1 << 16
_UNAUTHENTICATED_BACKLOG = 16  # connections that may wait to be refused, besides the followers'
_HEARTBEAT = b"\xff" * LENGTH.size  # a length that no frame has
_LEAVING = b"\xff\xff\xff\xfe"  # another one, behind rank 0's last frame
_HEARTBEAT_S = 1.0
_MAX_LATE_HEARTBEATS = 3
_REASON_WAIT_S = 1.0  # for what a follower sent before it closed the channel
_OTHERS_WAIT_S = 0.2  # for what others say of a step that one has refused: all compare the same message


class LeaderChannel:
    """Rank 0's end: `send` sends one frame to every follower; `address` is what they connect to.

    A follower that reads nothing for `timeout_s` seconds is given up; None waits forever. `token` is what a
    follower must send, 32 bytes; without one, the channel makes it and adds it to the address.
    """

    def __init__(
        self,
        followers: Sequence[int],
        host: str = "127.0.0.1",
        timeout_s: float | None = None,
        token: bytes = b"",
    ) -> None:
        self._followers = frozenset(followers)
        self._timeout_s = timeout_s
        self._token = token or secrets.token_bytes(32)
        self._listener = socket.create_server((host, 0), backlog=len(followers) + _UNAUTHENTICATED_BACKLOG)
        port = self._listener.getsockname()[1]
        name = abstract_name()
        self._unix_listener = listen_unix(name, len(followers) + _UNAUTHENTICATED_BACKLOG)
        published = "-" if token else self._token.hex()
        self.address = f"{host} {port} {published} {name or '-'}".encode()
        self._sockets: dict[int, socket.socket] = {}
        self._watcher: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()
        self._closing = threading.Lock()
        self._accepting = threading.Lock()
        self._closed = self._leaving = False
        self.failure: str | None = None
        self._reason_read = threading.Event()  # that the watcher has read why
        self._sending = threading.Lock()
        self._step_ended = threading.Condition()
        self._reports = StepReports(followers)

    def accept(self, timeout_s: float, lost: Callable[[str], None]) -> None:
        """Wait for every follower; afterwards `lost` is called once, from a thread, when one fails or goes.

        Raises: DeviceLostError: one did not connect in time.
        """
        try:
            with self._accepting:  # whose sockets stay open until it has noticed
                self._accept_followers(time.monotonic() + timeout_s, timeout_s)
            with self._closing:
                if self._closed:
                    raise DeviceLostError("rank 0 left while the others joined", retryable=True)
                self._watcher = threading.Thread(
                    target=self._watch, args=(lost,), name="layerzero-group-watch", daemon=True
                )
                self._watcher.start()
        except BaseException as error:
            for peer in self._sockets.values():
                peer.close()
            if self._closed and isinstance(error, OSError | ValueError):  # of a listener that is closed
                raise DeviceLostError("rank 0 left while the others joined", retryable=True) from error
            raise

    def _accept_followers(self, until: float, timeout_s: float) -> None:
        """Take every follower in who says the token, whatever strangers do meanwhile."""
        with ExitStack() as strangers, selectors.DefaultSelector() as selector:
            for listener in filter(None, (self._listener, self._unix_listener)):
                selector.register(listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while missing := self._followers - self._sockets.keys():
                ready = selector.select(max(0.0, until - time.monotonic()))
                if self._closed or (not ready and time.monotonic() >= until):
                    raise DeviceLostError(
                        f"ranks {sorted(missing)} did not connect to rank 0 within {timeout_s:g} s",
                        retryable=True,
                    )
                for key, _ in ready:
                    peer = key.fileobj
                    assert isinstance(peer, socket.socket)
                    if key.data is None:
                        peer = strangers.enter_context(peer.accept()[0])
                        peer.setblocking(False)
                        selector.register(peer, selectors.EVENT_READ, bytearray())
                    elif read_on(peer, key.data, _HELLO.size):
                        selector.unregister(peer)
                        self._authenticate(peer, key.data)

    def _authenticate(self, peer: socket.socket, hello: bytes) -> None:
        """Keep a peer that sent the token and a rank that is still missing; close any other."""
        token, rank = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
        if hmac.compare_digest(token, self._token) and rank in self._followers - self._sockets.keys():
            # A copy: the accepting thread closes what it accepted.
            self._sockets[rank] = follower = peer.dup()
            send_small_frames(follower, self._timeout_s)  # heartbeats are unconfirmed by a host cut off
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                limit_waits(follower, option, self._timeout_s)
        peer.close()

    def send(self, frame: bytes, *, last: bool = False) -> None:
        """Send `frame` to every follower; after the `last` one a closed connection is no error.

        Raises: DeviceLostError: one has failed or gone, or has not read for so long that its line is full;
            nothing may be run that needs it.
        """
        data = frame_bytes(frame) + (_LEAVING if last else b"")
        self._leaving = last
        with self._sending:
            for rank, peer in self._sockets.items():
                if self.failure is not None:
                    break
                try:
                    peer.sendall(data)
                except BlockingIOError:
                    self.failure = self.failure or (
                        f"rank {rank} has taken nothing for {self._timeout_s:g} s and its line is full; "
                        "it hangs"
                    )
                except OSError as error:
                    if not last:  # the reason, if it sent one, is on the connection that it closed
                        self.wait_for_reason()
                    self.failure = self.failure or f"rank {rank} is gone: {error}"
        if self.failure is not None:
            raise DeviceLostError(f"the rank group cannot take this step: {self.reasons()}", retryable=True)

    def reasons(self) -> str | None:
        """Why it has failed, in the words of all who have said so by now; None where it has not."""
        if self.failure is None:
            return None
        unread = [frame for peer in self._sockets.values() for frame in peek_frames(peer, _READ_BYTES)]
        texts = [frame.decode(errors="replace") for frame in unread if not frame.startswith(STEP_END_MARK)]
        return "; ".join([self.failure, *(text for text in texts if text not in self.failure)])

    def wait_for_reason(self) -> None:
        """Wait a moment for the watcher to read why a follower has gone."""
        self._reason_read.wait(_REASON_WAIT_S)

    def confirm_step(self, number: int, ran: bytes, timeout_s: float | None) -> None:
        """Wait until every follower has ended step `number`, and compare what it ran; b"" is not compared.

        Raises: ConsistencyError: one ran other ops. DeviceLostError: one has failed, or does not end it.
        """
        with self._step_ended:
            self._step_ended.wait_for(
                lambda: self.failure is not None or not self._reports.behind(number), timeout_s
            )
            if behind := self._reports.behind(number):  # who has gone after it takes nothing from the step
                late = f"ranks {behind} did not end it within {timeout_s} s of rank 0"
                if self.failure is not None:
                    wait_for_words([self._sockets[rank] for rank in behind], _OTHERS_WAIT_S)
                raise DeviceLostError(
                    f"step {number} counts for no rank: {self.reasons() or late}", retryable=False
                )
            self._reports.need_same(number, ran)

    def _send_heartbeat(self) -> None:
        """Send a heartbeat to followers that have read all there was; who reads nothing needs none."""
        if not self._sending.acquire(blocking=False):
            return  # a step is being sent
        try:
            for peer in self._sockets.values() if not self._leaving else ():  # the last word stays last
                with suppress(OSError):  # a follower that is gone, or reads nothing, is noticed elsewhere
                    if not unread_bytes(peer):
                        peer.sendall(_HEARTBEAT)
        finally:
            self._sending.release()

    def _read_message(self, rank: int) -> str | None:
        """Why a follower has failed, by its own words or without; None where it said what it ran."""
        try:
            frame = receive_frame(self._sockets[rank], _MAX_FRAME)
            if frame.startswith(STEP_END_MARK):
                with self._step_ended:
                    self._reports.add(rank, frame)
                    self._step_ended.notify_all()
                return None
        except BlockingIOError:
            return f"rank {rank} stopped in the middle of a word"
        except (OSError, EOFError):
            return f"rank {rank} is gone"
        except ConsistencyError as error:
            return f"rank {rank} says what cannot be read: {error}"
        return frame.decode(errors="replace")

    def _watch(self, lost: Callable[[str], None]) -> None:
        """Read what followers say: what they ran, or that they failed."""
        beat_s = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._sockets.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            selector.register(self._woken, selectors.EVENT_READ, -1)
            while True:
                ready = selector.select(_HEARTBEAT_S)
                if time.monotonic() - beat_s >= _HEARTBEAT_S:
                    self._send_heartbeat()
                    beat_s = time.monotonic()
                for key, _ in ready:
                    if key.data == -1:
                        return
                    text = self._read_message(key.data)
                    if text is None:
                        continue
                    if self._closed:
                        return
                    if self._leaving:
                        selector.unregister(key.fileobj)
                        continue
                    with self._step_ended:
                        self.failure = self.failure or text
                        self.failure = text = self.reasons() or text
                        self._step_ended.notify_all()
                    self._reason_read.set()
                    lost(text)
                    return

    def close(self) -> None:
        """Hang up; also on a thread that waits in `accept` or `send`. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._wake.send(b"x")
        for peer in list(self._sockets.values()):
            shut_down(peer)  # closing alone would not wake who reads or writes just now
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        with self._accepting:
            pass
        listeners = (self._listener, self._unix_listener)
        for each in filter(None, (*self._sockets.values(), *listeners, self._wake, self._woken)):
            each.close()


class FollowerChannel:
    """A follower's end of the line; `silence_s` without a heartbeat mean that rank 0 is frozen or gone."""

    def __init__(
        self,
        rank: int,
        address: bytes,
        timeout_s: float,
        silence_s: float | None = None,
        token: bytes = b"",
    ) -> None:
        host, port, published, name = address.decode().split(" ")
        peer = connect_unix("" if name == "-" else name, timeout_s)
        try:
            peer = peer or socket.create_connection((host, int(port)), timeout_s)
            peer.sendall(_HELLO.pack(token or bytes.fromhex(published), rank))
        except OSError as error:
            if peer is not None:
                peer.close()
            raise DeviceLostError(f"no rank 0 answers at {host}:{port}: {error}", retryable=True) from error
        self._socket = peer
        send_small_frames(peer)
        limit_waits(peer, socket.SO_RCVTIMEO, None)
        self._silence_s = None if silence_s is None else max(silence_s, _MAX_LATE_HEARTBEATS * _HEARTBEAT_S)
        self._limit: float | None = None
        self._buffer = bytearray(_READ_BYTES)
        self._from = self._upto = 0  # what has been received and not been returned

    def wait_for_hang_up(self) -> None:
        """Block until the line has ended, and take nothing; where the system cannot say, not at all."""
        wait_for_hang_up(self._socket)

    def was_left(self) -> bool:
        """Whether an ended line had rank 0's last word; who reads just now may have it, a moment unstored."""
        heard = bytes(self._buffer[: self._upto]) + peek(self._socket, _MAX_FRAME)
        return not CAN_SEE_HANG_UPS or heard.endswith(_LEAVING)  # which stays there

    def receive(self, timeout_s: float | None = None, *, heartbeat: bool = False) -> bytes:
        """The next frame, waiting for it; with `heartbeat` one of those ends the wait, too, as b"".

        Raises: DeviceLostError: rank 0 is gone, or said nothing within `timeout_s` seconds.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        limits = [each for each in (timeout_s, self._silence_s) if each is not None]
        limit = min(limits, default=None)
        try:
            while True:
                if limit != self._limit:  # a call of the system each time
                    limit_waits(self._socket, socket.SO_RCVTIMEO, limit)
                    self._limit = limit
                if (frame := self._frame()) is not None or heartbeat:
                    return frame or b""
                if until is not None:  # a heartbeat is no step message
                    limit = min(limits[-1], max(1e-3, until - time.monotonic()))
        except BlockingIOError:
            if until is not None and time.monotonic() >= until:
                raise DeviceLostError(f"rank 0 sent nothing for {timeout_s:g} s", retryable=False) from None
            raise DeviceLostError(
                f"rank 0 sent no heartbeat for {self._silence_s:g} s: it is frozen, or its host is gone",
                retryable=True,
            ) from None
        except (OSError, EOFError) as error:
            raise DeviceLostError(f"rank 0 is gone: {error or 'it hung up'}", retryable=True) from error

    def _frame(self) -> bytes | None:
        """One frame, or None for a heartbeat.

        As much as there is comes with one call of the system, for it costs more than the rest.

        Raises: EOFError: the other side hung up. ConsistencyError: the length is absurd.
        """
        while (buffered := self._upto - self._from) < LENGTH.size:
            self._fill_buffer(buffered)
        if self._buffer.startswith(_HEARTBEAT, self._from):
            self._from += LENGTH.size
            return None
        (size,) = LENGTH.unpack_from(self._buffer, self._from)
        if self._buffer.startswith(_LEAVING, self._from):
            raise EOFError("it left")
        if size > _MAX_FRAME:
            raise ConsistencyError(f"a frame needs at most {_MAX_FRAME} bytes, got {size}")
        begin = self._from + LENGTH.size
        end = begin + size
        if end <= self._upto:
            self._from = end
            return bytes(memoryview(self._buffer)[begin:end])
        part = bytes(memoryview(self._buffer)[begin : self._upto])
        self._from = self._upto = 0
        return part + receive_exactly(self._socket, size - len(part))

    def _fill_buffer(self, buffered: int) -> None:
        """Read on, behind the `buffered` bytes that are there."""
        if self._from:
            self._buffer[:buffered] = self._buffer[self._from : self._upto]
            self._from, self._upto = 0, buffered
        count = self._socket.recv_into(memoryview(self._buffer)[buffered:])
        if not count:
            raise EOFError("the other side hung up")
        self._upto += count

    def report_step(self, number: int, ran: bytes) -> None:
        """Tell rank 0 what this rank ran in step `number`."""
        self._send(step_end(number, ran))

    def fail(self, why: str) -> None:
        """Tell rank 0 that this rank cannot continue; a closed connection says the same."""
        self._send(why.encode())

    def _send(self, data: bytes) -> None:
        with suppress(OSError):  # rank 0 is gone, or learns it from the closed line
            self._socket.sendall(frame_bytes(data))

    def close(self) -> None:
        """Hang up; a thread that waits in `receive` raises."""
        shut_down(self._socket)
        self._socket.close()

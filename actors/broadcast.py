"""One-to-all frames: rank 0's manifests on their way to the followers, and followers' failures back.

Frames have a length of four bytes in front. Who connects says a token first that rank 0 published in the
agreement store; nobody else is served. Ranks of one host meet on a Unix socket where there are such, which
costs a third of TCP; the others on TCP.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from layerzero.errors import ConsistencyError, DeviceLostError

_LENGTH = struct.Struct("!I")
_HELLO = struct.Struct("!32sI")
_MAX_FRAME = 1 << 22
_AT_ONCE = 1 << 16
_NEVER_S = 1e7
_STRANGERS = 16  # who may wait to be hung up on, beside the followers
_HEARD_S = 1.0  # until what a follower said before it hung up has been read


class Leader:
    """Rank 0's end: `send` gives one frame to every follower; `lost` is told why one has gone.

    A follower that takes nothing for `timeout_s` seconds is given up; None waits for ever.
    """

    def __init__(
        self, followers: Sequence[int], host: str = "127.0.0.1", timeout_s: float | None = None
    ) -> None:
        self._followers = frozenset(followers)
        self._timeout_s = timeout_s
        self._token = secrets.token_bytes(32)
        self._listener = socket.create_server((host, 0), backlog=len(followers) + _STRANGERS)
        port = self._listener.getsockname()[1]
        self._near = _near_listener(len(followers))
        near = self._near.getsockname()[1:].decode() if self._near is not None else "-"
        self.address = f"{host} {port} {self._token.hex()} {near}".encode()
        self._sockets: dict[int, socket.socket] = {}
        self._quick: dict[int, socket.socket] = {}  # the same ones, which never wait
        self._watcher: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()
        self._closing = threading.Lock()
        self._greeting = threading.Lock()
        self._closed = self._leaving = False
        self.failure: str | None = None
        self._heard = threading.Event()  # that the watcher has read why

    def accept(self, timeout_s: float, lost: Callable[[str], None]) -> None:
        """Wait for every follower; afterwards `lost` is called once, from a thread, when one fails or goes.

        Raises: DeviceLostError: one did not connect in time.
        """
        try:
            with self._greeting:  # whose sockets stay open until it has noticed
                self._greet(time.monotonic() + timeout_s, timeout_s)
            with self._closing:
                if self._closed:
                    raise DeviceLostError("rank 0 left while the others joined", retryable=True)
                self._watcher = threading.Thread(
                    target=self._watch, args=(lost,), name="layerzero-gang-watch", daemon=True
                )
                self._watcher.start()
        except BaseException as error:
            for peer in (*self._sockets.values(), *self._quick.values()):
                peer.close()
            if self._closed and isinstance(error, OSError | ValueError):  # of a listener that is closed
                raise DeviceLostError("rank 0 left while the others joined", retryable=True) from error
            raise

    def _greet(self, until: float, timeout_s: float) -> None:
        """Take every follower in who says the token, whatever strangers do meanwhile."""
        with ExitStack() as strangers, selectors.DefaultSelector() as selector:
            for listener in filter(None, (self._listener, self._near)):
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
                    elif _said(peer, key.data):
                        selector.unregister(peer)
                        self._admit(peer, key.data)

    def _admit(self, peer: socket.socket, said: bytes) -> None:
        """Keep who said the token and a rank that is still missing; hang up on anybody else."""
        token, rank = _HELLO.unpack(said) if len(said) == _HELLO.size else (b"", -1)
        if hmac.compare_digest(token, self._token) and rank in self._followers - self._sockets.keys():
            self._quick[rank], own = peer.dup(), peer.dup()
            self._sockets[rank] = own
            self._quick[rank].setblocking(False)  # the other one too, unless it has a limit
            _ready(own, _NEVER_S if self._timeout_s is None else self._timeout_s)
        peer.close()

    def send(self, frame: bytes, *, last: bool = False) -> None:
        """Give `frame` to every follower; behind the `last` one they may hang up, and nobody is told.

        Raises: DeviceLostError: one has failed or gone, or has not read for so long that its line is full;
            nothing may be run that needs it.
        """
        data = _LENGTH.pack(len(frame)) + frame
        self._leaving = last
        for rank, peer in self._sockets.items():
            if self.failure is not None:
                break
            try:
                _send(self._quick[rank], peer, data)
            except TimeoutError:
                self.failure = self.failure or (
                    f"rank {rank} has taken nothing for {self._timeout_s:g} s and its line is full; it hangs"
                )
            except OSError as error:
                if not last:  # the reason, if it said one, lies on the line that it cut
                    self._heard.wait(_HEARD_S)
                self.failure = self.failure or f"rank {rank} is gone: {error}"
        if self.failure is not None:
            raise DeviceLostError(f"the gang cannot take this step: {self.failure}", retryable=True)

    def _watch(self, lost: Callable[[str], None]) -> None:
        """Read what followers say, which is only that they failed."""
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._sockets.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            selector.register(self._woken, selectors.EVENT_READ, -1)
            while True:
                for key, _ in selector.select():
                    if key.data == -1:
                        return
                    try:
                        why = receive(self._sockets[key.data])
                    except TimeoutError:
                        text = f"rank {key.data} stopped in the middle of a word"
                    except (OSError, EOFError):
                        text = f"rank {key.data} is gone"
                    except ConsistencyError as error:
                        text = f"rank {key.data} says what cannot be read: {error}"
                    else:
                        text = why.decode(errors="replace")
                    if self._closed:
                        return
                    if self._leaving:
                        selector.unregister(key.fileobj)
                        continue
                    self.failure = self.failure or text
                    self._heard.set()
                    lost(self.failure)
                    return

    def close(self) -> None:
        """Hang up; also on a thread that waits in `accept` or `send`. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._wake.send(b"x")
        for peer in list(self._sockets.values()):
            _hang_up(peer)  # closing alone would not wake who reads or writes just now
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        with self._greeting:
            pass
        ends = (*self._sockets.values(), *self._quick.values())
        for each in (*ends, self._listener, self._near, self._wake, self._woken):
            if each is not None:
                each.close()


class Follower:
    """A follower's end of the line."""

    def __init__(self, rank: int, address: bytes, timeout_s: float) -> None:
        host, port, token, near = address.decode().split(" ")
        found = _near_connection(near, timeout_s)
        try:
            found = found or socket.create_connection((host, int(port)), timeout_s)
            found.sendall(_HELLO.pack(bytes.fromhex(token), rank))
        except OSError as error:
            if found is not None:
                found.close()
            message = f"rank 0 does not answer at {host}:{port}: {error}"
            raise DeviceLostError(message, retryable=True) from error
        self._socket = found
        _ready(self._socket, None)
        self._limit: float | None = None
        self._held = bytearray(_AT_ONCE)
        self._from = self._upto = 0  # what has been received and not been given

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next frame, waiting for it.

        Raises: DeviceLostError: rank 0 is gone, or said nothing within `timeout_s` seconds.
        """
        if timeout_s != self._limit:  # a call of the system each time
            self._socket.settimeout(timeout_s)
            self._limit = timeout_s
        try:
            return self._frame()
        except TimeoutError:
            raise DeviceLostError(f"rank 0 sent nothing for {timeout_s:g} s", retryable=False) from None
        except (OSError, EOFError) as error:
            raise DeviceLostError(f"rank 0 is gone: {error or 'it hung up'}", retryable=True) from error

    def _frame(self) -> bytes:
        """One frame; as much as there is comes with one call of the system, for it costs more than the rest.

        Raises: EOFError: the other side hung up. ConsistencyError: the length is absurd.
        """
        while (here := self._upto - self._from) < _LENGTH.size:
            self._more(here)
        (size,) = _LENGTH.unpack_from(self._held, self._from)
        if size > _MAX_FRAME:
            raise ConsistencyError(f"a frame needs at most {_MAX_FRAME} bytes, got {size}")
        begin = self._from + _LENGTH.size
        end = begin + size
        if end <= self._upto:
            self._from = end
            return bytes(memoryview(self._held)[begin:end])
        found = bytes(memoryview(self._held)[begin : self._upto])
        self._from = self._upto = 0
        return found + _exactly(self._socket, size - len(found))

    def _more(self, here: int) -> None:
        """Read on, behind the `here` bytes that are there."""
        if self._from:
            self._held[:here] = self._held[self._from : self._upto]
            self._from, self._upto = 0, here
        count = self._socket.recv_into(memoryview(self._held)[here:])
        if not count:
            raise EOFError("the other side hung up")
        self._upto += count

    def fail(self, why: str) -> None:
        """Tell rank 0 that this rank cannot go on; a line that is cut says the same."""
        try:
            data = why.encode()
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            pass  # rank 0 is gone, or learns it from the closed line

    def close(self) -> None:
        """Hang up; a thread that waits in `receive` raises."""
        _hang_up(self._socket)
        self._socket.close()


def _near_listener(backlog: int) -> socket.socket | None:
    """A Unix socket in Linux's abstract names, which vanish with their owner; None elsewhere."""
    if sys.platform != "linux":
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0layerzero-{secrets.token_hex(16)}")
    listener.listen(backlog + _STRANGERS)
    return listener


def _near_connection(name: str, timeout_s: float) -> socket.socket | None:
    """A connection to rank 0 on this host; None where it is on another, or in another network namespace."""
    if name == "-" or sys.platform != "linux":
        return None
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(timeout_s)
    try:
        peer.connect(f"\0{name}")
    except OSError:
        peer.close()
        return None
    return peer


def _ready(peer: socket.socket, timeout_s: float | None) -> None:
    """Waiting at most `timeout_s` for the other side, and never for more to send."""
    peer.settimeout(timeout_s)
    if peer.family != getattr(socket, "AF_UNIX", None):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _hang_up(peer: socket.socket) -> None:
    """End both directions, for this process's other threads too; what was sent still arrives."""
    with suppress(OSError):  # the other side has hung up before
        peer.shutdown(socket.SHUT_RDWR)


def _said(peer: socket.socket, so_far: bytearray) -> bool:
    """Read on in a hello; whether it is complete, or will never be."""
    try:
        piece = peer.recv(_HELLO.size - len(so_far))
    except BlockingIOError:
        return False
    except OSError:
        return True
    so_far += piece
    return not piece or len(so_far) == _HELLO.size


def _send(quick: socket.socket, peer: socket.socket, data: bytes) -> None:
    """Send at once what fits, without asking first whether it does; wait for the rest on `peer`."""
    try:
        sent = quick.send(data)
    except BlockingIOError:
        sent = 0
    if sent < len(data):
        peer.sendall(memoryview(data)[sent:])


def receive(peer: socket.socket) -> bytes:
    """One frame of a socket.

    Raises: EOFError: the other side hung up. ConsistencyError: the length is absurd.
    """
    (size,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size))
    if size > _MAX_FRAME:
        raise ConsistencyError(f"a frame needs at most {_MAX_FRAME} bytes, got {size}")
    return _exactly(peer, size)


def _exactly(peer: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = peer.recv(size - len(found))
        if not piece:
            raise EOFError("the other side hung up")
        found += piece
    return bytes(found)

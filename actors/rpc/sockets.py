"""What the side channel and the rank group's channel share: framing, Unix names, socket options.

frame = 4 bytes, big-endian length of the rest; the rest
"""

from __future__ import annotations

import secrets
import select
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

from layerzero.spec.errors import ConsistencyError

LENGTH = struct.Struct("!I")
_ABSTRACT = sys.platform == "linux"


def frame_bytes(data: bytes) -> bytes:
    """`data` with its length in front."""
    return LENGTH.pack(len(data)) + data


def abstract_name() -> str:
    """A new name for a Unix socket in Linux's abstract namespace, which vanishes with its owner; ""
    elsewhere.

    It begins with "@", which `system_name` replaces by the zero byte that the system wants.
    """
    return f"@layerzero-{secrets.token_hex(16)}" if _ABSTRACT else ""


def system_name(name: str) -> str:
    """A Unix socket's name as the system takes it."""
    return name.replace("@", "\0", 1) if name.startswith("@") else name


def listen_unix(name: str, backlog: int) -> socket.socket | None:
    """A listener under an abstract name; None where the system has no such names."""
    if not name:
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(system_name(name))
    listener.listen(backlog)
    return listener


def connect_unix(name: str, timeout_s: float) -> socket.socket | None:
    """A connection to a listener of this host; None where it is on another, or in another network
    namespace.
    """
    if not name or not _ABSTRACT:
        return None
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(timeout_s)
    try:
        peer.connect(system_name(name))
    except OSError:
        peer.close()
        return None
    return peer


def send_small_frames(peer: socket.socket, silence_s: float | None = None) -> None:
    """Let TCP send at once, and end where the other host has confirmed nothing for `silence_s` seconds.

    TCP itself waits for a quarter of an hour, and without end where nothing is sent: a host that is cut off
    says nothing. A Unix socket needs none of it. Where the system has no such option, its own limits hold.
    """
    if peer.family == getattr(socket, "AF_UNIX", None):
        return
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if silence_s is None:
        return
    probe_s = max(1, int(silence_s / 3))
    limits = {
        "TCP_KEEPIDLE": probe_s,
        "TCP_KEEPINTVL": probe_s,
        "TCP_USER_TIMEOUT": max(1, int(silence_s * 1000)),
    }
    for name, limit in limits.items():
        if (option := getattr(socket, name, None)) is not None:
            peer.setsockopt(socket.IPPROTO_TCP, option, limit)


def limit_waits(peer: socket.socket, option: int, timeout_s: float | None) -> None:
    """Let a blocking socket wait at most `timeout_s` seconds, None forever; `option` SO_SNDTIMEO or
    SO_RCVTIMEO.

    A call that has waited so long raises BlockingIOError. The system keeps the limit: Python's own timeout
    would ask before each call whether the socket is ready, which costs a second system call.
    """
    peer.settimeout(None)
    us = 0 if timeout_s is None else max(1000, int(timeout_s * 1e6))
    value = (
        struct.pack("@I", us // 1000)
        if sys.platform == "win32"
        else struct.pack("@ll", *divmod(us, 1_000_000))
    )
    peer.setsockopt(socket.SOL_SOCKET, option, value)


def shut_down(peer: socket.socket) -> None:
    """End both directions, for this process's other threads too; what was sent still arrives."""
    with suppress(OSError):  # the other side has ended it before
        peer.shutdown(socket.SHUT_RDWR)


CAN_SEE_HANG_UPS = hasattr(select, "POLLRDHUP")


def wait_for_hang_up(peer: socket.socket) -> None:
    """Block until either side ends the connection, and read nothing; where that cannot be seen, return."""
    if not CAN_SEE_HANG_UPS:
        return
    poll = select.poll()
    poll.register(peer, select.POLLRDHUP)
    poll.poll()


def peek(peer: socket.socket, size: int) -> bytes:
    """What there is to read, at most `size` bytes, which stays there; nothing of a broken connection."""
    try:
        return peer.recv(size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return b""


def peek_frames(peer: socket.socket, size: int) -> list[bytes]:
    """The whole frames within the next `size` bytes, as far as they are there to read; they stay there."""
    frames, begin, data = [], LENGTH.size, peek(peer, size)
    while begin <= len(data) and (end := begin + LENGTH.unpack_from(data, begin - LENGTH.size)[0]) <= len(
        data
    ):
        frames.append(data[begin:end])
        begin = end + LENGTH.size
    return frames


def wait_for_words(peers: Iterable[socket.socket], timeout_s: float) -> None:
    """Wait until each of them has something to read or has gone, at most so long; nothing is read."""
    until = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            with suppress(OSError, ValueError):  # closed here meanwhile
                selector.register(peer, selectors.EVENT_READ)
        while selector.get_map() and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)


def read_on(peer: socket.socket, data: bytearray, size: int) -> bool:
    """Add what there is to `data`, of `size` bytes at most; whether it is complete, or will never be."""
    try:
        piece = peer.recv(size - len(data))
    except BlockingIOError:
        return False
    except OSError:
        return True
    data += piece
    return not piece or len(data) == size


def unread_bytes(peer: socket.socket) -> int:
    """Bytes that the other side has not taken yet; 0 where the system does not say."""
    if not _ABSTRACT:
        return 0
    import fcntl
    import termios

    return int.from_bytes(fcntl.ioctl(peer, termios.TIOCOUTQ, b"\0" * 4), sys.byteorder)


def receive_exactly(peer: socket.socket, size: int) -> bytes:
    """`size` bytes of a blocking socket.

    Raises: EOFError: the other side ended it. BlockingIOError: see `limit_waits`.
    """
    data = bytearray()
    while len(data) < size:
        piece = peer.recv(size - len(data))
        if not piece:
            raise EOFError("the other side hung up")
        data += piece
    return bytes(data)


def receive_frame(peer: socket.socket, max_bytes: int) -> bytes:
    """One frame of a blocking socket.

    Raises: EOFError: the other side ended it. ConsistencyError: the length is above `max_bytes`.
        BlockingIOError: see `limit_waits`.
    """
    (size,) = LENGTH.unpack(receive_exactly(peer, LENGTH.size))
    if size > max_bytes:
        raise ConsistencyError(f"a frame needs at most {max_bytes} bytes, got {size}")
    return receive_exactly(peer, size)

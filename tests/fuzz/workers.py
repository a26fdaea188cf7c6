"""Both ends of an isolated worker's socket, in this process: what it is asked, and what it answers."""

from __future__ import annotations

import os
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from layerzero.actors.isolation import frames
from layerzero.actors.isolation.arena import HostArena
from layerzero.actors.isolation.isolated_worker import IsolatedWorker
from layerzero.actors.isolation.serve import Server
from layerzero.actors.isolation.worker_errors import fault_error
from layerzero.spec.errors import BackendNotAvailableError


class _Socket:
    """Gives each request once, and keeps what is sent."""

    def __init__(self, requests: list[bytes]) -> None:
        self.requests, self.sent = iter([*requests, b""]), list[bytes]()

    def recv_into(self, buffer: memoryview, most: int = 0, flags: int = 0) -> int:
        """The next request, put into `buffer`; nothing at the end."""
        request = next(self.requests)[: len(buffer)]
        buffer[: len(request)] = request
        return len(request)

    def send(self, message: bytes) -> None:
        """Keep an answer."""
        self.sent.append(message)


@cache
def _arena() -> HostArena:
    arena, descriptor = HostArena.create(1 << 12)
    os.close(descriptor)
    return arena


def requests_to_a_worker(data: bytes) -> None:
    """One call of a kernel that doubles; every request has one answer, done or a fault that can be read."""
    request = data if data[:1] in (frames.CALL, frames.COMPILE) else frames.CALL + data
    requests = enumerate((request, b"?" + data), 1)
    socket = _Socket([frames.NUMBER.pack(number) + each for number, each in requests])
    server = Server(cast(Any, socket))
    server._calls["double"] = lambda x, *rest: x * 2
    server._arenas["cpu"] = _arena()
    server.serve()
    assert len(socket.sent) == 2, "a request needs one answer"
    for number, sent in enumerate(socket.sent, 1):
        assert sent.startswith(frames.NUMBER.pack(number))
        answer = sent[frames.NUMBER.size :]
        if answer[:1] == frames.FAULT:
            msgspec.msgpack.decode(answer[1:], type=frames.Fault)
        else:
            assert answer == frames.DONE


@cache
def _worker() -> IsolatedWorker:
    return IsolatedWorker("fuzzed", None, 1.0, lambda *what: None, lambda *what: None)


def answer_of_a_worker(data: bytes) -> None:
    """An answer and a greeting of any bytes: an error is made of the one, the other is refused as one."""
    raised = fault_error("made", data, _worker()._unavailable)
    assert isinstance(raised, Exception)
    life = cast(Any, SimpleNamespace(hear=lambda: data))
    try:
        _worker()._checked_hello(life)
    except (BackendNotAvailableError, msgspec.MsgspecError):
        return  # what `_open` makes the end of that process

"""Calls that a worker is asked for in shared memory: answered once, whatever comes late or by both ways."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
import torch

from layerzero.actors.isolation import frames, receiver
from layerzero.actors.isolation.arena import CALL_SLOT, CallSlot, HostArena
from layerzero.actors.isolation.serve import Server
from layerzero.actors.isolation.worker_errors import WorkerError
from layerzero.spec.reasons import Reason
from tests.actors.isolation import plugged
from tests.actors.isolation.test_isolation import X, asking, opened, right, until, worker_of

pytestmark = pytest.mark.skipif(
    HostArena.create(1)[0].slot is None, reason="processors of another order of writes ask by messages"
)
DONE_CALL = frames.CALL + frames.NUMBER.pack(7)


class Ran:
    """What a call ran, and how often."""

    def __init__(self) -> None:
        self.count, self.error = 0, ""

    def __call__(self) -> None:
        self.count += 1
        if self.error:
            raise ValueError(self.error)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CallSlot, socket.socket, Server, Ran]]:
    """A caller's slot and socket, and a worker that has laid out frame 7 and looks for ever."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(receiver, "SPIN_S", 3600.0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(60.0)
    memory, ran = mmap.mmap(-1, CALL_SLOT), Ran()
    server = Server(theirs)
    server._slot, server._runs[7] = CallSlot(memory), ran  # type: ignore[assignment]
    serving = threading.Thread(target=server.serve)
    serving.start()
    with theirs:
        yield CallSlot(memory), ours, server, ran
        ours.close()
        serving.join(60.0)
    assert not serving.is_alive()


def asked(slot: CallSlot, ours: socket.socket, number: int, frame: int = 7) -> int | None:
    """How a call was answered that is asked for in both ways, as by who looks away too soon."""
    slot.ask(number, frame)
    ours.send(frames.NUMBER.pack(number) + DONE_CALL)
    reply = ours.recv(4096)
    assert reply[:8] == frames.NUMBER.pack(number)
    return reply[8]


def test_a_call_that_is_asked_for_in_both_ways_runs_once_and_has_one_message(
    line: tuple[CallSlot, socket.socket, Server, Ran],
) -> None:
    """Done or refused: the later way adds nothing, and the next answer is the next call's."""
    slot, ours, _, ran = line
    for number in range(1, 201):
        ran.error = "" if number % 3 else "no"
        assert asked(slot, ours, number) == (0 if number % 3 else 1)
        assert ran.count == number


def test_what_is_done_is_answered_without_a_message(
    line: tuple[CallSlot, socket.socket, Server, Ran],
) -> None:
    """Where a message says more, it is there first; of a frame that is not laid out a message has to come."""
    slot, ours, _, ran = line
    ours.setblocking(False)
    for number in range(1, 101):
        while not slot.ask(number, 7):  # it has not yet begun to look
            pass
        assert slot.answers == number
        while slot.answer() is None:
            pass
        assert slot.answer() == 0 and ran.count == number
    with pytest.raises(BlockingIOError):
        ours.recv(1)
    ran.error = "no"
    slot.ask(101, 7)
    while slot.answer() is None:
        pass
    reply = ours.recv(4096)
    assert slot.answer() == 1 and reply[:9] == frames.NUMBER.pack(101) + frames.FAULT
    fault = msgspec.msgpack.decode(reply[9:], type=frames.Fault)
    assert (fault.kind, fault.message) == ("ValueError", "no")
    ran.error = ""
    ours.settimeout(60.0)
    assert asked(slot, ours, 102, frame=9) == 0
    assert ran.count == 102 and slot.answer() is None


def test_a_worker_that_sleeps_says_so_and_a_message_wakes_it(
    line: tuple[CallSlot, socket.socket, Server, Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for memory that nobody looks at."""
    slot, ours, _, ran = line
    monkeypatch.setattr(receiver, "SPIN_S", 0.0)
    assert asked(slot, ours, 1) == 0
    until(lambda: not slot.ask(1, 7))
    for number in range(2, 50):
        assert asked(slot, ours, number) == 0 and ran.count == number


def test_calls_of_one_layout_are_right_whatever_they_did_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error, operands that a kernel overwrote, rows that differ in their last element, then a hang."""
    monkeypatch.setattr(receiver, "SPIN_S", 0.2)  # the caller looks long enough, on any machine
    with opened() as runtime:
        call = runtime.device().registry.callable_of("wild.rms_norm")
        life = worker_of(runtime)._life
        assert life is not None
        other = X.clone()
        other[-1, -1] += 1.0
        for _ in range(3):
            for rows in (X, other, asking(plugged.SCRIBBLE), asking(plugged.SCRIBBLE), X):
                torch.testing.assert_close(call(rows, None, 1e-6), right(rows))
            with pytest.raises(ValueError, match="the operand asked for an error"):
                call(asking(plugged.RAISE), None, 1e-6)
        assert life.known and worker_of(runtime)._life is life
        with pytest.raises(WorkerError) as raised:
            call(asking(plugged.HANG), None, 1e-6)
        assert raised.value.reason is Reason.WORKER_HUNG


def test_layouts_are_forgotten_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller whose sizes never repeat holds no more of them than its worker does, and all are right."""
    with opened() as runtime:
        call = runtime.device().registry.callable_of("wild.rms_norm")
        call(X, None, 1e-6)
        life = worker_of(runtime)._life
        assert life is not None
        for count in (*range(1, frames.MOST_FRAMES + 200), 3, 3, frames.MOST_FRAMES, 3):
            rows = torch.full((count, 1), 1.0 + count % 7)
            torch.testing.assert_close(call(rows, None, 1e-6), right(rows))
            assert len(life.known) <= frames.MOST_FRAMES
        assert worker_of(runtime)._life is life


def test_other_threads_run_while_long_operands_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is held for a short one alone: an event loop would stand still for a large weight."""
    arena, descriptor = HostArena.create(1 << 20)
    os.close(descriptor)
    used: list[str] = []

    def differs(name: str, *_: int) -> int:
        used.append(name)
        return 1

    for name in ("_compare", "_compare_long"):
        monkeypatch.setattr(arena, name, partial(differs, name))
    for count in (16, 1 << 17):
        x = torch.arange(count, dtype=torch.float32)
        arena.write(CALL_SLOT, x)
        assert torch.equal(arena.view(CALL_SLOT, x.shape, x.dtype), x)
    assert used == ["_compare", "_compare_long"]

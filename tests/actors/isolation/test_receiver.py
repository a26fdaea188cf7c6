"""`Receiver`: a message is asked for before its thread sleeps, less often where that is in vain."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from layerzero.actors.isolation import receiver
from layerzero.actors.isolation.receiver import Receiver

NEVER_S, ALWAYS_S = 0.0, 3600.0


class Watched:
    """A socket's receiving end that notes how it was asked: "spin" without sleeping, or "sleep"."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.asked: list[str] = []

    def recv_into(self, buffer: memoryview, count: int = 0, flags: int = 0) -> int:
        self.asked.append("spin" if flags & socket.MSG_DONTWAIT else "sleep")
        return self._connection.recv_into(buffer, count, flags)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a socket of messages."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, other


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, whatever there are."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def test_a_message_that_comes_soon_is_taken_without_sleeping(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as it was sent, none joined; the other side's end is an empty one."""
    monkeypatch.setattr(receiver, "SPIN_S", ALWAYS_S)
    ours, theirs = ends
    watched = Watched(ours)
    received = Receiver(watched)  # type: ignore[arg-type]
    messages = [b"a", b"b" * 5000, b"c"]
    for message in messages:
        theirs.send(message)
    assert [received.receive() for _ in messages] == messages
    theirs.close()
    assert received.receive() == b""
    assert watched.asked == ["spin"] * 4


def test_spins_in_vain_are_made_less_and_less_often(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as many messages are slept on after each but the first; one that was not in vain halves that."""
    monkeypatch.setattr(receiver, "SPIN_S", NEVER_S)
    ours, theirs = ends
    received = Receiver(ours)
    spins: list[bool] = []
    monkeypatch.setattr(received, "_spin", lambda end_s, look: spins.append(True))

    def sleeps(count: int) -> list[int]:
        """After how many messages each spin came."""
        came = []
        for number in range(count):
            theirs.send(b"m")
            spins.clear()
            assert received.receive() == b"m"
            came += [number] if spins else []
        return came

    assert sleeps(16) == [0, 1, 3, 7, 15]
    for _ in range(15):  # what is left of the fifth pause
        sleeps(1)
    monkeypatch.setattr(received, "_spin", lambda end_s, look: ours.recv(9))
    assert sleeps(1) == []
    monkeypatch.setattr(received, "_spin", lambda end_s, look: spins.append(True))
    assert sleeps(16) == [0]


def test_a_spin_is_as_long_as_messages_usually_take(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as long, between two bounds; a pause between bursts changes nothing."""
    ours, theirs = ends
    received, now_s, spins = Receiver(ours), [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])

    def spin_us(message_s: float, count: int = 1) -> float:
        """How long the last of as many messages was spun for, each of which takes `message_s`."""

        def spin(end_s: float, look: object) -> bytes:
            spins.append((end_s - now_s[0]) * 1e6)
            now_s[0] += message_s
            return ours.recv(9)

        monkeypatch.setattr(received, "_spin", spin)
        for _ in range(count):
            theirs.send(b"m")
            received.receive()
        return spins[-1]

    assert spin_us(20e-6, 20) == pytest.approx(60.0)
    assert spin_us(100e-6, 20) == pytest.approx(200.0, rel=0.02)
    assert spin_us(5.0, 3) == pytest.approx(200.0, rel=0.02)
    assert spin_us(900e-6, 20) == pytest.approx(400.0)
    assert spin_us(20e-6, 20) == pytest.approx(60.0)

    def sleep(buffer: memoryview) -> int:
        now_s[0] += 100e-6
        return ours.recv_into(buffer)

    received._to_sleep = 20
    monkeypatch.setattr(received, "_receive", sleep)
    for _ in range(20):  # messages that are slept on tell it, too
        theirs.send(b"m")
        received.receive()
    assert spin_us(20e-6) == pytest.approx(200.0, rel=0.02)


def test_one_core_never_spins(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else could send meanwhile."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(receiver, "SPIN_S", ALWAYS_S)
    ours, theirs = ends
    watched = Watched(ours)
    received = Receiver(watched)  # type: ignore[arg-type]
    for _ in range(3):
        theirs.send(b"m")
        assert received.receive() == b"m"
    assert watched.asked == ["sleep"] * 3


def test_a_socket_that_stays_silent_ends_by_its_own_limit(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """A spin is no end: what comes after it is the socket's own error."""
    ours, _ = ends
    ours.settimeout(0.01)
    with pytest.raises(TimeoutError):
        Receiver(ours).receive()

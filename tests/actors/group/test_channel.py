"""The line of a rank group: strangers, garbage and half frames on it, and what closing wakes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from layerzero.actors.group import channel as broadcast
from layerzero.actors.group.channel import FollowerChannel, LeaderChannel
from layerzero.spec.errors import ConsistencyError, DeviceLostError
from tests import children


@contextmanager
def line(lost: list[str]) -> Iterator[tuple[LeaderChannel, FollowerChannel]]:
    """Rank 0's end and rank 1's."""
    with lines(lost, 1) as (leader, followers):
        yield leader, followers[0]


@contextmanager
def lines(lost: list[str], *ranks: int) -> Iterator[tuple[LeaderChannel, list[FollowerChannel]]]:
    """Rank 0's end and those of `ranks`."""
    leader = LeaderChannel(ranks)
    made: list[FollowerChannel] = []
    joining = threading.Thread(
        target=lambda: made.extend(FollowerChannel(rank, leader.address, 10.0) for rank in ranks)
    )
    joining.start()
    leader.accept(10.0, lost.append)
    joining.join()
    try:
        yield leader, made
    finally:
        for follower in made:
            follower.close()
        leader.close()


def told(leader: LeaderChannel, lost: list[str]) -> str:
    """What `lost` was called with."""
    assert leader._watcher is not None
    leader._watcher.join(10.0)
    assert len(lost) == 1 and leader.failure == lost[0]
    return lost[0]


def test_a_stranger_who_says_nothing_keeps_nobody_out() -> None:
    """Also one who says half a hello, or a wrong token."""
    leader = LeaderChannel([1])
    host, port, _, _ = leader.address.decode().split(" ")
    strangers = [socket.create_connection((host, int(port)), 10.0) for _ in range(3)]
    strangers[1].sendall(b"half")
    strangers[2].sendall(bytes(36))
    made: list[FollowerChannel] = []
    joining = threading.Thread(target=lambda: made.append(FollowerChannel(1, leader.address, 10.0)))
    threading.Timer(0.1, joining.start).start()
    leader.accept(30.0, lambda why: None)
    joining.join()
    leader.send(b"hello")
    assert made[0].receive(10.0) == b"hello"
    for stranger in strangers:
        stranger.settimeout(10.0)
        assert stranger.recv(1) == b""  # hung up on
        stranger.close()
    made[0].close()
    leader.close()


def test_garbage_from_a_follower_fails_the_gang() -> None:
    """A length that no frame has is told like any other failure."""
    lost: list[str] = []
    with line(lost) as (leader, follower):
        follower._socket.sendall(b"\xff" * 4)
        assert "at most" in told(leader, lost)


def test_a_follower_that_is_gone_is_told() -> None:
    """Also in the middle of a frame."""
    lost: list[str] = []
    with line(lost) as (leader, follower):
        follower._socket.sendall(b"\0\0")
        follower.close()
        assert told(leader, lost) == "rank 1 is gone"
        with pytest.raises(DeviceLostError, match="rank 1 is gone"):
            leader.send(b"step")


def test_what_a_follower_said_before_it_went_is_why_it_is_gone() -> None:
    """Also where rank 0 notices the cut line before it has read the reason."""
    for _ in range(100):
        lost: list[str] = []
        with line(lost) as (leader, follower):
            follower.fail("rank 1 cannot follow: its shard is broken")
            follower.close()
            with pytest.raises(DeviceLostError, match="its shard is broken"):
                leader.send(b"step")
            assert told(leader, lost) == "rank 1 cannot follow: its shard is broken"


def test_everybody_who_has_said_why_is_named_and_nobody_is_waited_for() -> None:
    """Rank 2 in the middle of a word, rank 4 without one, rank 3 behind a step and later than rank 1."""
    lost: list[str] = []
    with lines(lost, 1, 2, 3, 4) as (leader, followers):
        followers[0].fail("rank 1 cannot follow: other pages")
        assert told(leader, lost) == leader.reasons() == "rank 1 cannot follow: other pages"
        followers[1]._socket.sendall(b"\0\0\0\7half")
        followers[2].report_step(1, b"ops")
        followers[2].fail("rank 3 cannot follow: other rows")
        said = "rank 1 cannot follow: other pages; rank 3 cannot follow: other rows"
        assert [leader.reasons(), leader.reasons()] == [said, said]
        with pytest.raises(DeviceLostError, match=said):
            leader.send(b"step")
        with pytest.raises(DeviceLostError, match=f"step 1 counts for no rank: {said}"):
            leader.confirm_step(1, b"ops", None)


def test_a_refused_step_names_who_says_so_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks compare the same message side by side: the first word is not the last."""
    monkeypatch.setattr(broadcast, "_OTHERS_WAIT_S", 30.0)
    lost: list[str] = []
    with lines(lost, 1, 2, 3) as (leader, (first, second, third)), ThreadPoolExecutor(1) as other:
        first.fail("rank 1 cannot follow: other pages")
        told(leader, lost)
        first.close()
        second.report_step(1, b"ops")
        confirmed = other.submit(leader.confirm_step, 1, b"ops", None)
        with suppress(TimeoutError):  # it waits, where the machine lets it come so far
            confirmed.result(0.2)
        third.fail("rank 3 cannot follow: other rows")
        both = (
            "step 1 counts for no rank: rank 1 cannot follow: other pages; rank 3 cannot follow: other rows"
        )
        with pytest.raises(DeviceLostError, match=both):
            confirmed.result(60)


def test_a_step_that_a_follower_ends_twice_or_ahead_is_refused() -> None:
    """The second answer does not take the place of the first; one of a later step stands for none."""
    lost: list[str] = []
    far = 1 << 33  # steps of a month
    with lines(lost, 1, 2) as (leader, (first, second)):
        for follower in (first, second):
            follower.report_step(far, b"ops")
        leader.confirm_step(far, b"ops", 10.0)
        first.report_step(far + 1, b"ops")
        second.report_step(far + 2, b"ops")
        with pytest.raises(ConsistencyError, match=f"got 'the end of step {far + 2}' on rank 2: it ran"):
            leader.confirm_step(far + 1, b"ops", 10.0)
        first.report_step(far + 1, b"others")
        said = f"needs one behind step {far + 1}, got {far + 1}"
        assert told(leader, lost) == f"rank 1 says what cannot be read: a word after a step {said}"


def test_closing_waits_for_no_half_frame() -> None:
    """A follower that stopped in the middle of a word does not keep rank 0; nothing is told after the end."""
    lost: list[str] = []
    with line(lost) as (leader, follower):
        follower._socket.sendall(b"\0\0")
        closing = threading.Thread(target=leader.close, daemon=True)
        closing.start()
        closing.join(10.0)
        assert not closing.is_alive() and lost == []
        leader.close()


def test_closing_wakes_who_waits() -> None:
    """A thread in `receive`, and one in `accept`, raise when their end is closed."""
    errors: list[DeviceLostError] = []

    def waits(wait: object) -> None:
        assert callable(wait)
        try:
            wait()
        except DeviceLostError as error:
            errors.append(error)

    with line([]) as (_, follower):
        receiving = threading.Thread(target=waits, args=(follower.receive,), daemon=True)
        receiving.start()
        follower.close()
        receiving.join(10.0)
    alone = LeaderChannel([1])
    accepting = threading.Thread(
        target=waits, args=(lambda: alone.accept(600.0, lambda why: None),), daemon=True
    )
    accepting.start()
    alone.close()
    accepting.join(10.0)
    assert not receiving.is_alive() and not accepting.is_alive() and len(errors) == 2


def test_the_last_word_reaches_everybody_though_some_hang_up_at_once() -> None:
    """A follower that leaves behind the last word is no loss, and keeps nobody else from hearing it."""
    lost: list[str] = []
    leader = LeaderChannel([1, 2])
    made: list[FollowerChannel] = []
    joining = threading.Thread(
        target=lambda: made.extend(FollowerChannel(r, leader.address, 10.0) for r in (1, 2))
    )
    joining.start()
    leader.accept(10.0, lost.append)
    joining.join()
    second = leader._sockets[2]

    class Late:
        """Rank 2's socket, written to when rank 1 has long gone."""

        def sendall(self, data: bytes) -> None:
            assert made[0].receive(10.0) == b"end"
            made[0].close()
            assert leader._watcher is not None
            leader._watcher.join(0.2)
            second.sendall(data)

        def __getattr__(self, name: str) -> object:
            return getattr(second, name)

    leader._sockets[2] = Late()  # type: ignore[assignment]
    leader.send(b"end", last=True)
    assert made[1].receive(10.0) == b"end"
    assert lost == [] and leader.failure is None
    leader._sockets[2] = second
    made[1].close()
    leader.close()


def test_an_end_in_order_shows_whatever_of_it_was_read() -> None:
    """All of it on the line, or all in the reader's memory and a beat due; not where the line was cut."""
    for reads, is_last in ((False, True), (True, True), (True, False)):
        with line([]) as (leader, follower):
            leader.send(b"step")
            leader.send(b"end", last=is_last)
            if reads:
                assert follower.receive(10.0) == b"step"
            leader._send_heartbeat()
            leader.close()
            follower.wait_for_hang_up()
            assert follower.was_left() is is_last


def test_frames_arrive_whole_whatever_a_read_brings() -> None:
    """Many small ones in one read, one larger than a read, one cut in two by the end of the buffer."""

    def send() -> None:
        for size in sizes:
            leader.send(bytes([size % 251]) * size)

    sizes = [0, 1, 7, 65_530, 3, 1 << 20, 5, 65_532, 65_536, 2] * 3
    with line([]) as (leader, follower):
        sending = threading.Thread(target=send)
        sending.start()
        got = [follower.receive(10.0) for _ in sizes]
        sending.join()
    assert [len(frame) for frame in got] == sizes
    assert all(frame == bytes([n % 251]) * n for frame, n in zip(got, sizes, strict=True))


def test_an_idle_leader_gives_signs_of_life_that_are_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower that waits sees them and goes on waiting; the next frame comes as it was sent."""
    monkeypatch.setattr(broadcast, "_HEARTBEAT_S", 0.01)
    leader, follower = LeaderChannel([1]), None
    try:
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(leader.accept, 30.0, lambda why: None)
            follower = FollowerChannel(1, leader.address, 30.0, 30.0)
            accepted.result()
        assert [follower._frame() for _ in range(3)] == [None] * 3
        leader.send(b"")
        leader.send(b"next")
        assert (follower.receive(), follower.receive(30.0)) == (b"", b"next")
    finally:
        leader.close()
        if follower is not None:
            follower.close()


FROZEN = """
import sys, time
from layerzero.actors.group import channel as broadcast
broadcast._HEARTBEAT_S = 0.01
leader = broadcast.LeaderChannel([1])
print(leader.address.decode(), flush=True)
leader.accept(60.0, lambda why: None)
print("accepted", flush=True)
time.sleep(120)
"""


def test_a_frozen_leader_is_noticed_by_who_waits_for_its_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is under way and no line is cut: what is missing are the signs of life."""
    monkeypatch.setattr(broadcast, "_HEARTBEAT_S", 0.1)
    child = children.Child(FROZEN, folder=tmp_path)
    try:
        said = waiting_for(child, 1)
        follower = FollowerChannel(1, said[0].encode(), 30.0, 0.5)
        waiting_for(child, 2)
        assert follower._frame() is None
        os.kill(child.process.pid, signal.SIGSTOP)
        with pytest.raises(DeviceLostError, match=r"no heartbeat for 0\.5 s: it is frozen, or its host"):
            follower.receive()
        follower.close()
    finally:
        child.process.kill()


def waiting_for(child: children.Child, lines: int) -> list[str]:
    """What a child has printed, once it is so many lines."""
    while len(found := child.out.read_text().splitlines()) < lines:
        assert child.is_alive(), child.err.read_text()
        time.sleep(0.005)
    return found

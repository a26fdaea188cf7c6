"""One device of a cluster works for all: over a real TCPStore, with leaders that are killed or stopped."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from layerzero.actors.remote.stores import TorchStore
from layerzero.sharing.leases import Leases, LeaseStore
from layerzero.sharing.work import CHOICE, SharedWork, digest_of
from tests.children import Child
from tests.sharing.test_work import printed, wait_for, workers

TOKEN = bytes(range(32))
KEY = digest_of("the same question")

_DEVICE = """
import os, sys, time
from pathlib import Path
from layerzero.actors.remote.stores import connect_store
from layerzero.sharing.leases import Leases
folder, port, behave = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def work():
    with (folder / "worked").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    if behave == "hang":
        time.sleep(600)
    time.sleep(0.3)
    return str(os.getpid()).encode()

store = connect_store(("127.0.0.1", port), "test", bytes(range(32)), 60.0)
(folder / f"asks-{os.getpid()}").touch()
body, led = Leases(store, 0.5).once("key", work, reuse=True, wait_s=200.0, poll_s=0.01)
print(body.decode(), led)
"""


@pytest.fixture
def store() -> Iterator[TCPStore]:
    """A store of this process."""
    yield TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


def device(folder: Path, store: TCPStore, behave: str = "answer") -> Child:
    """A process with folders of its own, as on another host, that asks over the store."""
    return Child(_DEVICE, str(folder), str(store.port), behave, folder=folder)


def test_a_leader_that_is_killed_is_replaced_by_one(tmp_path: Path, store: TCPStore) -> None:
    """SIGKILL at its work: after its lease one of those who wait leads, and all take its answer."""
    leader = device(tmp_path, store, "hang")
    wait_for(lambda: bool(workers(tmp_path)))
    others = [device(tmp_path, store) for _ in range(3)]
    wait_for(lambda: len(list(tmp_path.glob("asks-*"))) == 4)
    os.kill(leader.process.pid, signal.SIGKILL)
    answers = [printed(child).split() for child in others]
    assert len(workers(tmp_path)) == 2
    assert {pid for pid, _ in answers} == {str(workers(tmp_path)[1])}
    assert sorted(led for _, led in answers) == ["False", "False", "True"]


def test_a_leader_that_lives_is_waited_for_longer_than_its_lease(store: TCPStore) -> None:
    """Its value changes while it works, so nobody takes its place."""
    one, other = (Leases(TorchStore(store, token=TOKEN), 0.4) for _ in range(2))
    working, done = threading.Event(), threading.Event()
    answers: list[tuple[bytes, bool]] = []

    def slow() -> bytes:
        working.set()
        assert done.wait(60)
        return b"slow"

    def never() -> bytes:
        raise AssertionError("the leader lives")

    def ask(leases: Leases, work: object) -> None:
        answers.append(leases.once(KEY, work, reuse=False, wait_s=100.0, poll_s=0.01))  # type: ignore[arg-type]

    leader = threading.Thread(target=ask, args=(one, slow))
    leader.start()
    assert working.wait(60)
    follower = threading.Thread(target=ask, args=(other, never))
    follower.start()
    follower.join(1.5)  # several leases
    assert not answers
    done.set()
    leader.join()
    follower.join()
    assert sorted(answers) == [(b"slow", False), (b"slow", True)]


def test_a_leader_that_was_replaced_stores_nothing_and_takes_its_successors_answer(store: TCPStore) -> None:
    """Stopped for longer than its lease it comes back to another leader: there is one answer in the end."""
    silent, other = Leases(TorchStore(store), 1e6), Leases(TorchStore(store), 0.2)
    working, done = threading.Event(), threading.Event()
    answers: list[tuple[bytes, bool]] = []

    def stopped() -> bytes:
        working.set()
        assert done.wait(60)
        return b"late"

    def ask() -> None:
        answers.append(silent.once(KEY, stopped, reuse=True, wait_s=100.0, poll_s=0.01))

    first = threading.Thread(target=ask)
    first.start()
    assert working.wait(60)
    assert other.once(KEY, lambda: b"new", reuse=True, wait_s=20.0, poll_s=0.01) == (b"new", True)
    done.set()
    first.join()
    assert answers == [(b"new", False)]
    assert other.once(KEY, lambda: b"x", reuse=True, wait_s=100.0, poll_s=0.01) == (b"new", False)


def test_an_answer_that_was_there_before_is_taken_only_where_it_may_be(store: TCPStore) -> None:
    """A measurement that ended before somebody asked is made again; a choice is not."""
    leases = Leases(TorchStore(store))
    numbers = iter(range(9))

    def work() -> bytes:
        return str(next(numbers)).encode()

    asked = [leases.once(KEY, work, reuse=reuse, wait_s=9.0, poll_s=0.01) for reuse in (False, True, False)]
    assert asked == [(b"0", True), (b"0", False), (b"1", True)]


def test_after_a_failure_the_next_one_leads(store: TCPStore) -> None:
    """The error is its own; the work is anybody's."""
    leases = Leases(TorchStore(store))

    def failing() -> bytes:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        leases.once(KEY, failing, reuse=True, wait_s=9.0, poll_s=0.01)
    assert leases.once(KEY, lambda: b"yes", reuse=True, wait_s=9.0, poll_s=0.01) == (b"yes", True)


class _Broken:
    """A store whose process is gone."""

    def get(self, key: str, timeout_s: float) -> bytes | None:
        raise ConnectionError("gone")

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        raise ConnectionError("gone")


class _Planted(_Broken):
    """A store in which another process has written."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return b'{"leader": 3}'


@pytest.mark.parametrize("bad", [_Broken(), _Planted()])
def test_without_the_store_each_host_works_for_itself(
    bad: LeaseStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The work is done once, here, and the log says that the store is lost."""
    shared, runs = SharedWork(tmp_path), list[int]()
    shared.join(bad)

    def work() -> bytes:
        runs.append(1)
        return b"own"

    assert shared.once(CHOICE, KEY, work) == (b"own", "")
    assert runs == [1] and "sharing.store_lost" in caplog.text


def test_what_another_process_wrote_into_the_store_is_no_answer(tmp_path: Path) -> None:
    """Without the pool's token nothing is read: the value is refused, and the work is done here."""
    raw = HashStore()
    planted = b'{"leader":"x","beat":0,"answer":"ZXZpbA=="}'
    TorchStore(raw).set(f"choice/{KEY}", planted)
    shared = SharedWork(tmp_path)
    shared.join(TorchStore(raw, token=TOKEN))
    assert shared.once(CHOICE._replace(fresh_s=60.0), KEY, lambda: b"own") == (b"own", "")


def test_hosts_of_a_cluster_take_one_anothers_answers(tmp_path: Path, store: TCPStore) -> None:
    """Two folders are two hosts; what one found is kept in the other's, too, for its processes."""
    one, other = SharedWork(tmp_path / "one"), SharedWork(tmp_path / "other")
    for shared in (one, other):
        shared.join(TorchStore(store, token=TOKEN))
    fresh = CHOICE._replace(fresh_s=60.0)
    assert one.once(fresh, KEY, lambda: b"1") == (b"1", "")
    assert other.once(fresh, KEY, lambda: b"2").body == b"1"
    other.join(None)
    assert other.once(fresh, KEY, lambda: b"3").body == b"1"

"""One process works for all that ask the same; real processes, and a leader that is killed at its work."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from layerzero.sharing import work
from layerzero.sharing.work import (
    CHOICE,
    COMPILE,
    MEASURE,
    SharedFailureError,
    SharedWork,
    WorkSpec,
    code_of,
    digest_of,
)
from tests.children import Child
from tests.waiting import EVERY_S, LIMIT_S

WAITED_FOR = WorkSpec("test", wait_s=200.0, poll_s=0.01)
KEY = digest_of("the same question")

_ASKER = """
import os, sys, time
from pathlib import Path
from layerzero.sharing.work import SharedWork, WorkSpec
folder, key, fresh_s, behave = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
wait_s = float(sys.argv[5])

def work():
    with (folder / "worked").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    if behave == "hang":
        time.sleep(600)
    while behave == "slow" and not (folder / "go").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    return b"42"

(folder / f"asks-{os.getpid()}").touch()
sharing = WorkSpec("test", wait_s=wait_s, fresh_s=fresh_s, poll_s=0.01)
answer = SharedWork(folder / "shared").once(sharing, key, work)
print(answer.body.decode(), bool(answer.leader))
"""


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(EVERY_S)


def asker(
    folder: Path, *, key: str = KEY, fresh_s: float = 60.0, behave: str = "answer", wait_s: float = 200.0
) -> Child:
    """A process that asks."""
    return Child(_ASKER, str(folder), key, str(fresh_s), behave, str(wait_s), folder=folder)


def workers(folder: Path) -> list[int]:
    """The processes that did the work, in their order."""
    path = folder / "worked"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def printed(child: Child) -> str:
    done = child.ended()
    assert done.returncode == 0, done.stderr[-800:]
    return done.stdout.strip()


def test_ten_processes_that_ask_at_once_work_once(tmp_path: Path) -> None:
    """One works, nine take its answer; who asks within the time bound later takes it, too."""
    (tmp_path / "shared").mkdir()
    children = [asker(tmp_path) for _ in range(10)]
    assert sorted(map(printed, children)) == ["42 False"] + ["42 True"] * 9
    assert len(workers(tmp_path)) == 1
    assert (
        SharedWork(tmp_path / "shared").once(WAITED_FOR._replace(fresh_s=60.0), KEY, lambda: b"43").body
        == b"42"
    )


def test_a_leader_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """SIGKILL at its work: the next one that waits works, and the others take that answer."""
    (tmp_path / "shared").mkdir()
    leader = asker(tmp_path, behave="hang")
    wait_for(lambda: bool(workers(tmp_path)))
    others = [asker(tmp_path) for _ in range(2)]
    wait_for(lambda: len(list(tmp_path.glob("asks-*"))) == 3)
    assert len(workers(tmp_path)) == 1
    os.kill(leader.process.pid, signal.SIGKILL)
    assert sorted(map(printed, others)) == ["42 False", "42 True"]
    assert len(workers(tmp_path)) == 2


def test_a_leader_that_is_stopped_holds_nobody_up_and_answers_when_it_goes_on(tmp_path: Path) -> None:
    """It holds its lock, which no other process can take: who waits works itself after the bound."""
    (tmp_path / "shared").mkdir()
    leader = asker(tmp_path, behave="slow")
    wait_for(lambda: bool(workers(tmp_path)))
    os.kill(leader.process.pid, signal.SIGSTOP)
    try:
        (tmp_path / "go").touch()
        assert printed(asker(tmp_path, wait_s=0.2)) == "42 False"
        assert not leader.out.read_text()
    finally:
        os.kill(leader.process.pid, signal.SIGCONT)
    assert printed(leader) == "42 False"
    assert len(workers(tmp_path)) == 2
    assert printed(asker(tmp_path)) == "42 True"


def test_an_answer_is_for_its_time_and_its_circumstances(tmp_path: Path) -> None:
    """Too old, of another key, of another boot, damaged or cut short: it is made anew."""
    shared, fresh = SharedWork(tmp_path), CHOICE._replace(fresh_s=60.0)
    assert shared.once(fresh, KEY, lambda: b"1") == (b"1", "")
    assert shared.once(fresh, KEY, lambda: b"2").body == b"1"
    assert shared.once(CHOICE._replace(fresh_s=1e-9), KEY, lambda: b"3") == (b"3", "")
    assert shared.once(MEASURE, KEY, lambda: b"4") == (b"4", "")
    assert shared.once(fresh, digest_of("the same question", "torch 2.14"), lambda: b"5") == (b"5", "")
    path = next(path for path in tmp_path.glob("choice-*") if path.name.endswith(KEY[:40]))
    kept = path.read_bytes()
    for damaged in (kept[:-3], kept[:40] + bytes([kept[40] ^ 1]) + kept[41:], b""):
        path.write_bytes(damaged)
        assert shared.once(fresh, KEY, lambda: b"6") == (b"6", "")
    other = path.with_name(path.name)
    other.write_bytes(
        next(p for p in tmp_path.glob("choice-*") if p != path and p.suffix != ".lock").read_bytes()
    )
    assert shared.once(fresh, KEY, lambda: b"7") == (b"7", "")


def test_a_boot_has_its_name_without_time_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older kernel tells boots apart, too: a host's name alone is the same after the next."""

    def missing(path: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", missing)
    boot = work._boot.__wrapped__()
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip() != socket.gethostname()


def test_an_answer_of_another_boot_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of two runs of a machine cannot be compared."""
    shared, fresh = SharedWork(tmp_path), CHOICE._replace(fresh_s=60.0)
    monkeypatch.setattr("layerzero.sharing.work._boot", lambda: "yesterday")
    shared.once(fresh, KEY, lambda: b"1")
    monkeypatch.undo()
    assert shared.once(fresh, KEY, lambda: b"2") == (b"2", "")


def test_a_leader_that_takes_too_long_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After the bound the work is done here as well, and the log says so."""
    working, done = threading.Event(), threading.Event()

    def slow() -> bytes:
        working.set()
        assert done.wait(60)
        return b"slow"

    shared = SharedWork(tmp_path)
    leader = threading.Thread(target=shared.once, args=(WAITED_FOR, KEY, slow))
    leader.start()
    assert working.wait(60)
    assert shared.once(WAITED_FOR._replace(wait_s=0.05), KEY, lambda: b"own") == (b"own", "")
    done.set()
    leader.join()
    assert "sharing.leader_late" in caplog.text


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What another user may have planted is no answer; the work is done, and the log says why alone."""
    shared, fresh = SharedWork(tmp_path / "shared"), CHOICE._replace(fresh_s=60.0)
    shared.once(fresh, KEY, lambda: b"planted")
    (tmp_path / "shared").chmod(0o777)
    assert shared.once(fresh, KEY, lambda: b"own") == (b"own", "")
    assert shared.once(fresh, KEY, lambda: b"own") == (b"own", "")
    assert caplog.text.count("sharing.folder_unusable") == 1


def test_what_is_made_on_a_host_is_made_once_and_used_by_all(tmp_path: Path) -> None:
    """The first does it alone; later ones do it side by side, without a lock."""
    shared, runs = SharedWork(tmp_path), list[int]()
    for number in range(3):
        shared.before_all(COMPILE, KEY, lambda number=number: runs.append(number))  # type: ignore[misc]
    assert runs == [0, 1, 2]
    lock = next(tmp_path.glob("*.lock"))
    before = lock.stat().st_mtime_ns
    shared.before_all(COMPILE, KEY, lambda: runs.append(3))
    assert runs[-1] == 3 and lock.stat().st_mtime_ns == before


def test_code_is_known_by_what_it_does_and_holds() -> None:
    """Two loads of one name with other code, or another value inside, are two."""

    def loading(folder: str) -> object:
        return lambda: folder

    def other(folder: str) -> object:
        return lambda: folder + "x"

    codes = [code_of(make(folder)) for make in (loading, other) for folder in ("a", "b")]  # type: ignore[arg-type]
    assert len(set(codes)) == 4 and code_of(loading("a")) == codes[0]  # type: ignore[arg-type]


def test_a_failure_reaches_those_who_waited_and_no_one_later(tmp_path: Path) -> None:
    """What does not compile is compiled once for all that wait; the next one tries again."""
    shared, working, go = SharedWork(tmp_path), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def failing() -> bytes:
        working.set()
        assert go.wait(60)
        raise ValueError("no such instruction")

    def ask(work: object) -> None:
        try:
            shared.once(COMPILE, KEY, work)  # type: ignore[arg-type]
        except Exception as error:
            errors.append(error)

    first = threading.Thread(target=ask, args=(failing,))
    first.start()
    assert working.wait(60)
    waiting = threading.Event()
    real = shared._acquire

    def acquire(*args: object) -> object:
        waiting.set()
        return real(*args)  # type: ignore[arg-type]

    shared._acquire = acquire  # type: ignore[method-assign,assignment]
    second = threading.Thread(target=ask, args=(lambda: b"never",))
    second.start()
    assert waiting.wait(60)
    go.set()
    first.join()
    second.join()
    assert [type(error) for error in errors] == [ValueError, SharedFailureError]
    assert "ValueError: no such instruction" in str(errors[1])
    assert SharedWork(tmp_path).once(COMPILE, KEY, lambda: b"43") == (b"43", "")

"""One process measures for all: it is killed at it, and another goes on where it was, into a real PerfDB."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from filelock import FileLock, Timeout
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import layerzero as lz
from layerzero.measure import tuning
from layerzero.measure.calls import Call
from layerzero.measure.tuner import Tuner, TuningResult
from layerzero.measure.tuning import TuneReport, TuningJob
from layerzero.perfdb.store import read_rows
from layerzero.selection.policy.policy import Policy
from layerzero.selection.policy.rules import Layer, make_rule
from layerzero.sharing.work import MEASURE, SHARED, PartialResult, SharedResult, SharedWork
from tests.children import Child
from tests.sharing.test_choices import _job, _norm
from tests.sharing.test_work import KEY, printed, wait_for
from tests.warmup.test_warmup import keep_what_is_compiled

ROWS = (2, 3, 4)
_TUNER = """
import os, sys, threading
from pathlib import Path
import filelock
import layerzero as lz
from layerzero.measure import tuner, tuning
from layerzero.sharing import leases, work
from tests.sharing.test_choices import _job, _norm
from tests.sharing.test_measuring import light_runtime

folder, perfdb, role, port = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
tuning._KEEP_EVERY_S = 0.0  # what was measured is published after each call
acquire, measure = filelock.FileLock.acquire, tuner.Tuner.measure

def acquired(*args, **options):
    try:
        return acquire(*args, **options)
    except filelock.Timeout:
        (folder / f"waits-{os.getpid()}").touch()
        raise

def measured(self, call, seed=0):
    with (folder / "measured").open("a") as file:
        file.write(f"{os.getpid()} {call}\\n")
    return measure(self, call, seed)

def progress(done, total, tuned):
    if role == f"hangs-{done}":
        (folder / "hangs").touch()
        threading.Event().wait(600)

filelock.FileLock.acquire, tuner.Tuner.measure = acquired, measured
runtime = light_runtime(perfdb)
if port:
    from layerzero.actors.remote.stores import connect_store

    store = connect_store(("127.0.0.1", port), "test", bytes(range(32)), 60.0)
    work.SHARED.join(store)
    work.SHARED._leases = leases.Leases(store, 0.5)
    get = store.get

    def seen(*args):
        (folder / f"waits-{os.getpid()}").touch()
        return get(*args)

    store.get = seen
report = _job(runtime, [_norm(rows) for rows in (2, 3, 4)], progress=progress).run()
assert report.calls == 3 and not report.skipped
print(len(report.rows))
runtime.close()
"""


def light_runtime(perfdb: str | None) -> lz.Runtime:
    """A runtime whose kernels load at once."""
    runtime = lz.Runtime(lz.Settings(device="cpu", warm="off", perfdb=perfdb))
    light = ("torch.*", "reference.*")
    runtime.device().set_policy(Policy((make_rule("allow", light, layer=Layer.PROGRAM),)))
    return runtime


def tuner(folder: Path, role: str = "", *, host: str = "here", port: int = 0) -> Child:
    """A process that tunes three norms; a host has a cache folder and a PerfDB of its own."""
    (folder / host).mkdir(exist_ok=True)
    keep_what_is_compiled(folder / host)
    variables = {**os.environ, "XDG_CACHE_HOME": str(folder / host), "LAYERZERO_PERFDB": ""}
    arguments = (str(folder), str(folder / f"{host}.sqlite"), role, str(port))
    return Child(_TUNER, *arguments, folder=folder, variables=variables)


def _run(perfdb: Path | None, sizes: tuple[int, ...] = (2,), progress: Any = None) -> TuneReport:
    """A tuning in this process."""
    runtime = light_runtime(None if perfdb is None else str(perfdb))
    try:
        job: TuningJob = _job(runtime, [_norm(size) for size in sizes], progress=progress)
        return job.run()
    finally:
        runtime.close()


def kill_at_work(folder: Path, leader: Child, others: int) -> None:
    """SIGKILL, once so many others have seen that it leads."""
    wait_for(lambda: len(list(folder.glob("waits-*"))) == others)
    os.kill(leader.process.pid, signal.SIGKILL)


def measured_by(folder: Path) -> list[tuple[int, str]]:
    """Which process measured which call, in their order."""
    pairs = [line.split(" ", 1) for line in (folder / "measured").read_text().splitlines()]
    return [(int(pid), call) for pid, call in pairs]


def kept(path: Path) -> Counter[tuple[int, str]]:
    """How many rows the PerfDB has of each size and kernel."""
    return Counter((dict(row.case.dims)["N"], row.kernel) for row in read_rows(path))


def test_a_leader_that_is_killed_while_it_measures_is_replaced_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that wait one measures what is missing, the other has its answer; no row is there twice."""
    leader = tuner(tmp_path, "hangs-2")  # with one call published and another one measured
    wait_for((tmp_path / "hangs").exists)
    of_leader = kept(tmp_path / "here.sqlite")
    assert {size for size, _ in of_leader} == {2}
    other, measured = tuner(tmp_path), list[str]()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    monkeypatch.setattr(Tuner, "measure", _counted(measured))
    reports: list[TuneReport] = []
    here = threading.Thread(target=lambda: reports.append(_run(tmp_path / "here.sqlite", ROWS)))
    monkeypatch.setattr(FileLock, "acquire", _noted(tmp_path / "waits-here"))
    here.start()
    kill_at_work(tmp_path, leader, 2)
    here.join()
    after = kept(tmp_path / "here.sqlite")
    assert printed(other) == str(len(reports[0].rows)) == str(len(after))
    assert set(after.values()) == {1} and {size for size, _ in after} == set(ROWS)
    assert of_leader.items() <= after.items()
    of_other = [call for pid, call in measured_by(tmp_path) if pid == other.process.pid]
    assert sorted((measured, of_other), key=len) == [[], [str(_norm(size)) for size in ROWS[1:]]]
    assert not list((tmp_path / "here" / "layerzero" / "shared").glob("*.part"))


def _counted(measured: list[str]) -> Callable[..., Any]:
    measure = Tuner.measure

    def counted(self: Tuner, call: Call, seed: int = 0) -> list[TuningResult]:
        measured.append(str(call))
        return measure(self, call, seed)

    return counted


def _noted(waits: Path) -> Callable[..., Any]:
    acquire = FileLock.acquire

    def noted(self: FileLock, *args: Any, **options: Any) -> Any:
        try:
            return acquire(self, *args, **options)
        except Timeout:
            waits.touch()
            raise

    return noted


def test_rows_that_a_killed_leader_had_not_written_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between its note and the PerfDB, or after both: nothing is measured again."""
    path = tmp_path / "perfdb.sqlite"
    made = [[tuned] for tuned in _run(path).tuned]
    monkeypatch.setattr(Tuner, "measure", lambda *_: pytest.fail("it was measured"))

    def taken_over(*asked: Any) -> SharedResult:
        asked[3].begun = msgspec.json.encode(made)
        return SharedResult(asked[2]())

    monkeypatch.setattr(SHARED, "once", taken_over)
    for written in (True, False):
        if not written:
            path.unlink()
        report = _run(path)
        assert report.path == str(path) and set(read_rows(path)) == set(report.rows) != set()
        assert set(kept(path).values()) == {1}


def test_a_draft_is_for_those_who_waited_and_ends_with_the_answer(tmp_path: Path) -> None:
    """Who asks after a leader died begins anew, and what the dead one had is gone."""
    shared, draft = SharedWork(tmp_path), PartialResult()

    def dies() -> bytes:
        draft.keep(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shared.once(MEASURE, KEY, dies, draft)
    (part,) = tmp_path.glob("*.part")
    assert b"half" in part.read_bytes()
    late = PartialResult()
    assert shared.once(MEASURE, KEY, lambda: late.begun or b"anew", late).body == b"anew"
    assert not part.exists()


@pytest.mark.slow
def test_a_leader_of_another_host_that_is_killed_is_replaced_by_one(tmp_path: Path) -> None:
    """Over a real store: one of two other hosts measures all, and both PerfDBs have each row once."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    leader = tuner(tmp_path, "hangs-2", host="first", port=store.port)
    wait_for((tmp_path / "hangs").exists)
    others = [tuner(tmp_path, host=host, port=store.port) for host in ("second", "third")]
    kill_at_work(tmp_path, leader, 2)
    rows = set(map(printed, others))
    for host in ("second", "third"):
        after = kept(tmp_path / f"{host}.sqlite")
        assert set(after.values()) == {1} and rows == {str(len(after))}
    assert {size for size, _ in kept(tmp_path / "first.sqlite")} == {2}
    pids = [pid for pid, _ in measured_by(tmp_path)][2:]
    assert len(pids) == 3 and len(set(pids)) == 1


def test_what_another_host_measured_is_kept_here_under_the_same_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file has our file's name and is not our file: the rows are written here, and once."""
    keep_what_is_compiled(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "perfdb.sqlite"
    there = _run(path)
    path.unlink()
    answer = SharedResult(msgspec.json.encode(there), "another device of the cluster")
    monkeypatch.setattr(SHARED, "once", lambda *_, **__: answer)
    for _ in range(2):
        assert _run(path).rows == there.rows and set(read_rows(path)) == set(there.rows)
        assert set(kept(path).values()) == {1}


def test_what_is_cut_short_by_the_end_of_a_process_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that is told to end has its own part of the report; who waited is not told that it is all."""
    keep_what_is_compiled(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ending = threading.Event()
    monkeypatch.setattr(tuning, "ENDING", ending)
    assert _run(None, ROWS, progress=lambda *_: ending.set()).skipped == 2
    left = {path.suffix for path in (tmp_path / "layerzero" / "shared").glob("measure-*")}
    assert ".lock" in left and "" not in left

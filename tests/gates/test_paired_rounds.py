"""Two processes timed in turn: what they measure, and what they say of calls that do not run."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerzero.gates import pace_worker, paired_rounds
from layerzero.gates.paired_rounds import (
    PacedCall,
    PaceProcess,
    PairedResult,
    compare_paces,
    tree_of,
)
from layerzero.gates.stages import confirm
from layerzero.spec.errors import ConfigurationError, FileRefusedError
from tests.popen import Forking

ROOT = Path(__file__).resolve().parents[2]
CALL = PacedCall("rms_norm x=4x64:float32 weight=64:float32")
SLOW = """

def __getattr__(name):
    import time

    function = _blocking(_table.get(name))
    def slow(**arguments):
        time.sleep(0.002)  # longer than another process holds the core of the tree beside it
        return function(**arguments)
    globals()[name] = slow
    return slow
"""


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> Forking:
    """What is timed finds torch imported."""
    forking = Forking()
    monkeypatch.setattr(paired_rounds, "subprocess", forking)
    return forking


def test_a_tree_that_is_far_slower_is_found(tmp_path: Path) -> None:
    """Each process measures the tree that it is given: a copy that waits in every call is slower."""
    tree = tmp_path / "slow"
    shutil.copytree(ROOT / "layerzero", tree / "layerzero")
    with (tree / "layerzero" / "sync.py").open("a") as file:
        file.write(SLOW)
    found = compare_paces(CALL, ROOT, tree, slower=0.05)
    assert found.answer == "slower" and found.ratio > 5 and found.why == "100 of 100 rounds above"


SOON, LATE, UNSURE = "as fast", "slower", "undecided"


@pytest.mark.parametrize(
    ("came", "counts"),
    [
        ((SOON,), SOON),
        ((UNSURE, SOON), SOON),
        ((UNSURE, UNSURE), UNSURE),
        ((LATE, LATE), LATE),
        ((UNSURE, LATE, LATE), LATE),
        ((LATE, UNSURE, LATE), LATE),
        ((LATE, SOON, LATE), LATE),
        ((LATE, SOON, SOON), SOON),
        ((UNSURE, LATE, UNSURE), UNSURE),
        ((LATE, UNSURE, UNSURE), UNSURE),
        ((UNSURE, LATE, SOON), UNSURE),
        ((LATE, UNSURE, SOON), UNSURE),
        ((LATE, SOON, UNSURE), UNSURE),
    ],
)
def test_an_answer_counts_that_fresh_processes_give_twice(came: tuple[Any, ...], counts: str) -> None:
    """Those that are asked are these and no more; "as fast" needs no second if nothing spoke against it."""
    queue = list(came)
    result = confirm(lambda: PairedResult(str(CALL), queue.pop(0), 800, 1.04, "by rounds"))
    assert result.answer == counts and queue == []
    assert (came.count(came[-1]) < 2 and LATE in came) == (", ".join(came) in result.why)


def repository(folder: Path) -> str:
    """A repository whose one commit has a tree of the library in `part`; the commit."""
    (folder / "part" / "layerzero").mkdir(parents=True)
    (folder / "part" / "layerzero" / "__init__.py").write_text("then = True\n")
    who = ("-c", "user.name=ann", "-c", "user.email=ann@example.org", "-c", "commit.gpgsign=false")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "The release")):
        subprocess.run(["git", *words], cwd=folder, check=True)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    )
    return head.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="a revision is one of git")
def test_a_revision_is_copied_and_named(tmp_path: Path) -> None:
    """The tree has what the commit had, by whatever name; it is gone after, the repository is as it was."""
    commit = repository(tmp_path)
    (tmp_path / "part" / "layerzero" / "__init__.py").write_text("now = True\n")
    for name in (commit, commit[:9], "HEAD"):
        with tree_of(f"git:{name}", tmp_path / "part", ROOT) as (tree, said):
            assert (tree / "layerzero" / "__init__.py").read_text() == "then = True\n"
            assert commit[:7] in said and "The release" in said
        assert not tree.exists()
    assert [path.name for path in tmp_path.iterdir() if path.name != ".git"] == ["part"]
    assert (tmp_path / "part" / "layerzero" / "__init__.py").read_text() == "now = True\n"


@pytest.mark.skipif(shutil.which("git") is None, reason="a revision is one of git")
@pytest.mark.parametrize("against", ["git:", "git:nowhere", "git:--output=x", "git:HEAD:part", "git:HEAD^7"])
def test_a_revision_that_is_none_is_refused(tmp_path: Path, against: str) -> None:
    """Neither an option nor a path is taken for one; git's own words are in the error."""
    repository(tmp_path)
    with pytest.raises(FileRefusedError, match="GATE_TREE") as caught, tree_of(against, tmp_path, ROOT):
        pass
    assert against in str(caught.value) and not (tmp_path / "x").exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="a revision is one of git")
def test_a_revision_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    """A link out of the tree is not followed; the gate says so as of any other tree that is none."""
    (tmp_path / "outside").symlink_to("/etc/hostname")
    repository(tmp_path)
    with (
        pytest.raises(FileRefusedError, match=r"git:HEAD: GATE_TREE: .*'outside' is a link"),
        tree_of("git:HEAD", tmp_path, ROOT),
    ):
        pass


def test_what_is_no_other_tree_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without the library, no repository, no git, the judged tree itself."""
    cases = {"part": "a tree with layerzero/", str(ROOT): "another tree than", "git:HEAD": "needs a commit"}
    for against, said in cases.items():
        with pytest.raises(FileRefusedError, match=f"GATE_TREE.*{said}"), tree_of(against, tmp_path, ROOT):
            pass
    monkeypatch.setenv("PATH", "")
    with (
        pytest.raises(FileRefusedError, match=r"GATE_TREE.*the program git"),
        tree_of("git:a", tmp_path, ROOT),
    ):
        pass


def test_a_process_that_imports_another_tree_is_not_timed(tmp_path: Path) -> None:
    """What is first on the path may not be what is imported: the numbers would be another tree's."""
    with (
        PaceProcess(CALL, tree=tmp_path) as process,
        pytest.raises(FileRefusedError, match=r"GATE_TREE.*it imports"),
    ):
        process.start()


class _Disturbed(PaceProcess):
    """A call of ten microseconds, in a process that loses its core for five milliseconds at some blocks."""

    def __init__(self, lost: set[int]) -> None:
        self._calls, self._order, self._lost, self._blocks, self.tree = 1, {}, lost, 0, None

    def block(self) -> int:
        self._blocks += 1
        return self._calls * 10_000 + 5_000_000 * (self._blocks in self._lost)

    def _write(self, line: str) -> None:
        pass

    def _read(self) -> str:
        return "{}"


@pytest.mark.parametrize("lost", [set[int](), {1}, {1, 3, 7}, set(range(1, 99, 2))])
def test_a_block_that_lost_the_core_is_not_taken_for_a_full_one(lost: set[int]) -> None:
    """Else blocks are of one call, cold each time: an unchanged tree seemed many times as slow."""
    process = _Disturbed(lost)
    process.start()
    assert process._calls >= 40


def test_a_call_whose_kernel_is_never_ready_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that it would be timed with is not the one that will run."""
    monkeypatch.setattr(pace_worker, "STEADY_S", 0.05)
    loading = SimpleNamespace(last_selection=lambda: SimpleNamespace(when_warm="a kernel"))
    with pytest.raises(SystemExit, match="still loading"):
        pace_worker.wait_until_steady(loading, lambda calls: None)
    ready = SimpleNamespace(last_selection=lambda: SimpleNamespace(when_warm=None))
    pace_worker.wait_until_steady(ready, lambda calls: None)


def test_a_call_is_timed_once_the_compiled_path_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a tree whose C++ has changed is timed in Python, while it compiles on the same core."""
    loaded: list[int] = []
    native = SimpleNamespace(FAST_PATH=SimpleNamespace(try_load=lambda: loaded.append(1)))
    ready = SimpleNamespace(last_selection=lambda: None)
    for module in (native, SimpleNamespace(), None):
        monkeypatch.setitem(sys.modules, "layerzero.native", module)
        pace_worker.wait_until_steady(ready, lambda calls: None)
    assert loaded == [1]


def test_awaited_calls_are_timed_too() -> None:
    """Callers that await together answer in nanoseconds a block: of the op, and of plain torch beside it."""
    for anchor in (False, True):
        with PaceProcess(PacedCall(CALL.call, callers=4), anchor=anchor) as awaited:
            awaited.start()
            assert awaited.block() > 0


def test_the_yardstick_of_awaited_calls_is_awaited_too() -> None:
    """All callers wait at once, and another thread runs torch for them: once a round."""
    threads: list[str] = []
    waiting: list[int] = []

    def call() -> None:
        threads.append(threading.current_thread().name)
        waiting.append(len(asyncio.all_tasks(loop)))

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        pace_worker.awaited_anchor(call, 50, loop)(3)
    assert len(threads) == 3 and threading.current_thread().name not in threads
    assert min(waiting) >= 50


def test_a_call_that_does_not_run_is_named() -> None:
    """An argument that the op has not: the call, and what the process said."""
    words = "rms_norm y=1x8:float32"
    with (
        PaceProcess(PacedCall(words)) as process,
        pytest.raises(ConfigurationError, match="calls needs calls that run") as caught,
    ):
        process.start()
    assert words in str(caught.value) and "TypeError" in str(caught.value)


def test_a_process_that_says_much_is_waited_for(monkeypatch: pytest.MonkeyPatch, forks: Forking) -> None:
    """What it prints beside its answers, more than a pipe holds, stops nothing: a new interpreter says it."""
    forks.fresh = True
    monkeypatch.setenv("PYTHONVERBOSE", "1")
    with PaceProcess(PacedCall(CALL.call)) as process:
        process.start()
        assert process.block() > 0

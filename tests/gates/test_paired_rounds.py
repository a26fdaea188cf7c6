"""Two processes timed in turn: what they measure, and what they say of calls that do not run."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from layerzero.gates import pace_worker
from layerzero.gates.paired_rounds import PacedCall, PaceProcess, compare_paces
from layerzero.gates.stages import confirm
from layerzero.spec.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
CALL = PacedCall("rms_norm x=4x64:float32 weight=64:float32")
SLOW = """

def __getattr__(name):
    import time

    function = _blocking(_table.get(name))
    def slow(**arguments):
        time.sleep(0.0001)
        return function(**arguments)
    globals()[name] = slow
    return slow
"""


def test_a_tree_that_is_far_slower_is_found(tmp_path: Path) -> None:
    """Each process measures the tree that it is given: a copy that waits in every call is slower."""
    tree = tmp_path / "slow"
    shutil.copytree(ROOT / "layerzero", tree / "layerzero", ignore=shutil.ignore_patterns("__pycache__"))
    with (tree / "layerzero" / "sync.py").open("a") as file:
        file.write(SLOW)
    found = compare_paces(CALL, ROOT, tree, slower=0.05)
    assert found.answer == "slower" and found.ratio > 5 and found.why == "100 of 100 rounds above"


def test_a_slow_answer_is_asked_again() -> None:
    """One that is not "as fast" counts only if fresh processes say so as well."""
    asked: list[int] = []

    def measure(*answers: str) -> str:
        queue = list(answers)
        asked.clear()

        def once() -> object:
            asked.append(1)
            return type("Result", (), {"answer": queue.pop(0)})()

        return confirm(once).answer  # type: ignore[arg-type]

    assert measure("as fast") == "as fast" and len(asked) == 1
    assert measure("slower", "as fast") == "as fast" and len(asked) == 2
    assert measure("slower", "slower") == "slower"


class _Disturbed(PaceProcess):
    """A call of ten microseconds, in a process that loses its core for five milliseconds at some blocks."""

    def __init__(self, lost: set[int]) -> None:
        self._calls, self._order, self._lost, self._blocks = 1, {}, lost, 0

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


def test_a_process_that_says_much_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prints beside its answers, more than a pipe holds, stops nothing."""
    monkeypatch.setenv("PYTHONVERBOSE", "1")
    with PaceProcess(PacedCall(CALL.call)) as process:
        process.start()
        assert process.block() > 0

"""`lz.tune` and `lz.record`: choices follow what was measured, here and in the next process."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.api.tune import tune, tune_blocking
from layerzero.measure.calls import Call
from layerzero.measure.compare import WinnerChange, winner_changes
from layerzero.measure.shapes import norm
from layerzero.measure.tuner import TuningResult, pick_winner
from layerzero.measure.tuning import TuneReport
from layerzero.ops import table as ops_table
from layerzero.perfdb.store import read_rows
from layerzero.runtime import Runtime, install, uninstall
from layerzero.scheduler.single_flight import SingleFlight
from layerzero.selection.context import SelectionOptions
from layerzero.selection.cost.measured import MeasuredCosts
from layerzero.selection.decide import roofline_cost
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.kernel import Kernel
from tests.kernels import kernel
from tests.waiting import LIMIT_S

CALL = norm("rms_norm", 16, 64, "float32")
X, WEIGHT = torch.randn(16, 64), torch.randn(64)
REFERENCE = ops_table.get("rms_norm").reference


class Ticks:
    """A clock that only kernels move, so that no neighbour on this machine decides a test."""

    ns = 0

    def perf_counter_ns(self) -> int:
        Ticks.ns += 50
        return Ticks.ns

    def perf_counter(self) -> float:
        return self.perf_counter_ns() / 1e9


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing reads the tests' clock."""
    monkeypatch.setattr("layerzero.measure.timing.time", Ticks())


def taking(us: float, wrong: float = 1.0) -> Callable[..., torch.Tensor]:
    """The reference times `wrong`, in so many microseconds of the tests' clock."""

    def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        Ticks.ns += int(us * 1000)
        out: torch.Tensor = REFERENCE(x, weight, eps) * wrong
        return out

    return run


def kernels() -> list[Kernel]:
    """One that estimates prefer and is slow, one that is quick, one that is quickest and wrong."""
    return [
        kernel("claims.rms_norm", taking(900.0), launch_us=0.1),
        kernel("quick.rms_norm", taking(100.0), launch_us=50.0),
        kernel("wrong.rms_norm", taking(0.0, wrong=1.01), launch_us=60.0),
    ]


def runtime(path: Path | None, made: list[Kernel] | None = None) -> Runtime:
    settings = lz.Settings(perfdb=str(path) if path else None, shipped_tables=False, warm="off")
    opened = Runtime(settings, kernels=lambda: made or kernels())
    opened.started = True
    return opened


@pytest.fixture
def installed(tmp_path: Path) -> Any:
    """A runtime with the three kernels and a file of measurements, the process's for one test."""
    opened = runtime(tmp_path / "perf.sqlite")
    install(opened)
    yield opened
    uninstall(opened)
    opened.close()


@pytest.mark.asyncio
async def test_tuning_changes_the_choice_here_and_in_the_next_process(
    installed: Runtime, tmp_path: Path
) -> None:
    """The kernel that measures as faster takes over, explained as measured; a later runtime reads it."""
    assert lz.which("rms_norm", X, WEIGHT) == "claims.rms_norm"
    seen: list[tuple[int, int]] = []
    report = await tune([CALL], progress=lambda done, total, _: seen.append((done, total)))
    assert lz.which("rms_norm", X, WEIGHT) == "quick.rms_norm"
    explained = str(lz.explain("rms_norm", X, WEIGHT))
    assert "us measured" in explained and "wrong.rms_norm" in explained
    assert seen == [(1, 1)] and report.path == str(tmp_path / "perf.sqlite")
    rows = await asyncio.to_thread(read_rows, str(report.path))
    assert {r.kernel for r in rows} == {"claims.rms_norm", "quick.rms_norm"}

    def again() -> list[set[str]]:
        with runtime(tmp_path / "perf.sqlite") as later:
            costs = later.device("cpu").costs
            assert isinstance(costs, MeasuredCosts)
            return [set(times) for _, times in costs.measured_buckets("rms_norm")]

    assert await asyncio.to_thread(again) == [{"claims.rms_norm", "quick.rms_norm"}]


@pytest.mark.asyncio
async def test_a_wrong_kernel_is_never_timed(installed: Runtime) -> None:
    """Numbers come before speed: one part in a hundred is refused, with by how much."""
    report = await tune([CALL])
    assert "wrong.rms_norm" not in report.tuned[0].times_us
    assert "wrong: output 0" in report.failures["wrong.rms_norm"]


def test_the_loop_stays_free_while_tuning(installed: Runtime) -> None:
    """Measuring happens on another thread: the event loop's turns go on."""

    async def main() -> tuple[TuneReport, int]:
        turns = 0
        task = asyncio.ensure_future(tune([CALL, norm("rms_norm", 8, 64, "float32")]))
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        return await task, turns

    report, turns = asyncio.run(main())
    assert report.calls == 2 and turns >= 3


@pytest.mark.asyncio
async def test_callers_who_ask_for_the_same_share_one_tuning(installed: Runtime) -> None:
    """Ten awaits and a thread, one measuring; a caller that leaves does not take it along."""
    begun: list[int] = []
    all_here = threading.Event()

    def measured(done: int, *_: object) -> None:
        begun.append(done)
        all_here.wait(30)  # nobody comes too late to share it

    lost = asyncio.ensure_future(tune([CALL], progress=measured))
    await asyncio.sleep(0)
    others = [asyncio.ensure_future(tune([CALL])) for _ in range(10)]
    blocking: list[TuneReport] = []
    thread = threading.Thread(target=lambda: blocking.append(tune_blocking([CALL])))
    thread.start()
    await asyncio.sleep(0.3)
    lost.cancel()
    all_here.set()
    reports = await asyncio.gather(*others)
    await asyncio.to_thread(thread.join)
    assert len({id(report) for report in [*reports, *blocking]}) == 1 and begun == [1]


def test_a_recorded_run_is_what_gets_tuned(installed: Runtime, tmp_path: Path) -> None:
    """Distinct calls with their counts, in the order of frequency; nothing is left around later calls."""
    lz.sync.rms_norm(X, WEIGHT)
    with lz.record() as seen:
        for _ in range(3):
            lz.sync.rms_norm(X, WEIGHT)
        lz.sync.rms_norm(X[:4], WEIGHT)
    lz.sync.rms_norm(X[:2], WEIGHT)
    workload = seen.save(tmp_path / "trace.json")
    assert [(c.count, c.make()[0].shape[0]) for c in workload.calls] == [(3, 16), (1, 4)]
    report = tune_blocking(tmp_path / "trace.json", quick=True)
    assert report.calls == 2 and len(report.rows) == 4


@pytest.mark.asyncio
async def test_batches_are_recorded_as_they_ran() -> None:
    """What a batcher merged is one call of many rows."""
    async with lz.start(lz.Settings(perfdb=None), scoped=True):
        with lz.record() as seen:
            await asyncio.gather(*[lz.rms_norm(X, WEIGHT) for _ in range(8)])
        rows = sorted(c.make()[0].shape[0] * c.count for c in seen.workload().calls)
        assert sum(rows) == 8 * 16 and max(c.make()[0].shape[0] for c in seen.workload().calls) > 16


def test_a_budget_ends_it_and_says_so(installed: Runtime) -> None:
    """Calls that had no time left are counted; what was measured counts."""
    calls = [norm("rms_norm", n, 64, "float32") for n in range(1, 200)]
    report = tune_blocking(calls, quick=True, budget_s=0.02)
    assert report.calls + report.skipped == 199 and report.skipped > 0 and report.rows


def test_two_tunes_name_the_same_winners_outside_the_band() -> None:
    """Noise inside the band is settled by the fixed order; a winner beyond it is the same in both."""
    made = {k.id: k for k in kernels()[:2]}
    knobs = SelectionOptions()
    assert pick_winner({"claims.rms_norm": 10.0, "quick.rms_norm": 10.2}, made, knobs)[0] == "claims.rms_norm"
    assert pick_winner({"claims.rms_norm": 10.2, "quick.rms_norm": 10.0}, made, knobs)[0] == "claims.rms_norm"
    assert pick_winner({"claims.rms_norm": 20.0, "quick.rms_norm": 10.0}, made, knobs)[0] == "quick.rms_norm"

    def tuned(winner: str, *tied: str) -> TuningResult:
        return TuningResult(call="c", op="rms_norm", launch="eager", winner=winner, tied=tied)

    near = winner_changes([tuned("a", "a", "b")], [tuned("b", "a", "b")])
    apart = winner_changes([tuned("a", "a")], [tuned("b", "b")])
    assert near == (1, (WinnerChange("c", "eager", "a", "b", False),))
    assert apart == (1, (WinnerChange("c", "eager", "a", "b", True),))
    assert winner_changes([tuned("a", "a")], [tuned("a", "a")]) == (1, ())


def test_repeated_tuning_reports_its_flip_rate(installed: Runtime) -> None:
    """Measured twice, the clear winner wins twice."""
    report = tune_blocking([CALL], repeat=2)
    assert (report.compared, report.flipped, report.flipped_outside) == (1, 0, 0)


def test_rounds_of_a_call_lie_apart_and_a_third_one_settles() -> None:
    """All calls are measured before any is measured again; of three tunes that disagree the median counts."""
    ran: list[int] = []

    def fickle(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not ran or ran[-1] != x.shape[0]:
            ran.append(x.shape[0])
        slow = ran.count(32) == 2 and x.shape[0] == 32
        return taking(900.0 if slow else 100.0)(x, weight, eps)

    calls = [norm("rms_norm", rows, 64, "float32") for rows in (16, 32, 64)]
    opened = runtime(None, [kernel("fickle.rms_norm", fickle), kernel("steady.rms_norm", taking(300.0))])
    install(opened)
    try:
        report = tune_blocking(calls, repeat=2)
        assert ran == [16, 32, 64, 16, 32, 64, 32]
        assert (report.flipped, report.flipped_outside, report.thirds) == (1, 1, 1)
        assert (report.calls, len(report.tuned)) == (3, 7)
        chosen = lz.select("rms_norm", torch.randn(32, 64), WEIGHT)
        assert chosen.kernel == "fickle.rms_norm"
    finally:
        uninstall(opened)
        opened.close()


def test_a_slow_call_leaves_no_time_for_second_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that compiles for longer than there is time is measured once; nothing is measured again."""
    ticks = SimpleNamespace(monotonic=lambda: Ticks.ns / 1e9)
    monkeypatch.setattr("layerzero.measure.tuning.time", ticks)
    ran: list[int] = []

    def compiles(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.shape[0] not in ran:
            ran.append(x.shape[0])
            Ticks.ns += 10**10 if x.shape[0] == 32 else 0
        return taking(100.0)(x, weight, eps)

    opened = runtime(None, [kernel("compiles.rms_norm", compiles), kernel("steady.rms_norm", taking(300.0))])
    install(opened)
    try:
        calls = [norm("rms_norm", rows, 64, "float32") for rows in (16, 32, 64)]
        report = tune_blocking(calls, repeat=2, budget_s=5.0)
    finally:
        uninstall(opened)
        opened.close()
    assert ran == [16, 32] and (report.calls, report.skipped, report.compared) == (2, 1, 0)
    assert 10.0 < report.seconds < 11.0


def test_what_cannot_be_tuned_is_told(installed: Runtime) -> None:
    """A call that the op refuses is no crash: the report names why, and the others are measured."""
    wrong = Call("rms_norm", {**CALL.args, "eps": -1.0})
    report = tune_blocking([wrong, CALL])
    assert "eps" in report.failures["call"] and report.rows
    with pytest.raises(ValueError, match="repeat needs 1 or 2, got 3"):
        tune_blocking([CALL], repeat=3)
    with pytest.raises(TypeError, match="tune\\(\\) has no argument 'speed'"):
        tune_blocking([CALL], speed=1)  # type: ignore[call-arg]


def test_a_file_that_cannot_be_written_is_told_before_measuring(tmp_path: Path) -> None:
    """A file where a folder has to be: refused by the setting's name, and no kernel has run."""
    (tmp_path / "file").touch()
    opened = runtime(tmp_path / "file" / "perf.sqlite")
    install(opened)
    before = Ticks.ns
    try:
        with pytest.raises(ConfigurationError, match=r"perfdb needs .* got .*perf\.sqlite"):
            tune_blocking([CALL])
        assert Ticks.ns == before
    finally:
        uninstall(opened)
        opened.close()


def test_another_programs_file_is_told_before_measuring(tmp_path: Path) -> None:
    """A sound database that is not ours: refused by the setting's name, and left as it is."""
    path = tmp_path / "perf.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
    connection.close()
    before = path.read_bytes()
    opened = runtime(path)
    install(opened)
    try:
        with pytest.raises(ConfigurationError, match=r"perfdb needs .* written by another program"):
            tune_blocking([CALL])
    finally:
        uninstall(opened)
        opened.close()
    assert path.read_bytes() == before


def test_without_a_file_the_process_remembers() -> None:
    """`perfdb=None`: choices follow the measurements all the same, and nothing is written."""
    opened = runtime(None)
    install(opened)
    try:
        assert tune_blocking([CALL]).path is None
        assert lz.which("rms_norm", X, WEIGHT) == "quick.rms_norm"
        tune_blocking([norm("rms_norm", 256, 64, "float32")], quick=True)
        assert lz.which("rms_norm", X, WEIGHT) == "quick.rms_norm"
    finally:
        uninstall(opened)
        opened.close()


def test_a_new_version_of_a_library_starts_anew(installed: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of another version of a kernel's library do not count, and that is logged."""
    tune_blocking([CALL])
    monkeypatch.setattr("layerzero.perfdb.versions_of", lambda kernel: "upgraded 2.0")
    with runtime(Path(str(installed.settings.perfdb))) as later:
        assert later.device("cpu").costs is roofline_cost


def test_the_last_caller_to_leave_takes_back_what_has_not_started(
    installed: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that is cancelled before the measuring began ends at once, and nothing is left on its way."""
    flights: SingleFlight[TuneReport] = SingleFlight(lambda run: None)
    monkeypatch.setattr("layerzero.api.tune._FLIGHTS", flights)

    async def give_up() -> None:
        task = asyncio.create_task(tune([CALL], quick=True))
        while not any(vars(f.future)["_done_callbacks"] for f in flights._flights.values()):  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    caller = threading.Thread(target=lambda: asyncio.run(give_up()), daemon=True)
    caller.start()
    caller.join(LIMIT_S)
    assert not caller.is_alive() and len(flights) == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ops": "rms_norm"}, r"ops needs a list of names, got 'rms_norm': write \['rms_norm'\]"),
        ({"launches": ["egaer"]}, r"launches needs 'eager' and 'graph', or one of them, got \['egaer'\]"),
        ({"launches": "eager"}, "launches needs 'eager' and 'graph', or one of them, got 'eager'"),
        ({"budget_s": -1}, "budget_s needs a number > 0, got -1"),
        ({"budget_s": float("nan")}, "budget_s needs a number > 0, got nan"),
        ({"workload": 3}, "workload needs a recorded workload, its file, or calls, got int"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_measured(given: dict[str, Any], said: str) -> None:
    """A launch of no kind was timed under its name, and an op's name was read letter by letter."""
    with lz.start(scoped=True), pytest.raises((ValueError, TypeError), match=said):
        tune_blocking(**{"workload": [CALL], **given})

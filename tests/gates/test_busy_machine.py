"""Baselines of busy and of quiet machines, by a clock that is made up: no wrong pass and no wrong alarm."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

import layerzero as lz
from layerzero.gates import paired_rounds
from layerzero.gates.baseline import (
    BaselineRefusedError,
    judge_call,
    measure_baseline,
    measure_call,
    write_baseline,
)
from layerzero.gates.outcome import GateReport, StageOutcome
from layerzero.gates.paired_rounds import PacedCall
from layerzero.gates.release_file import PerformanceStage
from layerzero.gates.stages import StageRunner
from layerzero.perfdb.record import Environment
from tests.perfdb.rows import HERE

Load = dict[str, bool]
AWAITED = PacedCall("rms_norm x=1x512:float32", callers=64)
PLAIN = PacedCall("rms_norm x=16x512:float32")
SLOWER, ROUNDS, MOMENTS = 0.15, 96, 16


class Machine:
    """Microseconds of the processes that a gate times: work, and turns of threads that wait for a core."""

    def __init__(self) -> None:
        self.draw = random.Random(7)
        self.slowdown = 1.0
        self.set_load(busy=False)

    def set_load(self, *, busy: bool, evenly: bool = False) -> None:
        """Another moment: how long a waking thread waits, how bursty it is, at what speed; or `evenly`."""
        self.busy = busy
        if evenly:
            self.busy, self.wait_us, self.bursts, self.speed = False, self.draw.uniform(40, 900), 0.0, 1.0
            return
        self.wait_us = self.draw.uniform(20, 900) if busy else 5.0
        self.bursts = self.draw.uniform(0.1, 0.5) if busy else 0.01
        self.speed = self.draw.uniform(1.0, 2.5) if busy else self.draw.uniform(0.95, 1.05)

    def block_us(self, work_us: float, wakes: int) -> float:
        """One call: its work at today's speed, its wakes, and what else had the core."""
        if self.busy:
            self.wait_us = min(max(self.wait_us * self.draw.uniform(0.97, 1.031), 5.0), 2000.0)
            self.speed = min(max(self.speed * self.draw.uniform(0.99, 1.0102), 1.0), 3.0)
        width = 0.5 if self.busy else 0.05
        waits = sum(self.wait_us * self.draw.uniform(1 - width, 1 + width) for _ in range(wakes))
        burst = work_us * self.draw.expovariate(1.0) if self.draw.random() < self.bursts else 0.0
        return self.speed * work_us * (1 + abs(self.draw.gauss(0, 0.02))) + waits + burst


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine in place of processes: the product, torch, and our call have each their own work."""
    made = Machine()

    class Timed:
        def __init__(self, call: PacedCall, *, anchor: bool = False, **_: Any) -> None:
            self._anchor = anchor
            self._is_product = call.call == paired_rounds.REFERENCE_WORDS
            self._wakes = 2 * bool(call.callers)
            self._work_us = 12.0 if self._is_product else 10.0 + 40.0 * bool(call.callers)

        def start(self) -> None:
            pass

        def block(self) -> int:
            ours = not self._anchor
            work_us = self._work_us * (1.0 if self._anchor else 3.0 * made.slowdown)
            return int(1e3 * made.block_us(work_us, self._wakes + ours * self._wakes // 2))

        def call_us(self, block_ns: float) -> float:
            return block_ns / 1e3

        def __enter__(self) -> Timed:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(paired_rounds, "PaceProcess", Timed)
    return made


def answer(machine: Machine, call: PacedCall, writing: Load, judging: Load, slowdown: float) -> str:
    """What is said of a call that became so much slower; "refused" where no baseline was written."""
    machine.slowdown = 1.0
    machine.set_load(**writing)
    try:
        (stored,) = measure_baseline((call,), HERE, rounds=ROUNDS, device="cpu").paced
    except BaselineRefusedError as error:
        (problem,) = error.problems
        assert problem.reason.value == "BASELINE_UNSTEADY" and problem.field == str(call)
        return "refused"
    machine.slowdown = slowdown
    machine.set_load(**judging)
    now = measure_call(call, rounds=ROUNDS, device="cpu")
    return judge_call(stored, now, slower=SLOWER, rounds=ROUNDS).answer


def answers(*situation: Any) -> list[str]:
    """The answers at pairs of moments."""
    return [answer(*situation) for _ in range(MOMENTS)]


@pytest.mark.parametrize("call", [AWAITED, PLAIN], ids=["awaited", "plain"])
@pytest.mark.parametrize("writing", [False, True], ids=["written quiet", "written busy"])
@pytest.mark.parametrize("judging", [False, True], ids=["judged quiet", "judged busy"])
def test_load_neither_hides_a_slowdown_nor_makes_one_up(
    machine: Machine, call: PacedCall, writing: bool, judging: bool
) -> None:
    """At many moments: an unchanged call is never slower, one 1.3 times as long never passes."""
    moments = {"busy": writing}, {"busy": judging}
    unchanged = answers(machine, call, *moments, 1.0)
    slowed = answers(machine, call, *moments, 1.3)
    assert "slower" not in unchanged and "as fast" not in slowed
    if not writing and not judging:
        assert set(unchanged) == {"as fast"} and set(slowed) == {"slower"}
    if writing and call is AWAITED:
        assert unchanged.count("refused") > MOMENTS / 2


@pytest.mark.parametrize("written", [False, True], ids=["judged under it", "written under it"])
def test_a_load_that_waits_evenly_is_told_by_the_control(machine: Machine, written: bool) -> None:
    """Rounds that agree with each other on another machine, as it were: all that is said is "undecided"."""
    even, quiet = {"busy": True, "evenly": True}, {"busy": False}
    moments = (even, quiet) if written else (quiet, even)
    assert {*answers(machine, AWAITED, *moments, 1.0), *answers(machine, AWAITED, *moments, 1.3)} == {
        "undecided"
    }


def test_rounds_that_disagree_decide_nothing(machine: Machine) -> None:
    """Then or now, of the call or of the control: medians that are fine by chance pass nothing."""
    calm = measure_call(AWAITED, rounds=ROUNDS, device="cpu")
    assert judge_call(calm, calm, slower=SLOWER, rounds=ROUNDS).answer == "as fast"
    for name in ("ratio", "control"):
        steady = getattr(calm, name)
        for restless in (
            msgspec.structs.replace(steady, scatter=1.3),
            msgspec.structs.replace(steady, lowest=steady.highest / 1.11),
        ):
            busy = msgspec.structs.replace(calm, **{name: restless})
            for pair in ((calm, busy), (busy, calm)):
                judged = judge_call(*pair, slower=5.0, rounds=ROUNDS)
                assert judged.answer == "undecided" and "quartiles" in judged.why


def test_what_cannot_be_told_from_noise_is_a_state_of_its_own(machine: Machine, tmp_path: Path) -> None:
    """Through the file and the stage: quiet it passes or is slower, busy it is undecided, with both loads."""
    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True) as runtime:
        runner = StageRunner(runtime, tmp_path)
        environment = Environment.of_hardware(runner.device.hardware)
    baseline = measure_baseline((AWAITED,), environment, rounds=ROUNDS, device="cpu")
    digest = write_baseline(tmp_path / "base.json", baseline)
    stage = PerformanceStage(baseline="base.json", sha256=digest, slower=SLOWER, rounds=ROUNDS)

    def outcome(slowdown: float, *, busy: bool) -> StageOutcome:
        machine.slowdown = slowdown
        machine.set_load(busy=busy)
        return runner.run("performance", stage)

    assert outcome(1.0, busy=False).state == "passed"
    slow = outcome(1.3, busy=False)
    assert slow.state == "failed" and slow.findings[0].code == "PACE_SLOWER"
    unsure = outcome(1.3, busy=True)
    (finding,) = unsure.findings
    assert unsure.state == "undecided" and finding.code == "PACE_UNDECIDED" and "load" in finding.text
    both = GateReport(title="", suite="", written_at="", machine="", stages=(slow, unsure))
    alone = msgspec.structs.replace(both, stages=(unsure,))
    assert (both.verdict, alone.verdict) == ("failed", "undecided")
    assert alone.as_plain()["passed"] is False and alone.as_plain()["stages"][0]["state"] == "undecided"

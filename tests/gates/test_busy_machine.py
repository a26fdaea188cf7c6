"""Baselines of busy and of quiet machines, by a clock that is made up: no wrong pass and no wrong alarm."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from layerzero import Runtime
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

AWAITED = PacedCall("rms_norm x=1x512:float32", callers=64)
PLAIN = PacedCall("rms_norm x=16x512:float32")
SLOWER, ROUNDS = 0.15, 160


class Machine:
    """Microseconds of the processes that a gate times: work, and turns of threads that wait for a core."""

    def __init__(self) -> None:
        self.draw = random.Random(7)
        self.slowdown = 1.0
        self.set_load(busy=False)

    def set_load(self, *, busy: bool) -> None:
        """Another moment: how long a waking thread waits here, how bursty it is, and how far clocks drifted."""
        self.busy = busy
        self.wait_us = self.draw.uniform(20, 900) if busy else 5.0
        self.bursts = self.draw.uniform(0.1, 0.5) if busy else 0.01
        self.speed = self.draw.uniform(1.0, 2.5) if busy else self.draw.uniform(0.95, 1.05)

    def block_us(self, work_us: float, wakes: int) -> float:
        """One call: its work at today's speed, its wakes, and what else had the core."""
        if self.busy:
            self.wait_us = min(max(self.wait_us * self.draw.uniform(0.97, 1.031), 5.0), 2000.0)
            self.speed = min(max(self.speed * self.draw.uniform(0.99, 1.0102), 1.0), 3.0)
        waits = sum(self.wait_us * self.draw.uniform(0.5, 1.5) for _ in range(wakes))
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


def answers(machine: Machine, call: PacedCall, writing: bool, judging: bool, slowdown: float) -> list[str]:
    """What is said of a call at 40 pairs of moments; "refused" where no baseline was written."""

    def one() -> str:
        machine.slowdown = 1.0
        machine.set_load(busy=writing)
        try:
            (stored,) = measure_baseline((call,), HERE, rounds=ROUNDS, device="cpu").paced
        except BaselineRefusedError as error:
            (problem,) = error.problems
            assert problem.reason.value == "BASELINE_UNSTEADY" and problem.field == str(call)
            return "refused"
        machine.slowdown = slowdown
        machine.set_load(busy=judging)
        now = measure_call(call, rounds=ROUNDS, device="cpu")
        return judge_call(stored, now, slower=SLOWER, rounds=ROUNDS).answer

    return [one() for _ in range(40)]


@pytest.mark.parametrize("call", [AWAITED, PLAIN], ids=["awaited", "plain"])
@pytest.mark.parametrize("writing", [False, True], ids=["written quiet", "written busy"])
@pytest.mark.parametrize("judging", [False, True], ids=["judged quiet", "judged busy"])
def test_load_neither_hides_a_slowdown_nor_makes_one_up(
    machine: Machine, call: PacedCall, writing: bool, judging: bool
) -> None:
    """Of 40 moments each: an unchanged call is never slower, one 1.3 times as long never passes."""
    unchanged = answers(machine, call, writing, judging, 1.0)
    slowed = answers(machine, call, writing, judging, 1.3)
    assert "slower" not in unchanged and "as fast" not in slowed
    if not writing and not judging:
        assert unchanged.count("as fast") >= 38 and slowed.count("slower") >= 38
    if writing and call is AWAITED:
        assert unchanged.count("refused") >= 30

"""A failed batch is taken apart until the culprits stand alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from layerzero.scheduler.core.bisect import bisect_failed_batch
from layerzero.scheduler.core.pending_call import Failure
from layerzero.spec.errors import DeviceLostError


class Kernel:
    """Answers with the index of each call; any of `bad` in the batch fails it all."""

    def __init__(self, bad: set[int], error: Exception | None = None) -> None:
        self.bad = bad
        self.error = error
        self.runs: list[int] = []

    def __call__(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        self.runs.append(len(calls))
        wrong = [args[0] for args in calls if args[0] in self.bad]
        if wrong:
            failed = Failure(self.error or ValueError(f"bad {wrong}"))
            return [failed] * len(calls)
        return [args[0] for args in calls]


def calls(count: int) -> list[tuple[Any, ...]]:
    """Calls numbered from 0."""
    return [(index,) for index in range(count)]


@given(count=st.integers(1, 80), data=st.data())
def test_exactly_the_culprits_fail(count: int, data: st.DataObject) -> None:
    """Every good call gets its own result, every bad one its own error, at a bounded price."""
    bad = data.draw(st.sets(st.integers(0, count - 1), max_size=6))
    kernel = Kernel(bad)
    outcomes = bisect_failed_batch(kernel, calls(count), pure=True)
    for index, outcome in enumerate(outcomes):
        if index in bad:
            assert isinstance(outcome, Failure) and str(outcome.error) == f"bad [{index}]"
        else:
            assert outcome == index
    assert len(kernel.runs) <= 1 + 2 * len(bad) * math.ceil(math.log2(max(count, 2)))


def test_what_is_not_pure_runs_once() -> None:
    """An op with effects is never run again, so all of its batch fails."""
    kernel = Kernel({3})
    outcomes = bisect_failed_batch(kernel, calls(8), pure=False)
    assert kernel.runs == [8]
    assert all(isinstance(outcome, Failure) for outcome in outcomes)


def test_a_lost_device_is_nobodys_fault() -> None:
    """Errors of the device are not looked for among the callers."""
    kernel = Kernel({3}, DeviceLostError("gone", retryable=False))
    outcomes = bisect_failed_batch(kernel, calls(8), pure=True)
    assert kernel.runs == [8]
    assert all(isinstance(outcome, Failure) for outcome in outcomes)


def test_outcomes_that_differ_are_final() -> None:
    """An executor that already knows whom to blame is believed."""
    mixed: list[Any] = [Failure(ValueError("one")), 1, 2]
    runs: list[int] = []

    def run(these: Sequence[tuple[Any, ...]]) -> list[Any]:
        runs.append(len(these))
        return mixed

    assert bisect_failed_batch(run, calls(3), pure=True) == mixed
    assert runs == [3]


def test_an_executor_that_breaks_its_contract_fails_its_calls() -> None:
    """Raising, or returning too few outcomes, becomes the error of every call."""

    def raises(these: Sequence[tuple[Any, ...]]) -> list[Any]:
        raise KeyError("inside")

    def too_few(these: Sequence[tuple[Any, ...]]) -> list[Any]:
        return []

    for run, text in ((raises, "inside"), (too_few, "0 outcomes")):
        outcomes = bisect_failed_batch(run, calls(2), pure=True)
        assert len(outcomes) == 2
        assert all(isinstance(o, Failure) and text in str(o.error) for o in outcomes)

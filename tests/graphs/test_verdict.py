"""What follows from an observation of a capture."""

from __future__ import annotations

import math
from typing import Any

import pytest

from layerzero.graphs.verdict import CaptureProblem, Observation, find_problems

WELL: dict[str, Any] = {"replays": (0.0, 1e-3), "changed": 0.7, "eps": 2**-8}


def test_a_capture_without_problems_is_the_proof() -> None:
    """Replays equal to direct calls, on inputs that matter, and nothing allocated outside."""
    assert find_problems(Observation(**WELL)) == ()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"raised": "RuntimeError: no"}, CaptureProblem.RAISED),
        ({"synchronised": "RuntimeError: called a synchronizing operation"}, CaptureProblem.SYNCHRONISED),
        ({"capture_error": "RuntimeError: not permitted"}, CaptureProblem.CAPTURE_FAILED),
        ({"outside_bytes": 512}, CaptureProblem.ALLOCATED_OUTSIDE),
        ({"replays": (0.0, 0.5)}, CaptureProblem.REPLAY_DIFFERS),
        ({"replays": (math.nan,)}, CaptureProblem.REPLAY_DIFFERS),
        ({"replays": ()}, CaptureProblem.NOT_SHOWN),
        ({"repeats": 0.3}, CaptureProblem.NOT_SHOWN),
        ({"changed": 0.0}, CaptureProblem.INPUTS_IGNORED),
        ({"changed": math.nan}, CaptureProblem.INPUTS_IGNORED),
    ],
)
def test_each_problem_is_found_alone(change: dict[str, Any], problem: CaptureProblem) -> None:
    """One thing wrong gives one finding, and its text says which."""
    (found,) = find_problems(Observation(**(WELL | change)))
    assert found.problem is problem and str(found).startswith(problem.value)

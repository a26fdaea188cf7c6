"""What follows from an observation of a capture."""

from __future__ import annotations

import math
from typing import Any

import pytest

from layerzero.graphs.verdict import Observation, Problem, findings

WELL: dict[str, Any] = {"replays": (0.0, 1e-3), "changed": 0.7, "eps": 2**-8}


def test_a_capture_without_problems_is_the_proof() -> None:
    """Replays equal to direct calls, on inputs that matter, and nothing allocated outside."""
    assert findings(Observation(**WELL)) == ()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"raised": "RuntimeError: no"}, Problem.RAISED),
        ({"synchronised": "RuntimeError: called a synchronizing operation"}, Problem.SYNCHRONISED),
        ({"capture_error": "RuntimeError: not permitted"}, Problem.CAPTURE_FAILED),
        ({"outside_bytes": 512}, Problem.ALLOCATED_OUTSIDE),
        ({"replays": (0.0, 0.5)}, Problem.REPLAY_DIFFERS),
        ({"replays": (math.nan,)}, Problem.REPLAY_DIFFERS),
        ({"replays": ()}, Problem.NOT_SHOWN),
        ({"repeats": 0.3}, Problem.NOT_SHOWN),
        ({"changed": 0.0}, Problem.INPUTS_IGNORED),
        ({"changed": math.nan}, Problem.INPUTS_IGNORED),
    ],
)
def test_each_problem_is_found_alone(change: dict[str, Any], problem: Problem) -> None:
    """One thing wrong gives one finding, and its text says which."""
    (found,) = findings(Observation(**(WELL | change)))
    assert found.problem is problem and str(found).startswith(problem.value)

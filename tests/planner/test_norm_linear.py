"""A norm with the products of it: found, priced beside every other cover, and right to the bit."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz
from layerzero.planner import planned as planned_module
from layerzero.planner.search import CoverProblem, Solution, search
from tests.planner.blocks import WIDTH, rows, weight
from tests.planner.test_search import brute_force, check_solution

Block = Callable[[Tensor], Any]
Q, K, V = (weight(width, WIDTH, seed=width) for width in (64, 32, 48))
SCALE, SQUARE = weight(WIDTH, seed=1) + 1, weight(WIDTH, WIDTH, seed=2)


def normed(x: Tensor) -> Tensor:
    return lz.sync.rms_norm(x, SCALE, eps=1e-5)


BLOCKS: dict[str, Block] = {
    "one product": lambda x: lz.sync.linear(normed(x), Q, Q[:, 0].clone()),
    "three products": lambda x: [lz.sync.linear(y, w) for y in (normed(x),) for w in (Q, K, V)],
    "a sum in front": lambda x: [lz.sync.linear(y, w) for y in (normed(x + x),) for w in (Q, K)],
    "two norms": lambda x: lz.sync.linear(normed(lz.sync.linear(normed(x), SQUARE)), K),
    "a feed-forward block": lambda x: F.linear(F.gelu(F.linear(normed(x), Q)), SQUARE),
    "a norm that leaves": lambda x: [(y, lz.sync.linear(y, Q)) for y in (normed(x),)],
}


def searched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[CoverProblem, Solution | None]]:
    """What a plan searches from here on, with what it finds."""
    found: list[tuple[CoverProblem, Solution | None]] = []

    def noting(problem: CoverProblem, beam: int) -> Solution | None:
        solution = search(problem, beam)
        found.append((problem, solution))
        return solution

    monkeypatch.setattr(planned_module, "search", noting)
    return found


@pytest.mark.parametrize("name", BLOCKS)
def test_kernels_and_fusions_are_those_of_brute_force(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the real kernels and prices of up to five ops, no cover is cheaper than the plan."""
    found = searched(monkeypatch)
    with lz.start(scoped=True), torch.no_grad():
        planned = lz.plan(BLOCKS[name], rows())
        got, wanted = planned(rows()), BLOCKS[name](rows())
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    problem, solution = found[0]
    assert solution is not None and solution.exact and len(problem.after) <= 5
    check_solution(problem, solution, brute_force(problem))
    kinds = {each.payload.kind for each in problem.alternatives}
    assert ("norm+linear" in kinds) == (name != "a norm that leaves")


def test_the_policy_decides_between_one_step_and_two() -> None:
    """Preferred, the fused op covers the norm and all its products; preferred apart, they stay so."""

    def fusions(*preferred: str) -> list[tuple[str, ...]]:
        with lz.start(scoped=True), contextlib.ExitStack() as stack, torch.no_grad():
            for op in preferred:
                stack.enter_context(lz.prefer("*", op=op))
            steps = lz.plan(BLOCKS["three products"], rows()).record.steps
        return [step.covers for step in steps if step.fusion == "norm+linear"]

    assert fusions("rms_norm_linear") == [("rms_norm", "linear", "linear_1", "linear_2")]
    assert fusions("rms_norm", "linear") == []

"""The sequential sign test: how often it is wrong, on rounds as busy machines give them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from layerzero.gates.paired_rounds import ROUNDS
from layerzero.gates.sign_test import SignTest

LIMIT = 1.05
Ratio = Callable[[random.Random], float]


def answer_of(ratio: Ratio, draw: random.Random) -> str:
    """What the test says of rounds whose ratios are drawn like this."""
    test = SignTest()
    while test.answer == "undecided" and test.rounds < ROUNDS:
        test.add(ratio(draw) > LIMIT)
    return test.answer


def answers(ratio: Ratio, runs: int = 2000) -> Counter[str]:
    """The answers of many runs, always the same ones."""
    draw = random.Random(7)
    return Counter(answer_of(ratio, draw) for _ in range(runs))


def noisy(factor: float, draw: random.Random) -> float:
    """A ratio of two disturbed times: each is stretched a little, and one in five by much."""

    def stretched(us: float) -> float:
        burst = draw.expovariate(1.0) if draw.random() < 0.2 else 0.0
        return us * (1 + abs(draw.gauss(0, 0.08)) + burst)

    return stretched(factor) / stretched(1.0)


def test_an_unchanged_tree_is_not_called_slower_beside_load() -> None:
    """Of 2,000 runs of equal times under load at most one in a hundred is a false alarm."""
    counts = answers(lambda draw: noisy(1.0, draw))
    assert counts["slower"] + counts["undecided"] <= 20


def test_a_tree_a_tenth_slower_is_found_beside_load() -> None:
    """Of 2,000 runs that are 10 % slower at least 95 in a hundred are found."""
    assert answers(lambda draw: noisy(1.1, draw))["slower"] >= 1900


def test_the_noise_of_these_runs_would_mislead_a_mean() -> None:
    """The negative control: means of 60 rounds call an unchanged tree slower in many of 300 runs."""
    draw = random.Random(7)
    wrong = sum(sum(noisy(1.0, draw) for _ in range(60)) / 60 > LIMIT for _ in range(300))
    assert wrong > 100


@pytest.mark.parametrize(
    ("share", "answer"), [(0.0, "as fast"), (0.35, "as fast"), (0.65, "slower"), (1.0, "slower")]
)
def test_the_share_of_rounds_decides(share: float, answer: str) -> None:
    """Clearly fewer or more than half of the rounds above the limit: the answer, nearly always."""
    assert answers(lambda draw: 2.0 if draw.random() < share else 0.5)[answer] >= 1990


def test_half_of_the_rounds_says_nothing() -> None:
    """Exactly between, no answer is forced while rounds are left."""
    test = SignTest()
    for number in range(200):
        test.add(number % 2 == 0)
    assert (test.answer, test.rounds, test.above) == ("undecided", 200, 100)


@pytest.mark.parametrize("shares", [(0.0, 0.6), (0.6, 0.4), (0.5, 0.5), (0.4, 1.0)])
def test_shares_are_checked(shares: tuple[float, float]) -> None:
    """Shares that order nothing are refused by name."""
    with pytest.raises(ValueError, match="rarely and mostly need"):
        SignTest(*shares)
    with pytest.raises(ValueError, match="mistakes needs"):
        SignTest(mistakes=0.7)

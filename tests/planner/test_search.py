"""The search behind plans, against every cover there is."""

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.planner.search import CoverOption, CoverProblem, Solution, search
from tests.profiles import many_examples

FORMATS = ("a", "b")


def schedule(problem: CoverProblem, chosen: tuple[CoverOption, ...]) -> list[CoverOption] | None:
    """`chosen` in an order in which they can run; None where each waits for another."""
    order: list[CoverOption] = []
    done: frozenset[int] = frozenset()
    waiting = list(chosen)
    while waiting:
        ready = [each for each in waiting if problem.precedes(each) <= done]
        if not ready:
            return None
        for each in ready:
            order.append(each)
            done |= each.covers
            waiting.remove(each)
    return order


def price(problem: CoverProblem, chosen: tuple[CoverOption, ...]) -> float:
    """What a cover costs: its alternatives, and each pair of a value and a format once."""
    produced = dict(problem.input_formats)
    for each in chosen:
        produced |= dict(each.produces)
    demanded = {pair for each in chosen for pair in each.demands} | set(problem.output_formats.items())
    return sum(each.cost_us for each in chosen) + sum(
        problem.convert_us(value, produced[value], form)
        for value, form in demanded
        if produced[value] != form
    )


def brute_force(problem: CoverProblem) -> float:
    """The least cost of any cover; infinite where there is none."""
    best = math.inf

    def extend(done: frozenset[int], chosen: tuple[CoverOption, ...]) -> None:
        nonlocal best
        left = [op for op in range(len(problem.after)) if op not in done]
        if not left:
            if schedule(problem, chosen) is not None:
                best = min(best, price(problem, chosen))
            return
        for each in problem.alternatives:
            if left[0] in each.covers and not each.covers & done:
                extend(done | each.covers, (*chosen, each))

    extend(frozenset(), ())
    return best


def random_problem(edges: list[tuple[int, int]], count: int, rng: random.Random) -> CoverProblem:
    """A block of `count` ops: value i is op i's, value count + i an input of op i; costs are drawn."""
    reads = {op: [before for before, after in edges if after == op] or [count + op] for op in range(count)}
    readers = {before for before, _ in edges}

    def alternative(covers: frozenset[int]) -> CoverOption:
        inside = covers if rng.random() < 0.5 else frozenset[int]()
        outside = {value for op in covers for value in reads[op]} - covers
        visible = {
            op for op in covers if op not in readers or any(a == op and b not in covers for a, b in edges)
        }
        return CoverOption(
            covers, float(rng.randint(1, 20) * (1 + 0.5 * len(inside))),
            tuple((value, rng.choice(FORMATS)) for value in sorted(outside)),
            tuple((op, rng.choice(FORMATS)) for op in sorted(visible)),
        )  # fmt: skip

    alternatives = [alternative(frozenset({op})) for op in range(count) for _ in range(2)]
    groups = [frozenset(g) for size in (2, 3) for g in itertools.combinations(range(count), size)]
    alternatives += [alternative(group) for group in groups if rng.random() < 0.4]
    conversions: dict[Any, float] = {
        (value, before, after): math.inf if rng.random() < 0.1 else float(rng.randint(1, 12))
        for value in range(2 * count) for before in FORMATS for after in FORMATS
    }  # fmt: skip
    return CoverProblem(
        after=[frozenset(before for before, after in edges if after == op) for op in range(count)],
        alternatives=alternatives,
        convert_us=lambda value, before, after: conversions[value, before, after],
        input_formats={count + op: rng.choice(FORMATS) for op in range(count)},
        output_formats={op: rng.choice(FORMATS) for op in range(count) if op not in readers},
    )


def check_solution(problem: CoverProblem, solution: Solution | None, least: float) -> None:
    """A solution is a cover in a possible order whose price is what it says; the least one where exact."""
    if solution is None:
        assert math.isinf(least)
        return
    done: frozenset[int] = frozenset()
    for each in solution.alternatives:
        assert not each.covers & done
        assert problem.precedes(each) <= done
        done |= each.covers
    assert done == frozenset(range(len(problem.after)))
    assert solution.cost_us == pytest.approx(price(problem, solution.alternatives))
    assert solution.cost_us >= least - 1e-9
    if solution.exact:
        assert solution.cost_us == pytest.approx(least)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_block_of_up_to_five_ops_is_planned_as_brute_force_plans_it(count: int) -> None:
    """For every way to join up to five ops, the search finds the least cost that any cover has."""
    pairs = list(itertools.combinations(range(count), 2))
    rng = random.Random(count)
    for chosen in itertools.product((False, True), repeat=len(pairs)):
        edges = [pair for pair, is_edge in zip(pairs, chosen, strict=True) if is_edge]
        problem = random_problem(edges, count, rng)
        solution = search(problem)
        assert solution is None or solution.exact
        check_solution(problem, solution, brute_force(problem))


@many_examples
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_costs_do_not_matter_to_exactness(seed: int, count: int) -> None:
    """Whatever things cost and whatever cannot be converted, the least cost is found."""
    rng = random.Random(seed)
    edges = [pair for pair in itertools.combinations(range(count), 2) if rng.random() < 0.4]
    problem = random_problem(edges, count, rng)
    check_solution(problem, search(problem), brute_force(problem))


@many_examples
@given(st.integers(0, 2**32))
def test_a_narrow_beam_gives_a_cover_and_says_that_it_may_not_be_the_best(seed: int) -> None:
    """With room for one state, what is found is a cover, no cheaper than the best, and exact only if so."""
    rng = random.Random(seed)
    edges = [pair for pair in itertools.combinations(range(5), 2) if rng.random() < 0.3]
    problem = random_problem(edges, 5, rng)
    solution = search(problem, beam=1)
    if solution is not None:
        check_solution(problem, solution, brute_force(problem))


def test_a_long_chain_is_exact() -> None:
    """On a chain of sixty ops no state is dropped, and the cost is that of the recurrence over formats."""
    rng, count = random.Random(7), 60
    problem = random_problem([(op, op + 1) for op in range(count - 1)], count, rng)
    singles = [each for each in problem.alternatives if len(each.covers) == 1]
    neighbours = [
        each for each in problem.alternatives if len(each.covers) > 1
        and max(each.covers) - min(each.covers) == len(each.covers) - 1
    ]  # fmt: skip
    convert = lambda value, before, after: 3.0  # noqa: E731
    chain = CoverProblem(
        problem.after, singles + neighbours, convert, problem.input_formats, problem.output_formats
    )
    solution = search(chain)
    assert solution is not None and solution.exact
    # The cheapest way to each cut between two ops, by the format in which the value crosses it.
    best: list[dict[object, float]] = [{problem.input_formats[count]: 0.0}] + [{} for _ in range(count)]
    for start in range(count):
        for each in singles + neighbours:
            if min(each.covers) != start:
                continue
            inside = dict(each.demands)
            value = start - 1 if start else count
            for form, cost_us in best[start].items():
                total = cost_us + each.cost_us + (0.0 if inside[value] == form else 3.0)
                end = max(each.covers) + 1
                out = dict(each.produces)[end - 1]
                best[end][out] = min(best[end].get(out, math.inf), total)
    output_formats = problem.output_formats[count - 1]
    assert solution.cost_us == pytest.approx(
        min(cost + (0.0 if form == output_formats else 3.0) for form, cost in best[count].items())
    )


def test_a_conversion_is_priced_once_for_all_readers() -> None:
    """Two ops that want a value in one other format pay for one conversion."""
    problem = CoverProblem(
        after=[frozenset(), frozenset()],
        alternatives=[CoverOption(frozenset({op}), 1.0, ((9, "b"),), ((op, "a"),)) for op in (0, 1)],
        convert_us=lambda value, before, after: 10.0,
        input_formats={9: "a"},
    )
    solution = search(problem)
    assert solution is not None
    assert solution.cost_us == 12.0


def test_what_cannot_be_covered_has_no_solution() -> None:
    """An op that no alternative covers, or that waits for itself through a group, has no plan."""
    single = CoverOption(frozenset({0}), 1.0)
    assert search(CoverProblem([frozenset(), frozenset()], [single], lambda *_: 1.0)) is None
    entangled = [CoverOption(frozenset({0, 2}), 1.0), CoverOption(frozenset({1}), 1.0)]
    chain = [frozenset[int](), frozenset({0}), frozenset({1})]
    assert search(CoverProblem(chain, entangled, lambda *_: 1.0)) is None

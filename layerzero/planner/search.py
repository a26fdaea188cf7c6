"""The search behind a plan: which implementations cover every op of a block at the least cost.

Pure: ops are numbers in topological order, values are numbers, formats are any hashable. An alternative
covers one op or several, demands formats of the values that it reads and gives formats to those that it
writes. A value is converted at most once to each format, however many read it so. The search goes through
sets of ops that are done; it is exact where no state had to be dropped, and on chains none is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Any hashable.
Format = Any
# States kept for each number of ops that are done.
BEAM = 256


@dataclass(frozen=True, slots=True, eq=False)
class CoverOption:
    """One way to run one op or several: what it costs, in microseconds, and in which formats.

    `demands` and `produces` are (value, format); `payload` is the caller's own.
    """

    covers: frozenset[int]
    cost_us: float
    demands: tuple[tuple[int, Format], ...] = ()
    produces: tuple[tuple[int, Format], ...] = ()
    payload: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class CoverProblem:
    """A block to cover: `after[op]` are the ops that run before it, `input_formats` those of its inputs.

    `output_formats` are those in which values leave the block. `convert_us(value, before, after)` is the
    price of one conversion, infinite where there is none.
    """

    after: Sequence[frozenset[int]]
    alternatives: Sequence[CoverOption]
    convert_us: Callable[[int, Format, Format], float]
    input_formats: Mapping[int, Format] = field(default_factory=dict)
    output_formats: Mapping[int, Format] = field(default_factory=dict)

    def precedes(self, alternative: CoverOption) -> frozenset[int]:
        """The ops that have to be done before an alternative runs."""
        before: frozenset[int] = frozenset().union(*(self.after[op] for op in alternative.covers))
        return before - alternative.covers


class Solution(NamedTuple):
    """Alternatives in an order in which they can run, what they cost with their conversions, in us.

    `exact` says that no cheaper one exists.
    """

    alternatives: tuple[CoverOption, ...]
    cost_us: float
    exact: bool


class _State(NamedTuple):
    """Ops that are done, with the formats of the values that are still read."""

    done: frozenset[int]
    formats: frozenset[tuple[int, Format, frozenset[Format]]]


class _Path(NamedTuple):
    """The cheapest way to a state."""

    cost_us: float
    steps: tuple[CoverOption, ...]


class _Search:
    def __init__(self, problem: CoverProblem) -> None:
        self._problem = problem
        self.covering: list[list[CoverOption]] = [[] for _ in problem.after]
        self.precedes: dict[int, frozenset[int]] = {}
        readers: dict[int, set[int]] = {}
        for alternative in problem.alternatives:
            self.precedes[id(alternative)] = problem.precedes(alternative)
            for op in alternative.covers:
                self.covering[op].append(alternative)
            for value, _ in alternative.demands:
                readers.setdefault(value, set()).update(alternative.covers)
        self._readers = {value: frozenset(ops) for value, ops in readers.items()}

    def start(self) -> _State:
        """Nothing done; the inputs in the formats in which they come."""
        input_formats = self._problem.input_formats.items()
        return self._pruned(
            frozenset(), ((value, form, frozenset[Format]()) for value, form in input_formats)
        )

    def _pruned(
        self, done: frozenset[int], formats: Iterable[tuple[int, Format, frozenset[Format]]]
    ) -> _State:
        """Only values that are read later, or leave the block, tell states apart."""
        readers, output_formats = self._readers, self._problem.output_formats
        return _State(
            done,
            frozenset(f for f in formats if f[0] in output_formats or readers.get(f[0], frozenset()) - done),
        )

    def choices(self, done: frozenset[int]) -> list[CoverOption]:
        """What may run next: all of one op where all of it can run, since the order costs nothing."""
        ready: list[CoverOption] = []
        for op, covering in enumerate(self.covering):
            if op in done:
                continue
            usable = [each for each in covering if not each.covers & done]
            runnable = [each for each in usable if self.precedes[id(each)] <= done]
            if len(usable) == len(runnable):
                return runnable
            ready += (each for each in runnable if min(each.covers) == op)
        return ready

    def step(self, state: _State, alternative: CoverOption) -> tuple[_State, float] | None:
        """The state after an alternative, and what it adds; None where a format cannot be had."""
        formats = {value: (form, paid) for value, form, paid in state.formats}
        cost_us = alternative.cost_us
        for value, target in alternative.demands:
            form, paid = formats[value]
            if target != form and target not in paid:
                cost_us += self._problem.convert_us(value, form, target)
                formats[value] = form, paid | {target}
        if math.isinf(cost_us):
            return None
        for value, form in alternative.produces:
            formats[value] = form, frozenset()
        entries = ((value, form, paid) for value, (form, paid) in formats.items())
        return self._pruned(state.done | alternative.covers, entries), cost_us

    def leaving_us(self, state: _State) -> float:
        """What brings the values that leave the block into their formats."""
        output_formats = self._problem.output_formats
        return sum(
            self._problem.convert_us(value, form, output_formats[value])
            for value, form, paid in state.formats
            if value in output_formats and output_formats[value] != form and output_formats[value] not in paid
        )


def search(problem: CoverProblem, beam: int = BEAM) -> Solution | None:
    """The cheapest cover of a block; None where there is none.

    Args: beam is the number of states that are kept for each number of ops done.
    """
    walk = _Search(problem)
    count, exact = len(problem.after), True
    layers: list[dict[_State, _Path]] = [{} for _ in range(count + 1)]
    layers[0][walk.start()] = _Path(0.0, ())
    for layer in layers[:-1]:
        states = sorted(layer.items(), key=lambda entry: entry[1].cost_us)
        exact = exact and len(states) <= beam
        for state, path in states[:beam]:
            for alternative in walk.choices(state.done):
                reached = walk.step(state, alternative)
                if reached is None:
                    continue
                cost_us = path.cost_us + reached[1]
                known_path = layers[len(reached[0].done)].get(reached[0])
                if known_path is None or cost_us < known_path.cost_us:
                    layers[len(reached[0].done)][reached[0]] = _Path(cost_us, (*path.steps, alternative))
        layer.clear()
    ends = [(path.cost_us + walk.leaving_us(state), path) for state, path in layers[-1].items()]
    ends = [entry for entry in ends if math.isfinite(entry[0])]
    if not ends:
        return None
    cost_us, cheapest = min(ends, key=lambda entry: entry[0])
    return Solution(cheapest.steps, cost_us, exact)

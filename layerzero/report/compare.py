"""Two reports compared: what two machines, versions or policies differ in, by how much, and why.

Times are compared call by call and kernel by kernel; a difference counts where it is larger than both
measurements' own spread and than `NOISE`. A choice that differs is traced to the first cause that explains
it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from layerzero.report.document import CallMap, MeasuredCall, ReportDocument

NOISE: Final = 0.05
_SPREADS: Final = 3.0
_Call = tuple[str, str, str]


class FactChange(msgspec.Struct, frozen=True):
    """A fact that differs; "-" where one side has none."""

    name: str
    first: str
    second: str


class TimeChange(msgspec.Struct, frozen=True):
    """One kernel's microseconds on one call in both reports; `certain` where it is more than noise."""

    op: str
    call: str
    kernel: str
    first_us: float
    second_us: float
    ratio: float
    certain: bool


class ChoiceChange(msgspec.Struct, frozen=True):
    """A call whose kernel differs, and why."""

    op: str
    call: str
    first: str
    second: str
    why: str


class OpChange(msgspec.Struct, frozen=True):
    """One op: calls of both reports, the mean (geometric) ratio of chosen kernels, choices that differ."""

    op: str
    calls: int
    ratio: float
    faster: int
    slower: int
    choices: int


class ReportComparison(msgspec.Struct, frozen=True):
    """What the second report differs in from the first."""

    first: str
    second: str
    facts: tuple[FactChange, ...]
    ops: tuple[OpChange, ...]
    times: tuple[TimeChange, ...]
    choices: tuple[ChoiceChange, ...]
    only_first: int
    only_second: int

    @property
    def slower(self) -> int:
        """How many times are certainly longer in the second."""
        return sum(change.certain and change.ratio > 1 for change in self.times)

    @property
    def faster(self) -> int:
        """How many times are certainly shorter in the second."""
        return sum(change.certain and change.ratio < 1 for change in self.times)

    def sentence(self) -> str:
        """The comparison in one sentence."""
        if not self.facts and not self.choices and not self.slower and not self.faster:
            return f"nothing differs in {len(self.times)} times that both have"
        return (
            f"{len(self.facts)} facts differ; of {len(self.times)} times that both have, "
            f"{self.faster} are shorter and {self.slower} longer; {len(self.choices)} choices differ"
        )


def compare_reports(first: ReportDocument, second: ReportDocument) -> ReportComparison:
    """What differs, by how much and why; times are those of maps of the same source."""
    facts = tuple(_fact_changes(first.facts, second.facts))
    times: list[TimeChange] = []
    choices: list[ChoiceChange] = []
    ops: list[OpChange] = []
    alone = [0, 0]
    seconds = {each.source: each for each in second.maps}
    for before in first.maps:
        after = seconds.get(before.source)
        if after is None:
            continue
        pair = _MapPair(before, after, facts)
        times += pair.time_changes()
        choices += pair.choice_changes()
        ops += pair.op_changes()
        alone = [alone[0] + pair.only_first, alone[1] + pair.only_second]
    times.sort(key=lambda change: -abs(math.log(change.ratio)))
    return ReportComparison(
        first.title, second.title, facts, tuple(ops), tuple(times), tuple(choices), alone[0], alone[1]
    )


def _fact_changes(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[FactChange]:
    for name in sorted(first.keys() | second.keys()):
        ours, theirs = first.get(name, "-"), second.get(name, "-")
        if ours != theirs and not _differ_in_trial(ours, theirs):
            yield FactChange(name, ours, theirs)


def _differ_in_trial(ours: str, theirs: str) -> bool:
    """Whether one of two states of a library says only that the release is there, not whether it works."""
    states, releases = zip(ours.partition(" ")[::2], theirs.partition(" ")[::2], strict=True)
    return "installed" in states and releases[0] == releases[1] != ""


class _MapPair:
    """Two maps of one source, call by call."""

    def __init__(self, first: CallMap, second: CallMap, facts: tuple[FactChange, ...]) -> None:
        self._first, self._second = first, second
        self._policies_differ = any(fact.name == "policy" for fact in facts)
        ours, theirs = _by_call(first), _by_call(second)
        self._calls = [(ours[key], theirs[key]) for key in ours if key in theirs]
        self.only_first, self.only_second = len(ours) - len(self._calls), len(theirs) - len(self._calls)

    def time_changes(self) -> Iterator[TimeChange]:
        for before, after in self._calls:
            ours, theirs = _times(self._first, before), _times(self._second, after)
            for kernel in ours.keys() & theirs.keys():
                (us, spread), (later_us, later_spread) = ours[kernel], theirs[kernel]
                noise = max(NOISE * us, _SPREADS * math.hypot(spread, later_spread))
                yield TimeChange(
                    before.op,
                    _name(before),
                    kernel,
                    us,
                    later_us,
                    round(later_us / us, 4),
                    abs(later_us - us) > noise,
                )

    def choice_changes(self) -> Iterator[ChoiceChange]:
        for before, after in self._calls:
            ours, theirs = _chosen(self._first, before), _chosen(self._second, after)
            if ours != theirs:
                yield ChoiceChange(before.op, _name(before), ours, theirs, self._why(before, after))

    def op_changes(self) -> Iterator[OpChange]:
        for op in sorted({before.op for before, _ in self._calls}):
            pairs = [pair for pair in self._calls if pair[0].op == op]
            ratios = [ratio for ratio in (self._chosen_ratio(*pair) for pair in pairs) if ratio is not None]
            yield OpChange(
                op=op,
                calls=len(pairs),
                ratio=round(math.exp(statistics.fmean(map(math.log, ratios))), 4) if ratios else 1.0,
                faster=sum(ratio < 1 - NOISE for ratio in ratios),
                slower=sum(ratio > 1 + NOISE for ratio in ratios),
                choices=sum(_chosen(self._first, a) != _chosen(self._second, b) for a, b in pairs),
            )

    def _chosen_ratio(self, before: MeasuredCall, after: MeasuredCall) -> float | None:
        """The second's chosen kernel over the first's, each by its own time."""
        ours = _times(self._first, before).get(_chosen(self._first, before))
        theirs = _times(self._second, after).get(_chosen(self._second, after))
        return None if ours is None or theirs is None else theirs[0] / ours[0]

    def _why(self, before: MeasuredCall, after: MeasuredCall) -> str:
        """The first cause that explains another choice."""
        old, new = _chosen(self._first, before), _chosen(self._second, after)
        refusal = _refusal(self._second, after, old)
        if refusal:
            return f"{old}: {refusal}"
        if after.chosen >= 0 and new not in _judged(self._first, before):
            return f"{new} is new"
        lifted = _refusal(self._first, before, new)
        if lifted:
            return f"{new} was refused before: {lifted}"
        reasons = (self._first.texts[before.why], self._second.texts[after.why])
        if self._policies_differ and any("policy" in reason for reason in reasons):
            return f"another policy: {reasons[1]}"
        expected = [
            (_expected(self._first, before, k), _expected(self._second, after, k)) for k in (old, new)
        ]
        (old_first, old_second), (new_first, new_second) = expected
        was, became = f"{_us(old_first)}, then {_us(old_second)}", f"{_us(new_first)}, then {_us(new_second)}"
        return f"expected us: {old} {was}; {new} {became}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _by_call(calls: CallMap) -> dict[_Call, MeasuredCall]:
    return {(call.op, call.call, call.launch): call for call in calls.calls}


def _name(call: MeasuredCall) -> str:
    return f"{call.call} ({call.launch})" if call.launch != "eager" else call.call


def _times(calls: CallMap, call: MeasuredCall) -> dict[str, tuple[float, float]]:
    return {calls.kernels[timed.kernel]: (timed.us, timed.spread_us) for timed in call.times if timed.us > 0}


def _chosen(calls: CallMap, call: MeasuredCall) -> str:
    return calls.kernels[call.chosen] if call.chosen >= 0 else "no kernel"


def _judged(calls: CallMap, call: MeasuredCall) -> frozenset[str]:
    return frozenset(calls.kernels[verdict.kernel] for verdict in call.verdicts)


def _expected(calls: CallMap, call: MeasuredCall, kernel: str) -> float | None:
    return next((v.expected_us for v in call.verdicts if calls.kernels[v.kernel] == kernel), None)


def _refusal(calls: CallMap, call: MeasuredCall, kernel: str) -> str:
    """Why a kernel refuses a call; empty where it takes it. One that is not there at all says so."""
    if kernel == "no kernel":
        return ""
    for verdict in call.verdicts:
        if calls.kernels[verdict.kernel] == kernel:
            refused = verdict.expected_us is None
            return "; ".join(calls.texts[place] for place in verdict.texts) if refused else ""
    return "it is not registered there" if call.verdicts else ""

"""What stages found, what waivers excuse, and the verdict over all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any, Literal

import msgspec

from layerzero.gates.release_file import Waiver
from layerzero.spec.reasons import Reason

State = Literal["passed", "failed", "undecided", "waived"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong: its name (`stage/what`), a sentence, a code if there is one, who waives it."""

    name: str
    text: str
    code: str = ""
    waived_by: str = ""

    @property
    def fails(self) -> bool:
        """Whether it stops the release."""
        return not self.waived_by


class StageOutcome(msgspec.Struct, frozen=True):
    """One stage: how many checks it made, what it found, lines worth keeping, what it was compared with."""

    stage: str
    checks: int
    seconds: float
    findings: tuple[Finding, ...] = ()
    lines: tuple[str, ...] = ()
    beside: str = ""

    @property
    def state(self) -> State:
        """Whether it passed, failed, could not tell, or passes by waivers alone."""
        codes = {finding.code for finding in self.findings if finding.fails}
        if codes:
            return "undecided" if codes == {Reason.PACE_UNDECIDED.value} else "failed"
        return "waived" if self.findings else "passed"


class GateReport(msgspec.Struct, frozen=True, kw_only=True):
    """All stages of a suite; the verdict is the exit status."""

    kind: str = "layerzero gate"
    format: int = 1
    title: str
    suite: str
    written_at: str
    machine: str
    stages: tuple[StageOutcome, ...]
    waivers: tuple[Waiver, ...] = ()
    notes: tuple[str, ...] = ()
    artifacts: tuple[tuple[str, str], ...] = ()

    @property
    def verdict(self) -> Literal["passed", "failed", "undecided"]:
        """Passed where no finding is left that no waiver excuses, undecided where all that are left are."""
        states = {stage.state for stage in self.stages}
        if "failed" in states:
            return "failed"
        return "undecided" if "undecided" in states else "passed"

    def as_plain(self) -> dict[str, Any]:
        """The report as JSON-ready values, each stage with its state."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        for entry, stage in zip(plain["stages"], self.stages, strict=True):
            entry["state"] = stage.state
        return plain | {"verdict": self.verdict, "passed": self.verdict == "passed"}


def excuse(outcome: StageOutcome, waivers: Iterable[Waiver], today: date) -> StageOutcome:
    """The outcome with each finding that a waiver in force covers marked as waived."""
    live = [waiver for waiver in waivers if waiver.last_day >= today]

    def marked(finding: Finding) -> Finding:
        waiver = next((each for each in live if each.covers(finding.name)), None)
        if waiver is None:
            return finding
        by = f"{waiver.owner} until {waiver.expires}: {waiver.reason}"
        return msgspec.structs.replace(finding, waived_by=by)

    return msgspec.structs.replace(outcome, findings=tuple(map(marked, outcome.findings)))


def check_waivers(waivers: Sequence[Waiver], today: date) -> StageOutcome:
    """A stage of its own: a waiver that has expired fails the gate until it is renewed or removed."""
    expired = tuple(
        Finding(
            f"waivers/{waiver.finding}",
            f"{Reason.WAIVER_EXPIRED.value}: last day {waiver.expires}; {waiver.owner} renews or removes it",
            Reason.WAIVER_EXPIRED.value,
        )
        for waiver in waivers
        if waiver.last_day < today
    )
    return StageOutcome("waivers", len(waivers), 0.0, expired)


def unused_waivers(waivers: Sequence[Waiver], stages: Sequence[StageOutcome]) -> tuple[str, ...]:
    """A sentence for each waiver that covers no finding of these stages."""
    names = [finding.name for stage in stages for finding in stage.findings]
    return tuple(
        f"waiver of {waiver.finding} ({waiver.owner}) covers nothing that was found"
        for waiver in waivers
        if not any(waiver.covers(name) for name in names)
    )

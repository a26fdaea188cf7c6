"""Waivers: what they excuse, until when, and what is said of the others."""

from __future__ import annotations

from datetime import date

from layerzero.gates.outcome import Finding, GateReport, StageOutcome, check_waivers, excuse, unused_waivers
from layerzero.gates.release_file import Waiver

TODAY = date(2026, 11, 23)
FOUND = StageOutcome(
    "numerics", 2, 0.1, (Finding("numerics/rope/a", "wrong"), Finding("numerics/mlp/b", "wrong"))
)


def waiver(finding: str, expires: str = "2026-11-23") -> Waiver:
    """A waiver of ann's."""
    return Waiver(finding, "ann", "it is known", expires)


def gate(*stages: StageOutcome) -> GateReport:
    """A report of these stages."""
    return GateReport(title="t", suite="full", written_at="now", machine="m", stages=stages)


def test_a_waiver_holds_through_its_last_day() -> None:
    """On the day it names it excuses; on the day after it does not, and fails the gate by itself."""
    held = excuse(FOUND, [waiver("numerics/*")], TODAY)
    assert held.state == "waived" and gate(held).verdict == "passed"
    assert held.findings[0].waived_by == "ann until 2026-11-23: it is known"
    late = excuse(FOUND, [waiver("numerics/*", "2026-11-22")], TODAY)
    assert late.state == "failed" and gate(late).verdict == "failed"
    (expired,) = check_waivers([waiver("numerics/*", "2026-11-22")], TODAY).findings
    assert expired.code == "WAIVER_EXPIRED" and "ann" in expired.text and expired.fails
    assert check_waivers([waiver("numerics/*")], TODAY).state == "passed"


def test_a_waiver_covers_what_it_names_alone() -> None:
    """One of two findings stays."""
    outcome = excuse(FOUND, [waiver("numerics/rope/*")], TODAY)
    assert [finding.fails for finding in outcome.findings] == [False, True] and outcome.state == "failed"


def test_a_waiver_covers_a_finding_by_its_own_name() -> None:
    """Also where the name has characters that mean something in a pattern."""
    found = StageOutcome("schemas", 1, 0.1, (Finding("schemas/table[12].json", "no file matches"),))
    assert excuse(found, [waiver("schemas/table[12].json")], TODAY).state == "waived"


def test_a_waiver_of_nothing_is_told() -> None:
    """What covers no finding is named with its owner, so that it can go."""
    (note,) = unused_waivers([waiver("numerics/*"), waiver("soak/*")], [FOUND])
    assert "soak/*" in note and "ann" in note


def test_a_report_passes_where_every_stage_does() -> None:
    """No finding: passed; the JSON has each stage's state and the verdict."""
    clean = StageOutcome("schemas", 3, 0.0)
    plain = gate(clean, FOUND).as_plain()
    assert [stage["state"] for stage in plain["stages"]] == ["passed", "failed"] and plain["passed"] is False
    assert gate(clean).as_plain()["passed"] is True

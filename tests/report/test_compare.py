"""Two reports compared: facts, times beyond noise, choices with the cause."""

from __future__ import annotations

import msgspec

from layerzero.report.compare import compare_reports
from layerzero.report.document import MeasuredCall, ReportDocument, StoredVerdict, TimedKernel
from tests.report.documents import TEXTS, call_map, document, measured

CALL = "float32 C=512 N=1"


def with_calls(*calls: MeasuredCall, policy: str = "abc", texts: tuple[str, ...] = TEXTS) -> ReportDocument:
    """A report of these calls alone."""
    each = msgspec.structs.replace(call_map(*calls), texts=texts)
    return document(maps=(each,), facts={"policy": policy})


def test_equal_reports_differ_in_nothing() -> None:
    """No fact, no time, no choice; the sentence says so."""
    comparison = compare_reports(document(), document())
    assert comparison.facts == comparison.choices == () and comparison.slower == comparison.faster == 0
    assert comparison.sentence().startswith("nothing differs in ")


def test_a_time_counts_beyond_noise_and_spread() -> None:
    """5 % is noise; 20 % is not, unless the measurements themselves vary by as much."""
    base = measured(CALL, 100.0, 200.0)
    near = measured(CALL, 104.0, 200.0)
    far = measured(CALL, 120.0, 200.0)
    unsteady = measured(CALL, 120.0, 200.0, times=(TimedKernel(0, 120.0, 30.0), TimedKernel(1, 200.0, 0.1)))
    for other, slower in ((near, 0), (far, 1), (unsteady, 0)):
        comparison = compare_reports(with_calls(base), with_calls(other))
        assert comparison.slower == slower and comparison.faster == 0
    back = compare_reports(with_calls(far), with_calls(base))
    assert (back.slower, back.faster) == (0, 1)
    assert back.times[0].kernel == "a.norm" and back.times[0].ratio == round(100 / 120, 4)
    (op,) = back.ops
    assert (op.op, op.calls, op.faster, op.choices) == ("rms_norm", 1, 1, 0)


def test_another_choice_has_its_cause() -> None:
    """A refusal, a new kernel, one that is gone, another policy, other expectations: in this order."""
    base = measured(CALL, 1.0, 2.0)

    def why(
        after: MeasuredCall, before: MeasuredCall = base, policy: str = "abc", texts: tuple[str, ...] = TEXTS
    ) -> str:
        comparison = compare_reports(with_calls(before), with_calls(after, policy=policy, texts=texts))
        (change,) = comparison.choices
        return change.why

    refused = measured(
        CALL, 1.0, 2.0, chosen=1, verdicts=(StoredVerdict(0, None, (2,)), StoredVerdict(1, 2.0, (1,)))
    )
    assert why(refused) == "a.norm: SM_TOO_OLD: sm needs >= 90, got 80"
    gone = measured(CALL, 1.0, 2.0, chosen=1, verdicts=(StoredVerdict(1, 2.0, (1,)),))
    assert why(gone) == "a.norm: it is not registered there"
    faster = measured(CALL, 1.0, 0.5, chosen=1)
    only_first = measured(CALL, 1.0, verdicts=(StoredVerdict(0, 1.0, (1,)),))
    assert why(faster, only_first) == "b.norm is new"
    assert why(measured(CALL, 1.0, 0.5, chosen=1), refused_b()) == "b.norm was refused before: " + TEXTS[2]
    assert why(faster) == "expected us: a.norm 1, then 1; b.norm 2, then 0.5"
    said = ("preferred by policy", *TEXTS[1:])
    assert why(faster, policy="other", texts=said) == "another policy: preferred by policy"
    none = measured(CALL, 1.0, 2.0, regret=None)
    nobody = msgspec.structs.replace(none, chosen=-1, verdicts=(StoredVerdict(0, None, (2,)),))
    assert why(nobody) == "a.norm: " + TEXTS[2]


def refused_b() -> MeasuredCall:
    """A call that b.norm refuses."""
    return measured(CALL, 1.0, 2.0, verdicts=(StoredVerdict(0, 1.0, (1,)), StoredVerdict(1, None, (2,))))


def test_maps_are_compared_by_source_and_calls_by_words() -> None:
    """Tables are not compared with measurements; calls that only one has are counted."""
    mine, table = (
        call_map(measured(CALL, 1.0, 2.0)),
        call_map(measured(CALL, 9.0, 2.0), source="table x", own=False),
    )
    other = call_map(measured("float32 N=7", 1.0, 2.0))
    assert compare_reports(document(maps=(mine,)), document(maps=(table,))).times == ()
    apart = compare_reports(document(maps=(mine,)), document(maps=(other,)))
    assert (apart.only_first, apart.only_second, apart.times) == (1, 1, ())


def test_facts_of_one_side_alone_are_named() -> None:
    """A fact that is gone or new stands beside a dash."""
    comparison = compare_reports(document(facts={"a": "1", "b": "2"}), document(facts={"b": "3", "c": "4"}))
    assert [(f.name, f.first, f.second) for f in comparison.facts] == [
        ("a", "1", "-"),
        ("b", "2", "3"),
        ("c", "-", "4"),
    ]


def test_a_library_that_was_not_imported_differs_by_its_version_alone() -> None:
    """A report with `--quick` knows which release is there, and not whether it works."""

    def facts(*states: str) -> tuple[str, ...]:
        first, second = (document(facts={"library ray": state}) for state in states)
        there, back = (compare_reports(*pair).facts for pair in ((first, second), (second, first)))
        assert len(there) == len(back)
        return tuple(fact.name for fact in there)

    assert facts("works 2.60.0", "installed 2.60.0") == facts("broken 2.60.0", "installed 2.60.0") == ()
    changed = ("library ray",)
    assert facts("works 2.60.0", "installed 2.61.0") == changed
    assert facts("works 2.60.0", "broken 2.60.0") == facts("missing", "installed 2.60.0") == changed

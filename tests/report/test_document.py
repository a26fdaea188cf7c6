"""A report's record: out of JSON and out of its page, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from layerzero.report.compare import compare_reports
from layerzero.report.document import read_report
from layerzero.report.page import page_of_comparison, page_of_report
from layerzero.spec.errors import ReportRefusedError
from layerzero.spec.reasons import Reason
from tests.report.documents import call_map, document, measured


def test_the_page_and_the_json_hold_the_same_record(tmp_path: Path) -> None:
    """What was written is what is read, whatever its texts hold."""
    report = document(notes=("</script> & <b>", "\u2028"))
    (tmp_path / "a.html").write_bytes(page_of_report(report))
    (tmp_path / "a.json").write_bytes(msgspec.json.encode(report))
    assert read_report(tmp_path / "a.html") == read_report(tmp_path / "a.json") == report


def refused(path: Path, data: bytes) -> tuple[Reason, str]:
    """The code and the words with which a file of these bytes is refused."""
    path.write_bytes(data)
    with pytest.raises(ReportRefusedError) as caught:
        read_report(path)
    (problem,) = caught.value.problems
    assert caught.value.path == str(path) and path.name in str(caught.value)
    return problem.reason, str(problem)


def test_what_is_no_report_is_refused_with_its_code(tmp_path: Path) -> None:
    """Another page, other JSON, a later format, a page of a comparison, a file that was cut."""
    path, page = tmp_path / "r.html", page_of_report(document())
    plain = msgspec.to_builtins(document())
    later = json.dumps(plain | {"format": 99}).encode()
    assert refused(path, b"<html></html>")[0] is Reason.REPORT_FORMAT
    assert refused(path, b'{"rows": []}')[0] is Reason.REPORT_FORMAT
    assert refused(path, b"[1, 2]")[0] is Reason.REPORT_FORMAT
    assert refused(path, later) == (
        Reason.REPORT_FORMAT,
        "REPORT_FORMAT: r.html needs 'layerzero report' of format 1, got 'layerzero report' of format 99",
    )
    compared = page_of_comparison(compare_reports(document(), document()))
    assert refused(path, compared)[0] is Reason.REPORT_FORMAT
    assert refused(path, b"")[0] is Reason.REPORT_DAMAGED
    assert refused(path, b'{"kind": "layerzero rep')[0] is Reason.REPORT_DAMAGED
    assert refused(path, b"\xff\xfe")[0] is Reason.REPORT_DAMAGED
    nested = b'{"kind": "layerzero report", "format": 1, "ledger": ' + b"[" * 100_000
    assert refused(path, nested)[0] is Reason.REPORT_DAMAGED
    cut = page[: page.index(b'"ledger"')]
    assert refused(path, cut)[0] is Reason.REPORT_DAMAGED


@pytest.mark.parametrize("change", [{"chosen": 7}, {"why": 40}, {"elsewhere": 4}, {"chosen": -2}])
def test_numbers_point_at_what_is_there(tmp_path: Path, change: dict[str, int]) -> None:
    """A record whose kernel or sentence is not listed would be shown wrongly, so it is refused."""
    call = msgspec.structs.replace(measured("float32 N=1", 1.0, 2.0), **change)
    spoiled = document(maps=(call_map(call),))
    reason, words = refused(tmp_path / "r.json", msgspec.json.encode(spoiled))
    assert reason is Reason.REPORT_DAMAGED and "not listed" in words


def test_any_cut_of_a_record_is_refused(tmp_path: Path) -> None:
    """Of the JSON of a report no beginning is a report."""
    data = msgspec.json.encode(document())
    for length in range(0, len(data) - 1, 97):
        assert refused(tmp_path / "r.json", data[:length])[0] is Reason.REPORT_DAMAGED

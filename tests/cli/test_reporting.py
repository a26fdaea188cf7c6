"""`lz report` and `lz compare`: the files they write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from layerzero.report.document import FORMAT, read_report
from tests.cli.command import Lz
from tests.report.documents import call_map, document, measured

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 3_000_000


def stored(path: Path, **more: Any) -> str:
    """A report as JSON."""
    path.write_bytes(msgspec.json.encode(document(**more)))
    return str(path)


def test_an_empty_perfdb_gives_a_report_that_says_so(
    lz: Lz, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing measured, no table: status 0, a page that opens, and the command that measures is named."""
    monkeypatch.setenv("LAYERZERO_SHIPPED_TABLES", "false")
    page = tmp_path / "report.html"
    done = lz("report", str(page), "--quick")
    assert done.exit_code == 0 and "nothing was measured on this machine: lz tune" in done.output
    report = read_report(page)
    own, *shipped = report.maps  # the second one where a shipped table is for this class of machines
    assert own.is_own and own.calls == () and not any(each.is_own for each in shipped)
    assert report.facts["platform"] == "cpu" and report.format == FORMAT


def test_what_was_not_imported_is_not_said_to_be_missing(lz: Lz) -> None:
    """With --quick an installed library is there as far as was asked."""
    report = json.loads(lz("report", "--quick", "--json").output)
    assert "installed" not in {state for _, state, _ in report["missing"]}
    assert any(fact.startswith("installed ") for fact in report["facts"].values())


def test_the_report_of_every_shipped_record_is_small(
    lz: Lz, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tables of the package, with a verdict of every kernel on every call, and the ledger: below 3 MB."""
    page = tmp_path / "report.html"
    ledger = str(ROOT / "REQUIREMENTS.md")
    assert lz("report", str(page), "--quick", "--every-table", "--ledger", ledger).exit_code == 0
    report = read_report(page)
    assert len(report.maps) > 3 and sum(len(each.calls) for each in report.maps) > 1500
    assert len(report.ledger) > 300
    assert page.stat().st_size < MAX_BYTES


def test_ranks_and_drift_stand_in_the_record(lz: Lz, tmp_path: Path) -> None:
    """Two ranks' reports are put side by side, and an earlier report is compared with."""
    first, second = stored(tmp_path / "rank0.json"), stored(tmp_path / "rank1.json", facts={"torch": "1"})
    done = lz("report", "--quick", "--json", "--rank", first, "--rank", second, "--since", first)
    report = json.loads(done.output)
    assert [rank["name"] for rank in report["ranks"]] == ["rank0.json", "rank1.json"]
    assert report["ranks"][1]["facts"]["torch"] == "1"
    assert report["drift"]["first"] == document().title and report["drift"]["facts"]


def test_secrets_do_not_reach_the_page(lz: Lz, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of the environment that stands in a setting is hidden, in tables and facts alike."""
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretindeed")
    folder = tmp_path / "hf_verysecretindeed"
    monkeypatch.setenv("LAYERZERO_PERFDB", str(folder / "perfdb.sqlite"))
    page = tmp_path / "report.html"
    assert lz("report", str(page), "--quick").exit_code == 0
    assert "verysecret" not in page.read_text() and "[hidden]" in page.read_text()


def test_reports_are_compared_on_the_command_line(lz: Lz, tmp_path: Path) -> None:
    """Text, JSON and a page; --fail-slower turns a longer time into status 1."""
    slower = call_map(measured("float32 C=512 N=1", 9.0, 2.0, 0.5, chosen=1))
    first, second = stored(tmp_path / "a.json"), stored(tmp_path / "b.json", maps=(slower,))
    shown = lz("compare", first, second, "--page", str(tmp_path / "compared.html"))
    assert shown.exit_code == 0 and "1 longer; 1 choices differ" in shown.output
    assert "b.norm" in shown.output and (tmp_path / "compared.html").stat().st_size > 5000
    plain = json.loads(lz("compare", first, second, "--json").output)
    assert plain["times"][0]["ratio"] == 8.0 and plain["choices"][0]["second"] == "b.norm"
    assert lz("compare", first, second, "--fail-slower").exit_code == 1
    assert lz("compare", second, first, "--fail-slower").exit_code == 0


def test_what_is_wrong_is_said_by_name(lz: Lz, tmp_path: Path) -> None:
    """No place to write to, files that are not ours, or no reports, traces, ledgers; no process."""
    other = tmp_path / "notes.html"
    other.write_text("<p>notes")
    page = str(tmp_path / "r.html")
    for words, said in {
        ("report", "--quick"): "PATH needs",
        ("report", "--quick", str(other)): "not replaced",
        ("report", "--quick", page, "--since", str(other)): "REPORT_FORMAT",
        ("report", "--quick", page, "--rank", str(other)): "REPORT_FORMAT",
        ("report", "--quick", page, "--trace", str(other)): "needs to be a trace",
        ("report", "--quick", page, "--ledger", str(other)): "ledger needs",
        ("report", "--quick", page, "--metrics", "nowhere"): "URL needs http",
        ("compare", str(other), str(other)): "REPORT_FORMAT",
        ("compare", str(other)): "Missing argument",
    }.items():
        refused = lz(*words)
        assert refused.exit_code == 2 and said in refused.output, words
    assert other.read_text() == "<p>notes" and not Path(page).exists()

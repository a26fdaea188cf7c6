"""Which requirements are met where comes from the ledger and the records, and from nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import exit_criteria
from scripts.exit_criteria import hardware_class, report

LEDGER = """| id | what | where | proof | state |
|---|---|---|---|---|
| A1 | named | `a.py` | `tests/a.py::test_a` | done: `benchmarks/results/named.json` |
| A2 | measured | `benchmarks/pace.py` | `tests/a.py::test_b` | partly: half of it |
| A3 | tested | `a.py` | `tests/a.py::test_c` | done |
| A4 | broken | `a.py` | `tests/b.py` | done |
| A5 | tried | `a.py` | `tests/a.py::test_d` | done |
| A6 | nothing | - | - | open |
"""
AMD, INTEL = "2 cores of a CPU by amd with AVX2", "2 cores of a CPU by intel with AMX"
CARD = "1 x NVIDIA H200, 16 cores of a CPU by intel with AMX"


def environment(machine: str, script: str = "python other.py") -> dict[str, Any]:
    """An environment as a record has it."""
    return {"date": "2026-11-27", "machine": machine, "script": script, "commit": "c"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A ledger and five records: one named, one of a benchmark, one of tests on a card, one of mutations."""
    tests = [
        {"test": "tests/a.py::test_c[float32]", "outcome": "passed"},
        {"test": "tests/a.py::test_cc", "outcome": "failed"},  # another test than A3's
        {"test": "tests/b.py::test_one", "outcome": "passed"},
        {"test": "tests/b.py::test_two", "outcome": "failed"},
    ]
    mutations = [
        {"mutation": "1", "rows": ["A5", "A2"], "verdict": "killed", "machine": AMD},
        {"mutation": "2", "rows": ["A2"], "verdict": "survived", "machine": AMD},
        {"mutation": "3", "rows": ["A5"], "verdict": "killed"},
    ]
    records: dict[str, dict[str, Any]] = {
        "named": {"environment": environment(AMD)},
        "pace_cpu": {"part": {"environment": environment(INTEL, "python benchmarks/pace.py --out x")}},
        "card": {"environment": environment(CARD), "tests": tests},
        "mutations": {"environment": environment(INTEL), "rows": mutations},
        "made_of_others": {"tables": {}},
    }
    for name, record in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    (tmp_path / "REQUIREMENTS.md").write_text(LEDGER)
    return tmp_path


def cells(folder: Path, name: str) -> dict[str, str]:
    """What a requirement's row says, by class, without the classes that have no record of it."""
    criteria = report(folder / "REQUIREMENTS.md", folder)["criteria"]
    (row,) = [dict(zip(criteria["columns"], row, strict=True)) for row in criteria["rows"] if row[0] == name]
    return {key: cell for key, cell in row.items() if cell != "-" and key != "requirement"}


def test_a_requirement_is_met_where_a_record_says_so(folder: Path) -> None:
    """By its name, its benchmark, its test, its mutations; a survivor shows nothing, a failure wins."""
    assert cells(folder, "A1") == {"ledger": "met", "AMD CPU": "met: named"}
    assert cells(folder, "A2") == {"ledger": "partly", "Intel CPU": "partly: pace_cpu"}
    assert cells(folder, "A3") == {"ledger": "met", "one H200": "met: card"}
    assert cells(folder, "A4") == {"ledger": "met", "one H200": "failed: card"}
    assert cells(folder, "A5") == {
        "ledger": "met", "AMD CPU": "met: mutations", "CPU not named": "met: mutations",
    }  # fmt: skip
    tables = report(folder / "REQUIREMENTS.md", folder)
    assert tables["unrecorded"]["rows"] == [["open", "A6"]]
    classes = {row[0]: row[1:] for row in tables["classes"]["rows"]}
    assert classes["one H200"][:7] == [
        1,
        1,
        0,
        0,
        0,
        1,
        4,
    ]  # records, met, partly, open, observed, failed, none
    assert classes["two GPUs"][:7] == [0, 0, 0, 0, 0, 0, 6]


@pytest.mark.parametrize(
    ("described", "gpus", "expected"),
    [
        ({"machine": AMD}, None, "AMD CPU"),
        ({"cpu": "Intel(R) Xeon(R) Processor", "gpu": None}, None, "Intel CPU"),
        ({"machine": "1 x NVIDIA H100 80GB HBM3, 16 cores of a CPU by intel with AMX"}, None, "one H100"),
        ({"machine": "2 x NVIDIA H200, 32 cores of a CPU by intel with AMX"}, None, "two GPUs"),
        ({"cpu": "Intel(R) Xeon(R) Processor", "gpu": "NVIDIA H200"}, 4, "four GPUs"),
        ({"device": "NVIDIA H200"}, None, "one H200"),
        ({"device": "NVIDIA RTX A6000"}, None, "one A6000"),
        ({}, None, ""),
    ],
)
def test_a_machine_has_one_class(described: dict[str, Any], gpus: int | None, expected: str) -> None:
    """Environments of older records name less."""
    assert hardware_class(described, gpus) == expected


def test_a_failure_and_a_class_without_a_record_stop_a_release(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 1, and what is wrong is named; the tables are kept."""
    made = report(folder / "REQUIREMENTS.md", folder)
    monkeypatch.setattr(exit_criteria, "report", lambda: made)
    assert exit_criteria.main(["--need", "two GPUs", "--out", str(folder / "out" / "exit.json")]) == 1
    assert capsys.readouterr().err.splitlines() == ["two GPUs: no record", "A4: failed: card"]
    assert json.loads((folder / "out" / "exit.json").read_text())["tables"] == made
    made["criteria"]["rows"] = [row for row in made["criteria"]["rows"] if row[0] != "A4"]
    assert exit_criteria.main(["--need", "AMD CPU", "one H200"]) == 0


def test_the_committed_records_hold_no_failure() -> None:
    """Of this project's own requirements; classes that nothing ran on are named all the same."""
    tables = report()
    assert not [row for row in tables["criteria"]["rows"] if any(str(c).startswith("failed") for c in row)]
    assert [row[0] for row in tables["classes"]["rows"]][:6] == list(exit_criteria.CLASSES)

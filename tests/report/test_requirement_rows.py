"""The ledger of requirements as a report reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerzero.report.requirement_rows import read_ledger
from layerzero.spec.errors import ConfigurationError
from scripts import ledger

ROOT = Path(__file__).resolve().parents[2]


def test_it_reads_the_rows_that_the_checks_read() -> None:
    """Every row of REQUIREMENTS.md, done where the project's own reader says done."""
    path = ROOT / "REQUIREMENTS.md"
    theirs = [(row.name, row.done) for row in ledger.rows(path)]
    assert [(row.id, row.state == "done") for row in read_ledger(path)] == theirs


def test_a_state_has_its_remark(tmp_path: Path) -> None:
    """What follows the state is the note; a state of no known word is open, with its words as the note."""
    path = tmp_path / "ledger.md"
    path.write_text(
        "# Tasks\n| id | what | where | proof | state |\n|---|---|---|---|---|\n"
        "| A | x | `f` | `t` | partly: the rest |\n| B | y | - | - | when it is warm |\n\n| no | ledger |\n"
    )
    first, second = read_ledger(path)
    assert (first.section, first.id, first.proof, first.state, first.note) == (
        "Tasks",
        "A",
        "t",
        "partly",
        "the rest",
    )
    assert (second.state, second.note) == ("open", "when it is warm")


@pytest.mark.parametrize("data", [b"", b"# nothing\n| a | b |\n", b"\xff\xfe"])
def test_what_is_no_ledger_is_refused(tmp_path: Path, data: bytes) -> None:
    """A file without rows of a ledger, or no text at all, is named with what it needs."""
    path = tmp_path / "notes.md"
    path.write_bytes(data)
    with pytest.raises(ConfigurationError, match="ledger needs"):
        read_ledger(path)
    with pytest.raises(ConfigurationError, match="ledger needs"):
        read_ledger(tmp_path / "missing.md")

"""The documents name what the package has: every op, every layer, every extra; and tables come from data."""

import tomllib
from pathlib import Path
from typing import Any

from layerzero.backends import load_builtin
from layerzero.ops import table as ops_table
from scripts import outputs, result_tables, support_matrix

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_names_every_op() -> None:
    """An op that users can call stands in the README, and nowhere else first."""
    text = (ROOT / "README.md").read_text()
    assert [name for name in ops_table.names() if f"`{name}`" not in text] == []


def test_the_readme_names_every_extra() -> None:
    """Whoever installs can read what an extra brings."""
    text = (ROOT / "README.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name in extras if f"`{name}`" not in text and name != "all"] == []


def test_backends_are_described() -> None:
    """Every built-in backend has its row in docs/backends.md."""
    text = (ROOT / "docs" / "backends.md").read_text()
    assert [name for name in {k.backend for k in load_builtin()} if f"| `{name}` |" not in text] == []


def test_the_matrix_claims_only_what_a_record_says() -> None:
    """Without a record nothing is measured; with one, exactly what passed is."""
    ids = [k.id for k in load_builtin() if "cpu" in k.capability.platforms]
    record: dict[str, Any] = {
        "platform": "cpu",
        "proof": "a test",
        "environment": {"date": "2026-01-01T00:00:00+00:00", "device": "a CPU", "versions": {"torch": "2"}},
        "kernels": {ids[0]: "passed", ids[1]: "failed"},
    }
    claimed = {
        row[1]: row[2]
        for row in support_matrix.matrix([record])["support"]["rows"]
        if row[2] in (support_matrix.MEASURED, "fails here")
    }
    assert claimed == {f"`{ids[0]}`": support_matrix.MEASURED, f"`{ids[1]}`": "fails here"}
    assert support_matrix.MEASURED not in str(support_matrix.matrix([])["support"]["rows"])


def test_a_row_that_was_not_measured_is_left_out() -> None:
    """The hot path's table holds what there is a number for, under its words."""
    record = {
        "verdicts": {
            "a_hit": {"us": 0.05, "floor": 1.0, "aim": 0.1, "meets_floor": True, "meets_aim": True},
            "e_one_of_64_spawn": {
                "us": None,
                "floor": 5.0,
                "aim": 1.5,
                "meets_floor": None,
                "meets_aim": None,
            },
        }
    }
    assert result_tables.calls(record)["rows"] == [[result_tables.CALLS["a_hit"], 0.05, 1.0, True, 0.1, True]]


def test_output_is_written_between_its_marks_only() -> None:
    """Text around a block stays; the block holds the command and what it printed."""
    before = "above\n<!-- output: lz --version -->\nold\n<!-- /output -->\nbelow\n"
    after = outputs.rendered(before)
    assert after.startswith("above\n<!-- output: lz --version -->\n```text\n$ lz --version\n")
    assert after.endswith("```\n<!-- /output -->\nbelow\n")
    assert outputs.rendered(after) == after

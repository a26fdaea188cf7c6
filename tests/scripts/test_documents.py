"""The documents name what the package has: every op, every layer, every extra; and tables come from data."""

import tomllib
from pathlib import Path
from typing import Any

from layerzero.backends import load_builtin
from layerzero.ops import table as ops_table
from layerzero.spec.settings import OTHER_VARIABLES, Settings
from scripts import ledger, outputs, reference, result_tables, support_matrix

ROOT = Path(__file__).resolve().parents[2]


def test_every_op_is_documented() -> None:
    """An op that users can call is on the page of ops."""
    text = (ROOT / "docs" / "reference" / "ops.md").read_text()
    assert [name for name in ops_table.names() if f"`{name}`" not in text] == []


def test_every_extra_is_documented() -> None:
    """The page on installing says what each extra brings."""
    text = (ROOT / "docs" / "guide" / "install.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert [name for name in extras if f"`{name}`" not in text and name != "all"] == []


def test_backends_are_described() -> None:
    """Every built-in backend has its row on the page of backends."""
    text = (ROOT / "docs" / "reference" / "backends.md").read_text()
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


def test_every_package_on_disk_is_in_the_architecture() -> None:
    """ARCHITECTURE's table names every folder with code, so that none can be forgotten."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    inits = [p for top in reference.FOLDERS for p in (ROOT / top).glob("*/**/__init__.py")]
    linked = [ROOT / "layerzero" / "actors", ROOT / "layerzero" / "scheduler"]
    folders = {p.parent for p in inits if not any(p.is_relative_to(link) for link in linked)}
    named = {f"`{folder.relative_to(ROOT).as_posix()}/`" for folder in folders}
    assert len(named) > 20
    assert {name for name in named if name not in text} == set()


def test_every_variable_is_explained() -> None:
    """The page of settings says what each variable that is no field does."""
    text = (ROOT / "docs" / "reference" / "settings.md").read_text()
    generated = reference.PLACE.sub("", text)
    assert [name for name in OTHER_VARIABLES if f"`{name}" not in generated] == []


def test_every_setting_has_a_meaning() -> None:
    """Each field of Settings is in the generated tables, with its default and a text."""
    text = reference.part("settings")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    fields = set(Settings.__struct_fields__) - {"version"}
    assert {row.split("`")[1] for row in rows} == fields
    assert all(row.rsplit("|", 2)[1].strip() for row in rows)


def test_every_requirement_has_one_state() -> None:
    """A row's state is one of the four, and what is partly done or open says what is missing."""
    wrong = [
        row.name
        for row in ledger.rows(ROOT / "REQUIREMENTS.md")
        if row.state.partition(":")[0].split()[0] not in ("done", "partly", "partly:", "open", "observed")
    ]
    assert wrong == []


def test_the_glossary_has_at_most_sixty_words_with_a_source_each() -> None:
    """A reader learns sixty words, and sees for each where the field uses it."""
    text = (ROOT / "docs" / "design" / "glossary.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert 30 <= len(rows) <= 60
    assert [row for row in rows if len(row) != 3 or not all(row)] == []
    assert [row[0] for row in rows] == sorted({row[0] for row in rows}, key=str.lower)

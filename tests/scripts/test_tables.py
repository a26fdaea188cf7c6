"""Tables of the documents are written from measurements, never by hand."""

import json
from pathlib import Path

import pytest

from scripts import tables

DATA = {
    "tables": {
        "calls": {"columns": ["what", "us", "calls"], "rows": [["hit", 0.0712345, 12000], ["a|b", 123.4, 1]]}
    }
}


def document(file: Path, body: str) -> str:
    """Return a document with one generated table that holds `body`."""
    return f"before\n<!-- table: {file}#calls -->\n{body}<!-- /table -->\nafter\n"


def test_a_table_is_written_between_its_marks(tmp_path: Path) -> None:
    """Three significant digits, thousands separated, pipes escaped, and nothing outside the marks changes."""
    (file := tmp_path / "r.json").write_text(json.dumps(DATA))
    body = "| what | us | calls |\n| --- | --- | --- |\n| hit | 0.0712 | 12,000 |\n| a\\|b | 123 | 1 |\n"
    assert tables.rendered(document(file, "stale\n")) == document(file, body)


def test_writing_twice_changes_nothing(tmp_path: Path) -> None:
    """A fresh table is its own rendering."""
    (file := tmp_path / "r.json").write_text(json.dumps(DATA))
    once = tables.rendered(document(file, ""))
    assert tables.rendered(once) == once


def test_a_short_row_is_refused() -> None:
    """A row with a missing cell would shift every number after it."""
    with pytest.raises(ValueError, match="a row needs 2 cells, got 1"):
        tables.table(["a", "b"], [[1]])


@pytest.mark.parametrize(
    ("value", "text"), [(True, "yes"), (None, "-"), (1e-4, "0.0001"), (99.96, "100"), ("x", "x")]
)
def test_cells(value: object, text: str) -> None:
    """Every kind of value has one rendering."""
    assert tables.cell(value) == text


def test_a_number_in_a_sentence_comes_from_its_record(tmp_path: Path) -> None:
    """The keys lead through objects and lists; text around the marks stays."""
    (file := tmp_path / "r.json").write_text('{"a b": [{"c": 1234}]}')
    text = f"cut <!-- value: {file}#a b/0/c -->{{}}<!-- /value --> times"
    assert tables.rendered(text.format("stale")) == text.format("1,234")

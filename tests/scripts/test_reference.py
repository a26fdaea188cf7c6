"""Parts of the documents are written from the code, never by hand."""

from __future__ import annotations

import re

import pytest

from scripts import reference


@pytest.mark.parametrize("name", sorted(reference.PARTS))
def test_every_part_has_rows(name: str) -> None:
    """A part that finds nothing in the code would empty its page in silence."""
    assert len(reference.part(name).splitlines()) > (0 if name == "variables" else 4)


def test_a_part_is_written_between_its_marks() -> None:
    """Nothing outside the marks changes, and a fresh document is its own rendering."""
    text = "before\n<!-- code: reasons -->\nstale\n<!-- /code -->\nafter\n"
    fresh = reference.rendered(text)
    assert fresh.startswith("before\n<!-- code: reasons -->\n| code |")
    assert fresh.endswith("<!-- /code -->\nafter\n")
    assert reference.rendered(fresh) == fresh


def test_an_unknown_part_is_named() -> None:
    """A misspelt mark is an error, not an empty page."""
    with pytest.raises(ValueError, match="<!-- code: resons --> needs one of"):
        reference.rendered("<!-- code: resons -->\n<!-- /code -->")


def test_events_carry_level_keys_and_place() -> None:
    """An event that is logged by its constant is found with what travels along."""
    (row,) = [
        line for line in reference.part("events").splitlines() if line.startswith("| `circuit.opened` ")
    ]
    assert "warning" in row
    assert "`kernel`, `why`" in row
    assert "layerzero/health/" in row


def test_commands_below_commands_are_shown() -> None:
    """The help of `lz policy check` stands beside that of `lz policy`."""
    assert "### lz policy check\n" in reference.part("commands")


def test_a_sentence_ends_at_its_stop() -> None:
    """The first sentence alone, on one line; dots inside a name do not end it."""
    assert reference.sentence("Runs `a.b`\nat once. Then stops.\n\nMore.") == "Runs `a.b` at once"


def test_a_second_name_of_an_exception_says_whose_it_is() -> None:
    """And the base of two public exceptions is public itself: what the table names can be caught."""
    rows = {line.split("`")[1]: line for line in reference.part("errors").splitlines()[2:]}
    assert "Another name of `NoKernelFoundError`" in rows["NoKernelAvailableError"]
    named = {base for line in rows.values() for base in line.split(" | ")[1].split("`")[1::2]}
    assert named - set(rows) <= {"Exception", "ValueError", "TimeoutError", "RuntimeError"}


def test_modules_may_give_one_name_to_two_events() -> None:
    """Three modules have a NOT_WRITTEN of their own; each logs its event, not the last one that was read."""
    rows = reference.part("events").splitlines()
    for event, place in (
        ("drift", "measure/drift"),
        ("timeline", "observe/timeline"),
        ("shipped_table", "shipped"),
    ):
        (row,) = [line for line in rows if re.match(rf"\| `{event}\.(not_written|refused)` ", line)]
        assert f"{place}.py" in row and "," not in row.rpartition(" | ")[2]


def test_every_constant_that_is_the_version_of_a_file_has_a_row() -> None:
    """Whatever the constant is called: FORMAT, FORMAT_VERSION, SCHEMA."""
    rows = reference.part("formats")
    for module in ("report/document", "warmup/archive", "spec/settings", "perfdb/rows", "sharing/work"):
        assert f"`layerzero/{module}.py`" in rows

"""REQUIREMENTS.md has one row for each requirement of its sources, and no state beyond its proof."""

from collections import Counter
from pathlib import Path

import pytest

from scripts import ledger

ROWS = ledger.rows(Path(__file__).resolve().parents[2] / "REQUIREMENTS.md")
STATES = ("done", "partly", "open", "observed")


def numbered(prefix: str, last: int, digits: int = 1) -> set[str]:
    """The ids of a source that counts from 1."""
    return {f"{prefix}{number:0{digits}}" for number in range(1, last + 1)}


def parts(chapter: int, last: int) -> set[str]:
    """The ids of a chapter of the end-to-end specification."""
    return numbered(f"E{chapter}.", last)


# What each source asks: tasks, its appendix and its end; scenarios; parity; reference definitions; decisions.
SOURCES = {
    "tasks": {"T0"} | numbered("T", 58) | numbered("D", 5) | numbered("A", 3),
    "ends": (
        (numbered("E", 25) - {"E6", "E7", "E8", "E9", "E10", "E11"})
        | parts(6, 19) | parts(7, 8) | parts(8, 5) | parts(9, 4) | parts(10, 5) | parts(11, 5)
    ),
    "scenarios": {
        f"{kind}-{number:03}" for kind in ("NO", "EC", "FS", "CS", "PS") for number in range(1, 36)
    },
    "parity": numbered("M", 15) | numbered("R", 10),
    "decisions": numbered("K", 44) | {"K14b"},
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_each_requirement_has_a_row(source: str) -> None:
    """None is left out, and one that is asked twice in other words has rows that say so."""
    answered = {name for row in ROWS for name in row.ids}
    assert sorted(SOURCES[source] - answered) == []


def test_each_row_stands_once_and_has_a_state() -> None:
    """Two rows of one name would be two states; partly and open say what is missing."""
    assert [name for name, count in Counter(row.name for row in ROWS).items() if count > 1] == []
    for row in ROWS:
        state, _, remark = row.state.partition(":")
        assert state.split()[0] in STATES, row.name
        assert remark or state != "partly", f"{row.name} does not say what is missing"

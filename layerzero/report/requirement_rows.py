"""The rows of a ledger of requirements, out of its Markdown tables."""

# Values whose shape the code has checked, or that a table names.
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from layerzero._util.files import read_given
from layerzero.report.document import LedgerRow
from layerzero.spec.errors import ConfigurationError

STATES: Final = ("done", "partly", "open", "observed")
_COLUMNS: Final = ("id", "what", "where", "proof", "state")


def read_ledger(path: str | os.PathLike[str]) -> tuple[LedgerRow, ...]:
    """The rows of a ledger: every table whose columns are id, what, where, proof, state.

    Raises: ConfigurationError: it cannot be read, or has no such row.
    """
    try:
        rows = tuple(_rows(read_given(path).decode()))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"ledger needs a Markdown file: {error}", path=str(path)) from error
    if not rows:
        columns = " | ".join(_COLUMNS)
        raise ConfigurationError(f"ledger needs rows of | {columns} |, got none in {path}", path=str(path))
    return rows


def _rows(text: str) -> Iterator[LedgerRow]:
    section, in_ledger = "", False
    for line in text.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        is_row = line.startswith("|")
        cells = tuple(cell.strip() for cell in line.strip().strip("|").split("|")) if is_row else ()
        if len(cells) != len(_COLUMNS):
            in_ledger = False
        elif (cells[0], *cells[2:]) == (_COLUMNS[0], *_COLUMNS[2:]):  # a decision's second one is "decided"
            in_ledger = True
        elif in_ledger and set(cells[0]) - {"-", ":"}:
            name, what, _, proof, verdict = cells
            first, _, rest = verdict.partition(":")
            word = first.partition(" ")[0].lower()
            state, note = (word, rest.strip()) if word in STATES else ("open", verdict)
            yield LedgerRow(section, name, what, proof.replace("`", ""), state, note)

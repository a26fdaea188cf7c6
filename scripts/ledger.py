"""Reads REQUIREMENTS.md: every row with its ids, the files it lives in, its proofs and its state."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

QUOTED = re.compile(r"`([^`]+)`")
DONE = re.compile(r"done\b", re.IGNORECASE)  # "done", "done: with a remark"
SPAN = re.compile(r"([A-Z]+-?)(\d+) to ([A-Z]+-?)(\d+)")
COLUMNS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One row: `ids` that it answers to, `where` and `proofs` as they stand between backquotes.

    A proof is a pytest node, a path, or a command line. `bare` is the text of the proof's cell.
    """

    line: int
    section: str
    name: str
    ids: tuple[str, ...]
    where: tuple[str, ...]
    proofs: tuple[str, ...]
    bare: str
    state: str

    @property
    def done(self) -> bool:
        """Whether the state says so, with or without a remark."""
        return DONE.match(self.state) is not None

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths and nodes that the proofs name: a command's are the words with a slash."""
        words = (word for proof in self.proofs for word in proof.split())
        return tuple(word for word in words if "/" in word and not word.startswith("-"))

    @property
    def tests(self) -> tuple[str, ...]:
        """The paths and nodes that pytest can run."""
        return tuple(path for path in self.paths if path.startswith("tests/"))


def rows(path: Path) -> list[Row]:
    """Every row of the ledger at `path`, in order."""
    return list(_rows(path.read_text()))


def _rows(text: str) -> Iterator[Row]:
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            section = line.lstrip("# ")
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if len(cells) != COLUMNS or cells[0] == "id" or set(cells[0]) <= {"-", ":"}:
            continue
        name, _, where, proof, state = cells
        yield Row(
            number, section, name, ids(name), tuple(QUOTED.findall(where)), whole(QUOTED.findall(proof)),
            proof, state,
        )  # fmt: skip


def ids(name: str) -> tuple[str, ...]:
    """What a row answers to: the name itself, each id in it, each id of a span such as `K7 to K10`."""
    answers = [name]
    for part in name.split(", "):
        span = SPAN.fullmatch(part)
        if span is None:
            answers.append(part)
            continue
        width = len(span[2])
        answers += [f"{span[1]}{n:0{width}}" for n in range(int(span[2]), int(span[4]) + 1)]
    return tuple(dict.fromkeys(answers))


def whole(proofs: list[str]) -> tuple[str, ...]:
    """The proofs with `::test` written out: it stands in the file of the proof before it."""
    written: list[str] = []
    for proof in proofs:
        before = written[-1].partition("::")[0] if written else ""
        written.append(before + proof if proof.startswith("::") else proof)
    return tuple(written)

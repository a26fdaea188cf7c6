"""The mutations of tests/mutations: read, checked against the ledger, and applied to a text.

One file a section of the ledger; each entry is a table:

    [[mutation]]
    rows = ["T2"]                 # ids or names of rows of the ledger
    file = "layerzero/spec/kernel.py"  # from the root of the checkout
    old = "x < y"                 # stands once in the file
    new = "x <= y"
    kills = "A limit is one too wide."
    proof = ["tests/..."]         # optional: pytest nodes; without it those of the rows
    needs = "cuda"                # optional: what this machine may lack
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.ledger import Row

REQUIRED = {"rows": list, "file": str, "old": str, "new": str, "kills": str}
OPTIONAL = {"proof": list, "needs": str}
NEEDS = ("cuda", "hours")


class MutationError(ValueError):
    """An entry that cannot be read, or names what is not there."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """The smallest edit that kills a feature, and the proof that must notice; `place` is where it stands."""

    place: str
    rows: tuple[str, ...]
    file: str
    old: str
    new: str
    kills: str
    proof: tuple[str, ...]
    needs: str = ""

    def applied(self, text: str) -> str:
        """`text` with the edit made.

        Raises: MutationError: `old` does not stand in it exactly once, or what comes out is no Python.
        """
        times = text.count(self.old)
        if times != 1:
            first = self.old.strip().splitlines()[0]
            fault = "is gone" if times == 0 else f"stands {times} times"
            raise MutationError(f"{self.file}: the old text {fault}, needs it once: {first!r} ({self.place})")
        edited = text.replace(self.old, self.new)
        if self.file.endswith(".py"):
            try:
                ast.parse(edited)
            except SyntaxError as error:  # any proof would be red
                why = f"the edit needs to be Python: {error}"
                raise MutationError(f"{self.file}: {why} ({self.place})") from None
        return edited


def read(folder: Path, ledger: Iterable[Row]) -> list[Mutation]:
    """Every mutation of `folder`, its proof filled in from the ledger where it names none.

    Raises: MutationError: an entry is not as the head of this file says.
    """
    by_id = {name: row for row in ledger for name in row.ids}
    return [
        _mutation(f"{path.name}, entry {number}", entry, by_id)
        for path in sorted(folder.glob("*.toml"))
        for number, entry in enumerate(_entries(path), 1)
    ]


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        entries = tomllib.loads(path.read_text()).get("mutation", [])
    except tomllib.TOMLDecodeError as error:
        raise MutationError(f"{path.name}: {error}") from error
    if not isinstance(entries, list):
        raise MutationError(f"{path.name}: needs entries under [[mutation]]")
    return entries


def _mutation(place: str, entry: dict[str, Any], by_id: dict[str, Row]) -> Mutation:
    known = REQUIRED | OPTIONAL
    if wrong := entry.keys() - known.keys():
        raise MutationError(f"{place}: unknown {', '.join(sorted(wrong))}; known are {', '.join(known)}")
    if missing := REQUIRED.keys() - entry.keys():
        raise MutationError(f"{place}: needs {', '.join(sorted(missing))}")
    for name, value in entry.items():
        empty = name != "new" and not value
        if empty or not isinstance(value, known[name]):
            raise MutationError(f"{place}: {name} needs a {known[name].__name__} that is not empty")
    if entry["old"] == entry["new"]:
        raise MutationError(f"{place}: old and new are the same")
    if entry.get("needs", NEEDS[0]) not in NEEDS:
        raise MutationError(f"{place}: needs is one of {', '.join(NEEDS)}, got {entry['needs']!r}")
    if strange := [name for name in entry["rows"] if name not in by_id]:
        raise MutationError(f"{place}: the ledger has no row {', '.join(map(str, strange))}")
    of_rows = tuple(dict.fromkeys(test for name in entry["rows"] for test in by_id[name].tests))
    proof = tuple(entry.get("proof", of_rows))
    if not proof:
        raise MutationError(f"{place}: the rows name no test; name one as its proof")
    texts = {name: entry[name] for name in ("file", "old", "new", "kills")}
    return Mutation(place, tuple(entry["rows"]), proof=proof, needs=entry.get("needs", ""), **texts)


def without(mutations: Iterable[Mutation], ledger: Iterable[Row]) -> list[Row]:
    """The rows that are done and that no mutation is named for."""
    named = {name for mutation in mutations for name in mutation.rows}
    return [row for row in ledger if row.done and not named.intersection(row.ids)]

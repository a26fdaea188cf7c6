"""What mutations were tried and what came of them, in a file that the next run goes on from.

Each row says at which commit it was tried and by what it is known: a digest of its file, its edit and its
proof. One that was killed is not tried again until one of these is another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness import environment, write
from scripts.mutations import Mutation


class MutationRecord:
    """The rows of a file, by mutation; a file that is not there has none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._rows = {row["mutation"]: row for row in json.loads(path.read_text())["rows"]}
        self._environment = environment()

    def verdict(self, mutation: Mutation) -> str:
        """What came of a mutation when it was tried last; empty where it was not."""
        row = self._rows.get(digest(mutation))
        return str(row["verdict"]) if row else ""

    def add(self, mutation: Mutation, verdict: str, why: str, by: str = "") -> None:
        """Note a result, and write the file."""
        self._rows[digest(mutation)] = {
            "mutation": digest(mutation), "place": mutation.place, "rows": list(mutation.rows),
            "verdict": verdict, "by": by, "why": why[:300], "commit": self._environment["commit"],
            "machine": self._environment["machine"],
        }  # fmt: skip
        write(self._path, {"environment": self._environment, "rows": list(self._rows.values())})


def digest(mutation: Mutation) -> str:
    """What a mutation is known by."""
    parts = (mutation.file, mutation.old, mutation.new, *mutation.proof)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def ordered(chosen: Iterable[Mutation]) -> list[Mutation]:
    """Those whose proofs are short first: few tests before many, and before whole files."""
    return sorted(chosen, key=lambda m: (any("::" not in node for node in m.proof), len(m.proof), m.proof))

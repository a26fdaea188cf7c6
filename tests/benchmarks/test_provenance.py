"""Every committed record says how it came about: script, commit of a clean tree, class of machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.provenance import ROOT, provenance

# Made before records named their commit and script; each waits for a run on its machine.
OLDER = frozenset(
    {
        "lane.json",
        "ran_cuda_flash_attn_2.json",
        "regret_h200.json",
        "regret_h200_second.json",
    }
)
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
# Made of other records; no number in them was measured for them.
DERIVED = {"support.json", "regret_h200_replayed.json"}


def environments(record: Any, depth: int = 2) -> Iterator[dict[str, Any]]:
    """The environments of a record: its own, or one of each of its sections."""
    if not isinstance(record, dict):
        return
    if isinstance(record.get("environment"), dict):
        yield record["environment"]
    elif depth:
        for section in record.values():
            yield from environments(section, depth - 1)


COMPLETE = [path for path in RECORDS if path.name not in DERIVED | OLDER]


def test_what_is_older_is_still_incomplete() -> None:
    """A record that was made anew leaves the list."""
    for name in OLDER:
        found = list(environments(json.loads((ROOT / "benchmarks" / "results" / name).read_text())))
        assert not found or any("script" not in environment for environment in found), name


@pytest.mark.parametrize("path", COMPLETE, ids=lambda p: p.stem)
def test_a_record_says_how_it_came_about(path: Path) -> None:
    """A reader can check out what ran, run it again, and knows for which machines the numbers hold."""
    found = list(environments(json.loads(path.read_text())))
    assert found, f"{path.name} has no environment"
    for environment in found:
        assert re.fullmatch(r"[0-9a-f]{40}", environment.get("commit") or ""), path.name
        assert environment["clean"] is True, path.name
        assert environment["machine"] and environment["date"], path.name
        named = re.search(
            r"(?:-m ([\w.]+)|((?:benchmarks|examples|scripts)/[\w/]+\.py))", environment["script"]
        )
        assert named, f"{path.name}: {environment['script']!r} names no script of the tree"
        script = named[2] or named[1].replace(".", "/") + ".py"
        assert (ROOT / script).exists() or (ROOT / script[:-3] / "__main__.py").exists(), script


def test_what_is_derived_names_what_it_is_made_of() -> None:
    """The support matrix and a replay are made of records that are committed too."""
    replayed = json.loads((ROOT / "benchmarks/results/regret_h200_replayed.json").read_text())
    assert (ROOT / "benchmarks" / "results" / replayed["record"]).exists()


def test_a_change_of_code_is_told_from_a_written_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """`clean` is about what runs, and a copy without history takes the commit that it is told."""
    from benchmarks import provenance as module

    asked: list[tuple[str, ...]] = []

    def git(*arguments: str) -> str | None:
        asked.append(arguments)
        return "a" * 40 if arguments[0] == "rev-parse" else " M layerzero/selection/dispatch.py"

    monkeypatch.setattr(module, "git", git)
    assert provenance()["clean"] is False
    assert ":!benchmarks/results" in asked[-1]
    monkeypatch.setattr(module, "git", lambda *_: None)
    monkeypatch.delenv("LZ_SOURCE_COMMIT", raising=False)
    assert provenance()["commit"] is None and provenance()["clean"] is None
    monkeypatch.setenv("LZ_SOURCE_COMMIT", "b" * 40)
    assert provenance()["commit"] == "b" * 40 and provenance()["clean"] is True

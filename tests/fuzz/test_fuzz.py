"""Bytes from outside are read, or refused by the error that is promised; `python -m tests.fuzz` asks more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fuzz import __main__ as command
from tests.fuzz.changes import MAX_LEN, mutated
from tests.fuzz.targets import CORPUS, TARGETS, Target

RUNS = 300
each = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)


def test_every_target_has_a_corpus_and_every_corpus_a_target() -> None:
    """No input lies where nothing reads it, and no parser starts from nothing."""
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert all(target.corpus() for target in TARGETS.values())


@each
def test_the_corpus_is_read_or_refused_as_promised(target: Target) -> None:
    """Inputs of defects that were found stay mended, and each parser reads behind its first checks."""
    broken = {path.name: target.broken_by(path.read_bytes()) for path in (CORPUS / target.name).iterdir()}
    assert {name: error for name, error in broken.items() if error} == {}
    if target.name != "plan":  # a plan holds for one machine
        assert any(_is_read(target, data) for data in target.corpus())


def _is_read(target: Target, data: bytes) -> bool:
    try:
        target.parse(data)
    except target.allowed:
        return False
    return True


@each
def test_changes_of_the_corpus_break_nothing(target: Target) -> None:
    """Some changes in this suite; the stress suite makes a million of each."""
    random, corpus = Random(7), target.corpus()
    for _ in range(RUNS):
        data = mutated(random.choice(corpus), corpus, target.words, random)
        error = target.broken_by(data)
        assert error is None, f"{data!r}: {error!r}"


def test_changes_reach_every_part_of_an_input_within_the_bound() -> None:
    """Each value of a JSON text is replaced or removed sooner or later, and nothing grows without end."""
    source = b'{"a": 1, "b": {"c": [2, 3]}, "d": "x"}'
    random = Random(1)
    results = {mutated(source, [source], [b"null"], random) for _ in range(3000)}
    assert max(map(len, results)) <= MAX_LEN
    trees = [json.loads(data) for data in results if _is_object(data)]
    for path in ("a", "b", "d"):
        assert any(path not in tree for tree in trees) and any(tree.get(path) is None for tree in trees)
    assert any(isinstance(tree.get("b"), dict) and tree["b"].get("c") == [3] for tree in trees)


def _is_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


def test_a_planted_defect_is_found_and_its_input_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A parser that forgets a check breaks within some hundred changes; the input that did it is written."""
    from server import protocol

    monkeypatch.setattr(protocol, "_object", json.loads)
    command._plain("http", 400, 1, tmp_path)
    kept = list(tmp_path.glob("http-*.input"))
    assert kept and TARGETS["http"].broken_by(kept[0].read_bytes())
    assert "BROKEN http" in capsys.readouterr().out


def test_what_was_run_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record counts runs, seconds, new inputs and broken ones of each target, and where it comes from."""
    found = tmp_path / "corpus" / "http"
    found.mkdir(parents=True)

    def ran(words: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        name, broken = words[3], words[3] == "http"
        if broken:
            (found / "new").write_bytes(b"{}")
        said = "BROKEN http: ValueError: a plant\n" if broken else ""
        assert {"--here", "--plain", "--runs", "40"} <= set(words) and name in TARGETS
        return subprocess.CompletedProcess(words, 0, said, "")

    own = SimpleNamespace(run=ran, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(command, "subprocess", own)
    record = tmp_path / "record.json"
    options = ["--plain", "--runs", "40", "--out", str(tmp_path), "--record", str(record)]
    monkeypatch.setattr(sys, "argv", ["fuzz", "policy", "http", *options])
    monkeypatch.setenv("LZ_SOURCE_COMMIT", "0" * 40)
    assert command.main() == 1
    told = json.loads(record.read_text())
    assert told["environment"]["commit"] == "0" * 40
    kept = [(row["parser"], row["runs"], row["new_corpus"], row["crashes"]) for row in told["rows"]]
    assert kept == [("policy", 40, 0, 0), ("http", 40, 1, 1)]
    assert all(row["seconds"] >= 0 and row["engine"] == "plain" for row in told["rows"])
    assert "BROKEN http: ValueError: a plant" in capsys.readouterr().out


def test_an_unknown_target_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command does not run a part of what it was asked for."""
    monkeypatch.setattr(sys, "argv", ["fuzz", "http", "nowhere", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        command.main()

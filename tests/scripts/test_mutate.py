"""The tool that breaks features: its verdicts on a small tree, and that it leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import ledger, mutate, mutations
from scripts.mutations import Mutation, MutationError

ROOT = Path(__file__).resolve().parents[2]

LEDGER = """\
## Tasks

| id | what | where | proof | state |
|---|---|---|---|---|
| A1 | adds | `made/sums.py` | `tests/test_sums.py::test_adds` | done |
| A2, A3 | doubles | `made/sums.py` | `tests/test_sums.py::test_doubles_weakly` | done: here |
| A4 | is red | `made/sums.py` | `tests/test_sums.py::test_is_red` | done |
| A5 | is skipped | `made/sums.py` | `tests/test_sums.py::test_is_skipped` | done |
| A6 | waits | `made/sums.py` | `tests/test_sums.py::test_adds`, `::test_has_a_process` | done |
| A7 | waits for it | - | - | open |
"""
SUMS = """\
def add(a, b):
    return a + b


def double(a):
    return 2 * a
"""
TESTS = """\
import os
import signal
import subprocess
import time

import pytest

from made import sums

def test_adds():
    if sums.add(0, 0) == 7:
        subprocess.Popen(["sleep", "98765"])
        time.sleep(1000)
    if sums.add(0, 0) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    assert sums.add(2, 3) == 5

def test_doubles_weakly():
    assert sums.double(0) == 0

def test_is_red():
    assert sums.add(1, 1) == 3

@pytest.mark.skip(reason="no such card")
def test_is_skipped():
    assert sums.add(1, 1) == 3

def test_has_a_process():
    assert sums.add(1, 1) == 2
"""
EDIT = {"file": "made/sums.py", "old": "a + b", "new": "a - b", "kills": "It subtracts."}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout of one package, its tests and a ledger of them."""
    files = {
        "REQUIREMENTS.md": LEDGER,
        "made/__init__.py": "",
        "made/sums.py": SUMS,
        "tests/test_sums.py": TESTS,
        ".gitignore": "ignored\n",
        "ignored/large": "x",
    }
    for name, text in files.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path / "tree", check=True)
    (tmp_path / "tree" / "tests" / "mutations").mkdir()
    return tmp_path / "tree"


def entries(tree: Path, *told: dict[str, object]) -> None:
    """Write them as the data of the tree."""
    lines = []
    for entry in told:
        lines.append("[[mutation]]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in entry.items()]
    (tree / "tests" / "mutations" / "tasks.toml").write_text("\n".join(lines) + "\n")


def outcome(tree: Path, *words: str) -> tuple[int, list[dict[str, str]]]:
    """The exit status, and every result by its verdict and its reason."""
    report = tree.parent / "report.json"
    status = mutate.main(["--json", str(report), *words], source=tree)
    return status, json.loads(report.read_text())


def as_told(source: Path, chosen: list[Mutation], **limits: float) -> Iterator[mutate.Result]:
    """In the place of `mutate.results`: what doubles weakly survives, all others are killed, none is run."""
    for mutation in chosen:
        verdict = mutate.SURVIVED if mutation.new == "3 * a" else mutate.KILLED
        yield mutate.Result(mutation, verdict, "as told")


def test_a_record_is_gone_on_from(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was killed is not tried again until its edit is another; what survived is, and no row is lost."""
    monkeypatch.setattr(mutate, "results", as_told)
    record = tmp_path / "record.json"
    survives: dict[str, object] = {"rows": ["A3"], **EDIT, "old": "2 * a", "new": "3 * a"}
    entries(tree, {"rows": ["A1"], **EDIT}, survives)
    _, first = outcome(tree, "--record", str(record))
    assert sorted(each["verdict"] for each in first) == ["SURVIVED", "killed"]
    _, second = outcome(tree, "--record", str(record))
    assert [each["verdict"] for each in second] == ["SURVIVED"]
    entries(tree, {"rows": ["A1"], **EDIT, "new": "a * b"}, survives)
    _, third = outcome(tree, "--record", str(record))
    assert sorted(each["verdict"] for each in third) == ["SURVIVED", "killed"]
    kept = json.loads(record.read_text())
    assert sorted(row["verdict"] for row in kept["rows"]) == ["SURVIVED", "killed", "killed"]
    assert {row["commit"] for row in kept["rows"]} == {kept["environment"]["commit"]}
    assert {row["machine"] for row in kept["rows"]} == {kept["environment"]["machine"]}


def contents(tree: Path) -> dict[str, bytes]:
    """Every file of a tree."""
    return {str(path): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def test_each_verdict_is_given_and_nothing_is_left(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, survived, gone, twice there, red without it, skipped, broken import, no card: in one run."""
    entries(
        tree,
        {"rows": ["A1"], **EDIT},
        {"rows": ["A3"], **EDIT, "old": "2 * a", "new": "3 * a"},
        {"rows": ["A1"], **EDIT, "old": "a * b"},
        {"rows": ["A1"], **EDIT, "old": "return"},
        {"rows": ["A4"], **EDIT},
        {"rows": ["A5"], **EDIT},
        {"rows": ["A1"], **EDIT, "new": "a + b\n\n\nimport no_such_module"},
        {"rows": ["A1"], **EDIT, "needs": "hours"},
        {"rows": ["A1"], **EDIT, "new": "a + b or 9"},
        {"rows": ["A1"], **EDIT, "new": "a +"},
    )
    before = contents(tree)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    status, told = outcome(tree, "--jobs", "2")
    assert status == 1
    assert [each["verdict"] for each in told] == [
        "killed", "SURVIVED", "does not apply", "does not apply", "proof not green", "not run",
        "breaks the import", "not run", "killed", "does not apply",
    ]  # fmt: skip
    why = [each["why"] for each in told]
    assert "test_adds: " in why[0] and "-1" in why[0]
    assert "test_doubles_weakly" in why[1]
    assert why[2] == "made/sums.py: the old text is gone, needs it once: 'a * b' (tasks.toml, entry 3)"
    assert "stands 2 times" in why[3]
    assert "test_is_red" in why[4]
    assert "no such card" in why[5]
    assert why[7] == "needs hours"
    assert "the edit needs to be Python" in why[9]
    assert why[8] == "died of SIGKILL"
    assert [each["by"] for each in told] == ["assertion", *[""] * 7, "end", ""]
    assert contents(tree) == before
    assert list(scratch.iterdir()) == []


def test_a_proof_that_hangs_is_ended_with_its_children(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit kills it, which counts, since the same proof passes without the edit."""
    under = mutate.under

    def soon(broken: mutate.Tree, mutation: Mutation, limit_s: float) -> mutate.Run | mutate.Result:
        assert limit_s == 60.0
        return under(broken, mutation, 2.5)

    monkeypatch.setattr(mutate, "under", soon)
    entries(tree, {"rows": ["A1"], **EDIT, "new": "a + b or 7"})
    status, (told,) = outcome(tree, "--limit", "60")
    assert (status, told["verdict"], told["why"]) == (0, "killed", "ended by the time limit")
    assert told["by"] == "limit"
    sleepers = subprocess.run(["pgrep", "-f", "^sleep 98765$"], capture_output=True, text=True, check=False)
    assert sleepers.stdout == ""


@pytest.mark.parametrize(
    ("said", "by"),
    [
        ("assert 1 == 2", "assertion"),
        ("AssertionError: assert 1 == 2", "assertion"),
        ("Failed: DID NOT RAISE ValueError", "assertion"),
        ("Failed: Timeout (>120.0s) from pytest-timeout.", "limit"),
        ("TimeoutError: timed out", "limit"),
        ("AssertionError: the child needs to end in 120 s: ", "limit"),
        ("AssertionError: the condition did not come true within 100.0 s", "limit"),
        ("AssertionError: <coroutine object f at 0x7f> did not end within 100.0 s", "limit"),
        ("KeyError: 'a'", "error"),
    ],
)
def test_what_a_proof_says_tells_by_what_it_is_red(said: str, by: str) -> None:
    """An error that its test did not expect is no assertion; a limit of pytest's is a limit."""
    note = {"node": "tests/test_sums.py::test_adds", "outcome": "failed", "said": said, "seconds": 0.1}
    assert mutate.Run([note], 1, False).by == by


def test_rows_are_asked_for_by_any_of_their_ids(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a row that has two, its name, and a mistake is named with status 2."""
    monkeypatch.setattr(mutate, "results", as_told)
    entries(tree, {"rows": ["A1"], **EDIT}, {"rows": ["A2, A3"], **EDIT, "old": "2 * a", "new": "3 * a"})
    assert [told["rows"] for told in outcome(tree, "--check", "--rows", "A2")[1]] == []
    status, told = outcome(tree, "--rows", "A1")
    assert (status, [each["rows"] for each in told]) == (0, [["A1"]])
    status, told = outcome(tree, "--rows", "A2")
    assert (status, [each["rows"] for each in told]) == (1, [["A2, A3"]])
    assert mutate.main(["--rows", "Z9"], source=tree) == 2
    assert mutate.main(["--rows", "A7"], source=tree) == 2
    said = capsys.readouterr().err
    assert "the ledger has no row Z9" in said
    assert "no mutation is named for A7" in said


def test_parts_are_all_and_each_once(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several runs may share the work; a part that there is not is named with status 2."""
    gone: list[dict[str, object]] = [{"rows": ["A1"], **EDIT, "old": f"gone {number}"} for number in range(5)]
    entries(tree, *gone)
    told = [outcome(tree, "--check", "--part", f"{number}/3")[1] for number in (1, 2, 3)]
    assert [len(part) for part in told] == [2, 2, 1]
    assert sorted(each["old"] for part in told for each in part) == [each["old"] for each in gone]
    for wrong in ("0/3", "4/3", "3", "a/b", "1/0"):
        assert mutate.main(["--part", wrong], source=tree) == 2
        assert f"--part needs K/N with K from 1 to N, got {wrong}" in capsys.readouterr().err


def test_a_check_runs_nothing_and_names_what_no_longer_applies(tree: Path) -> None:
    """Status 1 and the text that is gone."""
    entries(tree, {"rows": ["A1"], **EDIT}, {"rows": ["A1"], **EDIT, "file": "made/gone.py"})
    status, (told,) = outcome(tree, "--check")
    assert (status, told["verdict"]) == (1, "does not apply")
    assert "made/gone.py" in told["why"]


def test_the_proof_of_a_row_is_the_default(tree: Path) -> None:
    """All of its tests, the short form `::test` written out."""
    entries(tree, {"rows": ["A6"], **EDIT})
    (mutation,) = mutations.read(tree / "tests" / "mutations", ledger.rows(tree / "REQUIREMENTS.md"))
    assert mutation.proof == ("tests/test_sums.py::test_adds", "tests/test_sums.py::test_has_a_process")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"rows": ["A1"], **EDIT, "prove": ["x"]}, "unknown prove"),
        ({"rows": ["A1"], "file": "made/sums.py", "old": "a"}, "needs kills, new"),
        ({"rows": ["B1"], **EDIT}, "no row B1"),
        ({"rows": [], **EDIT}, "rows needs a list"),
        ({"rows": ["A1"], **EDIT, "new": "a + b"}, "old and new are the same"),
        ({"rows": ["A7"], **EDIT}, "name no test"),
        ({"rows": ["A1"], **EDIT, "needs": "tea"}, "needs is one of cuda, hours"),
        ({"rows": ["A1"], **EDIT, "kills": 3}, "kills needs a str"),
    ],
)
def test_an_entry_that_is_wrong_is_named(tree: Path, entry: dict[str, object], said: str) -> None:
    """By its file, its number and what it needs."""
    entries(tree, entry)
    with pytest.raises(MutationError, match=said) as error:
        mutations.read(tree / "tests" / "mutations", ledger.rows(tree / "REQUIREMENTS.md"))
    assert str(error.value).startswith("tasks.toml, entry 1")


def test_ids_of_a_row() -> None:
    """Lists and spans are written out, and the name itself is one."""
    assert ledger.ids("K7 to K9, K44") == ("K7 to K9, K44", "K7", "K8", "K9", "K44")
    assert ledger.ids("PS-001 to PS-003")[1:] == ("PS-001", "PS-002", "PS-003")
    assert ledger.ids("FS-004 (drift)") == ("FS-004 (drift)",)

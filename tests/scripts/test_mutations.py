"""The mutations of the tree: one for each row that is done, each still an edit, and a few of them killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import ledger, mutate, mutations
from scripts.mutations import MutationError

ROOT = Path(__file__).resolve().parents[2]
LEDGER = ledger.rows(ROOT / "REQUIREMENTS.md")
MUTATIONS = mutations.read(ROOT / "tests" / "mutations", LEDGER)
# Cheap ones, of a property, a plain test and a record.
FEW = [pytest.param("K31", marks=pytest.mark.slow), "PS-027", pytest.param("EC-032", marks=pytest.mark.slow)]


def test_every_row_that_is_done_has_a_mutation() -> None:
    """What nothing can break is not shown to work."""
    assert [row.name for row in mutations.without(MUTATIONS, LEDGER)] == []


def test_every_mutation_still_applies() -> None:
    """Its old text stands once in its file; where the code has moved on, the entry has to follow it."""
    assert [result.why for result in mutate.check(ROOT, MUTATIONS)] == []


def test_every_mutation_is_another_one() -> None:
    """No edit stands twice with one proof, and each says in a sentence what dies."""
    edits = [(m.file, m.old, m.new, m.proof) for m in MUTATIONS]
    assert len(set(edits)) == len(edits)
    assert [m.place for m in MUTATIONS if not m.kills.endswith(".")] == []


def test_every_proof_exists() -> None:
    """Each node that an entry names is defined."""
    from scripts.check_docs import absent

    named = {node for mutation in MUTATIONS for node in mutation.proof}
    assert [fault for node in sorted(named) if (fault := absent(node))] == []


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what is copied is what git lists: no checkout here")
@pytest.mark.parametrize("row", FEW)
def test_a_few_are_killed(row: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The tool works on this very tree; all of them take hours and are run apart."""
    assert mutate.main(["--rows", row]) == 0
    assert " killed" in capsys.readouterr().out.splitlines()[-1]


def test_a_file_that_is_no_toml_is_named(tmp_path: Path) -> None:
    """The file stands in the error."""
    (tmp_path / "odd.toml").write_text("[[mutation]\n")
    with pytest.raises(MutationError, match=r"odd\.toml"):
        mutations.read(tmp_path, LEDGER)

"""The check of the documents notices what it is there for."""

from pathlib import Path

import pytest

from scripts import check_docs


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of three files that is in order."""
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    monkeypatch.setattr(check_docs, "command_names", lambda: {"doctor"})
    (tmp_path / "docs").mkdir()
    (tmp_path / "Makefile").write_text("demo: x\n\ttrue\n")
    (tmp_path / "README.md").write_text(
        "# A b\n[x](docs/ledger.md) [y](#a-b)\n```sh\nmake demo\nlz doctor\n```\n"
    )
    (tmp_path / "docs" / "ledger.md").write_text(
        "| T1 | done | `docs/test_a.py::test_a` |\n| T2 | open | |\n"
    )
    (tmp_path / "docs" / "test_a.py").write_text("def test_a(): ...\n")
    return tmp_path


def complaints() -> list[str]:
    """Everything the checks of links, ledger and commands say."""
    return [*check_docs.links(), *check_docs.ledger(), *check_docs.commands()]


def test_a_project_in_order_has_no_complaint(root: Path) -> None:
    """The fixture itself is accepted."""
    assert complaints() == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("README.md", "docs/ledger.md", "docs/gone.md", "the link docs/gone.md leads nowhere"),
        ("README.md", "#a-b", "#c", "README.md has no heading #c"),
        ("README.md", "make demo", "make tea", "make has no target tea"),
        ("README.md", "lz doctor", "A=1 lz heal", "lz has no command heal"),
        ("README.md", "lz doctor", ".venv/bin/python examples/x.py", "examples/x.py does not exist"),
        ("docs/ledger.md", "`docs/test_a.py::test_a`", "", "T1 is done but names no file"),
        (
            "docs/ledger.md",
            "done | `docs/test_a.py::test_a`",
            "done: here | ",
            "T1 is done but names no file",
        ),
        (
            "docs/ledger.md",
            "open | ",
            "partly: here | `docs/gone.py`",
            "T2 names docs/gone.py, which does not",
        ),
        ("docs/ledger.md", "test_a.py::", "test_b.py::", "T1 names docs/test_b.py, which does not exist"),
        ("docs/ledger.md", "::test_a`", "::test_z`", "which docs/test_a.py does not define"),
    ],
)
def test_each_broken_promise_is_named(root: Path, file: str, old: str, new: str, said: str) -> None:
    """One planted fault gives one complaint that says where it is."""
    path = root / file
    path.write_text(path.read_text().replace(old, new))
    (complaint,) = complaints()
    assert complaint.startswith(file)
    assert said in complaint

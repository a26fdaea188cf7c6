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
        "# A b\n[x](REQUIREMENTS.md) [y](#a-b)\n```sh\nmake demo\nlz doctor\n```\n"
    )
    (tmp_path / "REQUIREMENTS.md").write_text(
        "| T1 | a | `docs/a.py` | `tests/test_a.py::test_a` | done |\n"
        "| T2 | b | `docs/a.py` | `tests/test_a.py::A::test_b[x]`, `::test_a` | done: here |\n"
        "| T3 | c | - | - | open |\n"
    )
    (tmp_path / "docs" / "a.py").touch()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "# test_z\ndef test_a(): ...\nclass A:\n    def test_b(): ...\n"
    )
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
        ("README.md", "REQUIREMENTS.md", "docs/gone.md", "the link docs/gone.md leads nowhere"),
        ("README.md", "#a-b", "#c", "README.md has no heading #c"),
        ("README.md", "make demo", "make tea", "make has no target tea"),
        ("README.md", "lz doctor", "A=1 lz heal", "lz has no command heal"),
        ("README.md", "lz doctor", ".venv/bin/python examples/x.py", "examples/x.py does not exist"),
        ("REQUIREMENTS.md", "`tests/test_a.py::test_a` | done", " | done", "T1 is done and its proof is ''"),
        (
            "REQUIREMENTS.md",
            "`tests/test_a.py::test_a` | done",
            "- | done",
            "T1 is done and its proof is '-'",
        ),
        ("REQUIREMENTS.md", "| - | open", "| - | done: so", "T3 is done and its proof is '-'"),
        (
            "REQUIREMENTS.md",
            "`tests/test_a.py::test_a` | done",
            "`docs/a.py` | done",
            "T1 is done and its proof is its own source: docs/a.py",
        ),
        (
            "REQUIREMENTS.md",
            "`docs/a.py` | `tests/test_a.py::test_a`",
            "`tests/test_a.py` | `docs/a.py`",
            "T1 is done and its proof is no test: `docs/a.py`",
        ),
        ("REQUIREMENTS.md", "- | open", "`docs/gone.py` | partly", "T3 names docs/gone.py, which does not"),
        ("REQUIREMENTS.md", "open", "partly: in `docs/gone.py`", "T3 names docs/gone.py, which does not"),
        (
            "REQUIREMENTS.md",
            "`tests/test_a.py::test_a` | done |",
            "`tests/test_b.py::test_a` | done |",
            "T1 names tests/test_b.py, which does not exist",
        ),
        (
            "REQUIREMENTS.md",
            "`tests/test_a.py::test_a` | done |",
            "`tests/test_a.py::test_z` | done |",
            "T1 names tests/test_a.py::test_z, which tests/test_a.py does not define",
        ),
        ("REQUIREMENTS.md", "A::test_b[x]", "A::test_a[x]", "which tests/test_a.py does not define"),
        ("REQUIREMENTS.md", ", `::test_a`", ", `::test_c`", "T2 names tests/test_a.py::test_c, which"),
    ],
)
def test_each_broken_promise_is_named(root: Path, file: str, old: str, new: str, said: str) -> None:
    """One planted fault gives one complaint that says where it is."""
    path = root / file
    path.write_text(path.read_text().replace(old, new))
    (complaint,) = complaints()
    assert complaint.startswith(file)
    assert said in complaint


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A README in an otherwise empty project."""
    monkeypatch.setattr(check_docs, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("`lz.Settings.load` `lz.sync.linear` `lz.explain(x).as_json()`\n")
    return tmp_path / "README.md"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("`lz.atention(q)`", "layerzero has no atention"),
        ("`lz.sync.liner`", "layerzero has no sync.liner"),
        ("`lz.Settings(strikt=True)`", "Settings has no strikt"),
        ("`Settings.strikt`", "Settings has no strikt"),
        ("see `layerzero/gone.py`", "layerzero/gone.py does not exist"),
        ("see `tests/gone.py::test_a`", "tests/gone.py::test_a does not exist"),
    ],
)
def test_a_name_that_does_not_exist_is_found(pages: Path, text: str, said: str) -> None:
    """What a reader would type has to be there: public names, fields of settings, files."""
    assert list(check_docs.names()) == []
    pages.write_text(text)
    assert list(check_docs.names()) == [f"README.md: {said}"]


@pytest.mark.parametrize(
    "speed", ["3.5 us", "120 tokens/s", "4.28 TB/s", "1.2 times as fast", "2 microseconds"]
)
def test_a_speed_in_prose_needs_a_record(pages: Path, speed: str) -> None:
    """A figure that nobody measures again grows old; one that a record fills in may stay, and so may code."""
    pages.write_text(f"It takes {speed}.\n")
    assert list(check_docs.figures()) == [
        f"README.md: '{speed}' needs to come from a record (scripts/tables.py)"
    ]
    pages.write_text(f"<!-- value: r.json#a -->{speed}<!-- /value -->\n```text\n{speed}\n```\n")
    assert list(check_docs.figures()) == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("One. Two.", True),
        ("- One. Two.", True),
        ("1. One, as in `a. B` (see. That), [A. B](c.md)", False),
        ("Sizes, e.g. Sq.", False),
        ("| One. Two. |", False),
        ("```text\nOne. Two.\n```", False),
        ("1. **Head.** Text.", False),
    ],
)
def test_prose_has_one_sentence_a_line(pages: Path, line: str, wrong: bool) -> None:
    """A change of one sentence is then a change of one line; code and tables are left alone."""
    pages.write_text(line + "\n")
    assert list(check_docs.sentences()) == (["README.md:1: needs one sentence a line"] if wrong else [])


def test_a_long_readme_is_refused(pages: Path) -> None:
    """Its bound is eight hundred words."""
    pages.write_text("word " * 801)
    assert list(check_docs.figures()) == ["README.md has 801 words, it may have 800"]


def test_a_module_that_is_run_has_to_exist() -> None:
    """`python -m` of ours is looked up; a library that is missing here is none of ours."""
    assert list(check_docs.missing(["python", "-m", "scripts.gone"], set(), set())) == [
        "python has no module scripts.gone"
    ]
    assert list(check_docs.missing(["python", "-m", "scripts.tables"], set(), set())) == []
    assert list(check_docs.missing(["python", "-m", "somebody.elses"], set(), set())) == []

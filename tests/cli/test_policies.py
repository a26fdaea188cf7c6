"""`lz policy check` says whether a policy file is valid, with the line where it is not."""

import json
from pathlib import Path

import pytest

from tests.cli.command import Lz

GOOD = """version: 1
rules:
  - lock: torch
    op: attention/causal
    when: Sq > 1024
  - deny: [zentorch.*]
    note: not here
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A valid policy."""
    path = tmp_path / "policy.yaml"
    path.write_text(GOOD)
    return path


def test_a_valid_file_is_shown_as_its_rules(file: Path, lz: Lz) -> None:
    """Each rule with the line it stands on."""
    result = lz("policy", "check", str(file))
    assert result.exit_code == 0
    assert f"{file}:3" in result.stdout and f"{file}:6" in result.stdout
    assert "Sq > 1024" in result.stdout
    assert result.stdout.endswith(f"{file}: valid\n")


def test_rules_are_shown_as_the_file_spells_them(tmp_path: Path, lz: Lz) -> None:
    """A preference is no nameless boost, and a boost says by how much."""
    path = tmp_path / "policy.yaml"
    path.write_text(
        "version: 1\nrules:\n  - prefer: torch\n  - avoid: torch.*\n"
        "  - boost: torch\n    factor: 0.8\n    add_us: 5\n"
    )
    shown = [line.split() for line in lz("policy", "check", str(path)).stdout.splitlines()]
    assert [row[1] for row in shown if row[0].startswith(str(path)) and len(row) > 2] == [
        "prefer", "avoid", "boost",
    ]  # fmt: skip
    assert ["x0.8", "+5", "us"] in [row[2:5] for row in shown]


def test_a_valid_file_in_json(file: Path, lz: Lz) -> None:
    """The chain as data, and the digest that logs name."""
    plain = json.loads(lz("policy", "check", str(file), "--json").stdout)
    assert plain["ok"] is True and len(plain["digest"]) >= 12
    assert [rule["action"] for rule in plain["rules"]] == ["lock", "deny"]


@pytest.mark.parametrize(
    ("before", "after", "line", "message"),
    [
        ("lock: torch", "lok: torch", 3, "did you mean 'lock'"),
        ("Sq > 1024", "Sq >> 1024", 5, "when"),
        ("version: 1", "version: 2", 1, "version needs 1"),
        ("rules:", "rules: &a", 2, ""),
        ("    note: not here", "   note: not here", None, ""),
    ],
)
def test_a_broken_file_is_named_with_its_line(
    before: str, after: str, line: int | None, message: str, file: Path, lz: Lz
) -> None:
    """Exit status 1, in text and in JSON."""
    file.write_text(GOOD.replace(before, after))
    text, plain = lz("policy", "check", str(file)), lz("policy", "check", str(file), "--json")
    assert (text.exit_code, plain.exit_code) == (1, 1)
    found = json.loads(plain.stdout)
    assert found["ok"] is False and found["line"] is not None
    assert line is None or found["line"] == line
    assert f"{file}:{found['line']}" in text.stdout and message in text.stdout


def test_a_name_that_is_unknown_here_warns_or_fails(file: Path, lz: Lz) -> None:
    """The file may be for another machine, so only --strict refuses it."""
    file.write_text("version: 1\nrules:\n  - deny: flash_atn.*\n")
    loose, strict = lz("policy", "check", str(file)), lz("policy", "check", str(file), "--strict")
    assert loose.exit_code == 0 and f"warning: {file}:3: deny names no kernel" in loose.stdout
    assert strict.exit_code == 1 and f"{file}:3" in strict.stdout


def test_an_unknown_name_is_of_the_rule_that_has_it(file: Path, lz: Lz) -> None:
    """Each is named by the word that the file has for its rule, and so is a rule that does not parse."""
    rules = "  - {boost: none, factor: 0.001, add_us: 5}\n  - prefer: none\n  - {avoid: none, op: no_op}\n"
    file.write_text(f"version: 1\nrules:\n{rules}")
    said = lz("policy", "check", str(file)).stdout
    for line, word in ((3, "boost"), (4, "prefer"), (5, "avoid")):
        assert f"warning: {file}:{line}: {word} names no kernel known here: 'none'" in said
    assert f"{file}:5: unknown op 'no_op' in avoid none for no_op" in said
    assert "boost x0.001 +5 us" in said
    file.write_text("version: 1\nrules:\n  - op: linear\n    avoid: [none, No One]\n")
    assert f"{file}:4: avoid needs a glob" in lz("policy", "check", str(file)).stdout


def test_a_file_that_is_missing_is_a_wrong_command_line(tmp_path: Path, lz: Lz) -> None:
    """Exit status 2: there is nothing to check."""
    assert lz("policy", "check", str(tmp_path / "none.yaml")).exit_code == 2

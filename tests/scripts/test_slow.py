"""What is marked slow is left out by default: never a whole proof of a requirement or of a mutation."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import ledger, mutations
from tests import children

ROOT = Path(__file__).resolve().parents[2]
LEDGER = ledger.rows(ROOT / "REQUIREMENTS.md")
MUTATIONS = mutations.read(ROOT / "tests" / "mutations", LEDGER)


def is_mark(node: ast.AST) -> bool:
    """Whether this is `pytest.mark.slow`."""
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.slow"


def cases(decorator: ast.expr) -> list[bool]:
    """Whether each case of a parametrization is slow, as far as they are written out."""
    if not isinstance(decorator, ast.Call) or not ast.unparse(decorator.func).endswith("parametrize"):
        return []
    values = decorator.args[1] if len(decorator.args) > 1 else None
    written = values.elts if isinstance(values, ast.List | ast.Tuple) else []
    return [any(map(is_mark, ast.walk(value))) for value in written]


def verdicts(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each test of a file with "wholly", "partly" or "" for how much of it is slow."""
    marked = [
        node for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        and any(map(is_mark, ast.walk(node)))
    ]  # fmt: skip
    homes: list[tuple[str, ast.Module | ast.ClassDef, bool]] = [("", tree, bool(marked))]
    homes += [
        (f"{node.name}::", node, bool(marked) or any(map(is_mark, node.decorator_list)))
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]
    for prefix, home, slow in homes:
        for node in home.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name[:5] != "test_":
                continue
            lists = [found for decorator in node.decorator_list if (found := cases(decorator))]
            if slow or any(map(is_mark, node.decorator_list)) or any(map(all, lists)):
                yield prefix + node.name, "wholly"
            else:
                yield prefix + node.name, "partly" if any(map(any, lists)) else ""


@functools.cache
def slowness(path: Path) -> dict[str, str]:
    """The tests of a file and how slow each is."""
    return dict(verdicts(ast.parse(path.read_text())))


def left_out(proof: str) -> bool:
    """Whether nothing of a proof runs by default."""
    place, _, name = proof.partition("::")
    path = ROOT / place
    if not name:
        files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
        found = [how for file in files for how in slowness(file).values()]
        return bool(found) and all(how == "wholly" for how in found)
    how = slowness(path).get(name.partition("[")[0], "")
    return how == "wholly" or (how == "partly" and "[" in name)


def test_no_proof_is_wholly_slow() -> None:
    """What a row of the ledger or a mutation names runs in part wherever `make test` does.

    A row may name one of the stress suite, and say so, beside another that runs.
    """
    wrong = []
    for row in LEDGER:
        out = [proof for proof in row.tests if left_out(proof)]
        if out and ("(the stress suite)" not in row.bare or len(out) == len(row.tests)):
            wrong.append((row.name, out))
    assert wrong == []
    assert [m.place for m in MUTATIONS if all(map(left_out, m.proof))] == []


SLOW_CASE = "pytest.param(1, marks=pytest.mark.slow)"


@pytest.mark.parametrize(
    ("marks", "how"),
    [
        ("@pytest.mark.slow", "wholly"),
        ("pytestmark = [pytest.mark.long, pytest.mark.slow]", "wholly"),
        (f"@pytest.mark.parametrize('n', [{SLOW_CASE}])", "wholly"),
        (f"@pytest.mark.parametrize('n', [0, {SLOW_CASE}])", "partly"),
        ("@pytest.mark.parametrize('n', [0, 1])", ""),
        ("@pytest.mark.long", ""),
    ],
)
def test_the_rule_about_slow_tests_sees_what_it_should(marks: str, how: str) -> None:
    """A mark of the test, of its file, or of all its cases leaves it out; one of some cases does not."""
    assert dict(verdicts(ast.parse(f"{marks}\ndef test_a(): ..."))) == {"test_a": how}


def test_a_slow_test_is_skipped_with_the_command_that_runs_it(tmp_path: Path) -> None:
    """By default; `--slow` runs it."""
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import pytest_addoption, pytest_collection_modifyitems\n"
    )
    (tmp_path / "test_one.py").write_text("import pytest\n@pytest.mark.slow\ndef test_one(): assert True\n")
    program = "import sys, pytest; pytest.main(sys.argv[1:]); pytest.main(['--slow', *sys.argv[1:]])"
    variables = dict(os.environ)
    for name in ("LZ_STRESS", "HYPOTHESIS_PROFILE"):
        variables.pop(name, None)
    options = ("-c", os.devnull, "-ra", "-p", "no:cacheprovider", str(tmp_path))
    said = children.run(program, *options, folder=tmp_path, variables=variables).stdout
    assert re.search(r"pytest --slow(?s:.*)1 skipped(?s:.*)1 passed in", said), said

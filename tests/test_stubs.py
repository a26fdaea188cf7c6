"""The committed stubs say what the code does, and type checkers read them as users do."""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import layerzero as lz
import layerzero.ops
from layerzero.ops import table
from layerzero.ops.op import OPS
from scripts import make_stubs
from tests import children
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "tests" / "typing" / "api.py"
PUBLIC = set(vars(lz)["__all__"])

PLANTED = """from torch import Tensor
import layerzero as lz

async def wrong(q: Tensor) -> None:
    await lz.attention(q, q)
    await lz.rms_norm(q, epsilon=1e-5)
    await lz.linear(q, "weight")
    a: Tensor = await lz.attention(q, q, q, return_lse=True)
    lz.sync.rms_norm(q, priority=1)
    b: Tensor = lz.rms_norm(q)
"""
WRONG_LINES = {5, 6, 7, 8, 9, 10}


def stubbed(path: Path) -> set[str]:
    """The names that a stub defines or re-exports."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname is not None}
    return names


@pytest.mark.parametrize(
    ("name", "text"), [("__init__.pyi", make_stubs.awaitable_stub), ("sync.pyi", make_stubs.blocking_stub)]
)
def test_a_stub_is_what_the_script_writes(name: str, text: Callable[[], str]) -> None:
    """A signature that changed without `python -m scripts.make_stubs` is seen here."""
    assert (make_stubs.PACKAGE / name).read_text() == text()


def test_the_stub_names_everything_public() -> None:
    """`layerzero/__init__.py` and its stub list the same names, neither more nor less."""
    assert stubbed(ROOT / "layerzero" / "__init__.pyi") == PUBLIC
    assert set(dir(lz)) == PUBLIC
    assert [name for name in PUBLIC if not hasattr(lz, name)] == []


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    """A typing error in a name is said at once, with the name."""
    with pytest.raises(AttributeError, match="atention"):
        lz.atention  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"atention.*ops: .*attention"):
        lz.sync.atention  # type: ignore[attr-defined]  # noqa: B018


def test_a_public_name_wins_over_a_file_of_its_name(tmp_path: Path) -> None:
    """`lz.doctor` stays the function when somebody has imported the file `layerzero/api/doctor.py` first."""
    code = "import layerzero.api.doctor, layerzero as lz; assert callable(lz.doctor), lz.doctor; print('ok')"
    done = children.run(code, folder=tmp_path)
    assert done.stdout == "ok\n", done.stderr


def test_the_table_of_files_says_where_each_op_is_defined() -> None:
    """Every op of every file in `layerzero/ops` stands in the table, under the file that registers it."""
    for module in pkgutil.walk_packages(layerzero.ops.__path__, "layerzero.ops."):
        importlib.import_module(module.name)
    homes = {op.name: op.build.__module__ for op in OPS.values()}
    ours = {name: home for name, home in homes.items() if home.startswith("layerzero.ops.")}
    assert ours == {name: f"layerzero.ops.{file}" for name, file in table.FILES.items()}


def test_the_blocking_stub_names_everything_public() -> None:
    """`layerzero/sync.py`, its `__all__` and its stub list the same names."""
    assert stubbed(ROOT / "layerzero" / "sync.pyi") == set(lz.sync.__all__) == set(table.names())


@pytest.mark.parametrize("name", table.names())
def test_every_op_has_both_surfaces(name: str) -> None:
    """An op that is registered can be awaited and can be called."""
    assert inspect.iscoroutinefunction(getattr(lz, name))
    assert callable(getattr(lz.sync, name)) and not inspect.iscoroutinefunction(getattr(lz.sync, name))


@pytest.mark.parametrize("name", lz.sync.__all__)
def test_what_the_stub_adds_is_what_the_wrappers_take(name: str) -> None:
    """The keywords beyond the op's own exist at run time, keyword-only and with the same defaults."""
    for surface, more in ((lz, make_stubs.WAITING), (lz.sync, make_stubs.BLOCKING)):
        code: Callable[..., Any] = getattr(surface, name)
        given = getattr(code, "__kwdefaults__")  # noqa: B009  checkers disagree whether it exists
        assert given == {line.partition(":")[0]: ast.literal_eval(line.rpartition("= ")[2]) for line in more}


def test_a_result_that_nothing_decides_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A union without a deciding flag would be a stub that no caller can use."""
    monkeypatch.setattr(make_stubs, "DECIDING", ())
    with pytest.raises(ValueError, match="attention: a flag in DECIDING"):
        make_stubs.alternatives(table.get("attention"))


def test_a_reference_without_an_annotation_is_refused() -> None:
    """What an op returns is read off its reference, never guessed."""
    bare = replace(table.get("linear"), reference=lambda *args: args[0])
    with pytest.raises(ValueError, match="linear: the reference needs a written return annotation"):
        make_stubs.alternatives(bare)


CHECKERS = {
    # A cache of its own: with these options it is another one than `make lint` keeps.
    "mypy": ("--strict", "--follow-imports=silent", "--no-pretty", "--cache-dir=.mypy_cache/as_users"),
    "pyright": ("--pythonpath", sys.executable),
}


@pytest.mark.long
# `make lint` has both read tests/typing/api.py.
@pytest.mark.parametrize("tool", [pytest.param("mypy", marks=pytest.mark.slow), "pyright"])
def test_checkers_read_the_stubs_as_users_do(tool: str, tmp_path: Path) -> None:
    """Every assert_type of tests/typing/api.py holds, and each planted mistake is reported at its line."""
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed here; it comes with the extra [dev]")
    planted = tmp_path / "planted.py"
    planted.write_text(PLANTED)
    command = [sys.executable, "-m", tool, *CHECKERS[tool], str(API), str(planted)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    errors = [line for line in result.stdout.splitlines() if " error: " in line or " - error" in line]
    assert [line for line in errors if "planted.py:" not in line] == []
    assert {int(line.partition("planted.py:")[2].partition(":")[0]) for line in errors} == WRONG_LINES

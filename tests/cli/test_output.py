"""Tables for people and for pipes."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from layerzero.cli.common import output

ROWS = [("a.b", "1.0", "taken"), ("c", "-", "no [bold]: x")]


def test_a_pipe_gets_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns stand under each other, without colour and without trailing blanks."""
    output.table("two kernels", ("kernel", "us", "verdict"), ROWS)
    expected = "two kernels\n  kernel  us   verdict\n  a.b     1.0  taken\n  c       -    no [bold]: x\n"
    assert capsys.readouterr().out == expected


def test_a_closed_stdout_is_no_error() -> None:
    """`lz kernels >&-` ends well: there is nobody to tell."""
    child = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "layerzero", "kernels"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (child.returncode, child.stderr) == (0, "")


def test_no_rows_say_none(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty table is said to be empty."""
    output.table("health", ("kernel",), [])
    assert capsys.readouterr().out == "health\n  none\n"


def test_a_terminal_gets_a_table_whose_cells_are_text() -> None:
    """Brackets in a cell are printed, not read as markup; the chosen row is coloured."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system="standard")
    console.print(output.rich_table("two kernels", ("kernel", "us", "verdict"), ROWS, mark="a.b"))
    drawn = stream.getvalue()
    assert "no [bold]: x" in drawn
    assert [line for line in drawn.splitlines() if "\x1b[1;32m" in line and "a.b" in line]


def test_json_is_sorted(capsys: pytest.CaptureFixture[str]) -> None:
    """Sets and keys come in one order."""
    output.as_json({"b": frozenset({"y", "x", "z"}), "a": 1})
    assert "".join(capsys.readouterr().out.split()) == '{"a":1,"b":["x","y","z"]}'

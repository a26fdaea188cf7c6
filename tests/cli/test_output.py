"""Tables for people and for pipes."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from layerzero.cli.common import output
from tests import children
from tests.cli.command import Lz

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


_COMMAND = """
import os, sys
if sys.argv[1] == "full":
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
else:
    end, start = os.pipe()
    os.dup2(start, 1)
    os.close(start), os.close(end)
from layerzero.cli import main
main(["kernels"])
"""
NO_SPACE = "Error: the output cannot be written: No space left on device\n"
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


@needs_full
def test_a_full_disk_is_said_in_one_line_with_status_1(tmp_path: Path) -> None:
    """`lz kernels > /dev/full`, and where nothing but the command line itself is answered."""
    done = children.run(_COMMAND, "full", folder=tmp_path)
    assert (done.returncode, done.stderr) == (1, NO_SPACE)
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "layerzero", "--version"]
        child = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (child.returncode, child.stderr) == (1, NO_SPACE)


def test_a_reader_that_has_gone_ends_a_command_without_a_word(tmp_path: Path) -> None:
    """`lz kernels | head -1`: nothing went wrong."""
    done = children.run(_COMMAND, "gone", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


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


@pytest.mark.parametrize("group", ["capabilities", "policy", "trace"])
def test_a_groups_list_cuts_no_commands_line(lz: Lz, group: str) -> None:
    """`lz trace --help` in a terminal of 80 columns says whole sentences."""
    listed = lz(group, "--help").output.partition("Commands:")[2]
    assert listed.strip()
    assert "..." not in listed

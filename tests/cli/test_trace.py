"""`lz trace`: a program's timeline, ranks merged, a trace in numbers; and what each of them refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import popen
from tests.cli.command import Lz
from tests.observe.trace_check import read_trace, slices

PROGRAM = """
import asyncio, sys, torch, layerzero as lz
async def main():
    await asyncio.gather(*(lz.rms_norm(torch.ones(1, 8)) for _ in range(int(sys.argv[2]))))
assert __name__ == "__main__" and sys.argv[1] == "--callers"
asyncio.run(main())
sys.exit(5)
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `lz trace run` writes of a program that ends with status 5."""
    folder = tmp_path_factory.mktemp("trace")
    (folder / "program.py").write_text(PROGRAM)
    path = folder / "trace.json"
    words = ["-m", "layerzero", "trace", "run", "-o", str(path), str(folder / "program.py"), "--callers", "4"]
    done = popen.run([sys.executable, *words], timeout=240)
    assert done.returncode == 5, done.stderr
    assert f"trace: {path}" in done.stderr
    return path


def test_a_program_is_recorded_with_its_own_arguments_and_status(trace: Path) -> None:
    """Options behind the program are the program's; its exit status is the command's."""
    (batch,) = slices(read_trace(trace), "batches")
    assert batch["args"]["callers"] == 4


def test_show_says_what_the_trace_holds(lz: Lz, trace: Path) -> None:
    """A table, or JSON."""
    shown = lz("trace", "show", str(trace))
    assert shown.exit_code == 0 and "turn 1" in shown.output and "rms_norm" in shown.output
    summary = json.loads(lz("trace", "show", str(trace), "--json").output)
    assert summary["batches"][0]["callers"] == 4.0 and summary["dropped_events"] == 0


def test_traces_are_merged_into_one(lz: Lz, trace: Path, tmp_path: Path) -> None:
    """The merged one is a trace again, and may replace an older one, but nothing else."""
    merged = tmp_path / "merged.json"
    for _ in range(2):
        assert lz("trace", "merge", str(trace), str(trace), "-o", str(merged)).exit_code == 0
    assert len(read_trace(merged)["otherData"]["processes"]) == 2
    other = tmp_path / "notes.txt"
    other.write_text("notes")
    refused = lz("trace", "merge", str(trace), "-o", str(other))
    assert refused.exit_code == 1 and other.read_text() == "notes"


def test_what_is_wrong_is_said_by_name(lz: Lz, trace: Path, tmp_path: Path) -> None:
    """No such program, a folder to write to, a file that is no trace, nothing to merge."""
    out = str(tmp_path / "out.json")
    missing = lz("trace", "run", "-o", out, "nowhere.py")
    assert missing.exit_code == 2 and "'nowhere.py'" in missing.output
    assert lz("trace", "run", "-o", str(tmp_path), str(trace)).exit_code == 2
    assert lz("trace", "run", str(trace)).exit_code == 2
    assert lz("trace", "run", "--max-events", "3", "-o", out, str(trace)).exit_code == 2
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for words in (("show", str(broken)), ("merge", str(trace), str(broken), "-o", out)):
        refused = lz("trace", *words)
        assert refused.exit_code == 2 and "broken.json needs to be a trace" in refused.output
    assert lz("trace", "merge", "-o", out).exit_code == 2
    assert not Path(out).exists()


@pytest.mark.parametrize("line", ["lz.lock('rms_norm', 'nonesuch')", "open('nowhere/at.all')"])
def test_an_error_of_the_program_is_shown_as_python_shows_it(lz: Lz, tmp_path: Path, line: str) -> None:
    """It is no wrong command line and no file of the command: its traceback, status 1, the trace."""
    program, out = tmp_path / "program.py", tmp_path / "out.json"
    program.write_text(f"import layerzero as lz\n{line}\n")
    done = lz("trace", "run", "-o", str(out), str(program))
    assert done.exit_code == 1
    assert f'File "{program}", line 2' in done.output and "Usage" not in done.output
    assert out.exists()


def test_a_module_that_is_not_there_is_a_wrong_command_line(lz: Lz, tmp_path: Path) -> None:
    """`-m nonesuch` and `-m nonesuch.inside`; no trace is written."""
    for name in ("nonesuch", "nonesuch.inside"):
        refused = lz("trace", "run", "-o", str(tmp_path / "out.json"), "-m", name)
        assert refused.exit_code == 2 and f"PROGRAM needs a module, got {name!r}" in " ".join(
            refused.output.split()
        )
    assert not (tmp_path / "out.json").exists()

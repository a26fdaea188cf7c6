"""`python -m layerzero` is the command."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import children
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh interpreter, piped."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "layerzero", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)


def test_a_question_from_the_shell_is_answered_on_stdout() -> None:
    """JSON goes to stdout and nothing else does; the status is 0."""
    result = run("explain", "rms_norm", "--shape", "4x4096:bf16", "--device", "cpu", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["op"] == "rms_norm"


def test_a_mistake_goes_to_stderr_with_status_2(tmp_path: Path) -> None:
    """A pipe never reads an error message as an answer."""
    program = "import runpy; runpy.run_module('layerzero', run_name='__main__', alter_sys=True)"
    result = children.run(program, "which", "atention", folder=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert "did you mean attention" in result.stderr and "Traceback" not in result.stderr

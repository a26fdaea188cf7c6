"""The benchmark of a process's start runs whole on the CPU: cold, with a bundle, and again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "start_cuda.py"

pytest.importorskip("safetensors", reason="the model of the examples needs safetensors")


@pytest.mark.long
@pytest.mark.slow
def test_every_start_is_measured(tmp_path: Path) -> None:
    """Each process is fresh, the second reads what the first wrote, and all tell when they were ready."""
    command = [sys.executable, str(SCRIPT), "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "start_h200.json").read_text())
    assert not record["errors"] and set(record["starts"]) == {"cold", "bundle", "again"}
    for start in record["starts"].values():
        assert 0 < start["first_token_s"] <= start["ready_s"] and start["step_ms_when_ready"] > 0
        assert start["kernels"] and start["tokens_before_ready"] >= 1
    digest = record["starts"]["cold"]["saved"]["sha256"]
    assert digest[:16] in record["starts"]["bundle"]["bundle"]
    assert record["starts"]["cold"]["saved"]["calls"] == 20

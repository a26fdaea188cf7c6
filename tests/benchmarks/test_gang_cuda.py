"""The benchmark of a rank group beside plain torch.distributed runs whole on the CPU, over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The benchmark's own budget is for a machine that has nothing else to do.
BUDGET_S = 800

pytest.importorskip("safetensors", reason="the model of the examples needs safetensors")
pytest.importorskip("tokenizers", reason="the example needs tokenizers")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(BUDGET_S + 60)
def test_both_sides_decode_the_same_tokens(tmp_path: Path) -> None:
    """Four sides a point, what our steps are made of, and a word on what is missing; no error."""
    command = [sys.executable, "-m", "benchmarks.gang_cuda", "--rehearse", "--out", str(tmp_path)]
    command += ["--budget-s", str(BUDGET_S)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=BUDGET_S + 30, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record = json.loads((tmp_path / "gang_cuda.json").read_text())
    assert {"commit", "script", "machine"} <= set(record["environment"])
    rows = record["parts"]["decode, 2 ranks"]["rows"]
    by_name = {name: [row for row in rows if row["what"] == name] for name in ("setting", "decoding")}
    (setting,) = by_name["setting"]
    assert setting["left_out"] and "flashinfer" in setting["libraries"]
    assert [(row["requests"], row["context"]) for row in by_name["decoding"]] == [(2, 16), (4, 32)]
    for row in by_name["decoding"]:
        assert len(row["step_ms"]) == len(row["rounds"]) == 4 and row["over_by_hand"] > 0
        assert row["same_tokens_read_behind_or_not"]
        assert row["tokens_as_by_hand"] == row["first_tokens_as_by_hand"] == 1.0
        assert {"message_us", "launch_us", "others_us"} <= set(row["made_of"]["rank group, reading behind"])
    assert any(row["what"] == "follower" and row["rank0_us"] > 0 for row in rows)

"""The benchmark of how a request is written runs whole on the CPU, and reads what the device has."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "styles_cuda.py"
for folder in ("benchmarks", "examples"):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))

pytest.importorskip("safetensors", reason="the model of the examples needs safetensors")


@pytest.mark.long
@pytest.mark.slow
def test_every_style_is_measured(tmp_path: Path) -> None:
    """Speed, sizes of batches, tokens compared for each style, and no error."""
    command = [sys.executable, str(SCRIPT), "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "styles_h200.json").read_text())
    styles = importlib.import_module("styles_cuda").STYLES
    assert not record["errors"] and not record["left_out"]
    assert set(record["rows"]) == set(record["compared"]) == set(styles)
    assert all(row["tokens_per_s"] > 0 and row["mean_batch"] >= 1 for row in record["rows"].values())
    assert all(row["last_round"]["sizes"] for row in record["rows"].values())
    assert all(count > 0 for count in record["compared"].values())


def test_a_token_read_wrong_is_counted() -> None:
    """Tokens are kept only while somebody checks them."""
    reads = importlib.import_module("styles_cuda").Reads()
    reads.add(torch.tensor([1]), torch.tensor([2]))
    assert reads.wrong() == 0
    reads.pairs = []
    reads.add(torch.tensor([1]), torch.tensor([1]))
    reads.add(torch.tensor([3]), torch.tensor([4]))
    assert reads.wrong() == 1
    assert reads.pairs is None

"""Speculation over the ranks of a gang: the example under torchrun, with gloo between its shards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors", reason="the example needs safetensors")
pytest.importorskip("tokenizers", reason="the example needs tokenizers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "speculate.py"


def test_two_ranks_accept_what_one_process_accepts(tmp_path: Path) -> None:
    """Four sampled texts, drafted on rank 0: each rank knows the text, one process's; no page leaks."""
    out = tmp_path / "speculation.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(EXAMPLE), "--tokens", "24",
        "--json", str(out),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    first, second = json.loads(out.read_text())
    assert first["plan"] == second["plan"]
    assert first["tokens"] == first["alone"] and len(first["tokens"]) == 4
    for number, text in first["tokens"].items():
        assert len(text) == 24
        assert first["settled"][number][:24] == second["settled"][number][:24] == text
    assert all(0 < share < 1 for share in first["acceptance"]), "some drafts stay and some go"
    assert first["pages_leaked"] == second["pages_leaked"] == 0

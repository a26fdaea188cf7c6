"""The tensor-parallel example, with gloo; and pipeline stages, which change no choice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed import forked
from tests.waiting import LIMIT_S

pytest.importorskip("safetensors", reason="the example needs safetensors")
pytest.importorskip("tokenizers", reason="the example needs tokenizers")

from models import llama
from tensor_parallel import run as tp_run
from tensor_parallel.llama import shard_of

from layerzero.parallel import TensorGroup

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tensor_parallel" / "run.py"


def right(out: Path, ranks: int, *, captured: bool = False) -> None:
    """Check what a run wrote: every text is that of one process, over the collectives that there are.

    With `captured` rank 0's steps were captured ones.
    """
    said = json.loads(out.read_text())
    assert said["captures"] > 0 or not captured, said
    assert (said["ranks"], said["requests"], said["texts_as_one_device"]) == (ranks, 8, 8)
    assert said["collectives"] == ("nccl" if torch.cuda.device_count() >= ranks else "gloo")


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        pytest.param(3, ["--stages"], id="stages", marks=pytest.mark.slow),
        pytest.param(4, ["--stages", "2", "--sequence"], id="both"),
        pytest.param(4, ["--stages", "2", "--captured"], id="captured stages"),
    ],
)
def test_sharded_texts_are_those_of_one_process(ranks: int, how: list[str], tmp_path: Path) -> None:
    """Eight requests, sampled with their seeds: the same tokens from shards or stages as from the whole."""
    out = tmp_path / "tp.json"
    arguments = [str(EXAMPLE), "--tokens", "8", "--json", str(out), *how]
    ended = forked.run_ranks(ranks, arguments, tmp_path, 170)
    assert [each.returncode for each in ended] == [0] * ranks, ended
    right(out, ranks, captured="--captured" in how)


def test_torchrun_starts_ranks_that_replay_captured_steps(tmp_path: Path) -> None:
    """As the example says that it is started: two ranks, decoding steps as graphs, the same tokens."""
    out = tmp_path / "tp.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(EXAMPLE), "--tokens", "8",
        "--captured", "--json", str(out),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    right(out, 2, captured=True)


def test_ranks_with_a_gpu_each_meet_through_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that nobody has here: NCCL needs one a rank; ranks that share one meet through gloo."""
    wanted = {
        (0, "auto", 2): ("cpu", "gloo"), (2, "auto", 2): ("cuda", "nccl"), (1, "auto", 2): ("cpu", "gloo"),
        (1, "cuda", 2): ("cuda", "gloo"), (8, "cuda", 4): ("cuda", "nccl"), (8, "cpu", 2): ("cpu", "gloo"),
    }  # fmt: skip
    for (gpus, asked, ranks), means in wanted.items():
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert tp_run.device_and_backend(asked, ranks) == means


def test_a_share_that_does_not_divide_is_refused() -> None:
    """Three ranks cannot share eight heads; the message says what would. Key heads may be repeated."""
    whole = llama.LlamaConfig.read(llama.FOLDER)
    with pytest.raises(ValueError, match="ranks needs a divisor of the model's 8 num_attention_heads, got 3"):
        shard_of(whole, TensorGroup(0, 3))
    assert shard_of(whole, TensorGroup(0, 8)).num_key_value_heads == 1


def test_a_stage_of_a_pipeline_chooses_as_one_process_does(tmp_path: Path) -> None:
    """NO-012: rank 3 of 8 selects what rank 0 of 1 selects; nothing of torchrun's environment is asked."""
    code = (
        "import torch, layerzero as lz; q = torch.zeros(2, 8, 64, 32); x = torch.zeros(8, 64); "
        "print(lz.which('attention', q, q, q, is_causal=True), lz.which('linear', x, torch.zeros(32, 64)))"
    )
    ours = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **ours}
    )
    script = tmp_path / "first.py"
    script.write_text(code)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    first = forked.run([str(script)], tmp_path, 60, alone)
    assert first.returncode == 0 and first.stdout == run.stdout and "attention" in run.stdout, first

"""The tensor-parallel example, under torchrun with gloo; and pipeline stages, which change no choice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.conftest import BARE

pytest.importorskip("safetensors", reason="the example needs safetensors")
pytest.importorskip("tokenizers", reason="the example needs tokenizers")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tp_generate.py"


@pytest.mark.parametrize(
    ("ranks", "how"), [(2, ["--captured"]), (4, []), (3, ["--stages"])], ids=["2", "4", "stages"]
)
def test_sharded_texts_are_those_of_one_process(ranks: int, how: list[str], tmp_path: Path) -> None:
    """Eight requests, sampled with their seeds: the same tokens from shards or stages as from the whole."""
    out = tmp_path / "tp.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(EXAMPLE), "--tokens", "8",
        "--json", str(out), *how,
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(out.read_text())
    assert (said["ranks"], said["requests"], said["texts_as_one_device"]) == (ranks, 8, 8)
    assert said["collectives"] == ("nccl" if torch.cuda.device_count() >= ranks else "gloo")


@pytest.mark.ray
def test_the_ranks_are_actors_of_a_cluster_of_two_nodes(ray: Any, tmp_path: Path) -> None:
    """The same tokens from shards on two nodes, with coroutines, streams and manifests between them."""
    from ray.cluster_utils import Cluster

    out = tmp_path / "tp.json"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1, **BARE})
    try:
        cluster.add_node(num_cpus=2, num_gpus=1, **BARE)
        command = [sys.executable, str(EXAMPLE), "--cluster", cluster.address, "--tokens", "8"]
        done = subprocess.run(
            [*command, "--json", str(out)],
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    finally:
        cluster.shutdown()
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(out.read_text())
    assert (said["ranks"], said["nodes"], said["epoch"]) == (2, 2, 1)
    assert said["texts_as_one_device"] == said["requests"] == 8


def test_ranks_with_a_gpu_each_meet_through_nccl() -> None:
    """GPUs that nobody has here: NCCL needs one a rank; ranks that share one meet through gloo."""
    wanted = {
        (0, "auto", 2): ("cpu", "gloo"), (2, "auto", 2): ("cuda", "nccl"), (1, "auto", 2): ("cpu", "gloo"),
        (1, "cuda", 2): ("cuda", "gloo"), (8, "cuda", 4): ("cuda", "nccl"), (8, "cpu", 2): ("cpu", "gloo"),
    }  # fmt: skip
    code = f"""
import torch, tp_generate as t
for gpus, asked, ranks in {list(wanted)}:
    torch.cuda.device_count = lambda: gpus
    print(*t.means(asked, ranks))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parent)},
    )
    assert [tuple(line.split()) for line in done.stdout.splitlines()] == list(wanted.values())


def test_a_share_that_does_not_divide_is_refused() -> None:
    """Three ranks cannot share eight heads; the message says what would."""
    done = subprocess.run(
        [sys.executable, "-c", "import tp_generate as t; t.shard_of(t.Config.read(t.FOLDER), 3)"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parent)},
    )
    assert "ValueError: ranks needs a divisor of the model's 8 heads, got 3" in done.stderr


def test_a_stage_of_a_pipeline_chooses_as_one_process_does() -> None:
    """NO-012: rank 3 of 8 selects what rank 0 of 1 selects; nothing of torchrun's environment is asked."""
    code = (
        "import torch, layerzero as lz; q = torch.zeros(2, 8, 64, 32); x = torch.zeros(8, 64); "
        "print(lz.which('attention', q, q, q, is_causal=True), lz.which('linear', x, torch.zeros(32, 64)))"
    )
    said = set()
    for rank, ranks in ((0, 1), (3, 8)):
        ours = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ours
        )
        said.add(run.stdout)
    assert len(said) == 1 and "attention" in said.pop()

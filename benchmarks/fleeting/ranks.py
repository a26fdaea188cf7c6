"""A tensor-parallel group whose ranks are Ray actors, or processes as torchrun starts them: the same model.

As a script it is one such process: rank 0 answers each line on its standard input with a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for name in ("examples", "benchmarks", "") if (path := str(ROOT / name)) not in sys.path]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tensor_parallel.llama import TensorParallelLlama  # noqa: E402
from tensor_parallel.run import config_and_weights  # noqa: E402

import layerzero as lz  # noqa: E402
from benchmarks.ganging import decoding  # noqa: E402
from benchmarks.ganging.rank import TINY, plant_attention  # noqa: E402
from fleeting.hosted import Load, refill  # noqa: E402
from layerzero.runtime import current  # noqa: E402


class Weights:
    """The whole random weights of the model, the same on every rank."""

    def __init__(self, load: Load) -> None:
        self.like = torch.empty(0, device=load.device, dtype=load.dtype)
        asked: Any = type("Asked", (), {"layers": 4 if load.device == "cpu" else load.layers, "folder": None})
        config, self.get = config_and_weights(asked, self.like)
        self.config = TINY if load.device == "cpu" else config


def build(load: Load, member: Any) -> TensorParallelLlama:
    """One rank's share, with the steps of this load captured."""
    if load.device == "cpu":
        torch.set_num_threads(1)
    plant_attention(current())
    weights = Weights(load)
    model = TensorParallelLlama(
        weights.config, weights.get, member, weights.like, load.pages, buckets=sorted({1, load.requests}),
        graphs=True,
    )  # fmt: skip
    refill(model)
    return model


async def step_ms(model: Any, load: Load, tokens: int) -> float:
    """Milliseconds a step of all requests over the group; asked of rank 0."""
    took, _ = await decoding.crowd(model, load.requests, load.context, tokens, behind=True)
    return took


class Launched:
    """The group as processes that a launcher started; `ask` measures once."""

    def __init__(self, load: Load, ranks: int, port: int, log: Path) -> None:
        shared = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
        }  # fmt: skip
        asked = json.dumps([load.device, load.layers, load.requests, load.context, load.tokens])
        self._log = log.open("w")
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, asked], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=self._log, cwd=ROOT, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def ask(self, tokens: int) -> float:
        """Milliseconds a step, as rank 0 measures it.

        Raises: EOFError: it has ended.
        """
        return await asyncio.to_thread(self._ask, tokens)

    def _ask(self, tokens: int) -> float:
        first = self.processes[0]
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write(f"{tokens}\n")
        first.stdin.flush()
        for line in first.stdout:
            if line.startswith("step_ms "):
                return float(line.split()[1])
        raise EOFError(f"rank 0 has ended; {self._log.name} has its last words")

    def close(self) -> None:
        """End every rank."""
        for process in self.processes:
            process.kill()
            process.wait()
        self._log.close()


async def _serve(load: Load) -> None:
    device = load.device if load.device == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}"
    settings = lz.Settings(device=device, inference=True, perfdb=None, warm="eager", freeze_gc=True)
    async with lz.start(settings), lz.rank_group(timeout_s=120.0) as member:
        model = build(load, member)
        if member.rank:
            await member.follow()
            return
        while line := await asyncio.to_thread(sys.stdin.readline):
            print("step_ms", await step_ms(model, load, int(line)), flush=True)


def main() -> None:
    """Be one rank until standard input ends."""
    load = Load(*json.loads(sys.argv[1]))
    own = None
    if load.device == "cuda":
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
    dist.init_process_group("nccl" if own else "gloo", timeout=timedelta(seconds=120), device_id=own)
    asyncio.run(_serve(load))
    os._exit(0)  # a group whose peers are gone may wait for them


if __name__ == "__main__":
    main()

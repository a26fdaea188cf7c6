"""What a pipeline of stages loses and sends: bubbles beside its own bound, bytes beside its rows.

    python -m benchmarks.parallel --json benchmarks/results/parallel.json

Each stage is a process on this machine, over gloo. `device` stages sleep for a fixed time, as a host does
while its device computes, so that many stages fit few cores; `products` stages multiply matrices, a core
each. Both take as long for few rows as for many, as decoding does. `--requests` awaited callers take
`--steps` steps each in one batch after another (`flushed`, a step at a time); then as many callers for each
stage, in as many batches as there are stages; then in one batch more, which hides what hosts take between two
steps (`one more`).

A pipeline's own bound is its slowest stage, busy all the time: `of_bound` is the seconds that this stage was
inside its function, over the seconds that all took. `bubble` is what each stage lacks to that, `bytes` what
each passed on for a row, beside the row's own.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import layerzero as lz
from benchmarks.harness import environment, show, write
from layerzero import parallel

TORCH: Any = dist  # its stores are public, and declared nowhere
WIDE = 256
WARM_STEPS = 4
ARMS = ("flushed", "stages", "one more")


class Stage:
    """One stage's work on rows (T, WIDE)."""

    def __init__(self, kind: str, layout: parallel.Layout, work_s: float) -> None:
        self._sleeps_s = work_s if kind == "device" else 0.0
        self._weight = torch.eye(WIDE * 4) if kind == "products" else None
        self._products = max(1, round(work_s / 1.5e-3))  # of about a millisecond and a half each
        self._layout = layout

    def __call__(self, x: Tensor | None, ids: Tensor) -> Tensor:
        """What the stage passes on, or the results."""
        if self._weight is None:
            time.sleep(self._sleeps_s)
        else:
            for _ in range(self._products):
                self._weight @ self._weight[:, :64]
        rows = ids[:, None].expand(-1, WIDE).float() if x is None else x + 1
        return rows[:, :1] if self._layout.last else rows


async def serve(options: argparse.Namespace, stages: int, kind: str) -> list[dict[str, Any]]:
    """All arms on this rank: what it did, and on rank 0 how long that took."""
    rows: list[dict[str, Any]] = []
    async with lz.start(lz.Settings(inference=True, perfdb=None)):
        for epoch, batches in enumerate((1, stages, stages + 1)):
            async with lz.rank_group(epoch=epoch, timeout_s=60.0) as member:
                layout = parallel.Layout(member, pp=stages)
                pipeline = parallel.Pipeline(layout, batches=batches)
                step = pipeline.batched(
                    Stage(kind, layout, options.work_ms * 1e-3),
                    name="stage",
                    carries=lambda count: torch.empty(count, WIDE),
                    returns=lambda ids: torch.empty(len(ids), 1),
                )
                if member.rank:
                    await member.follow()
                    rows.append(said(pipeline.stats, batches))
                    continue

                async def one(request: int, steps: int, step: Any = step) -> None:
                    ids = torch.tensor([request])
                    for _ in range(steps):
                        out = await step(request, ids)
                        assert float(out) == request + stages - 1, (out, request)

                async def all_requests(steps: int, count: int = options.requests * batches) -> float:
                    began_s = time.perf_counter()
                    await asyncio.gather(*(one(request, steps) for request in range(count)))
                    return time.perf_counter() - began_s

                await all_requests(WARM_STEPS)
                before = said(pipeline.stats, batches)
                wall_s = await all_requests(options.steps)
                rows.append({**said(pipeline.stats, batches), "wall_s": wall_s, "warm": before["steps"]})
    return rows


def said(stats: parallel.StageStats, batches: int) -> dict[str, Any]:
    """A rank's counts as data."""
    return {"batches": batches, "steps": stats.steps, "busy_s": stats.busy_s, "sent": stats.sent_bytes}


def rank_main(rank: int, stages: int, port: int, kind: str, options: argparse.Namespace, out: Any) -> None:
    """One stage in its process."""
    torch.set_num_threads(1)
    store = TORCH.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=stages, timeout=timedelta(seconds=60))
    options_of_rank = {"RANK": str(rank), "WORLD_SIZE": str(stages)}
    with patched_environment(options_of_rank):
        out.put((rank, asyncio.run(serve(options, stages, kind))))
    dist.barrier()
    dist.destroy_process_group()


def patched_environment(variables: dict[str, str]) -> Any:
    """A block in which `lz.rank_group` finds who this process is, as under torchrun."""
    from unittest import mock

    return mock.patch.dict("os.environ", variables)


def measure(stages: int, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One pipeline: all arms, with each stage's part."""
    server = TORCH.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [
        context.Process(target=rank_main, args=(rank, stages, server.port, kind, options, out))
        for rank in range(stages)
    ]
    for process in processes:
        process.start()
    by_rank = dict(out.get(timeout=150) for _ in range(stages))
    for process in processes:
        process.join(60)
    return {
        name: arm([by_rank[rank][index] for rank in range(stages)], options)
        for index, name in enumerate(ARMS)
    }


def arm(ranks: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """What one arm's ranks make together."""
    first = ranks[0]
    timed = (first["steps"] - first["warm"]) / first["steps"]
    busy_s = [rank["busy_s"] * timed for rank in ranks]
    requests = options.requests * first["batches"]
    tokens = requests * (options.steps + WARM_STEPS)
    return {
        "batches": first["batches"],
        "steps": first["steps"] - first["warm"],
        "tokens_per_s": requests * options.steps / first["wall_s"],
        "of_bound": max(busy_s) / first["wall_s"],
        "bubble": [1 - each / first["wall_s"] for each in busy_s],
        "bytes_per_row": [rank["sent"] / tokens for rank in ranks],
    }


def table(measured: dict[str, Any]) -> dict[str, Any]:
    """What documents show of the record."""
    columns = ["stages", "work"]
    columns += [f"{what}, {name}" for what in ("tokens/s", "of the bound") for name in ARMS]
    columns += ["bytes a row and stage"]
    lines = []
    for key, row in measured.items():
        stages, kind = key.split(" ")
        shown = [row[name][what] for what in ("tokens_per_s", "of_bound") for name in ARMS]
        lines.append([stages, kind, *shown, max(row["stages"]["bytes_per_row"])])
    return {"columns": columns, "rows": lines}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8], help="of `device` work")
    parser.add_argument("--products", type=int, nargs="*", default=[2], help="stages of `products` work")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--work-ms", type=float, default=20.0, help="of a stage, for one batch")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    measured: dict[str, Any] = {}
    where = environment(["layerzero-runtime", "torch"])
    for kind, counts in (("device", options.stages), ("products", options.products)):
        for stages in counts:
            measured[f"{stages} {kind}"] = measure(stages, kind, options)
            if options.json:
                record = {"environment": where, "work_ms": options.work_ms, "requests": options.requests}
                tables = {"parallel": table(measured)}
                write(options.json, {**record, "pipelines": measured, "tables": tables})
    shown = table(measured)
    cells = [[*row[:2], *(f"{value:.2f}" for value in row[2:])] for row in shown["rows"]]
    show("pipelines of stages on one machine", shown["columns"], cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What agreement costs a gang: plans that are agreed, manifests that are sent, bytes beside them.

    python -m benchmarks.gang --json benchmarks/results/gang.json

For 2, 4 and 8 ranks, each a process on this machine, over a TCPStore: the time from rank 0's proposal to the
outcome (every rank has voted), the time that rank 0 spends to send one step's manifest, and the time that a
follower spends to unpack it. gloo's own broadcast of a small object stands beside them.
Between plans nothing is written to the store: its keys are counted before and after the steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import layerzero as lz
from benchmarks.harness import distribution, environment
from layerzero.actors.gang import Gang
from layerzero.actors.stores import TorchStore
from layerzero.scheduler.steps import Steps

REQUESTS = [f"cmpl-{number:08d}" for number in range(64)]
WARM = 20
PAUSE_S = 0.0005


def rank_main(rank: int, ranks: int, port: int, plans: int, steps: int, out: Any) -> None:
    """One rank: join, agree `plans` times, take `steps` steps; rank 0 and 1 report nanoseconds."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, None, False, wait)
    dist.init_process_group("gloo", store=dist.PrefixStore("pg", store.clone()), rank=rank, world_size=ranks)
    with lz.start(lz.Settings(inference=True, perfdb=None)) as runtime:
        gang = Gang(
            runtime.device("cpu"), TorchStore(store.clone(), "gang"), rank=rank, ranks=ranks, timeout_s=60.0
        )
        agreed = gang.join()
        walk = Steps(gang)
        agree_ns = []
        for version in range(2, 2 + plans + WARM):
            dist.barrier()
            begin = time.perf_counter_ns()
            if rank == 0:
                gang.propose(msgspec.structs.replace(agreed, version=version, activate_at=1))
            else:
                gang.agree(version)
            agree_ns.append(time.perf_counter_ns() - begin)
        dist.barrier()
        keys = store.num_keys()
        step_ns = _steps(walk, rank, steps, PAUSE_S)
        dist.barrier()
        warm_ns = _steps(walk, rank, steps, 0.0)
        dist.barrier()
        sent = store.num_keys() - keys
        broadcast_ns = _broadcasts(rank, steps)
        if rank < 2:
            out.put((rank, agree_ns[WARM:], step_ns, warm_ns, broadcast_ns, sent))
        dist.barrier()
        if rank:
            walk.next()  # the word that ends the gang
        walk.close()
    dist.destroy_process_group()


def _steps(walk: Steps, rank: int, count: int, pause_s: float) -> tuple[list[int], list[int]]:
    """Nanoseconds of `take` on rank 0, by the wall and of its thread: 64 requests and their ids."""
    ids = torch.arange(len(REQUESTS))
    found: list[int] = []
    spent: list[int] = []
    for number in range(count + WARM):
        if rank == 0:
            time.sleep(pause_s)  # the followers wait for the manifest, as between two steps of a model
            begin, cpu = time.perf_counter_ns(), time.thread_time_ns()
            walk.take("step", REQUESTS, (ids,))
            spent.append(time.thread_time_ns() - cpu)
            found.append(time.perf_counter_ns() - begin)
        else:
            manifest, _ = walk.next()
            begin = time.perf_counter_ns()
            walk.values(manifest)
            found.append(time.perf_counter_ns() - begin)
        if number % 100 == 99:
            dist.barrier()
    return found[WARM:], spent[WARM:]


def _broadcasts(rank: int, count: int) -> list[int]:
    """The same news by torch.distributed's own `broadcast_object_list`."""
    found = []
    for _ in range(min(count, 200)):
        box = [(1, 2, "step", REQUESTS)] if rank == 0 else [None]
        begin = time.perf_counter_ns()
        dist.broadcast_object_list(box, 0)
        found.append(time.perf_counter_ns() - begin)
    return found


def measure(ranks: int, plans: int, steps: int) -> dict[str, Any]:
    """The distributions for a gang of `ranks` processes, microseconds."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [
        context.Process(target=rank_main, args=(rank, ranks, server.port, plans, steps, out))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    said = {found[0]: found[1:] for found in (out.get(timeout=240) for _ in range(2))}
    for process in processes:
        process.join(60)
    agree_ns, step_ns, warm_ns, broadcast_ns, sent = said[0]
    return {
        "agreement": distribution(agree_ns),
        "manifest_sent": distribution(step_ns[0]),
        "manifest_sent_cpu": distribution(step_ns[1]),
        "manifest_back_to_back": distribution(warm_ns[0]),
        "manifest_unpacked": distribution(said[1][1][0]),
        "gloo_broadcast": distribution(broadcast_ns),
        "store_keys_written_by_steps": sent,
        "steps": len(step_ns[0]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = {str(ranks): measure(ranks, options.plans, options.steps) for ranks in options.ranks}
    table = Table(title="gangs on one machine, microseconds: p50 / p99")
    for column in (
        "ranks",
        "one plan agreed",
        "a manifest sent",
        "of it on the CPU",
        "back to back",
        "gloo's broadcast",
        "store keys written by steps",
    ):
        table.add_column(column)
    for ranks, row in rows.items():
        pairs = [
            row[name]
            for name in (
                "agreement",
                "manifest_sent",
                "manifest_sent_cpu",
                "manifest_back_to_back",
                "gloo_broadcast",
            )
        ]
        cells = [f"{pair['median_us']:.0f} / {pair['p99_us']:.0f}" for pair in pairs]
        table.add_row(ranks, *cells, str(row["store_keys_written_by_steps"]))
    Console().print(table)
    record = {"environment": environment(["layerzero-runtime", "torch"]), "ranks": rows}
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

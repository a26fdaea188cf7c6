"""What agreement costs a gang: plans that are agreed, manifests that are sent, bytes beside them.

    python -m benchmarks.gang --json benchmarks/results/gang.json

For 2, 4 and 8 ranks, each a process on this machine, over a TCPStore: the time from rank 0's proposal to the
outcome (every rank has voted), and what manifests of 64 requests cost. That is said in two ways. `step`: rank
0's time for a step of fixed work with a manifest, less its time for the same work without one, neighbour by
neighbour; the followers wait meanwhile, so that waking them counts. `woken` is the same with two bytes in
place of a manifest: what no manifest could save. The pieces: rank 0 packs the arguments, writes the frame and
sends it, a follower receives, admits and unpacks it; frames lie ready when they are received. Times are
those of the calling thread, beside them the time of the processor that it had.
gloo's own broadcast of a small object stands beside all this.
Between plans nothing is written to the store: its keys are counted before and after the steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import layerzero as lz
from benchmarks.harness import distribution, environment, show, write
from layerzero.actors.group.channel import FollowerChannel, LeaderChannel
from layerzero.actors.group.config import GroupConfig
from layerzero.actors.group.plan import AgreedPlan
from layerzero.actors.group.rank_group import RankGroup
from layerzero.actors.group.step_message import decode, pack
from layerzero.actors.group.steps import Steps
from layerzero.actors.remote.stores import TorchStore

REQUESTS = [f"cmpl-{number:08d}" for number in range(64)]
WARM = 20
BURST = 16
TORCH: Any = dist  # its stores are public, and declared nowhere
WORK = 400  # additions: about twenty microseconds of one core

Nanoseconds = dict[str, list[float]]


class Gate:
    """Every rank waits here for every other, in the store: no collective, nothing that spins."""

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self._store, self._rank, self._ranks, self._number = store, rank, ranks, 0

    def __call__(self) -> None:
        self._number += 1
        key = f"gate/{self._number}"
        if self._store.add(key, 1) == self._ranks:
            self._store.set(f"{key}/open", b"1")
        self._store.wait([f"{key}/open"])


def agreements(gang: RankGroup, agreed: AgreedPlan, plans: int, gate: Gate) -> list[float]:
    """Nanoseconds that this rank took for each of `plans` plans."""
    taken: list[float] = []
    for version in range(2, 2 + plans + WARM):
        gate()
        begin = time.perf_counter_ns()
        if gang.rank == 0:
            gang.propose(msgspec.structs.replace(agreed, version=version, activate_at=1))
        else:
            gang.agree(version)
        taken.append(time.perf_counter_ns() - begin)
    return taken[WARM:]


def manifests(walk: Steps, count: int, gate: Gate) -> Nanoseconds:
    """What manifests cost this rank, `count` of each kind: nanoseconds by name."""
    if isinstance(walk.group.channel, LeaderChannel):
        line, ids = walk.group.channel, torch.arange(len(REQUESTS))
        found = _apart(walk, count, gate)
        gate()
        steps, spent = _beside_work(lambda: walk.start_step("step", REQUESTS, (ids,)), count, gate)
        gate()
        woken, _ = _beside_work(lambda: line.send(b"up"), count, gate)
        return found | {"step": steps, "step, of the processor": spent, "woken": woken}
    line = walk.group.channel
    assert isinstance(line, FollowerChannel)
    found = _received(walk, count, gate)
    for take in (walk.next_step, line.receive):
        gate()
        for number in range(count + WARM):
            take()
            if number % BURST == BURST - 1:
                gate()
    return found


def _beside_work(say: Callable[[], object], count: int, gate: Gate) -> tuple[list[float], list[float]]:
    """Nanoseconds that `say` adds to a step of fixed work, by its neighbour without; and the processor's."""
    steps, spent = [], []
    for number in range(count + WARM):
        began = time.perf_counter_ns(), time.thread_time_ns()
        _work()
        middle = time.perf_counter_ns(), time.thread_time_ns()
        say()
        _work()
        ended = time.perf_counter_ns(), time.thread_time_ns()
        wall, cpu = ((c - b) - (b - a) for a, b, c in zip(began, middle, ended, strict=True))
        steps.append(float(wall))
        spent.append(float(cpu))
        if number % BURST == BURST - 1:
            gate()
    return steps[WARM:], spent[WARM:]


def _work() -> int:
    total = 0
    for number in range(WORK):
        total += number
    return total


def _apart(walk: Steps, count: int, gate: Gate) -> Nanoseconds:
    """Rank 0's pieces, a burst at a time: nobody reads meanwhile."""
    ids, clock, line = torch.arange(len(REQUESTS)), time.perf_counter_ns, walk.group.channel
    assert isinstance(line, LeaderChannel)
    found: Nanoseconds = {"packed": [], "written": [], "sent": []}
    for _ in range(-(-(count + WARM) // BURST)):
        for _ in range(BURST):
            begin = clock()
            packed = pack((ids,), "step")
            middle = clock()
            frame = walk.next_frame("step", REQUESTS, packed)
            written = clock()
            line.send(frame)
            ended = clock()
            for name, took in zip(found, (middle - begin, written - middle, ended - written), strict=True):
                found[name].append(float(took))
        gate()
        gate()
    return {name: values[WARM:] for name, values in found.items()}


def _received(walk: Steps, count: int, gate: Gate) -> Nanoseconds:
    """A follower's pieces, of frames that lie ready."""
    clock, line = time.perf_counter_ns, walk.group.channel
    assert isinstance(line, FollowerChannel)
    found: Nanoseconds = {"received": [], "admitted": [], "unpacked": []}
    for _ in range(-(-(count + WARM) // BURST)):
        gate()
        for _ in range(BURST):
            begin = clock()
            frame = line.receive()
            middle = clock()
            manifest, _ = walk.accept(decode(frame))
            admitted = clock()
            walk.values(manifest)
            ended = clock()
            for name, took in zip(found, (middle - begin, admitted - middle, ended - admitted), strict=True):
                found[name].append(float(took))
        gate()
    return {name: values[WARM:] for name, values in found.items()}


def broadcasts(rank: int, count: int) -> list[float]:
    """The same news by torch.distributed's own `broadcast_object_list`, nanoseconds."""
    found = []
    for _ in range(min(count, 200)):
        box = [(1, 2, "step", REQUESTS)] if rank == 0 else [None]
        begin = time.perf_counter_ns()
        dist.broadcast_object_list(box, 0)
        found.append(float(time.perf_counter_ns() - begin))
    return found


def rank_main(rank: int, ranks: int, port: int, plans: int, steps: int, out: Any) -> None:
    """One rank: join, agree `plans` times, take steps; ranks 0 and 1 report nanoseconds."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=60)
    store = TORCH.TCPStore("127.0.0.1", port, None, False, wait)
    dist.init_process_group("gloo", store=TORCH.PrefixStore("pg", store.clone()), rank=rank, world_size=ranks)
    with lz.start(lz.Settings(inference=True, perfdb=None)) as runtime:
        agreeing = TorchStore(store.clone(), "gang")
        gang = RankGroup(runtime.device("cpu"), agreeing, GroupConfig(rank=rank, ranks=ranks, timeout_s=60.0))
        agreed, walk, counted = gang.join(), Steps(gang), store.clone()
        gate = Gate(TORCH.PrefixStore("gates", store.clone()), rank, ranks)
        plan_ns = agreements(gang, agreed, plans, gate)
        gate()
        keys, gates = counted.num_keys(), gate._number
        found = manifests(walk, steps, gate)
        gate()
        written = counted.num_keys() - keys - 2 * (gate._number - gates)
        broadcast_ns = broadcasts(rank, steps)
        if rank < 2:
            out.put((rank, plan_ns, found, broadcast_ns, written))
        dist.barrier()
        if rank:
            walk.next_step()  # the word that ends the gang
        walk.close()
    dist.destroy_process_group()


def measure(ranks: int, plans: int, steps: int) -> dict[str, Any]:
    """The distributions for a gang of `ranks` processes, microseconds."""
    server = TORCH.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
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
    plan_ns, leading, broadcast_ns, written = said[0]
    return {
        "agreement": distribution(plan_ns),
        "manifest": {name: distribution(values) for name, values in (leading | said[1][1]).items()},
        "gloo_broadcast": distribution(broadcast_ns),
        "store_keys_written_by_steps": written,
        "steps": steps,
    }


def table(rows: dict[str, Any]) -> dict[str, Any]:
    """What documents show of the record: medians, and p99 of what is agreed."""
    columns = ["ranks", "a plan agreed: p50", "p99", "a step message", "of it to wake the followers"]
    columns += ["packed", "written", "sent", "received", "admitted", "unpacked", "gloo's broadcast"]
    lines = []
    for ranks, row in rows.items():
        pieces = [row["manifest"][name]["median_us"] for name in ("step", "woken", *columns[5:11])]
        plan = row["agreement"]
        lines.append([ranks, plan["median_us"], plan["p99_us"], *pieces, row["gloo_broadcast"]["median_us"]])
    return {"columns": columns, "rows": lines}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows: dict[str, Any] = {}
    where = environment(["layerzero-runtime", "torch"])
    for ranks in options.ranks:
        rows[str(ranks)] = measure(ranks, options.plans, options.steps)
        if options.json:
            write(options.json, {"environment": where, "ranks": rows, "tables": {"gang": table(rows)}})
    shown = table(rows)
    cells = [[row[0], *(f"{value:.1f}" for value in row[1:])] for row in shown["rows"]]
    show("gangs on one machine, microseconds", shown["columns"], cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())

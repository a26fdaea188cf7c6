"""An hour of four loads at once, with a fault every two seconds: is anything lost, doubled, stuck or kept?

    python benchmarks/soak_faults.py [--minutes 2] [--out FILE]
    python benchmarks/soak_faults.py --minutes 60 --out benchmarks/results/soak_cpu.json

The loads: callers of a pool of Ray devices, seeded texts of a rank group over two of them, a backend in a
process of its own, and the example server with streaming clients. The faults: SIGKILL of a device, of a rank,
of the worker, of the server; SIGSTOP of the worker; a caller that goes in the middle of its answer.
Who is hit has served since its last fault, so that every load gets on; where nobody has, a caller goes.

Every call ends once, as answered, as an error with a name, or as cancelled; the counters of the library are
those of the callers; what this process holds does not grow over the second half, by the slope of its floor.
`lz consistency` compares the pool's devices all the while, and at the end finds devices that were made to
differ. Exit status 1 where something of that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import secrets
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster import RESULTS  # sets what Ray reads when it is imported
from benchmarks.harness import environment, write
from benchmarks.soaking.resources import MARK, Watch, marked, segments

EVERY_S = 2.0  # between two faults
SETTLE_S = 150.0  # for what is under way at the end
DEVICES = ("gpu-0", "gpu-1", "gpu-2")  # the first two are ranks
COMMAND_DEVICES = 2  # that `lz consistency` opens beside them
PLANT_ROUNDS = 1
DELAY_S = 0.5  # the longest pause before a device or a rank group begins anew; by itself it grows to ten


class Faults:
    """What was hit, when, and by what."""

    def __init__(self, loads: list[Any], callers: list[Any]) -> None:
        self.loads, self.callers = loads, callers
        self.done: Counter[str] = Counter()
        self.minutes: list[Counter[str]] = []
        self.running = True

    async def run(self) -> None:
        """One fault every two seconds until `running` is taken back."""
        draw, began = random.Random(7), time.monotonic()
        due = began
        while self.running:
            due += EVERY_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if not self.running:
                return
            ready = [load for load in self.loads if load.ready()]
            weights = [load.weight for load in ready]
            try:
                how = draw.choices(ready, weights)[0].strike(draw) if ready else self._cut(draw)
            except ProcessLookupError:
                how = "was dead already"
            self.done[how] += 1
            minute = int((time.monotonic() - began) // 60)
            self.minutes += [Counter() for _ in range(minute + 1 - len(self.minutes))]
            self.minutes[minute][how] += 1

    def _cut(self, draw: random.Random) -> str:
        """Cancel what one caller waits for, at any load of this loop."""
        for ends in draw.sample(self.callers, len(self.callers)):
            if ends.cut(draw):
                return f"caller cut: {ends.name}"
        return "nobody to cut"


async def soak(minutes: float, folder: Path, address: str) -> dict[str, Any]:
    """Open everything, run so long, let all calls end, and look."""
    import layerzero as lz
    from benchmarks.soaking.comparing import Comparing, Planting
    from benchmarks.soaking.fleet import Fleet, Gang
    from benchmarks.soaking.isolated import Isolated
    from benchmarks.soaking.serving import Serving
    from layerzero.actors.remote import restarts
    from tests.distributed import shards

    settings = lz.Settings(
        cluster="auto", cluster_devices=len(DEVICES), device="cpu", inference=True, max_restarts=1_000_000,
        hang_s=20.0, placement_timeout_s=200.0, perfdb=None, shipped_tables=False,
    )  # fmt: skip
    restarts.MAX_DELAY_S = DELAY_S
    async with lz.start(settings) as runtime:
        pool = runtime.device_pool
        async with lz.remote_rank_group(shards.shard, list(DEVICES[:2]), timeout_s=30.0) as group:
            began = asyncio.get_running_loop().time()
            fleet, gang = Fleet(pool, folder / "executed", began, DEVICES[2]), Gang(pool, group, began)
            isolated, serving = Isolated(began), Serving(folder, began)
            callers = [fleet.ends, fleet.generations, gang.ends, serving.ends, serving.ends]
            parts: dict[str, Any] = {
                "fleet": fleet,
                "rank group": gang,
                "isolated": isolated,
                "server": serving,
            }
            comparing, faults = Comparing(pool, address), Faults(list(parts.values()), callers)
            watch = Watch(began, minutes * 60)
            telling = asyncio.ensure_future(tell(faults, comparing, watch, began))
            stuck = await together({**parts, "consistency": comparing, "faults": faults}, watch, minutes)
            telling.cancel()
            seconds = asyncio.get_running_loop().time() - began
        checks = {"nothing is stuck": not stuck}
        checks["fleet: no device has calls"] = all(device.load == 0 for device in pool.devices.values())
        planting = Planting(pool, DEVICES[1], DEVICES[2])
        await planting.run(PLANT_ROUNDS)
    judged: list[Any] = [
        part for name, part in {**parts, "consistency": comparing}.items() if name not in stuck
    ]
    for part in [*judged, planting]:
        checks |= part.checks()
    return {
        "minutes": round(seconds / 60, 2), "stuck": stuck, "checks": checks,
        **{name: part.record() for name, part in parts.items()},
        "consistency": comparing.record() | planting.record(),
        "faults": {"by kind": dict(faults.done), "a minute": [dict(each) for each in faults.minutes]},
        "resources": watch.record(),
    }  # fmt: skip


async def together(parts: dict[str, Any], watch: Any, minutes: float) -> list[str]:
    """Run all parts so long, and let what is under way end; the parts that do not."""
    work = {name: asyncio.ensure_future(part.run()) for name, part in parts.items()}
    watching = asyncio.ensure_future(watch.run())
    await asyncio.wait([watching, *work.values()], timeout=minutes * 60, return_when=asyncio.FIRST_EXCEPTION)
    if watching.done():
        watching.result()
    watching.cancel()
    for part in parts.values():
        part.running = False
    _, stuck = await asyncio.wait(work.values(), timeout=SETTLE_S)
    for task in work.values():
        if task not in stuck:
            task.result()
    return [name for name, task in work.items() if task in stuck]


async def tell(faults: Faults, comparing: Any, watch: Watch, began: float) -> None:
    """A line now and then, for who watches."""
    while True:
        await asyncio.sleep(15)
        seconds = asyncio.get_running_loop().time() - began
        calls = {load.ends.name: dict(load.ends.ended) for load in faults.loads}
        line = {
            "s": round(seconds),
            **calls,
            "faults": dict(faults.done),
            "consistency": dict(comparing.looked),
            "held": watch.last(),
        }
        print(json.dumps(line), file=sys.stderr, flush=True)


def run(minutes: float, *, command: bool) -> dict[str, Any]:
    """The soak on a node of its own, and what is left behind it."""
    import ray

    before = segments([os.getpid()])
    gpus = len(DEVICES) + (COMMAND_DEVICES if command else 0)
    ray.init(
        "local",
        num_cpus=2,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    address = ray.get_runtime_context().gcs_address if command else ""
    tracemalloc.start(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(soak(minutes, Path(folder), address))
    finally:
        tracemalloc.stop()
        ray.shutdown()
    found["checks"] |= left_behind(before)
    for name, trend in found["resources"]["trends"].items():
        found["checks"][f"{name} stays flat"] = trend["flat"]
    found["verdict"] = "all holds" if all(found["checks"].values()) else "WRONG"
    return found


def left_behind(before: set[bytes], patience_s: float = 30.0) -> dict[str, bool]:
    """Whether processes and shared memory outlive what used them."""
    until = time.monotonic() + patience_s
    while (left := marked()) and time.monotonic() < until:
        time.sleep(0.5)
    gc.collect()
    for pid in left:
        print(f"left: {pid} {Path(f'/proc/{pid}/cmdline').read_bytes()!r}", file=sys.stderr)
    kept = segments([os.getpid()]) - before
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        if b" ".join(line.split()[3:5]) in kept:
            print(f"left: {line.decode(errors='replace')}", file=sys.stderr)
    return {
        "no process is left": not left,
        "no shared memory is left": not kept,
    }


def main() -> int:
    """Run, print and write; exit status 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument(
        "--no-command", action="store_true", help="compare the pool, without `lz consistency`"
    )
    parser.add_argument("--out", type=Path, default=None, help=f"for example {RESULTS / 'soak_cpu.json'}")
    asked = parser.parse_args()
    if MARK not in os.environ:  # what a process has in its environment is what it was started with
        os.environ[MARK] = secrets.token_hex(8)
        os.execv(sys.executable, sys.orig_argv)
    result = run(asked.minutes, command=not asked.no_command)
    record = {
        "environment": environment(("ray", "layerzero-runtime")),
        "seconds between faults": EVERY_S,
        **result,
    }
    if asked.out is not None:
        write(asked.out, record)
    shown = {name: value for name, value in result.items() if name != "resources"}
    print(json.dumps({**shown, "trends": result["resources"]["trends"]}, indent=1))
    return 0 if result["verdict"] == "all holds" else 1


if __name__ == "__main__":
    sys.exit(main())

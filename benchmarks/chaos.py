"""Devices of a Ray cluster that die at random while Ray loses messages: is anything lost, doubled or stuck?

    python benchmarks/chaos.py --minutes 10

Two devices on this machine. All the while run seeded generations, whose tokens are compared with those of a
run without failures, and counted calls, whose executions are written to a file that outlives the device. A
call that was answered must have run once, one whose device was lost at most once, and every await must end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# Before ray is imported; every process that it starts inherits it.
os.environ["RAY_testing_rpc_failure"] = (  # noqa: SIM112  Ray's spelling
    '{"CoreWorkerService.grpc_client.PushTask": {"num_failures": -1, "req_failure_prob": 10, '
    '"resp_failure_prob": 10, "in_flight_failure_prob": 0}}'
)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import layerzero as lz
from benchmarks.cluster import RESULTS, mark, tokens
from benchmarks.harness import environment, write
from layerzero.actors.fleet import Fleet

LOST_PERCENT = 10  # of the requests, and of the answers, as said above
GENERATORS, CALLERS, LENGTH = 16, 8, 20
STRIDE = 1000  # between the seeds of one caller; each begins at its own number below it
SETTLE_S = 90.0
SAMPLE_S = 5.0


class Run:
    """One run: what was answered, what failed and how, and this process's memory all the while."""

    def __init__(self, fleet: Fleet, seconds: float, path: str) -> None:
        self.fleet = fleet
        self.path = path
        self.began = time.monotonic()
        self.until = self.began + seconds
        self.done: Counter[str] = Counter()
        self.answered: set[int] = set()
        self.unsure: set[int] = set()
        self.gaps: list[float] = []
        self.samples: list[tuple[float, float, int]] = []  # seconds, MiB, open files

    @property
    def goes_on(self) -> bool:
        """Whether new work is begun."""
        return time.monotonic() < self.until

    async def generations(self, seed: int) -> None:
        """One generation after the other, each compared with what it must give."""
        while self.goes_on:
            got: list[int] = []
            last = time.monotonic()
            async for token in self.fleet.stream(tokens, seed, LENGTH, 0.005, resume=True):
                got.append(token)
                now = time.monotonic()
                self.gaps.append(now - last)
                last = now
            right = got == [t async for t in tokens(seed, LENGTH, 0.0)]
            self.done["generations right" if right else "generations wrong"] += 1
            seed += STRIDE

    async def calls(self, key: int) -> None:
        """Calls that write their number down where they run."""
        while self.goes_on:
            try:
                if await self.fleet.run(mark, self.path, key) == key:
                    self.answered.add(key)
            except lz.DeviceLostError as error:
                self.done["calls lost, retryable" if error.retryable else "calls lost after they began"] += 1
                self.unsure.add(key)
            key += STRIDE

    async def killer(self) -> None:
        """SIGKILL of a device's process, every four to twelve seconds."""
        rng = random.Random(7)
        while time.monotonic() < self.until - 10.0:
            await asyncio.sleep(rng.uniform(4.0, 12.0))
            try:
                os.kill(rng.choice(self.fleet.facts).pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it is dead already, and its next life has not told its id yet
            self.done["kills"] += 1

    async def watch(self) -> None:
        """A line on standard error and a sample of this process every few seconds, until cancelled."""
        while True:
            self.samples.append((time.monotonic() - self.began, *_process()))
            seconds, mib, files = self.samples[-1]
            print(
                f"{seconds:5.0f} s  {len(self.answered)} calls answered, {self.done['generations right']} "
                f"generations right, {self.done['kills']} kills, {mib:.0f} MiB, {files} open files",
                file=sys.stderr,
                flush=True,
            )
            await asyncio.sleep(SAMPLE_S)

    async def go(self) -> int:
        """Everything at once; how many awaits had no answer long after the end."""
        work = [
            *(self.generations(seed) for seed in range(GENERATORS)),
            *(self.calls(key) for key in range(CALLERS)),
            self.killer(),
        ]
        tasks = [asyncio.ensure_future(one) for one in work]
        watch = asyncio.ensure_future(self.watch())
        ended, stuck = await asyncio.wait(tasks, timeout=self.until - time.monotonic() + SETTLE_S)
        watch.cancel()
        for task in stuck:
            task.cancel()
        for task in ended:
            task.result()
        return len(stuck)

    def verdict(self, hung: int) -> dict[str, Any]:
        """What the file of executions says about the answers, and what memory did."""
        executed = Counter(map(int, Path(self.path).read_text().split()))
        lost = len(self.answered - executed.keys())
        doubled = sum(times > 1 for times in executed.values())
        stray = len(executed.keys() - self.answered - self.unsure)
        fine = not (lost or doubled or stray or hung or self.done["generations wrong"])
        gaps = sorted(self.gaps)
        return {
            "verdict": "nothing lost, nothing doubled, no hang" if fine else "WRONG",
            "calls answered": len(self.answered),
            "calls answered that never ran": lost,
            "calls that ran twice": doubled,
            "calls that ran and got no word": stray,
            "awaits without an answer": hung,
            "generations wrong": self.done["generations wrong"],
            **self.done,
            "tokens": len(gaps),
            "gap between tokens p50, p99, worst s": [
                round(gaps[int((len(gaps) - 1) * part)], 4) for part in (0.5, 0.99, 1.0)
            ],
            "driver": _flat(self.samples),
        }


def _process() -> tuple[float, int]:
    """Resident MiB of this process, and how many files it has open."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir("/proc/self/fd"))


def _flat(samples: list[tuple[float, float, int]]) -> dict[str, Any]:
    """Memory and files of this process, and how much memory grew a minute after the first quarter."""
    settled = samples[len(samples) // 4 :]
    mean_s = sum(s for s, _, _ in settled) / len(settled)
    mean_mib = sum(mib for _, mib, _ in settled) / len(settled)
    spread = sum((s - mean_s) ** 2 for s, _, _ in settled) or 1.0
    slope = sum((s - mean_s) * (mib - mean_mib) for s, mib, _ in settled) / spread
    return {
        "RSS MiB, first, after a quarter, last": [
            round(each[1], 1) for each in (samples[0], settled[0], samples[-1])
        ],
        "RSS growth after a quarter, MiB a minute": round(slope * 60, 3),
        "open files, first, after a quarter, last": [
            each[2] for each in (samples[0], settled[0], samples[-1])
        ],
    }


async def chaos(seconds: float) -> dict[str, Any]:
    """Start a node, two devices on it, and run for so long."""
    import ray

    started = {"num_cpus": 2, "num_gpus": 2, "include_dashboard": False}
    ray.init("local", **started, log_to_driver=False, configure_logging=False)
    try:
        async with lz.start(lz.Settings(cluster="auto", device="cpu", max_restarts=10_000)) as runtime:
            with tempfile.TemporaryDirectory() as folder:
                run = Run(runtime.fleet, seconds, f"{folder}/executed")
                hung = await run.go()
                result = run.verdict(hung)
            health = await runtime.fleet.health()
            return {
                **result,
                "restarts": [each.restarts for each in health],
                "states": [each.state.value for each in health],
            }
    finally:
        ray.shutdown()


def main() -> int:
    """Run, print and write; exit status 1 where anything was lost, doubled or stuck."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--json", type=Path, default=RESULTS / "cluster_chaos.json")
    asked = parser.parse_args()
    result = asyncio.run(chaos(asked.minutes * 60))
    record = {
        "environment": environment(("ray", "msgspec", "layerzero-runtime")),
        "minutes": asked.minutes,
        "messages of Ray lost, percent of requests and of answers": LOST_PERCENT,
        **result,
    }
    write(asked.json, record)
    print(json.dumps(result, indent=1))
    return 0 if result["verdict"].startswith("nothing") else 1


if __name__ == "__main__":
    sys.exit(main())

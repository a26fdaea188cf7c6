"""Devices of a Ray cluster that die at random while Ray loses messages: is anything lost, doubled or stuck?

    python benchmarks/chaos.py --minutes 10

Two devices on this machine. All the while run seeded generations, whose tokens are compared with those of a
run without failures, and counted calls, whose executions are written to a file that outlives the device. A
call that was answered must have run once, one whose device was lost at most once, and every await must end.

What is remembered of a call is one byte and of a gap between tokens one bin, so that the memory of this
process shows the runtime and not the record. A device's memory is watched for as long as its process lives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from array import array
from collections import Counter, defaultdict
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
SETTLE_S = 90
SAMPLE_S = 5.0
LIVED_S = 30.0  # a device's process that lived shorter says nothing about growth: it was still loading
UNKNOWN, ANSWERED, UNSURE = range(3)  # of a call, as its caller knows it
Sample = tuple[float, float, int]  # seconds, MiB, open files


class Gaps:
    """How long tokens let wait, in bins of five percent: any number of gaps takes the same memory."""

    SHORTEST_S, STEP, BINS = 1e-5, 1.05, 400

    def __init__(self) -> None:
        self.bins = array("Q", [0] * self.BINS)
        self.worst_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one gap."""
        place = int(math.log(max(seconds, self.SHORTEST_S) / self.SHORTEST_S, self.STEP))
        self.bins[min(place, self.BINS - 1)] += 1
        self.worst_s = max(self.worst_s, seconds)

    def percentile(self, percent: float) -> float:
        """The seconds, rounded up by at most five percent, that so many percent of the gaps do not exceed."""
        wanted, seen = sum(self.bins) * percent / 100, 0
        for place, count in enumerate(self.bins):
            seen += count
            if count and seen >= wanted:
                return min(self.worst_s, self.SHORTEST_S * self.STEP ** (place + 1))
        return self.worst_s


class Run:
    """One run: what was answered, what failed and how, and this process's memory all the while."""

    def __init__(self, fleet: Fleet, seconds: float, path: str) -> None:
        self.fleet = fleet
        self.path = path
        self.began = time.monotonic()
        self.until = self.began + seconds
        self.done: Counter[str] = Counter()
        self.known = [bytearray() for _ in range(CALLERS)]  # by caller and turn
        self.gaps = Gaps()
        self.samples: list[Sample] = []
        self.lives: dict[int, list[Sample]] = defaultdict(list)  # of the devices, by process id

    @property
    def goes_on(self) -> bool:
        """Whether new work is begun."""
        return time.monotonic() < self.until

    @property
    def answered(self) -> int:
        """Calls that were answered."""
        return sum(known.count(ANSWERED) for known in self.known)

    async def generations(self, seed: int) -> None:
        """One generation after the other, each compared with what it must give."""
        while self.goes_on:
            got: list[int] = []
            last = time.monotonic()
            async for token in self.fleet.stream(tokens, seed, LENGTH, 0.005, resume=True):
                got.append(token)
                now = time.monotonic()
                self.gaps.add(now - last)
                last = now
            right = got == [t async for t in tokens(seed, LENGTH, 0.0)]
            self.done["generations right" if right else "generations wrong"] += 1
            seed += STRIDE

    async def calls(self, caller: int) -> None:
        """Calls that write their number down where they run."""
        known = self.known[caller]
        while self.goes_on:
            known.append(UNKNOWN)
            key = caller + STRIDE * (len(known) - 1)
            try:
                if await self.fleet.run(mark, self.path, key) == key:
                    known[-1] = ANSWERED
            except lz.DeviceLostError as error:
                self.done["calls lost, retryable" if error.retryable else "calls lost after they began"] += 1
                known[-1] = UNSURE

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
        """A line on standard error and a sample of every process every few seconds, until cancelled."""
        while True:
            seconds = time.monotonic() - self.began
            for facts in self.fleet.facts:
                if (found := _process(facts.pid)) is not None:
                    self.lives[facts.pid].append((seconds, *found))
            mib, files = _process(os.getpid()) or (0.0, 0)
            self.samples.append((seconds, mib, files))
            print(
                f"{seconds:5.0f} s  {self.answered} calls answered, {self.done['generations right']} "
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
        await asyncio.wait(tasks, timeout=self.until - time.monotonic())
        stuck = set(tasks)
        for _ in range(SETTLE_S):  # second by second: while the machine stands still, nobody is late
            _, stuck = await asyncio.wait(tasks, timeout=1.0)
            if not stuck:
                break
        watch.cancel()
        for task in stuck:
            task.cancel()
        for task in tasks:
            if task not in stuck:
                task.result()
        return len(stuck)

    def verdict(self, hung: int) -> dict[str, Any]:
        """What the file of executions says about the answers, and what memory did."""
        executed = Counter(map(int, Path(self.path).read_text().split()))
        known = {
            caller + STRIDE * turn: state
            for caller, states in enumerate(self.known)
            for turn, state in enumerate(states)
        }
        lost = sum(state == ANSWERED and key not in executed for key, state in known.items())
        doubled = sum(times > 1 for times in executed.values())
        stray = sum(known.get(key, UNKNOWN) == UNKNOWN for key in executed)
        fine = not (lost or doubled or stray or hung or self.done["generations wrong"])
        return {
            "verdict": "nothing lost, nothing doubled, no hang" if fine else "WRONG",
            "calls answered": self.answered,
            "calls answered that never ran": lost,
            "calls that ran twice": doubled,
            "calls that ran and got no word": stray,
            "awaits without an answer": hung,
            "generations wrong": self.done["generations wrong"],
            **self.done,
            "tokens": sum(self.gaps.bins),
            "gap between tokens p50, p99, worst s": [
                round(self.gaps.percentile(percent), 4) for percent in (50, 99, 100)
            ],
            "driver": _flat(self.samples),
            f"devices that lived for {LIVED_S:.0f} s": [
                _flat(life) for life in self.lives.values() if life[-1][0] - life[0][0] >= LIVED_S
            ],
        }


def _process(pid: int) -> tuple[float, int] | None:
    """Resident MiB of a process of this machine and how many files it has open; None if it has gone."""
    proc = Path("/proc") / str(pid)
    try:
        pages = int((proc / "statm").read_text().split()[1])
        if not pages:  # it has ended, and its parent has not heard of it
            return None
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(proc / "fd"))
    except OSError:
        return None


def _flat(samples: list[Sample]) -> dict[str, Any]:
    """Memory and files of a process, and how much memory grew a minute after the first quarter."""
    settled = samples[len(samples) // 4 :]
    mean_s = sum(s for s, _, _ in settled) / len(settled)
    mean_mib = sum(mib for _, mib, _ in settled) / len(settled)
    spread = sum((s - mean_s) ** 2 for s, _, _ in settled) or 1.0
    slope = sum((s - mean_s) * (mib - mean_mib) for s, mib, _ in settled) / spread
    return {
        "seconds": round(samples[-1][0] - samples[0][0], 1),
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

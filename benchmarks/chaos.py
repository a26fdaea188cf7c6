"""Devices of a Ray cluster that die at random while Ray loses messages: is anything lost, doubled or stuck?

    python benchmarks/chaos.py --minutes 10
    python benchmarks/chaos.py --calls 1000000 --callers 64 --generators 4
    python benchmarks/chaos.py --cuts --minutes 10      two hosts, and a cable between them; needs root

Two devices on this machine. All the while run seeded generations, whose tokens are compared with those of a
run without failures, and counted calls, whose executions are written to a file that outlives the device. Some
callers cancel theirs at a random moment, some set a limit that is too short. A call that was answered must
have run once, one that was cancelled, came late or lost its device at most once, and every await must end.

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
import subprocess
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
from benchmarks.hosting.namespaces import Hosts, cut, mend, why_not
from layerzero.actors.remote.pool import DevicePool

CANCELLED, LIMITED = 0.1, 0.1  # shares of the calls
SOON_S = 0.03  # until a cancel or a limit; a call takes about half of it
KILL_S = (4.0, 12.0)
# A cut is longer than a device may give no sign of life, and too short for Ray to give up a node.
CUT_EVERY_S, CUT_S, HANG_S = (6.0, 12.0), 4.0, 2.0
LOST_PERCENT = 10  # of the requests, and of the answers, as said above
LENGTH = 20
STRIDE = 1000  # between the seeds of one caller; each begins at its own number below it
SETTLE_S = 90
SAMPLE_S = 5.0
LIVED_S = 30.0  # a device's process that lived shorter says nothing about growth: it was still loading
UNKNOWN, ANSWERED, UNSURE, NEVER = range(4)  # of a call, as its caller knows it; NEVER: it did not begin
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

    def __init__(self, fleet: DevicePool, asked: argparse.Namespace, path: str) -> None:
        self.fleet = fleet
        self.asked = asked
        seconds = asked.minutes * 60
        self.path = path
        self.began = time.monotonic()
        self.until = self.began + seconds
        self.done: Counter[str] = Counter()
        self.known = [bytearray() for _ in range(asked.callers)]  # by caller and turn
        self.gaps = Gaps()
        self.samples: list[Sample] = []
        self.lives: dict[int, list[Sample]] = defaultdict(list)  # of the devices, by process id

    @property
    def goes_on(self) -> bool:
        """Whether new work is begun."""
        return time.monotonic() < self.until and self.made < self.asked.calls

    @property
    def made(self) -> int:
        """Calls that were begun."""
        return sum(map(len, self.known))

    @property
    def answered(self) -> int:
        """Calls that were answered."""
        return sum(known.count(ANSWERED) for known in self.known)

    async def generations(self, seed: int) -> None:
        """One generation after the other, each compared with what it must give."""
        while self.goes_on:
            got: list[int] = []
            last = time.monotonic()
            try:
                async for token in self.fleet.stream(tokens, seed, LENGTH, 0.005, resume=True):
                    got.append(token)
                    now = time.monotonic()
                    self.gaps.add(now - last)
                    last = now
            except lz.DeviceLostError as error:
                # The machine may stand still for longer than a caller waits for any device to come back.
                kind = "no device came back in time" if error.retryable else "lost their device too often"
                self.done[f"generations, {kind}"] += 1
                continue
            right = got == [t async for t in tokens(seed, LENGTH, 0.0)]
            self.done["generations right" if right else "generations wrong"] += 1
            seed += STRIDE

    async def calls(self, caller: int) -> None:
        """Calls that write their number down where they run; some are cancelled, some come late."""
        known, rng = self.known[caller], random.Random(caller)
        while self.goes_on:
            known.append(UNKNOWN)
            key = caller + STRIDE * (len(known) - 1)
            kind, soon = rng.random(), rng.uniform(0.0, SOON_S)
            limit = soon if CANCELLED <= kind < CANCELLED + LIMITED else None
            call = asyncio.ensure_future(self.fleet.run(mark, self.path, key, timeout_s=limit))
            cancel = None if kind >= CANCELLED else asyncio.get_running_loop().call_later(soon, call.cancel)
            try:
                known[-1] = ANSWERED if await call == key else UNKNOWN
            except lz.DeviceLostError as error:
                self.done["calls lost, retryable" if error.retryable else "calls lost after they began"] += 1
                known[-1] = NEVER if error.retryable else UNSURE
            except lz.DeadlineExceededError:
                self.done["calls that came late"] += 1
                known[-1] = UNSURE
            except asyncio.CancelledError:
                if not call.cancelled() or cancel is None:
                    raise
                self.done["calls cancelled"] += 1
                known[-1] = UNSURE
            finally:
                if cancel is not None:
                    cancel.cancel()

    async def killer(self) -> None:
        """SIGKILL of a device's process, every few seconds."""
        rng = random.Random(7)
        while self.goes_on and time.monotonic() < self.until - 10.0:
            await asyncio.sleep(rng.uniform(*KILL_S))
            try:
                os.kill(rng.choice(self.fleet.facts).pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it is dead already, and its next life has not told its id yet
            self.done["kills"] += 1

    async def cutter(self) -> None:
        """Cut the cable to the second host, every few seconds, for long enough to be taken for dead."""
        rng = random.Random(11)
        while self.goes_on and time.monotonic() < self.until - 10.0:
            await asyncio.sleep(rng.uniform(*CUT_EVERY_S))
            await asyncio.to_thread(cut, self.asked.cable)
            try:
                await asyncio.sleep(CUT_S)
            finally:
                await asyncio.to_thread(mend, self.asked.cable)
            self.done["cuts"] += 1

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
            *(self.generations(seed) for seed in range(self.asked.generators)),
            *(self.calls(key) for key in range(self.asked.callers)),
            self.killer(),
            *([self.cutter()] if self.asked.cable else []),
        ]
        tasks = [asyncio.ensure_future(one) for one in work]
        watch = asyncio.ensure_future(self.watch())
        stuck = set(tasks)
        while stuck and self.goes_on:
            _, stuck = await asyncio.wait(tasks, timeout=1.0)
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
        times = [bytearray(len(states)) for states in self.known]
        with open(self.path) as file:
            for line in file:
                turn, caller = divmod(int(line), STRIDE)
                times[caller][turn] = min(times[caller][turn] + 1, 255)
        pairs: Counter[tuple[int, int]] = Counter()
        for states, ran in zip(self.known, times, strict=True):
            pairs.update(zip(states, ran, strict=True))
        lost = pairs[ANSWERED, 0]
        doubled = sum(count for (_, ran), count in pairs.items() if ran > 1)
        stray = sum(count for (state, ran), count in pairs.items() if ran and state in (UNKNOWN, NEVER))
        fine = not (lost or doubled or stray or hung or self.done["generations wrong"])
        return {
            "verdict": "nothing lost, nothing doubled, no hang" if fine else "WRONG",
            "calls": self.made,
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


async def chaos(asked: argparse.Namespace) -> dict[str, Any]:
    """Start a node, or join the one of the first host, open two devices, and run for so long."""
    import ray

    if asked.inside:
        ray.init(asked.inside, log_to_driver=False, configure_logging=False)
    else:
        started = {"num_cpus": 2, "num_gpus": 2, "include_dashboard": False}
        ray.init("local", **started, log_to_driver=False, configure_logging=False)
    given: dict[str, Any] = {"hang_s": HANG_S, "cluster_devices": 2} if asked.cable else {}
    try:
        settings = lz.Settings(cluster="auto", device="cpu", max_restarts=10_000, **given)
        async with lz.start(settings) as runtime:
            with tempfile.TemporaryDirectory() as folder:
                run = Run(runtime.device_pool, asked, f"{folder}/executed")
                hung = await run.go()
                result = run.verdict(hung)
            health = await runtime.device_pool.health()
            return {
                **result,
                "restarts": [each.restarts for each in health],
                "states": [each.state.value for each in health],
            }
    finally:
        ray.shutdown()


def between_hosts(asked: argparse.Namespace) -> int:
    """The same on two hosts of this machine: this program again, on the first of them."""
    if why := why_not():
        print(why, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts end with this process
    with Hosts({}, first_gpus=1) as hosts:
        again = [sys.executable, *sys.argv, "--inside", hosts.address, "--cable", hosts.cable]
        return subprocess.run(hosts.command(hosts.first, again), check=False).returncode


def main() -> int:
    """Run, print and write; exit status 1 where anything was lost, doubled or stuck."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--calls", type=float, default=math.inf, help="end after so many, if that is sooner")
    parser.add_argument("--callers", type=int, default=8, help=f"at most {STRIDE}")
    parser.add_argument("--generators", type=int, default=16)
    parser.add_argument("--cuts", action="store_true", help="two hosts, and cuts between them")
    parser.add_argument("--json", type=Path, default=RESULTS / "cluster_chaos.json")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)  # Ray on the first host
    parser.add_argument("--cable", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cuts and not asked.inside:
        return between_hosts(asked)
    result = asyncio.run(chaos(asked))
    record = {
        "environment": environment(("ray", "msgspec", "layerzero-runtime")),
        "command": " ".join(sys.argv[1:]),
        "minutes": asked.minutes,
        "hosts": 2 if asked.cable else 1,
        "messages of Ray lost, percent of requests and of answers": LOST_PERCENT,
        **result,
    }
    write(asked.json, record)
    print(json.dumps(result, indent=1))
    return 0 if result["verdict"].startswith("nothing") else 1


if __name__ == "__main__":
    sys.exit(main())

"""Two hosts and the network between them: calls by link, what a cut costs, and whether any ran twice.

    python benchmarks/hosts.py                   every part, about three minutes; needs root
    python benchmarks/hosts.py --seconds 1 --links 2

Two network namespaces of this machine stand for two hosts; a device is on each, and everything is asked from
the first. The second one booted a day before, and its time of day is an hour ahead. A call writes its number
into a file where it runs: one that was answered must have run once, one that was lost at most once, or not at
all where its caller is told that it may be repeated. Streams that may resume must give what they give here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "token")  # before ray is imported
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_worker_niceness", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import layerzero as lz
from benchmarks.cluster import RESULTS, mark, tokens
from benchmarks.harness import environment, percentile, write
from benchmarks.hosting.namespaces import ADDRESSES, Clocks, Hosts, cut, mend, shape, why_not
from layerzero.actors.group.cluster import RemoteRankGroup
from layerzero.actors.group.join import RankHandle
from layerzero.actors.remote.pool import DevicePool
from layerzero.actors.remote.ray_device import RayDevice
from layerzero.actors.rpc.client import DeviceState

HOUR_S, DAY_S = 3600.0, 86_400
HANG_S, SHORT_S = 3.0, 1.0
CALLERS, STREAMS, LENGTH = 16, 4, 20
EVERY_S = 0.005
LIMIT_S = 240.0
ROWS, WIDE = 4, 64
# Seconds towards the first host and towards the second, and the share of packets that is lost either way.
LINKS = {
    "a direct cable": (0.0, 0.0, 0.0),
    "1 ms there and back": (0.0005, 0.0005, 0.0),
    "20 ms there and back": (0.01, 0.01, 0.0),
    "2 ms there, 40 ms back": (0.04, 0.002, 0.0),
    "1 ms, 1 % lost": (0.0005, 0.0005, 0.01),
    "1 ms, 5 % lost": (0.0005, 0.0005, 0.05),
}
DIRECTIONS = {"both ways": None, "towards the driver": 1, "towards the device": 2}


class Shard:
    """One of two ranks' columns of a product."""

    def __init__(self, member: RankHandle) -> None:
        self.rank = member.rank
        whole = torch.ones(WIDE, WIDE)
        self.own = whole.chunk(2, dim=1)[member.rank].contiguous()
        self.step = member.batched(self._sum, name="sum")
        self.number = 0

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = lz.sync.linear(x.chunk(2, dim=1)[self.rank].contiguous(), self.own)
        dist.all_reduce(out)
        return out


async def one_step(model: Shard) -> bool:
    """A step of both ranks; whether its sums are right."""
    model.number += 1
    out = await model.step(model.number, torch.ones(ROWS, WIDE))
    return bool((out == WIDE).all())


class Calls:
    """Calls to one device, counted where they are made; what they wrote counts where they ran."""

    def __init__(self, device: RayDevice, path: str) -> None:
        self.device, self.path = device, path
        self.words: list[str] = []  # of each call, by its number
        self.latencies: list[float] = []
        self.streams = Counter({"right": 0, "wrong": 0})
        self._answered = asyncio.Event()

    async def one(self) -> None:
        """One call."""
        number, began = len(self.words), time.perf_counter()
        self.words.append("unknown")
        try:
            assert await self.device.run(mark, self.path, number) == number
        except lz.DeviceLostError as error:
            self.words[number] = "never" if error.retryable else "unsure"
            await asyncio.sleep(EVERY_S)
        else:
            self.words[number] = "answered"
            self.latencies.append(time.perf_counter() - began)
            self._answered.set()

    async def answered(self) -> None:
        """Wait until the next answer."""
        self._answered.clear()
        await asyncio.wait_for(self._answered.wait(), LIMIT_S)

    async def many(self, until: asyncio.Event, streams: int = 0) -> None:
        """Calls of many callers, and streams, until the event is set, and their ends."""

        async def caller() -> None:
            while not until.is_set():
                await self.one()

        async def reader(seed: int) -> None:
            while not until.is_set():
                await self.stream(seed)

        callers, readers = (caller() for _ in range(CALLERS)), map(reader, range(streams))
        await asyncio.gather(*callers, *readers)

    async def stream(self, seed: int) -> None:
        """A stream that may resume, compared with what it gives here."""
        stream = self.device.stream(tokens, seed, LENGTH, 2 * EVERY_S, resume=True)
        got = [token async for token in stream]
        right = got == [token async for token in tokens(seed, LENGTH, 0.0)]
        self.streams["right" if right else "wrong"] += 1

    def verdict(self) -> dict[str, int]:
        """What the file says about the answers."""
        ran = Counter(map(int, Path(self.path).read_text().split()))
        words = Counter(self.words)
        return {
            "calls": len(self.words),
            "answered": words["answered"],
            "lost after they may have begun": words["unsure"],
            "lost before": words["never"],
            "without an end": words["unknown"],
            "streams right": self.streams["right"],
            "streams wrong": self.streams["wrong"],
            "ran twice": sum(times > 1 for times in ran.values()),
            "answered and never ran": sum(w == "answered" and not ran[n] for n, w in enumerate(self.words)),
            "said not to have run and ran": sum(
                w == "never" and ran[n] > 0 for n, w in enumerate(self.words)
            ),
        }


async def by_link(device: RayDevice, asked: argparse.Namespace) -> dict[str, Any]:
    """Calls a second, their latency and that of a control message, over each kind of link."""
    found = {}
    for name, (first_s, second_s, loss) in list(LINKS.items())[: asked.links]:
        shape(asked.cable, delay_s=first_s, loss=loss, towards=1)
        before = shape(asked.cable, delay_s=second_s, loss=loss, towards=2)
        calls = Calls(device, f"{asked.folder}/link-{len(found)}")
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(asked.seconds, over.set)
        began = time.perf_counter()
        await calls.many(over)
        seconds = time.perf_counter() - began
        pings = []
        for number in range(50):
            begin = time.perf_counter()
            assert await device.control("ping", number, timeout_s=LIMIT_S) == number
            pings.append(time.perf_counter() - begin)
        after = shape(asked.cable)
        found[name] = {
            "calls a second": round(len(calls.latencies) / seconds, 1),
            "call ms, p50 and p99": [
                round(percentile(sorted(calls.latencies), p) * 1e3, 2) for p in (50, 99)
            ],
            "control message ms, p50 and p99": [
                round(percentile(sorted(pings), p) * 1e3, 2) for p in (50, 99)
            ],
            "packets lost": sum(after[end][1] - before[end][1] for end in (1, 2)),
            **calls.verdict(),
        }
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    shape(asked.cable, delay_s=0.0005, loss=0.0)
    return found


async def by_cut(device: RayDevice, asked: argparse.Namespace) -> dict[str, Any]:
    """A cut that is shorter than a device may say nothing, and one that is longer, of each direction."""
    found = {}
    parts = [(*direction, long) for direction in DIRECTIONS.items() for long in (False, True)]
    for name, towards, long in parts:
        calls = Calls(device, f"{asked.folder}/cut-{len(found)}")
        over = asyncio.Event()
        running = asyncio.ensure_future(calls.many(over, STREAMS))
        await calls.answered()
        await asyncio.sleep(SHORT_S)
        began = time.monotonic()
        cut(asked.cable, towards)
        noticed = await _noticed(device, began, LIMIT_S if long else SHORT_S)
        mended = time.monotonic()
        mend(asked.cable)
        await calls.answered()
        recovered = time.monotonic() - mended
        over.set()
        await asyncio.wait_for(running, LIMIT_S)
        found[f"{name}, {'until noticed' if long else f'{SHORT_S:g} s'}"] = {
            "noticed after s": None if noticed is None else round(noticed, 2),
            "first answer after it was mended s": round(recovered, 2),
            **calls.verdict(),
        }
        print(f"{name}: {list(found.values())[-1]}", file=sys.stderr, flush=True)
    return found


async def _noticed(device: RayDevice, began: float, limit_s: float) -> float | None:
    """Seconds until the driver takes the device for lost; None where it does not within the limit."""
    while time.monotonic() - began < limit_s:
        if device.state is not DeviceState.RUNNING:
            return time.monotonic() - began
        await asyncio.sleep(EVERY_S)
    return None


async def by_group(asked: argparse.Namespace) -> dict[str, Any]:
    """Steps of two ranks, one on each host: over the link, and through a cut that ends an epoch."""
    async with lz.remote_rank_group(Shard, 2, timeout_s=HANG_S) as group:
        right, began = 0, time.monotonic()
        while time.monotonic() - began < asked.seconds:
            right += await group.run(one_step)
        steps_per_s = right / (time.monotonic() - began)
        began = time.monotonic()
        cut(asked.cable)
        # A step that had begun fails its caller; one that had not waits for the next epoch.
        after = asyncio.ensure_future(_right_step(group))
        while not group.why and time.monotonic() - began < LIMIT_S:  # noqa: ASYNC110  it shows by its words
            await asyncio.sleep(EVERY_S)
        noticed = time.monotonic() - began
        mended = time.monotonic()
        mend(asked.cable)
        again = await asyncio.wait_for(after, LIMIT_S)
        return {
            "steps a second": round(steps_per_s, 1),
            "noticed after s": round(noticed, 2),
            "as": group.why[:200],
            "first step after it was mended s": round(time.monotonic() - mended, 2),
            "epoch": group.epoch,
            "right after it": again,
        }


async def _right_step(group: RemoteRankGroup) -> bool:
    """The next step that has an answer."""
    while True:
        try:
            return bool(await group.run(one_step))
        except lz.DeviceLostError:
            await asyncio.sleep(EVERY_S)


async def inside(asked: argparse.Namespace) -> dict[str, Any]:
    """Every part, from the first host."""
    settings = lz.Settings(
        cluster=asked.inside, device="cpu", cluster_devices=2, perfdb=None, shipped_tables=False,
        hang_s=HANG_S, placement_timeout_s=LIMIT_S, max_restarts=100, state_dir=None,
    )  # fmt: skip
    async with lz.start(settings) as runtime:
        device = _of_second(runtime.device_pool)
        clock_s = await device.run(_wall) - time.time()
        return {
            "clock of the second host ahead by s": round(clock_s),
            "links": await by_link(device, asked),
            "cuts": await by_cut(device, asked),
            "rank group over both hosts, 1 ms": await by_group(asked),
        }


async def _wall() -> float:
    return time.time()


def _of_second(pool: DevicePool) -> RayDevice:
    (device,) = (
        each for each in pool.devices.values()
        if isinstance(each, RayDevice) and each.address.host == ADDRESSES[2]
    )  # fmt: skip
    return device


def wrongs(result: dict[str, Any]) -> int:
    """Calls that ran twice, ran unsaid, were answered and never ran, or have no end; wrong streams."""
    wrong = ("ran twice", "answered and never ran", "said not to have run and ran", "without an end")
    wrong += ("streams wrong",)
    parts = [*result["links"].values(), *result["cuts"].values()]
    return sum(part[name] for part in parts for name in wrong)


def tables(result: dict[str, Any]) -> dict[str, Any]:
    """What the documents show."""
    kinds = ("call ms, p50 and p99", "control message ms, p50 and p99")
    links = [
        [name, part["calls a second"], *(ms for kind in kinds for ms in part[kind])]
        for name, part in result["links"].items()
    ]
    lost = "lost after they may have begun"
    times = ("noticed after s", "first answer after it was mended s")
    cuts = [
        [name, *(part[each] for each in times), part["answered"], part[lost], part["ran twice"]]
        for name, part in result["cuts"].items()
    ]
    ms = ("call p50 ms", "call p99 ms", "message p50 ms", "message p99 ms")
    return {
        "links": {"columns": ["link", "calls/s", *ms], "rows": links},
        "cuts": {
            "columns": ["cut", "noticed s", "first answer s", "answered", "may have begun", "ran twice"],
            "rows": cuts,
        },
    }


def main() -> int:
    """Run, print and write; exit status 1 where a call ran twice or was lost without a word."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each link")
    parser.add_argument("--links", type=int, default=len(LINKS), help="only so many kinds of link")
    parser.add_argument("--json", type=Path, default=RESULTS / "hosts_cpu.json")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)  # Ray on the first host
    parser.add_argument("--cable", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        result = asyncio.run(inside(asked))
        (Path(asked.folder) / "result.json").write_text(json.dumps(result))
        return 0
    if why := why_not():
        print(why, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts end with this process
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    variables |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    clocks = Clocks(HOUR_S, DAY_S)
    with tempfile.TemporaryDirectory() as folder, Hosts(variables, 1, 1, clocks) as hosts:
        again = [sys.executable, *sys.argv, "--inside", hosts.address, "--cable", hosts.cable]
        full = hosts.command(hosts.first, [*again, "--folder", folder])
        done = subprocess.run(full, env={**os.environ, **variables}, check=False)
        if done.returncode:
            return done.returncode
        result = json.loads((Path(folder) / "result.json").read_text())
    record = {
        "environment": environment(("ray", "layerzero-runtime")),
        "command": " ".join(sys.argv[1:]),
        "callers": CALLERS,
        "a device may say nothing for s": HANG_S,
        "calls and streams that went wrong": wrongs(result),
        **result,
        "tables": tables(result),
    }
    write(asked.json, record)
    print(json.dumps(result, indent=1))
    return 1 if wrongs(result) else 0


if __name__ == "__main__":
    sys.exit(main())

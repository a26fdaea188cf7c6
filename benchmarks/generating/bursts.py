"""What queues in front of the batcher: a burst, an open load near saturation, and queues of several depths.

Requests are small: a norm and a linear layer of one row, a few times over, each op awaited by itself.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import torch
from harness import percentile
from torch import Tensor
from torch.nn.functional import linear, rms_norm

import layerzero as lz
from generating.where import Where

WIDTH, STEPS = 256, 4
DEPTHS = (10, 100, 1000)
CROWDS = (8, 16, 32, 64, 128)


class Requests(Protocol):
    """Who answers requests."""

    def request(self) -> Awaitable[Tensor]: ...


class Weights:
    """What every request's ops work with."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.norm = torch.ones(WIDTH)
        self.weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5


class Small(Weights):
    """A request of a few small ops."""

    async def request(self) -> Tensor:
        """Written for one caller."""
        x = torch.ones(1, WIDTH)
        for _ in range(STEPS):
            x = await lz.linear(await lz.rms_norm(x, self.norm), self.weight)
        return x


class Line:
    """The least that batches one op by hand: futures in a list, run together at the end of a loop turn."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.fn = fn
        self.waiting: list[tuple[Tensor, asyncio.Future[Tensor]]] = []

    def __call__(self, row: Tensor) -> asyncio.Future[Tensor]:
        loop = asyncio.get_running_loop()
        if not self.waiting:
            loop.call_soon(self._run)
        future: asyncio.Future[Tensor] = loop.create_future()
        self.waiting.append((row, future))
        return future

    def _run(self) -> None:
        waiting, self.waiting = self.waiting, []
        with torch.inference_mode():
            rows = self.fn(torch.cat([row for row, _ in waiting]))
            for (_, future), row in zip(waiting, rows.split(1), strict=True):
                future.set_result(row)


class ByHand(Weights):
    """The same request over two such lines, on the loop's thread: no checks, no limits, nothing to cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = Line(lambda rows: rms_norm(rows, (WIDTH,), self.norm))
        self.mixed = Line(lambda rows: linear(rows, self.weight))

    async def request(self) -> Tensor:
        """Written for one caller."""
        x = torch.ones(1, WIDTH)
        for _ in range(STEPS):
            x = await self.mixed(await self.normed(x))
        return x


def measure(seconds: float, rounds: int) -> dict[str, Any]:
    """PS-031, PS-025 and PS-032."""
    settings = lz.Settings(device="cpu", inference=True, warm="eager", freeze_gc=True)
    with lz.start(settings) as runtime:
        small = Small()
        bursts = [asyncio.run(_burst(runtime, small, seed)) for seed in range(rounds + 1)][1:]
        load = asyncio.run(_load(runtime, small, seconds))
        load["by_hand"] = asyncio.run(_load(runtime, ByHand(), seconds))
    with lz.start(settings.replace(max_batch_size=64)) as runtime:
        depths = asyncio.run(_depths(runtime, small, rounds))
    drained = statistics.median([burst["drained_s"] for burst in bursts])
    return {
        "burst": {"rounds": bursts, "drained_s": drained, "met": drained < 1.0},
        "load": load,
        "depths": depths,
    }


def _batches(runtime: lz.Runtime) -> tuple[int, int]:
    sizes = runtime.device("cpu").loop_drivers.stats().sizes
    return sum(sizes.values()), sum(size * count for size, count in sizes.items())


async def _arriving(runtime: lz.Runtime, small: Requests, gaps: list[float]) -> dict[str, Any]:
    """Requests that are due after these gaps; latencies count from when each was due."""
    late: list[float] = []
    most = 0

    async def one(due: float) -> None:
        await small.request()
        late.append(time.perf_counter() - due)

    batches, calls = _batches(runtime)
    lane = runtime.device("cpu").loop_drivers.current().batcher
    begin = due = time.perf_counter()
    tasks = []
    for gap in gaps:
        due += gap
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        most = max(most, lane.queued)
        tasks.append(asyncio.ensure_future(one(due)))
    while not all(task.done() for task in tasks):
        most = max(most, lane.queued)
        await asyncio.sleep(0.001)
    seconds = time.perf_counter() - begin
    after = _batches(runtime)
    late.sort()
    return {
        "requests": len(gaps), "drained_s": round(seconds, 4), "most_queued": most,
        "p50_ms": round(percentile(late, 50) * 1e3, 3), "p99_ms": round(percentile(late, 99) * 1e3, 3),
        "mean_batch": round((after[1] - calls) / max(1, after[0] - batches), 2),
    }  # fmt: skip


async def _burst(runtime: lz.Runtime, small: Small, seed: int) -> dict[str, Any]:
    """A thousand Poisson arrivals in about 100 ms."""
    draw = random.Random(seed)
    return await _arriving(runtime, small, [draw.expovariate(1e4) for _ in range(1000)])


async def _load(runtime: lz.Runtime, small: Requests, seconds: float) -> dict[str, Any]:
    """Poisson loads of 10, 50 and 90 % of what 64 callers reach who ask again at once, and where their time
    goes."""
    saturation = await _closed(small, 64, seconds)
    took_us = {callers: callers / await _closed(small, callers, seconds / 4) * 1e6 for callers in CROWDS}
    found: dict[str, Any] = {
        "saturation_per_s": round(saturation, 1),
        "us_a_request_by_callers": {str(callers): round(us, 1) for callers, us in took_us.items()},
        **_floor(took_us, 0.9 * saturation),
    }
    for share in (0.1, 0.5, 0.9):
        draw, rate = random.Random(1), share * saturation
        gaps = [draw.expovariate(rate) for _ in range(int(rate * seconds))]
        found[f"{share:.0%}"] = await _arriving(runtime, small, gaps)
    with Where() as where:
        await _closed(small, 64, seconds)
    found["where"] = where.shares()
    found["p50_of_90_over_10"] = round(found["90%"]["p50_ms"] / found["10%"]["p50_ms"], 2)
    found["met"] = found["p50_of_90_over_10"] < 2
    return found


async def _closed(small: Requests, callers: int, seconds: float) -> float:
    """Requests a second of so many callers who ask again at once, a task each as under the open load."""
    done, begin = 0, time.perf_counter()

    async def one() -> None:
        await small.request()

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < begin + seconds:
            await asyncio.ensure_future(one())
            done += 1

    await asyncio.gather(*(client() for _ in range(callers)))
    return done / (time.perf_counter() - begin)


def _floor(took_us: dict[int, float], rate: float) -> dict[str, float | None]:
    """What a load of `rate` a second must come to, by what one more caller adds to a request's time.

    With `fixed + n * each` for a request among n, and `n = rate * time` of Little's law, the time is
    `fixed / (1 - rate * each)`. Below twice the fixed time needs `rate * each` below a half.
    """
    line = statistics.linear_regression(list(took_us), list(took_us.values()))
    busy = rate * line.slope / 1e6
    return {
        "us_fixed": round(line.intercept, 1),
        "us_each_caller_adds": round(line.slope, 2),
        "share_of_time_that_calls_add": round(busy, 3),
        "least_over_fixed": round(1 / (1 - busy), 2) if busy < 1 else None,  # it could never keep up
    }


async def _depths(runtime: lz.Runtime, small: Small, rounds: int) -> dict[str, Any]:
    """Queues of 10, 100 and 1,000 calls of one op; at the deepest one call of another op comes last."""
    rows = torch.ones(1, WIDTH)
    other = torch.ones(WIDTH)
    took: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    waits, drains = [], []

    async def timed(call: Any) -> float:
        begin = time.perf_counter()
        await call
        return time.perf_counter() - begin

    for _ in range(rounds + 1):
        for depth in DEPTHS:
            calls = [timed(lz.linear(rows, small.weight)) for _ in range(depth)]
            stranger = [timed(lz.rms_norm(rows, other))] if depth == DEPTHS[-1] else []
            begin = time.perf_counter()
            each = await asyncio.gather(*calls, *stranger)
            took[depth].append(time.perf_counter() - begin)
            if stranger:
                waits.append(each[-1])
                drains.append(max(each[:-1]))
    per_call = {str(depth): statistics.median(own[1:]) / depth * 1e6 for depth, own in took.items()}
    waited, drained = statistics.median(waits[1:]), statistics.median(drains[1:])
    return {
        "us_a_call": {depth: round(us, 2) for depth, us in per_call.items()},
        "stranger_waits_ms": round(waited * 1e3, 3),
        "queue_drains_ms": round(drained * 1e3, 3),
        "met": per_call["1000"] <= 1.5 * per_call["100"] and waited < drained,
    }

"""A soak of the batcher: callers that cancel, hurry, give way and meet a failing kernel, as long as is asked.

    python benchmarks/soak.py [--seconds 600] [--callers 64] [--out FILE]

It ends with three verdicts: memory at the end of the second half beyond its beginning, the counts of calls
that went in and came out, and how late the event loop was. The exit status says whether all three hold.

Plans and the allocator's arenas fill in the first minute or two; a soak shorter than five minutes has part of
that in its second half. The blocks that Python holds stand beside the memory: they tell a leak from an arena.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import environment, write
from torch import Tensor

import layerzero as lz
from layerzero.ops import table as ops_table

RESULTS = Path(__file__).resolve().parent / "results" / "soak.json"
WIDTH = 128
GROWTH_MIB, LAG_MS = 1.0, 10.0
PERIOD_S = 0.002  # between two looks at how late the loop is
STOPPED_S = 1.0  # a gap of that length in which the process got no CPU time is told apart
BIN_MS, BINS = 0.1, 5000
FLAKY = "soak.rms_norm.flaky"
FAILS = 0.002  # of the flaky kernel's launches
POISON = 0.001  # of the batched calls
Call = Callable[..., Awaitable[Any]]


class Poisoned(Exception):
    """What the batched function raises for a caller that asks for it."""


def scaled(rows: Tensor, bad: list[bool]) -> Tensor:
    """A function over rows that one caller can spoil for all: the batcher finds out whose it is."""
    if any(bad):
        raise Poisoned("one caller asked for this")
    return rows * 0.5


class Flaky:
    """A kernel that is always the cheapest and fails now and then."""

    def __init__(self, seed: int) -> None:
        self.failed = self.launched = 0
        self._draw = random.Random(seed)
        self._reference = ops_table.get("rms_norm").reference

    def __call__(self, *args: Any) -> Any:
        self.launched += 1
        if self._draw.random() < FAILS:
            self.failed += 1
            raise RuntimeError("injected: this launch was to fail")
        return self._reference(*args)

    def kernel(self) -> lz.Kernel:
        """Its descriptor."""
        return lz.Kernel(
            id=FLAKY,
            op="rms_norm",
            backend="soak",
            capability=lz.Capability(source="any float32 rows on the CPU", platforms=frozenset({"cpu"})),
            load=lambda: self,
            efficiency=lz.Efficiency(1.0, 1.0, 0.001, "said to be free, so that it is taken"),
        )


class Lag:
    """How late the loop runs what is due, in bins: any number of looks takes the same memory."""

    def __init__(self) -> None:
        self.bins = array("Q", [0] * BINS)
        self.running = array("Q", [0] * BINS)
        self.worst_ms = self.stopped_s = 0.0

    async def watch(self, until: float) -> None:
        """Look every `PERIOD_S`; a blocked loop is late for every look that it missed."""
        loop = asyncio.get_running_loop()
        due = loop.time() + PERIOD_S
        worked = time.process_time()
        while (now := loop.time()) < until:
            if now < due:
                await asyncio.sleep(due - now)
                now = loop.time()
            late_s, begun, worked = now - due, worked, time.process_time()
            # Nothing of this process ran, on no thread: it was stopped from outside, or the machine was.
            stopped = late_s > STOPPED_S and worked - begun < 0.02 * late_s
            self.stopped_s += late_s if stopped else 0.0
            while due <= now:
                late_ms = (now - due) * 1e3
                place = min(BINS - 1, int(late_ms / BIN_MS))
                self.bins[place] += 1
                self.running[place] += not stopped
                self.worst_ms = max(self.worst_ms, late_ms)
                due += PERIOD_S

    def percentile(self, percent: float, *, running: bool = False) -> float:
        """The lateness in milliseconds that so many percent of the looks (while running) do not exceed."""
        bins = self.running if running else self.bins
        wanted, seen = sum(bins) * percent / 100, 0
        for index, count in enumerate(bins):
            seen += count
            if seen >= wanted:
                return (index + 1) * BIN_MS
        return BINS * BIN_MS


class Soak:
    """The callers and what became of each of their calls."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.ended: Counter[str] = Counter()
        self.asked = 0
        self.cancels = 0
        self.norm = torch.ones(WIDTH)
        self.weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        self.up = torch.randn(8 * WIDTH, WIDTH) / WIDTH**0.5
        self.down = torch.randn(WIDTH, 4 * WIDTH) / (4 * WIDTH) ** 0.5
        self.scaled = lz.batched(scaled, pure=True)

    async def caller(self, seed: int, until: float) -> None:
        """One caller: requests of a few calls, some of them given up half way."""
        draw = random.Random(seed)
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            request = asyncio.ensure_future(self._request(draw))
            if draw.random() < 0.1:
                await asyncio.sleep(draw.random() * 0.01)
                self.cancels += request.cancel()
            await asyncio.wait({request})
            if not request.cancelled():
                request.result()
            await asyncio.sleep(draw.random() * 0.01)

    async def _request(self, draw: random.Random) -> None:
        x = torch.randn(draw.choice((1, 1, 1, 4, 16)), WIDTH)
        for _ in range(draw.randint(1, 6)):
            how: dict[str, Any] = {"priority": draw.choice((0, 1, 1, 1, 2))}
            if draw.random() < 0.2:
                how["timeout"] = draw.choice((0.0, 0.0005, 0.005, 1.0))
            call, args = self._drawn(draw, x)
            self.asked += 1
            try:
                await call(*args, **how)
            except asyncio.CancelledError:
                self.ended["cancelled"] += 1
                raise
            except lz.DeadlineExceededError:
                self.ended["expired"] += 1
            except lz.OverloadedError:
                self.ended["rejected"] += 1
            except Poisoned:
                self.ended["failed"] += 1
            else:
                self.ended["done"] += 1

    def _drawn(self, draw: random.Random, x: Tensor) -> tuple[Call, tuple[Any, ...]]:
        kind = draw.randrange(5)
        if kind == 0:
            return lz.rms_norm, (x, self.norm)
        if kind == 1:
            return lz.linear, (x, self.weight)
        if kind == 2:
            return _swiglu, (x, self.up, self.down)
        if kind == 3:
            return lz.sample, (x,)
        return self.scaled, (x, draw.random() < POISON)


async def _swiglu(x: Tensor, up: Tensor, down: Tensor, **how: Any) -> Any:
    return await lz.mlp(x, up, down, activation="swiglu", **how)


def resident_mib() -> float:
    """The process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def soaked(runtime: lz.Runtime, seconds: float, callers: int, seed: int) -> dict[str, Any]:
    """Run the callers for `seconds`, then count."""
    soak, lag = Soak(seed), Lag()
    memory, blocks = array("d"), array("q")
    loop = asyncio.get_running_loop()
    begin = loop.time()
    until = begin + seconds

    async def weigh() -> None:
        while loop.time() < until:
            memory.append(resident_mib())
            blocks.append(sys.getallocatedblocks())
            await asyncio.sleep(max(0.2, seconds / 600))

    tasks = [soak.caller(seed + index, until) for index in range(callers)]
    await asyncio.gather(lag.watch(until), weigh(), *tasks)
    await asyncio.sleep(0.2)  # batches whose callers have gone
    counted = _counted(runtime, soak, lag)
    return {"seconds": seconds, "callers": callers} | counted | _grown(memory, blocks)


def _grown(memory: array[float], blocks: array[int]) -> dict[str, Any]:
    """What the first and the last tenth of the second half held, and the difference."""
    half = len(memory) // 2
    tenth = max(1, (len(memory) - half) // 10)
    begin, end = slice(half, half + tenth), slice(-tenth, None)
    return {
        "memory_mib": {
            "first": round(memory[0], 2),
            "half": round(median(memory[begin]), 2),
            "last": round(median(memory[end]), 2),
            "growth": round(median(memory[end]) - median(memory[begin]), 3),
        },
        "python_blocks": {
            "half": int(median(blocks[begin])),
            "last": int(median(blocks[end])),
            "growth": int(median(blocks[end]) - median(blocks[begin])),
        },
    }


def _counted(runtime: lz.Runtime, soak: Soak, lag: Lag) -> dict[str, Any]:
    stats = runtime.device("cpu").loop_drivers.stats()
    lane = {
        name: getattr(stats, name)
        for name in ("submitted", "done", "failed", "cancelled", "expired", "rejected", "detached", "batches")
    }
    return {
        "asked": soak.asked,
        "ended": dict(soak.ended),
        "cancels": soak.cancels,
        "lane": lane,
        "mean_batch": round(stats.mean_batch, 2),
        "lag_ms": {
            "p50": round(lag.percentile(50), 1), "p99": round(lag.percentile(99), 1),
            "p999": round(lag.percentile(99.9), 1), "worst": round(lag.worst_ms, 1), "looks": sum(lag.bins),
            "p99_while_running": round(lag.percentile(99, running=True), 1),
            "stopped_s": round(lag.stopped_s, 1),
        },
    }  # fmt: skip


def verdicts(found: dict[str, Any]) -> dict[str, bool]:
    """Whether what was promised holds."""
    lane = found["lane"]
    ended = sum(lane[name] for name in ("done", "failed", "cancelled", "expired", "rejected"))
    return {
        "every call that the lane took has ended": lane["submitted"] == ended,
        "every call that was made has one outcome": found["asked"] == sum(found["ended"].values()),
        f"memory of the second half grows by at most {GROWTH_MIB} MiB": (
            found["memory_mib"]["growth"] <= GROWTH_MIB
        ),
        f"the loop's lag has a p99 below {LAG_MS} ms": found["lag_ms"]["p99"] < LAG_MS,
    }


def main() -> int:
    """Soak, print, write; 0 where everything held."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    options = parser.parse_args()
    settings = lz.Settings(
        device="cpu",
        inference=True,
        warm="eager",
        freeze_gc=True,
        max_queue_size=48,
        queue_full_policy="reject",
        window_s=2.0,
        cooldown_s=0.2,
        cooldown_max_s=1.0,
        shipped_tables=False,
        perfdb=None,  # no measurement goes before the flaky kernel's word
    )
    flaky = Flaky(options.seed)
    with lz.start(settings) as runtime:
        runtime.device("cpu")  # kernels are imported when a device opens: not on the loop
        runtime.add_kernel(flaky.kernel())
        begin = time.perf_counter()
        found = asyncio.run(soaked(runtime, options.seconds, options.callers, options.seed))
        found["took_s"] = round(time.perf_counter() - begin, 1)
    found["injected"] = {"launches": flaky.launched, "failures": flaky.failed}
    found["verdicts"] = verdicts(found)
    for name, value in found.items():
        print(f"{name}: {value}")
    record = {"environment": environment(("layerzero-runtime", "torch", "zentorch")), "soak": found}
    if options.out is not None or options.seconds >= 600:
        write(options.out or RESULTS, record)
    return 0 if all(found["verdicts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())

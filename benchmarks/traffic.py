"""Traffic that is not one straight line: awaited, one call after another, and batched by hand, on the CPU.

    python benchmarks/traffic.py [--loads NAMES] [--widths N,N] [--callers N] [--quick] [--out FILE]

Without arguments it writes `benchmarks/results/traffic.json`. The four sides run the same coroutines in one
event loop and take turns within each round:

- `awaited`: `await lz.linear(...)`, every caller a task;
- `one by one`: `lz.sync`, one request after another, a coroutine around each call;
- `in turns`: `lz.sync`, of all requests one call each in turns: in the order of the awaited load, so that
  what is left of the difference does not come from the order;
- `by hand`: futures in a list for each weight, run together at the end of a turn of the loop, with torch's
  own kernels and nothing else: no checks, limits, modes, cancelling or errors.

`of_one_by_one`, `of_in_turns` and `of_by_hand` are how many times less an awaited load takes than on the
other side, taken round by round: wall time; for the Poisson load the mean time from when a request is due to
its end. `cpu` has the same of the CPU time, which neighbours disturb less; a Poisson load's is no time of a
request.
`at_once` is the share of awaited calls that ran in their callers' own steps, `mean_batch` how many of the
others met.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import environment, show, write
from torch import Tensor
from traffic_loads import LOADS, Awaited, ByHand, InTurns, Load, OneByOne, Ops, World, tokens

import layerzero as lz
from layerzero.native import FAST_PATH

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "traffic.json"
AWAITED, ONE_BY_ONE, IN_TURNS, BY_HAND = "awaited", "one by one", "in turns", "by hand"
OVERS = {"of_one_by_one": ONE_BY_ONE, "of_in_turns": IN_TURNS, "of_by_hand": BY_HAND}
RATE, SERVICE_S = 200.0, 0.0025  # Poisson: requests a second, and what one takes by itself
POISSON = "poisson"
SETTLE_S, _POLL_S = 300.0, 0.1


async def closed(ops: Ops, load: Load, world: World, steps: int) -> float:
    """Seconds that a load takes from its first call to its last."""
    programs = load(ops, world, steps)
    begin = time.perf_counter()
    await ops.together(*programs)
    return time.perf_counter() - begin


async def _seconds_of(program: Awaitable[Any]) -> float:
    begin = time.perf_counter()
    await program
    return time.perf_counter() - begin


async def poisson(ops: Ops, world: World, steps: int, seconds: float, seed: int) -> float:
    """Mean seconds of a request from when it is due, each of 0.5 to 1.5 times `steps`."""
    rng = random.Random(seed)
    due, late = 0.0, list[float]()
    plan = []
    while due < seconds:
        due += rng.expovariate(RATE)
        plan.append((due, rng.randint(max(1, steps // 2), steps * 3 // 2)))
    begin = time.perf_counter()

    async def request(row: Tensor, at: float, count: int) -> None:
        await tokens(ops, world.model, row, count)
        late.append(time.perf_counter() - begin - at)

    running = []
    for number, (at, count) in enumerate(plan):
        wait = at - (time.perf_counter() - begin)
        if wait > 0:
            await asyncio.sleep(wait)
        running.append(asyncio.ensure_future(request(world.rows[number % world.callers], at, count)))
    await asyncio.gather(*running)
    return statistics.fmean(late)


@dataclass
class Row:
    """One load at one width: seconds by side and round, batches of the awaited side."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)
    batches: int = 0
    calls: int = 0
    at_once: int = 0

    def described(self) -> dict[str, Any]:
        """Medians, and ratios taken round by round."""

        def over(other: str, seconds: dict[str, list[float]]) -> float:
            pairs = zip(seconds[other], seconds[AWAITED], strict=True)
            return round(statistics.median([theirs / ours for theirs, ours in pairs]), 3)

        def ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
            return {name: over(other, seconds) for name, other in OVERS.items()}

        return {
            **ratios(self.seconds),
            "cpu": ratios(self.cpu_s),
            "mean_batch": round(self.calls / max(self.batches, 1), 2),
            "at_once": round(self.at_once / max(self.at_once + self.calls, 1), 3),
            "ms": {side: round(statistics.median(own) * 1e3, 3) for side, own in self.seconds.items()},
            "rounds_ms": {side: [round(s * 1e3, 3) for s in own] for side, own in self.seconds.items()},
        }


def settle(device: Any) -> None:
    """Wait for what loads behind the calls so far: it takes the interpreter from what is measured."""
    while not device.loader.run_later(lambda: None).wait(SETTLE_S) or device.loader.loading:
        time.sleep(_POLL_S)


async def measured(
    runtime: lz.Runtime, name: str, world: World, options: argparse.Namespace
) -> dict[str, Any]:
    """One load, the sides in turns; the first rounds, in which kernels load, do not count."""
    sides: dict[str, Ops] = {
        AWAITED: Awaited(), ONE_BY_ONE: OneByOne(), IN_TURNS: InTurns(), BY_HAND: ByHand()
    }  # fmt: skip
    steps = 1

    async def run(side: str, turn: int) -> float:
        if name == POISSON:
            return await poisson(sides[side], world, steps, options.seconds * 4, turn)
        return await closed(sides[side], LOADS[name], world, steps)

    # As many steps as one by one takes `--seconds` for; for Poisson, what one request takes `SERVICE_S` for.
    if name == POISSON:
        ops, row = sides[ONE_BY_ONE], world.rows[0]
        alone = min([await _seconds_of(tokens(ops, world.model, row, 10)) for _ in range(9)])
        steps = max(2, round(SERVICE_S / (alone / 10)))
    else:
        alone = min([await closed(sides[ONE_BY_ONE], LOADS[name], world, 1) for _ in range(9)])
        steps = max(1, round(options.seconds / alone))
    found = Row()
    for turn in range(-options.warm, options.rounds):
        if turn <= 0:
            settle(runtime.device("cpu"))
        order = list(sides)[turn % 4 :] + list(sides)[: turn % 4]
        for side in order:
            gc.collect()
            stats = runtime.device("cpu").loop_drivers.stats()
            before = stats.batches, stats.done, stats.at_once
            began_s = time.process_time()
            took = await run(side, turn)
            if turn < 0:
                continue
            found.seconds.setdefault(side, []).append(took)
            found.cpu_s.setdefault(side, []).append(time.process_time() - began_s)
            if side == AWAITED:
                stats = runtime.device("cpu").loop_drivers.stats()
                found.batches += stats.batches - before[0]
                found.calls += stats.done - before[1]
                found.at_once += stats.at_once - before[2]
    return {"steps": steps} | found.described()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    names = [*LOADS, POISSON]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--loads", type=lambda text: text.split(","), default=names)
    parser.add_argument("--widths", type=lambda text: [int(w) for w in text.split(",")], default=[256, 512])
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm", type=int, default=2, help="rounds before those that count")
    parser.add_argument("--seconds", type=float, default=0.06, help="of one by one in each round")
    parser.add_argument("--quick", action="store_true", help="shows that everything runs; writes nothing")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    given = parser.parse_args(arguments)
    for load in given.loads:
        if load not in names:
            parser.error(f"--loads needs some of {', '.join(names)}, got {load}")
    if given.quick:
        given.widths, given.callers, given.rounds, given.warm, given.seconds = [32], 8, 1, 1, 0.005
    return given


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse(arguments)
    torch.set_num_threads(1)
    FAST_PATH.try_load()  # or the first load would be Python's alone, beside a compiler
    record: dict[str, Any] = {
        "environment": environment(("layerzero-runtime", "torch")),
        "awaited_path": FAST_PATH.describe(),
        "callers": options.callers,
        "loads": {},
    }
    out = options.out or (None if options.quick else RESULTS)
    # Nothing is read from this user's measurements, nor written to them.
    settings = lz.Settings(device="cpu", inference=True, warm="eager", freeze_gc=True, perfdb=None)

    async def everything(runtime: lz.Runtime, width: int) -> None:
        world = World(width, options.callers)
        for name in options.loads:
            row = await measured(runtime, name, world, options)
            record["loads"].setdefault(name, {})[str(width)] = row
            print(f"{name}, {width}: {row}", flush=True)
            if out is not None:
                write(out, record)

    for width in options.widths:
        with lz.start(settings) as runtime, torch.no_grad():
            asyncio.run(everything(runtime, width))
    show(
        f"Awaited over the others, {options.callers} callers",
        ("load", "width", "of one by one", "of in turns", "of by hand", "of all in CPU time", "mean batch"),
        [
            (
                name, width, *(f"{r[over]:.2f}" for over in OVERS),
                ", ".join(f"{r['cpu'][over]:.2f}" for over in OVERS), f"{r['mean_batch']:.1f}",
            )
            for name, widths in record["loads"].items()
            for width, r in widths.items()
        ],
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

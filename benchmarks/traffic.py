"""Traffic that is not one straight line: awaited, one call after another, and batched by hand, on the CPU.

    python benchmarks/traffic.py [--loads NAMES] [--widths N,N] [--callers N] [--rounds N] [--quick] [--out FILE]

Without arguments it writes `benchmarks/results/traffic.json`. The three sides run the same coroutines in one
event loop and take turns within each round:

- `awaited`: `await lz.linear(...)`, every caller a task;
- `one by one`: `lz.sync`, one request after another, a coroutine around each call (0.1 microseconds);
- `by hand`: futures in a list for each weight, run together at the end of a turn of the loop, with torch's own
  kernels and nothing else: no checks, limits, modes, cancelling or errors.

`of_one_by_one` and `of_by_hand` are how many times less an awaited load takes than on the other side, taken
round by round: wall time, for the Poisson load the mean time from when a request is due to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from harness import environment, show, write
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

import layerzero as lz
from layerzero.native import FAST_PATH

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "traffic.json"
LAYERS, EXPERTS, OWN_OPS, BEAMS = 4, 8, 8, 4
AWAITED, ONE_BY_ONE, BY_HAND = "awaited", "one by one", "by hand"
RATE, SERVICE_S = 200.0, 0.0025  # Poisson: requests a second, and what one takes by itself


class Ops(Protocol):
    """One side's way to run ops and to run several coroutines."""

    def linear(self, x: Tensor, weight: Tensor) -> Awaitable[Tensor]: ...
    def rms_norm(self, x: Tensor, weight: Tensor) -> Awaitable[Tensor]: ...
    def together(self, *programs: Coroutine[Any, Any, Any]) -> Awaitable[Any]: ...


class Awaited:
    """Ours."""

    linear = staticmethod(lz.linear)
    rms_norm = staticmethod(lz.rms_norm)
    together = staticmethod(asyncio.gather)


class OneByOne:
    """Blocking calls; of several coroutines the next begins when one has ended."""

    async def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return lz.sync.linear(x, weight)

    async def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return lz.sync.rms_norm(x, weight)

    async def together(self, *programs: Coroutine[Any, Any, Any]) -> list[Any]:
        return [await program for program in programs]


class Line:
    """The calls of one op with one weight since the last turn."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        self.run = run
        self.waiting: list[tuple[Tensor, asyncio.Future[Tensor]]] = []

    def __call__(self, row: Tensor) -> asyncio.Future[Tensor]:
        loop = asyncio.get_running_loop()
        if not self.waiting:
            loop.call_soon(self.flush)
        future: asyncio.Future[Tensor] = loop.create_future()
        self.waiting.append((row, future))
        return future

    def flush(self) -> None:
        """Run what waits and answer it."""
        waiting, self.waiting = self.waiting, []
        with torch.inference_mode():
            if len(waiting) == 1:
                waiting[0][1].set_result(self.run(waiting[0][0]))
                return
            out = self.run(torch.cat([row for row, _ in waiting]))
            for (_, future), row in zip(waiting, out.split(1), strict=True):
                future.set_result(row)


class ByHand:
    """A line for each weight."""

    together = staticmethod(asyncio.gather)

    def __init__(self) -> None:
        self.lines: dict[Tensor, Line] = {}

    def linear(self, x: Tensor, weight: Tensor) -> asyncio.Future[Tensor]:
        line = self.lines.get(weight)
        if line is None:
            line = self.lines[weight] = Line(lambda rows: linear(rows, weight))
        return line(x)

    def rms_norm(self, x: Tensor, weight: Tensor) -> asyncio.Future[Tensor]:
        line = self.lines.get(weight)
        if line is None:
            line = self.lines[weight] = Line(lambda rows: rms_norm(rows, weight.shape, weight))
        return line(x)


class Block:
    """The weights of one layer: a norm, a product, and narrower ones into and out of 16 channels."""

    def __init__(self, width: int, outs: int | None = None) -> None:
        self.norm = torch.ones(width)
        self.weight = torch.randn(outs or width, width) / width**0.5


class World:
    """The weights of every load."""

    def __init__(self, width: int, callers: int) -> None:
        torch.manual_seed(0)
        self.width, self.callers = width, callers
        self.model = [(Block(width), Block(width)) for _ in range(LAYERS)]
        self.routers = [Block(width, EXPERTS) for _ in range(LAYERS)]
        self.experts = [[(Block(width), Block(width)) for _ in range(EXPERTS)] for _ in range(LAYERS)]
        self.adapters = [
            [(Block(width, 16).weight, Block(16, width).weight) for _ in range(callers)]
            for _ in range(LAYERS)
        ]
        self.models = [[(Block(width), Block(width)) for _ in range(LAYERS)] for _ in range(callers // 2)]
        self.own = [Block(width) for _ in range(OWN_OPS)]
        self.rows = [torch.randn(1, width) for _ in range(callers)]
        rng = random.Random(0)
        self.orders = [rng.sample(range(OWN_OPS), OWN_OPS) for _ in range(callers)]


async def token(ops: Ops, model: list[tuple[Block, Block]], x: Tensor) -> Tensor:
    """Once through a model of norms and products."""
    for first, second in model:
        x = await ops.rms_norm(x, first.norm)
        x = await ops.linear(x, first.weight)
        x = await ops.linear(x, second.weight)
    return x


async def tokens(ops: Ops, model: list[tuple[Block, Block]], x: Tensor, steps: int) -> Tensor:
    """A request that is one straight line."""
    start = x
    for _ in range(steps):
        await token(ops, model, start)
    return start


Programs = list[Coroutine[Any, Any, Any]]
Load = Callable[[Ops, World, int], Programs]


def straight(ops: Ops, world: World, steps: int) -> Programs:
    """Every caller the same ops in the same order."""
    return [tokens(ops, world.model, row, steps) for row in world.rows]


def experts(ops: Ops, world: World, steps: int) -> Programs:
    """A mixture of experts, top-1: each caller goes the way of its expert in every layer."""

    async def request(row: Tensor, number: int) -> None:
        for step in range(steps):
            x = row
            for layer in range(LAYERS):
                x = await ops.rms_norm(x, world.model[layer][0].norm)
                scores = await ops.linear(x, world.routers[layer].weight)
                # Which expert wins would be the same in every step for one row: the step takes part in it.
                chosen = (int(scores.argmax()) + step + number) % EXPERTS
                up, down = world.experts[layer][chosen]
                x = await ops.linear(silu(await ops.linear(x, up.weight)), down.weight)

    return [request(row, number) for number, row in enumerate(world.rows)]


def _adapted(count: int) -> Load:
    def load(ops: Ops, world: World, steps: int) -> Programs:
        async def request(row: Tensor, number: int) -> None:
            for _ in range(steps):
                x = row
                for layer in range(LAYERS):
                    x = await ops.rms_norm(x, world.model[layer][0].norm)
                    into, out = world.adapters[layer][number % count]
                    added = await ops.linear(await ops.linear(x, into), out)
                    x = await ops.linear(x, world.model[layer][0].weight) + added

        return [request(row, number) for number, row in enumerate(world.rows)]

    load.__doc__ = f"A shared model with {count} low-rank adapters, each request its own."
    return load


def own_orders(ops: Ops, world: World, steps: int) -> Programs:
    """The same eight products in another order for each caller."""

    async def request(row: Tensor, order: list[int]) -> None:
        for _ in range(steps):
            x = row
            for position in order:
                x = await ops.linear(x, world.own[position].weight)

    return [request(row, order) for row, order in zip(world.rows, world.orders, strict=True)]


def many_models(ops: Ops, world: World, steps: int) -> Programs:
    """Half as many models as callers elsewhere, each with one caller."""
    return [tokens(ops, model, world.rows[n], steps) for n, model in enumerate(world.models)]


def beams(ops: Ops, world: World, steps: int) -> Programs:
    """Beam search: a request forks into beams, which meet again after every token."""

    async def request(row: Tensor) -> None:
        for _ in range(steps):
            await token(ops, world.model, row)
            found = await ops.together(*(token(ops, world.model, row + beam) for beam in range(BEAMS)))
            max(found, key=lambda out: float(out.max()))

    return [request(row) for row in world.rows[: world.callers // BEAMS]]


def guidance(ops: Ops, world: World, steps: int) -> Programs:
    """Classifier-free guidance: two rows of a request side by side, mixed after every token."""

    async def request(row: Tensor) -> None:
        x = row
        for _ in range(steps):
            with_prompt, without = await ops.together(
                token(ops, world.model, x), token(ops, world.model, row)
            )
            x = row + 0.01 * (with_prompt - without)

    return [request(row) for row in world.rows[: world.callers // 2]]


def lengths(ops: Ops, world: World, steps: int) -> Programs:
    """Requests of 1 to 8 times the steps of the shortest: the crowd thins out."""
    return [
        tokens(ops, world.model, row, 1 + (steps * 2 * number) // world.callers)
        for number, row in enumerate(world.rows)
    ]


LOADS: dict[str, Load] = {
    "straight": straight,
    "lengths": lengths,
    "experts": experts,
    "16 adapters": _adapted(16),
    "64 adapters": _adapted(64),
    "own orders": own_orders,
    "one caller a model": many_models,
    "beams": beams,
    "guidance": guidance,
}
POISSON = "poisson"


async def closed(ops: Ops, load: Load, world: World, steps: int) -> float:
    """Seconds that a load takes from its first call to its last."""
    programs = load(ops, world, steps)
    begin = time.perf_counter()
    await ops.together(*programs)
    return time.perf_counter() - begin


async def poisson(ops: Ops, world: World, steps: int, seconds: float, seed: int) -> float:
    """Mean seconds of a request from when it is due, at `RATE` requests a second of 0.5 to 1.5 times `steps`."""
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
    batches: int = 0
    calls: int = 0
    at_once: int = 0

    def described(self) -> dict[str, Any]:
        """Medians, and ratios taken round by round."""

        def over(other: str) -> float:
            pairs = zip(self.seconds[other], self.seconds[AWAITED], strict=True)
            return round(statistics.median([theirs / ours for theirs, ours in pairs]), 3)

        return {
            "of_one_by_one": over(ONE_BY_ONE),
            "of_by_hand": over(BY_HAND),
            "mean_batch": round(self.calls / max(self.batches, 1), 2),
            "ms": {side: round(statistics.median(own) * 1e3, 3) for side, own in self.seconds.items()},
            "rounds_ms": {side: [round(s * 1e3, 3) for s in own] for side, own in self.seconds.items()},
        }


async def measured(
    runtime: lz.Runtime, name: str, world: World, options: argparse.Namespace
) -> dict[str, Any]:
    """One load, the sides in turns; the first rounds, in which batchers learn and kernels load, do not count."""
    sides: dict[str, Ops] = {AWAITED: Awaited(), ONE_BY_ONE: OneByOne(), BY_HAND: ByHand()}
    steps = 1

    async def run(side: str, turn: int) -> float:
        if name == POISSON:
            return await poisson(sides[side], world, steps, options.seconds * 4, turn)
        return await closed(sides[side], LOADS[name], world, steps)

    # As many steps as one by one takes `--seconds` for; for Poisson, what one request takes `SERVICE_S` for.
    for _ in range(3):
        if name == POISSON:
            begin = time.perf_counter()
            await tokens(sides[ONE_BY_ONE], world.model, world.rows[0], 10)
            steps = max(2, round(SERVICE_S / ((time.perf_counter() - begin) / 10)))
        else:
            steps = 1
            steps = max(1, round(options.seconds / await closed(sides[ONE_BY_ONE], LOADS[name], world, 1)))
    row = Row()
    for turn in range(-options.warm, options.rounds):
        order = list(sides)[turn % 3 :] + list(sides)[: turn % 3]
        for side in order:
            gc.collect()
            stats = runtime.device("cpu").loop_drivers.stats()
            before = stats.batches, stats.done
            took = await run(side, turn)
            if turn < 0:
                continue
            row.seconds.setdefault(side, []).append(took)
            if side == AWAITED:
                stats = runtime.device("cpu").loop_drivers.stats()
                row.batches += stats.batches - before[0]
                row.calls += stats.done - before[1]
    return {"steps": steps} | row.described()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    names = [*LOADS, POISSON]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--loads", type=lambda text: text.split(","), default=names)
    parser.add_argument("--widths", type=lambda text: [int(w) for w in text.split(",")], default=[256, 512])
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm", type=int, default=2, help="rounds before those that count")
    parser.add_argument("--seconds", type=float, default=0.1, help="of one by one in each round")
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
        with lz.start(settings) as runtime, torch.inference_mode():
            asyncio.run(everything(runtime, width))
    show(
        f"Awaited over the others, {options.callers} callers",
        ("load", "width", "of one by one", "of by hand", "mean batch"),
        [
            (name, width, f"{r['of_one_by_one']:.2f}", f"{r['of_by_hand']:.2f}", f"{r['mean_batch']:.1f}")
            for name, widths in record["loads"].items()
            for width, r in widths.items()
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

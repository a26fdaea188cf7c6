"""The loads of benchmarks/traffic.py, and the four ways to run the ops of one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import coroutine
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

import layerzero as lz

LAYERS, EXPERTS, OWN_OPS, BEAMS = 4, 8, 8, 4


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


@coroutine
def turn() -> Generator[None, None, None]:
    """Let the next coroutine go on."""
    yield


class InTurns(OneByOne):
    """Blocking calls; several coroutines make one call each in turns: in the order of awaited calls."""

    def __init__(self) -> None:
        self.inside = False

    async def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        out = lz.sync.linear(x, weight)
        await turn()
        return out

    async def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = lz.sync.rms_norm(x, weight)
        await turn()
        return out

    async def together(self, *programs: Coroutine[Any, Any, Any]) -> list[Any]:
        nested, self.inside = self.inside, True
        results: dict[int, Any] = {}
        while len(results) < len(programs):
            for number, program in enumerate(programs):
                if number in results:
                    continue
                try:
                    program.send(None)
                except StopIteration as ended:
                    results[number] = ended.value
            if nested:
                await turn()
        self.inside = nested
        return [results[number] for number in range(len(programs))]


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

"""Generation over the ranks of a gang, by heads and columns and by stages, beside one device and plain torch.

Requests begin behind `context` tokens whose keys and values are in the cache already: decoding is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from generating import by_hand
from llama import BLOCKING, Draw, Llama, finished, pool
from paging import places_of
from stages import Stage
from torch import Tensor
from tp_generate import Shard, shard_of

import layerzero as lz
from benchmarks.ganging.rank import Rank, plant_attention, summed

Point = tuple[int, int]  # requests, context
ROUNDS = 3


def points(me: Rank) -> list[Point]:
    """How many requests at which context."""
    return [(2, 16), (4, 32)] if me.rehearse else [(1, 512), (16, 1024), (64, 1024)]


def tokens_of(me: Rank) -> int:
    """Tokens of each request in one run."""
    return 6 if me.rehearse else 32


def pages_of(me: Rank) -> int:
    """Pages that the largest crowd needs."""
    return max(n * (-(-(context + tokens_of(me) + 64) // 16) + 1) for n, context in points(me))


def warmed(me: Rank, runtime: lz.Runtime, heads: int, rows: tuple[int, ...] = (1,)) -> str:
    """Load and compile what a model with 1/`heads` of the heads asks for; the attention that it gets."""
    plant_attention(runtime)
    own = replace(shard_of(me.config, heads), layers=1)
    model = Llama(own, me.weights(), _pool(me, own, pages_of(me)))
    for (n, context), each in itertools.product(points(me), rows):
        width = -(-(context + each) // 16)
        tables = torch.arange(n * width, dtype=torch.int32).view(n, width)
        for _ in range(2):
            at = places_of(model.pages, [context] * n, tables, [each] * n)
            ids = torch.zeros(n * each, dtype=torch.int64, device=me.device)
            logits = finished(model.forward(BLOCKING, model._blocking, ids, at))
            lz.sync.sample(logits[:n], temperature=0.0, seed=1)
    chosen: Any = by_hand.chosen_attention(model, *points(me)[-1])
    return str(chosen.binding.plan.kernel)


def _pool(me: Rank, config: Any, pages: int) -> Any:
    return pool(config, me.device, me.like.dtype, pages, 16)


async def crowd(model: Llama, n: int, context: int, tokens: int) -> list[list[int]]:
    """The texts of `n` coroutines, each behind `context` tokens."""

    async def one(number: int) -> list[int]:
        found: list[int] = []
        with model.pages.sequence(context + tokens) as sequence:
            sequence.length = context
            ids = torch.tensor([number % model.config.vocab], device=model.pages.device)
            for drawn in range(tokens):
                ids = await model.next(ids, sequence.extend(1), Draw(0.0, 1.0, number, drawn))
                found.append(int(await lz.to_host(ids)))
        return found

    return list(await asyncio.gather(*map(one, range(n))))


def loop(me: Rank, cache: Any, n: int, context: int, tokens: int) -> float:
    """Seconds of the same in plain torch: one batch, every token read before the next."""
    model = cache.model
    with ExitStack() as stack, torch.inference_mode():
        sequences = [stack.enter_context(model.pages.sequence(context + tokens)) for _ in range(n)]
        cache.join(sequences, [context] * n)
        ids = torch.arange(n, device=me.device) % model.config.vocab
        me.done()
        begin = time.perf_counter()
        for _ in range(tokens):
            ids = by_hand.step(cache, ids).argmax(-1)
            ids.tolist()
        return time.perf_counter() - begin


async def _timed(call: Any) -> float:
    begin = time.perf_counter()
    await call
    return time.perf_counter() - begin


async def interleaved(arms: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of each arm, in turns; the first round of each warms up."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            took = await arm()
            if turn:
                found[name].append(took)
    return found


async def generate(me: Rank) -> None:
    """Tokens a second over the gang, by hand over its ranks, on one device, and by hand there."""
    async with lz.start(me.settings) as runtime:
        kernel = warmed(me, runtime, me.ranks)
        whole = warmed(me, runtime, 1) if me.rank == 0 else ""
        pages, count = pages_of(me), tokens_of(me)
        bound = by_hand.chosen_attention
        async with runtime.gang(timeout_s=60.0) as member:
            shard = Shard(me.config, me.weights(), member, me.like, pages)
            caches = {"shard": by_hand.Paged(shard, bound(shard, *points(me)[-1]))}

            def hand(n: list[int], context: list[int], tokens: list[int]) -> list[float]:
                return [loop(me, caches["shard"], *now) for now in zip(n, context, tokens, strict=True)]

            def reduced(rows: list[int]) -> list[float]:
                x = torch.zeros(rows[0], me.config.channels, dtype=me.like.dtype, device=me.device)
                return [me.seconds(lambda: summed(x), 50)]

            by_ranks, reducing = member.batched(hand, name="hand"), member.batched(reduced, name="reduce")
            if member.rank:
                await member.follow()
                return
            me.row(
                what="setting", layers=me.config.layers, channels=me.config.channels, tokens=count,
                dtype=str(me.like.dtype), attention=kernel, attention_alone=whole, plan=member.plan,
            )  # fmt: skip
            alone = Llama(me.config, me.weights(), _pool(me, me.config, pages))
            caches["alone"] = by_hand.Paged(alone, bound(alone, *points(me)[-1]))
            with me.trying(what="logits"):
                me.row(what="logits", **await compared(me, shard, alone))
            numbers = itertools.count()
            for n, context in points(me):
                if me.left_s < 5:
                    me.row(what="generation", requests=n, context=context, error="no time left")
                    continue

                async def over_ranks(n: int = n, context: int = context) -> float:
                    took: float = await by_ranks(next(numbers), n, context, count)
                    return took

                async def here(n: int = n, context: int = context) -> float:
                    return loop(me, caches["alone"], n, context, count)

                arms = {
                    "gang": lambda n=n, at=context: _timed(crowd(shard, n, at, count)),
                    "by hand over torch.distributed": over_ranks,
                    "one device": lambda n=n, at=context: _timed(crowd(alone, n, at, count)),
                    "by hand on one device": here,
                }
                with me.trying(what="generation", requests=n, context=context):
                    found = await interleaved(arms)
                    speed = {name: n * count / statistics.median(took) for name, took in found.items()}
                    us = await reducing(next(numbers), n) * 1e6
                    me.row(
                        what="generation", requests=n, context=context, tokens_per_s=speed,
                        step_ms={name: n / value * 1e3 for name, value in speed.items()},
                        gang_over_one_device=speed["gang"] / speed["one device"],
                        gang_over_by_hand=speed["gang"] / speed["by hand over torch.distributed"],
                        rounds=found, all_reduce_us=us,
                    )  # fmt: skip


async def compared(me: Rank, shard: Any, alone: Llama) -> dict[str, Any]:
    """How far the gang's logits are from one device's, and how many tokens of a text are the same."""
    n, context = points(me)[0]

    async def logits(model: Any) -> Tensor:
        with model.pages.sequence(context + 1) as sequence:
            sequence.length = context
            ids = torch.tensor([7], device=me.device)
            found: Tensor = await model.step(ids, sequence.extend(1))
            return found.float()

    ours, theirs = await logits(shard), await logits(alone)
    texts = [await crowd(model, n, context, tokens_of(me)) for model in (shard, alone)]
    same = sum(a == b for one, two in zip(*texts, strict=True) for a, b in zip(one, two, strict=True))
    return {
        "worst_over_deviation": float((ours - theirs).abs().max() / theirs.std()),
        "same_tokens": same,
        "of": n * tokens_of(me),
    }


async def stages(me: Rank) -> None:
    """Tokens a second over a pipeline of as many stages as ranks, beside one device."""
    async with lz.start(me.settings) as runtime:
        kernel = warmed(me, runtime, 1)
        async with runtime.gang(timeout_s=60.0) as member:
            stage = Stage(me.config, me.weights(), member, me.like, pages_of(me))
            if member.rank:
                await member.follow()
                return
            me.row(what="setting", stages=member.ranks, layers=me.config.layers, attention=kernel)
            alone = Llama(me.config, me.weights(), _pool(me, me.config, pages_of(me)))
            with me.trying(what="stage logits"):
                me.row(what="stage logits", **await compared(me, stage, alone))
            count = tokens_of(me)
            for n, context in points(me):
                if me.left_s < 4:
                    me.row(what="stages", requests=n, context=context, error="no time left")
                    continue
                arms = {
                    "stages": lambda n=n, at=context: _timed(crowd(stage, n, at, count)),
                    "one device": lambda n=n, at=context: _timed(crowd(alone, n, at, count)),
                }
                with me.trying(what="stages", requests=n, context=context):
                    found = await interleaved(arms, 2)
                    speed = {name: n * count / statistics.median(took) for name, took in found.items()}
                    me.row(what="stages", requests=n, context=context, tokens_per_s=speed,
                           over_one_device=speed["stages"] / speed["one device"])  # fmt: skip

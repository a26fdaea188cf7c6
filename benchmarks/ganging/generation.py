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
from generating.captured import Whole
from models.llama import BLOCKING, Llama, SampleArgs, kv_pool, run_sync
from tensor_parallel.pipeline import PipelineLlama
from tensor_parallel.run import TensorParallelLlama, shard_of
from torch import Tensor

import layerzero as lz
from benchmarks.ganging.rank import Rank, compiled, plant_attention, summed
from benchmarks.ganging.replaying import replayed

Point = tuple[int, int]  # requests, context
ROUNDS = 3


def points(me: Rank) -> list[Point]:
    """How many requests at which context: those whose pages fit beside the weights."""
    if me.rehearse:
        return [(2, 16), (4, 32)]
    wanted = [(1, 512), (64, 1024), (128, 3072)]
    config = me.config
    token = (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * me.like.element_size()
    )
    room = (
        0.55 * torch.cuda.get_device_properties(me.device).total_memory
    )  # a share of the cache stands beside
    return [(n, context) for n, context in wanted if n * context * token < room]


def tokens_of(me: Rank) -> int:
    """Tokens of each request in one run."""
    return 6 if me.rehearse else 16


def pages_of(me: Rank) -> int:
    """Pages that the largest crowd needs."""
    return max(n * (-(-(context + tokens_of(me) + 64) // 16) + 1) for n, context in points(me))


def warmed(me: Rank, runtime: lz.Runtime, heads: int, rows: tuple[int, ...] = (1,)) -> str:
    """Load and compile what a model with 1/`heads` of the heads asks for; the attention that it gets."""
    plant_attention(runtime)
    own = replace(shard_of(me.config, heads), layers=1)
    model = Llama(own, me.weights(), _pool(me, own, pages_of(me)))
    for (n, context), each in itertools.product(points(me), rows):
        for _ in range(2):
            numbers = [model.cache.new() for _ in range(n)]
            model.cache.extend(numbers, [context] * n)
            at = model.cache.prepare_batch(numbers, [each] * n)
            ids = torch.zeros(n * each, dtype=torch.int64, device=me.device)
            logits = run_sync(model.forward(BLOCKING, model._blocking, ids, at))
            lz.sync.sample(logits[:n], temperature=0.0, seed=1)
            for number in numbers:
                model.cache.free(number)
    chosen: Any = by_hand.chosen_attention(model, *points(me)[-1])
    return str(chosen.binding.plan.kernel)


def _pool(me: Rank, config: Any, pages: int) -> Any:
    return kv_pool(config, me.device, me.like.dtype, pages, 16)


async def crowd(model: Llama, n: int, context: int, tokens: int) -> list[list[int]]:
    """The texts of `n` coroutines, each behind `context` tokens."""

    async def one(number: int) -> list[int]:
        found: list[int] = []
        with model.sequence(context + tokens) as sequence:
            sequence.extend(context)
            ids = torch.tensor([number % model.config.vocab_size], device=model.cache.device)
            for drawn in range(tokens):
                ids = await model.sample_next(ids, sequence.extend(1), SampleArgs(0.0, 1.0, number, drawn))
                found.append(int(await lz.to_host(ids)))
        return found

    return list(await asyncio.gather(*map(one, range(n))))


def loop(me: Rank, cache: Any, n: int, context: int, tokens: int) -> float:
    """Seconds of the same in plain torch: one batch, every token read before the next."""
    model = cache.model
    with ExitStack() as stack, torch.inference_mode():
        sequences = [stack.enter_context(model.sequence(context + tokens)) for _ in range(n)]
        cache.join(sequences, [context] * n)
        ids = torch.arange(n, device=me.device) % model.config.vocab_size
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


class Sides:
    """The models of one rank, and what all ranks run of them by hand."""

    def __init__(self, me: Rank, member: Any) -> None:
        self.me, self.count = me, tokens_of(me)
        crowds = sorted({n for n, _ in points(me)})
        self.shard = TensorParallelLlama(me.config, me.weights(), member, me.like, pages_of(me), crowds)
        self.graph, self.wide = self.shard._graph, self.shard.wide
        self._switched([False])
        self.cache = by_hand.Paged(self.shard, by_hand.chosen_attention(self.shard, *points(me)[-1]))
        self.alone: Any = None
        self.device_ms: dict[Point, dict[str, float]] = {}
        self._numbers = itertools.count()
        self._hand = member.batched(self._by_hand, name="hand")
        self._replay = member.batched(self._replayed, name="replay")
        self._reduce = member.batched(self._reduced, name="reduce")
        self._switch = member.batched(self._switched, name="switch")

    def _by_hand(self, n: list[int], context: list[int]) -> list[float]:
        return [loop(self.me, self.cache, *now, self.count) for now in zip(n, context, strict=True)]

    def _replayed(self, n: list[int], context: list[int]) -> list[tuple[list[float], float]]:
        return [replayed(self.me, self.cache, *now, self.count) for now in zip(n, context, strict=True)]

    def _reduced(self, rows: list[int]) -> list[float]:
        x = torch.zeros(rows[0], self.me.config.hidden_size, dtype=self.me.like.dtype, device=self.me.device)
        return [self.me.seconds(lambda: summed(x), 50)]

    def _switched(self, captured: list[bool]) -> list[None]:
        self.shard._graph = self.graph if captured[0] else None
        self.shard.wide = self.wide if captured[0] else 1
        return [None]

    async def capture(self, on: bool) -> None:
        """Let the gang's steps be graphs, on every rank."""
        await self._switch(next(self._numbers), on)

    async def by_ranks(self, n: int, context: int) -> float:
        """Seconds by hand over all ranks."""
        took: float = await self._hand(next(self._numbers), n, context)
        return took

    async def replay(self, n: int, context: int) -> tuple[list[float], float]:
        """Seconds by hand over all ranks in a graph, with tokens read and, of one round, without."""
        took: tuple[list[float], float] = await self._replay(next(self._numbers), n, context)
        return took

    async def all_reduce_us(self, rows: int) -> float:
        """Microseconds of one sum over the ranks, waited for."""
        took: float = await self._reduce(next(self._numbers), rows)
        return took * 1e6

    def lone(self) -> None:
        """On rank 0: the whole model beside its share."""
        me = self.me
        model = Llama(me.config, me.weights(), _pool(me, me.config, pages_of(me)))
        self.alone = by_hand.Paged(model, by_hand.chosen_attention(model, *points(me)[-1]))


async def generate(me: Rank) -> None:
    """Tokens a second over the gang, by hand over its ranks, on one device, and by hand there.

    First each step as a captured graph, then launched kernel by kernel.
    """
    async with lz.start(me.settings) as runtime:
        kernel = warmed(me, runtime, me.ranks)
        whole = warmed(me, runtime, 1) if me.rank == 0 else ""
        async with lz.rank_group(timeout_s=60.0) as member:
            sides = Sides(me, member)
            if member.rank:
                await member.follow()
                return
            me.row(
                what="setting", ranks=member.ranks, layers=me.config.num_hidden_layers,
                channels=me.config.hidden_size,
                tokens=sides.count, dtype=str(me.like.dtype), attention=kernel, attention_alone=whole,
                plan=member.plan_digest, awaited_path=await compiled(),
            )  # fmt: skip
            sides.lone()
            with me.trying(what="logits"):
                me.row(what="logits", **await compared(me, sides.shard, sides.alone.model))
            for captured, (n, context) in itertools.product((True, False), points(me)):
                where = {"what": "generation", "captured": captured, "requests": n, "context": context}
                if me.left_s < 8:
                    me.row(**where, error="no time left")
                    continue
                with me.trying(**where):
                    await sides.capture(captured)
                    found = await (_captured if captured else _launched)(sides, n, context)
                    me.row(
                        **where, **found, bound=_bound(found["step_ms"], sides.device_ms.get((n, context)))
                    )


def _bound(step_ms: dict[str, float], device: dict[str, float] | None) -> dict[str, str]:
    """What each side waits for: its GPUs where a step takes little longer than they need, or its host."""
    if device is None:
        return {}
    need = {name: device["one" if "one device" in name else "ranks"] for name in step_ms}
    return {name: "device" if took < 1.25 * need[name] else "host" for name, took in step_ms.items()}


def _speeds(sides: Sides, n: int, found: dict[str, list[float]]) -> dict[str, Any]:
    speed = {name: n * sides.count / statistics.median(took) for name, took in found.items()}
    hand = speed["by hand over torch.distributed"]
    return {
        "tokens_per_s": speed,
        "step_ms": {name: n / value * 1e3 for name, value in speed.items()},
        "gang_over_one_device": speed["gang"] / speed["one device"],
        "gang_over_by_hand": speed["gang"] / hand,
        "rounds": found,
    }


async def _launched(sides: Sides, n: int, context: int) -> dict[str, Any]:
    """Each step launched kernel by kernel, on every side."""
    count, alone = sides.count, sides.alone

    async def here() -> float:
        return loop(sides.me, alone, n, context, count)

    arms = {
        "gang": lambda: _timed(crowd(sides.shard, n, context, count)),
        "by hand over torch.distributed": lambda: sides.by_ranks(n, context),
        "one device": lambda: _timed(crowd(alone.model, n, context, count)),
        "by hand on one device": here,
    }
    found = await interleaved(arms, 2)
    return {**_speeds(sides, n, found), "all_reduce_us": await sides.all_reduce_us(n)}


async def _captured(sides: Sides, n: int, context: int) -> dict[str, Any]:
    """Each step a graph, on every side; by hand, each graph is made anew, outside of the time."""
    count, me = sides.count, sides.me
    own = Whole(sides.alone.model, context + count, n)
    try:
        arms = {
            "gang": lambda: _timed(crowd(sides.shard, n, context, count)),
            "one device": lambda: _timed(crowd(own, n, context, count)),  # type: ignore[arg-type]
        }
        found = await interleaved(arms)
    finally:
        own.close()
    over, ranks_s = await sides.replay(n, context)
    alone, one_s = replayed(me, sides.alone, n, context, count)
    found["by hand over torch.distributed"], found["by hand on one device"] = over, alone
    # What the GPUs take for a step alone: replayed one behind the other, nothing read in between.
    device = sides.device_ms[n, context] = {"ranks": ranks_s / count * 1e3, "one": one_s / count * 1e3}
    said = _speeds(sides, n, found)
    return {**said, "device_step_ms": device}


async def compared(me: Rank, shard: Any, alone: Llama) -> dict[str, Any]:
    """How far the gang's logits are from one device's, and how many tokens of a text are the same."""
    n, context = points(me)[0]

    async def logits(model: Any) -> Tensor:
        with model.sequence(context + 1) as sequence:
            sequence.extend(context)
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
        async with lz.rank_group(timeout_s=60.0) as member:
            stage = PipelineLlama(me.config, me.weights(), member, me.like, pages_of(me))
            if member.rank:
                await member.follow()
                return
            path = await compiled()
            me.row(
                what="setting", stages=member.ranks, layers=me.config.num_hidden_layers, attention=kernel,
                awaited_path=path,
            )  # fmt: skip
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

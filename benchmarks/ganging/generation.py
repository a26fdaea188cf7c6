"""What the parts share, and generation over stages of a pipeline beside one device.

Requests begin behind `context` tokens whose keys and values are in the cache already: decoding is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from generating import by_hand
from models.llama import BLOCKING, Llama, SampleArgs, kv_pool, run_sync
from tensor_parallel.llama import shard_of
from tensor_parallel.pipeline import PipelineLlama
from torch import Tensor

import layerzero as lz
from benchmarks.ganging.rank import Rank, compiled, plant_attention
from layerzero.parallel import TensorGroup

Point = tuple[int, int]  # requests, context
ROUNDS = 3
# Under way in a grid of two stages. One more than stages leaves no slack: a step that a rank ends late idles
# the other stage.
BATCHES = 4


def points(me: Rank) -> list[Point]:
    """How many requests at which context: those whose pages fit beside the weights.

    Where a part decodes only, a rank has its share of the pages; elsewhere one has all of them too. In a grid
    there are as many for each of its batches.
    """
    if me.rehearse:
        return [(2, 16), (4, 32)]
    wanted = [(64, 1024), (128, 3072), (64, 8192) if me.part.startswith("grid") else (1, 512)]
    config = me.config
    token = (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * me.like.element_size()
    )
    if me.part.startswith(("decode", "grid")):
        token //= me.ranks
    if me.part.startswith("grid"):
        token *= BATCHES
    total = torch.cuda.get_device_properties(me.device).total_memory
    room = total - 22e9 if me.part.startswith("alone") else 0.55 * total  # beside the weights
    return [(n, context) for n, context in wanted if n * context * token < room]


def tokens_of(me: Rank) -> int:
    """Tokens of each request in one run."""
    return 6 if me.rehearse else 64


def pages_of(me: Rank) -> int:
    """Pages that the largest crowd needs."""
    return max(n * (-(-(context + tokens_of(me) + 64) // 16) + 1) for n, context in points(me))


def warmed(me: Rank, runtime: lz.Runtime, heads: int, rows: tuple[int, ...] = (1,)) -> str:
    """Load and compile what a model with 1/`heads` of the heads asks for; the attention that it gets."""
    plant_attention(runtime)
    own = replace(shard_of(me.config, TensorGroup(0, heads)), num_hidden_layers=1)
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


async def _timed(call: Any) -> float:
    begin = time.perf_counter()
    await call
    return time.perf_counter() - begin


async def interleaved(arms: dict[str, Callable[..., Any]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of each arm, in turns; the first round of each warms up."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            took = await arm()
            if turn:
                found[name].append(took)
    return found


async def compared(
    me: Rank, shard: Any, alone: Llama, requests: int | None = None, tokens: int | None = None
) -> dict[str, Any]:
    """How far the gang's logits are from one device's, and how many tokens of a text are the same.

    The texts are those of the first point, or of fewer `requests` with fewer `tokens`.
    """
    n, context = points(me)[0]
    n, count = requests or n, tokens or tokens_of(me)

    async def logits(model: Any) -> Tensor:
        with model.sequence(context + 1) as sequence:
            sequence.extend(context)
            ids = torch.tensor([7], device=me.device)
            found: Tensor = await model.step(ids, sequence.extend(1))
            return found.float()

    ours, theirs = await logits(shard), await logits(alone)
    texts = [await crowd(model, n, context, count) for model in (shard, alone)]
    same = sum(a == b for one, two in zip(*texts, strict=True) for a, b in zip(one, two, strict=True))
    return {
        "worst_over_deviation": float((ours - theirs).abs().max() / theirs.std()),
        "same_tokens": same,
        "of": n * count,
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

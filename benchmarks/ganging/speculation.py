"""Speculative decoding with a draft of one layer, at rates of acceptance from one to almost none.

The target is a random Llama whose first layer drafts. What its other layers add is scaled: not at all, and
both agree on every token; in full, and they hardly know each other. Every forward costs what it costs anyway.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from generate import SamplingParams
from generate import generate as plainly
from models.llama import Llama, kv_pool
from speculate import SequenceDecoder, TargetShard, speculate_request, start_generation
from tensor_parallel.llama import TensorParallelLlama

import layerzero as lz
from benchmarks.ganging.generation import _timed, interleaved, warmed
from benchmarks.ganging.rank import Rank, compiled

SCALES = (0.0, 0.03, 0.02, 0.01, 0.06, 0.15)  # the first three are rates of about 1, 0.5 and 0.8
PLACES = 4
TEMPERATURE = 0.3
PAGES = 512
DRAFTED = (1, 2, 4, 8)  # rows of a step that verifies, or that drafts on


class Damped:
    """A model whose layers behind the first can be scaled again and again."""

    def __init__(self, model: Llama) -> None:
        self._last = [(layer, layer.w_o.clone(), layer.w_down.clone()) for layer in model.layers[1:]]

    def scale(self, share: float) -> None:
        """Let the layers add `share` of what they were made to."""
        for layer, out, down in self._last:
            layer.w_o.copy_(out * share)
            layer.w_down.copy_(down * share)


def first_layer(me: Rank, device: torch.device) -> Llama:
    """The draft, with the target's own first layer."""
    config = replace(me.config, num_hidden_layers=1)
    get = me.weights()
    return Llama(
        config,
        lambda name, shape: get(name, shape).to(device),
        kv_pool(config, device, me.like.dtype, PAGES, 16),
    )


def prompt_of(me: Rank, number: int) -> list[int]:
    """Some tokens for each request."""
    drawn = torch.Generator().manual_seed(number)
    return torch.randint(me.config.vocab_size, (16 if me.rehearse else 64,), generator=drawn).tolist()


def crowds(me: Rank) -> tuple[int, ...]:
    """How many requests at once."""
    return (2,) if me.rehearse else (1,)


def sampling(me: Rank, number: int) -> SamplingParams:
    """How request `number` draws."""
    return SamplingParams(max_tokens=8 if me.rehearse else 32, temperature=TEMPERATURE, seed=number)


async def plain(me: Rank, model: Any, n: int) -> None:
    """`n` requests, decoded token by token."""

    async def one(number: int) -> None:
        async for _ in plainly(model, prompt_of(me, number), sampling(me, number)):
            pass

    await asyncio.gather(*map(one, range(n)))


async def guessed(me: Rank, draft: Llama, target: Llama, n: int, stats: list[Any]) -> None:
    """`n` requests, drafted and verified on one process's devices."""

    async def one(number: int) -> None:
        asked = prompt_of(me, number), sampling(me, number)
        stats.append((await speculate_request(draft, target, *asked, PLACES))[1])

    await asyncio.gather(*map(one, range(n)))


async def shared(me: Rank, draft: Llama, share: TargetShard, n: int, stats: list[Any]) -> None:
    """`n` requests, drafted on rank 0 and verified by all ranks."""

    async def one(number: int) -> None:
        prompt = prompt_of(me, number)
        limit = len(prompt) + sampling(me, number).max_tokens + 2 * PLACES
        with SequenceDecoder(draft, limit) as small:
            async with share.target.sequence(limit) as large:
                generation = start_generation(small, large, prompt, sampling(me, number), PLACES)
                async for _ in generation:
                    pass
        stats.append(generation.stats)

    await asyncio.gather(*map(one, range(n)))


async def speculate(me: Rank) -> None:
    """Plain and speculative decoding over the ranks; then on one device, and with the draft on another."""
    async with lz.start(me.settings) as runtime:
        # Before joining: what is loaded then may be chosen by the gang.
        warmed(me, runtime, me.ranks, (1, PLACES + 1, 64))
        if me.rank == 0:
            warmed(me, runtime, 1, (1, PLACES + 1, 64))
        async with lz.rank_group(timeout_s=60.0) as member:
            shard = TensorParallelLlama(me.config, me.weights(), member, me.like, PAGES)
            share = TargetShard(member, me.config, me.weights(), me.like)
            both = [Damped(shard), Damped(share.model)]

            def damp(shares: list[float]) -> list[None]:
                for each in both:
                    each.scale(shares[-1])
                return [None] * len(shares)

            def capture(calls: list[int]) -> list[None]:
                share.model.runners[1].capture(buckets=DRAFTED)
                return [None] * len(calls)

            damping, capturing = member.batched(damp, name="damp"), member.batched(capture, name="capture")
            if member.rank:
                await member.follow()
                return
            draft = first_layer(me, me.device)
            draft.runners[1].capture(buckets=DRAFTED)
            await capturing(0, 0)
            me.row(
                what="speculation setting", layers=me.config.num_hidden_layers, draft_layers=1,
                places=PLACES, temperature=TEMPERATURE, prompt=len(prompt_of(me, 0)),
                tokens=sampling(me, 0).max_tokens, ranks=member.ranks, awaited_path=await compiled(),
            )  # fmt: skip
            numbers = itertools.count()
            for n, scale in itertools.product(crowds(me), SCALES):
                guesses = {"over ranks": partial(shared, me, draft, share, n)}
                await damping(next(numbers), scale)
                await _row(me, runtime, "speculation over ranks", n, scale, shard, guesses)
        # The other ranks have ended: a draft on another GPU has it alone.
        target = Llama(me.config, me.weights(), kv_pool(me.config, me.device, me.like.dtype, PAGES, 16))
        drafts = {"speculated": draft}
        if me.device.type == "cuda" and torch.cuda.device_count() > 1:
            drafts["draft on another GPU"] = first_layer(me, torch.device("cuda", 1))
        for model in (target, *drafts.values()):
            model.runners[1].capture(buckets=DRAFTED)
        alone = Damped(target)
        for n, scale in itertools.product(crowds(me), SCALES):
            alone.scale(scale)
            guesses = {name: partial(guessed, me, small, target, n) for name, small in drafts.items()}
            await _row(me, runtime, "speculation", n, scale, target, guesses)


async def _row(
    me: Rank,
    runtime: lz.Runtime,
    what: str,
    n: int,
    scale: float,
    model: Any,
    guesses: Mapping[str, Callable[[list[Any]], Coroutine[Any, Any, None]]],
) -> None:
    """Every way to decode at one scale: tokens a second, over plain decoding, and how many drafts stay."""
    where = {"what": what, "requests": n, "scale": scale}
    if me.left_s < 6:
        me.row(**where, error="no time left")
        return
    stats: dict[str, list[Any]] = {name: [] for name in guesses}
    arms: dict[str, Any] = {name: partial(guess, stats[name]) for name, guess in guesses.items()}
    arms["plain"] = partial(plain, me, model, n)
    with me.trying(**where):
        found = await interleaved({name: lambda arm=arm: _timed(arm()) for name, arm in arms.items()}, 2)
        tokens = n * sampling(me, 0).max_tokens
        speed = {name: tokens / statistics.median(took) for name, took in found.items()}
        counted = {name: each[n:] for name, each in stats.items()}  # the first round warms up
        me.row(
            **where,
            tokens_per_s=speed,
            acceptance={
                name: sum(s.num_accepted for s in each) / max(1, sum(s.num_draft_tokens for s in each))
                for name, each in counted.items()
            },
            over_plain={name: speed[name] / speed["plain"] for name in guesses},
            steps_without_a_graph=runtime.device(me.device).counters.total("graph_uncaptured_calls"),
        )

"""Decoding over the ranks of a group, reading behind, beside plain torch.distributed that does so as well.

Both sides replay captured graphs of the same shards over the same pages, with the same attention kernel. Ours
is what a server has: a coroutine a request, each a plain loop over `lz.run_ahead`. The other is what an
expert writes for a fixed crowd: a graph that feeds itself, launched once a step on every rank, whose tokens
are copied to pinned memory behind it and read while the next step runs. Each side is timed from the token
that all requests have read in their fourth step to the last; the sides take turns.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any

import torch
from generating import by_hand
from models.llama import SampleArgs
from tensor_parallel.llama import TensorParallelLlama
from torch import Tensor

import layerzero as lz
from benchmarks.ganging.generation import Point, pages_of, points, tokens_of, warmed
from benchmarks.ganging.rank import Rank, compiled, libraries
from benchmarks.ganging.replaying import Replayed

OURS, HAND = "rank group, reading behind", "torch.distributed, reading behind"
OURS_AT_ONCE, HAND_AT_ONCE = "rank group, each token read first", "torch.distributed, each token read first"
ROUNDS = 5  # and one that warms up
NEEDS = 0.95
SKIPPED = 4  # steps of a round that are not counted


class Stamps:
    """When a whole crowd had read each of its steps."""

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._read: list[int] = []
        self.times: list[float] = []

    def read(self, step: int) -> None:
        """One request has read its token of a step."""
        if step == len(self._read):
            self._read.append(0)
        self._read[step] += 1
        if self._read[step] == self._requests:
            self.times.append(time.perf_counter())

    def step_ms(self) -> float:
        """The mean step behind those that are not counted."""
        skipped = min(SKIPPED, len(self.times) // 2)
        return (self.times[-1] - self.times[skipped]) / (len(self.times) - 1 - skipped) * 1e3


class Watch:
    """What each of this rank's steps took: its message, its launch, the wait for the others, the device."""

    def __init__(self, me: Rank, member: Any) -> None:
        self._me = me
        self._spans: dict[str, list[float]] = {name: [] for name in ("message", "launch", "others", "rank0")}
        self._events: list[tuple[Any, Any]] = []
        steps, channel = member._steps, member.group.channel
        steps.start_step = self._timed("message", steps.start_step)
        steps.end_step = self._timed("others", steps.end_step)
        if member.rank:
            channel.receive = self._timed("rank0", channel.receive)
        for name, function in member._functions.items():
            if name.startswith("share"):
                member._functions[name] = replace(function, fn=self._on_device(function.fn))

    def _timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self._spans[what].append((time.perf_counter() - begin) * 1e6)

        return timed

    def _on_device(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        cuda = self._me.device.type == "cuda"
        launch = self._timed("launch", fn)

        def run(*args: Any, **named: Any) -> Any:
            if not cuda:
                return launch(*args, **named)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            out = launch(*args, **named)
            end.record()
            self._events.append((begin, end))
            return out

        return run

    def taken(self) -> dict[str, Any]:
        """Medians of the steps since the last call, microseconds, and what the device did in each."""
        self._me.done()
        found: dict[str, Any] = {
            f"{what}_us": round(statistics.median(spans), 1) for what, spans in self._spans.items() if spans
        }
        if len(events := self._events[SKIPPED:]) > 1:
            found |= device_times(events)
        for spans in self._spans.values():
            spans.clear()
        self._events.clear()
        return found


def device_times(events: list[tuple[Any, Any]]) -> dict[str, float]:
    """Milliseconds that the device takes for a step, and microseconds that it pauses before the next."""
    steps = [begin.elapsed_time(end) for begin, end in events]
    pauses = [last[1].elapsed_time(now[0]) * 1e3 for last, now in itertools.pairwise(events)]
    return {
        "device_ms": round(statistics.median(steps), 4),
        "device_pause_us": round(statistics.median(pauses), 1),
    }


async def crowd(model: Any, n: int, context: int, tokens: int, *, behind: bool) -> tuple[float, list[Any]]:
    """Milliseconds a step of `n` requests, each behind `context` tokens; and their texts."""
    stamps = Stamps(n)

    async def one(sequence: Any, number: int) -> list[int]:
        found: list[int] = []
        offsets = itertools.count()

        async def step(ids: Tensor) -> Tensor:
            draw = SampleArgs(0.0, 1.0, number, next(offsets))
            return await model.sample_next(ids, sequence.extend(1), draw)

        ids = torch.tensor([number % model.config.vocab_size], device=model.cache.device)
        if behind:
            async with aclosing(lz.run_ahead(step, ids, max_steps=tokens)) as drawn:
                async for token in drawn:
                    stamps.read(len(found))
                    found.append(int(token))
            return found
        for number_read in range(tokens):
            ids = await step(ids)
            found.append(int(await lz.to_host(ids)))
            stamps.read(number_read)
        return found

    with ExitStack() as stack:
        sequences = [stack.enter_context(model.sequence(context + tokens)) for _ in range(n)]
        for sequence in sequences:
            sequence.extend(context)
        texts = list(await asyncio.gather(*map(one, sequences, range(n))))
    return stamps.step_ms(), texts


class Expert:
    """The loop by hand over plain torch.distributed, one captured graph a point."""

    def __init__(self, me: Rank, shard: TensorParallelLlama) -> None:
        self.me, self.shard = me, shard
        self._attention = {point: by_hand.chosen_attention(shard, *point) for point in points(me)}
        self._loops: dict[Point, Replayed] = {}

    def round(self, n: int, context: int, behind: bool) -> tuple[float, list[list[int]], dict[str, float]]:
        """Milliseconds a step, the tokens of each step, and what the device did."""
        tokens = tokens_of(self.me)
        with ExitStack() as stack, torch.inference_mode():
            limit = context + tokens + 8  # with room for the steps of the capture
            sequences = [stack.enter_context(self.shard.sequence(limit)) for _ in range(n)]
            loop = self._loop(sequences, n, context, limit)
            loop.start(sequences, context)
            self.me.done()
            stamps, texts, events = self._walk(loop, n, tokens, behind)
            self.me.done()
        device = device_times(events[SKIPPED:]) if len(events) > SKIPPED + 1 else {}
        return stamps.step_ms(), texts, device

    def _loop(self, sequences: list[Any], n: int, context: int, limit: int) -> Replayed:
        loop = self._loops.get((n, context))
        if loop is None:
            cache = by_hand.Paged(self.shard, self._attention[n, context])
            loop = self._loops[n, context] = Replayed(cache, n, limit)
            loop.start(sequences, context)
            loop.capture()
        return loop

    def _walk(
        self, loop: Replayed, n: int, tokens: int, behind: bool
    ) -> tuple[Stamps, list[list[int]], list[Any]]:
        stamps, texts, events = Stamps(1), [], []  # type: ignore[var-annotated]
        cuda = self.me.device.type == "cuda"
        reading: tuple[Tensor, Any] | None = None

        def read(host: Tensor, done: Any) -> None:
            if done is not None:
                done.synchronize()
            stamps.read(len(texts))
            texts.append(host.tolist())

        for _ in range(tokens):
            begin = torch.cuda.Event(enable_timing=True) if cuda else None
            end = torch.cuda.Event(enable_timing=True) if cuda else None
            if begin is not None:
                begin.record()
            loop()
            if end is not None:
                end.record()
                events.append((begin, end))
            host = torch.empty(loop.ids.shape, dtype=loop.ids.dtype, pin_memory=cuda)
            host.copy_(loop.ids, non_blocking=True)
            done = torch.cuda.Event() if cuda else None
            if done is not None:
                done.record()
            if reading is not None:
                read(*reading)
            reading = host, done
            if not behind:
                read(*reading)
                reading = None
        if reading is not None:
            read(*reading)
        return stamps, texts, events


class Sides:
    """What one rank has of both sides."""

    def __init__(self, me: Rank, member: Any) -> None:
        self.me, self.member = me, member
        self.shard = TensorParallelLlama(me.config, me.weights(), member, me.like, pages_of(me), graphs=False)
        # Tables as wide as the other side's, a point. Made before any sequence: padding has the same pages.
        self.runners = {
            (n, context): lz.StepRunner(
                self.shard.greedy_step, self.shard.cache, max_model_len=context + tokens_of(me) + 8,
                max_num_seqs=n, buckets=(n,), graphs=True,
            )
            for n, context in points(me)
        }  # fmt: skip
        self.expert = Expert(me, self.shard)
        self._numbers = itertools.count()
        self._hand = member.batched(self._by_hand, name="hand")
        self._select = member.batched(self._selected, name="select")
        self.watch = Watch(me, member)

    def _by_hand(self, n: list[int], context: list[int], behind: list[bool]) -> list[Any]:
        return [self.expert.round(*now) for now in zip(n, context, behind, strict=True)]

    def _selected(self, n: list[int], context: list[int]) -> list[None]:
        self.shard._greedy_runner = self.runners[n[0], context[0]]
        # Every page holds the same keys and values, whichever a sequence gets: texts can be compared.
        generator = torch.Generator(self.me.device)
        for number, pools in enumerate(self.shard.cache.pools):
            for pool in pools:
                generator.manual_seed(number)
                pool.copy_(torch.randn(pool[0].shape, generator=generator, device=pool.device).to(pool.dtype))
        return [None]

    async def select(self, n: int, context: int) -> None:
        """Let every rank step by the graph of one point, over fresh pages."""
        await self._select(next(self._numbers), n, context)

    async def hand(self, n: int, context: int, *, behind: bool) -> tuple[float, Any, dict[str, float]]:
        """A round by hand on every rank."""
        found: tuple[float, Any, dict[str, float]] = await self._hand(next(self._numbers), n, context, behind)
        return found


async def rounds(sides: Sides, n: int, context: int) -> dict[str, Any]:
    """Milliseconds a step of each side, in turns; what our steps were made of; how many tokens agree."""
    times: dict[str, list[float]] = {}
    parts: dict[str, list[dict[str, Any]]] = {}
    texts: dict[str, Any] = {}

    async def ours(*, behind: bool) -> tuple[float, Any, dict[str, Any]]:
        sides.watch.taken()
        took, found = await crowd(sides.shard, n, context, tokens_of(sides.me), behind=behind)
        return took, [list(step) for step in zip(*found, strict=True)], sides.watch.taken()

    arms: dict[str, Callable[[], Awaitable[Any]]] = {
        OURS: lambda: ours(behind=True),
        HAND: lambda: sides.hand(n, context, behind=True),
        OURS_AT_ONCE: lambda: ours(behind=False),
        HAND_AT_ONCE: lambda: sides.hand(n, context, behind=False),
    }
    names = list(arms)
    for turn in range((1 if sides.me.rehearse else ROUNDS) + 1):
        if turn > 2 and sides.me.left_s < 15:
            break
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            await sides.select(n, context)
            took, texts[name], made_of = await arms[name]()
            if turn:
                times.setdefault(name, []).append(round(took, 4))
                parts.setdefault(name, []).append(made_of)
    return _row(n, times, parts, texts)


def _row(
    n: int, times: dict[str, list[float]], parts: dict[str, list[dict[str, Any]]], texts: dict[str, Any]
) -> dict[str, Any]:
    step_ms = {name: statistics.median(took) for name, took in times.items()}
    same = [a == b for a, b in zip(texts[OURS], texts[OURS_AT_ONCE], strict=True)]
    beside = [
        a == b
        for ours, hand in zip(texts[OURS], texts[HAND], strict=True)
        for a, b in zip(ours, hand, strict=True)
    ]
    return {
        "step_ms": step_ms,
        "tokens_per_s": {name: round(n / took * 1e3, 1) for name, took in step_ms.items()},
        "over_by_hand": round(step_ms[HAND] / step_ms[OURS], 4),
        "needs": NEEDS,
        "over_by_hand_at_once": round(step_ms[HAND_AT_ONCE] / step_ms[OURS_AT_ONCE], 4),
        "made_of": {name: _medians(each) for name, each in parts.items()},
        "same_tokens_read_behind_or_not": all(same),
        "tokens_as_by_hand": sum(beside) / len(beside),
        "first_tokens_as_by_hand": sum(beside[:n]) / n,  # before a text took another way
        "rounds": times,
    }


def _medians(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows if name in row) for name in rows[0]}


async def decode(me: Rank) -> None:
    """Both sides at every point, and what a follower's steps were made of."""
    async with lz.start(me.settings) as runtime:
        kernel = warmed(me, runtime, me.ranks)
        async with lz.rank_group(timeout_s=120.0) as member:
            sides = Sides(me, member)
            if member.rank:
                await member.follow()
                me.row(what="follower", rank=member.rank, **sides.watch.taken())
                return
            me.row(
                what="setting", ranks=member.ranks, layers=me.config.num_hidden_layers,
                channels=me.config.hidden_size, tokens=tokens_of(me), dtype=str(me.like.dtype),
                attention=kernel, left_out=me.left_out, libraries=libraries(), plan=member.plan_digest,
                awaited_path=await compiled(),
            )  # fmt: skip
            for n, context in points(me):
                where = {"what": "decoding", "requests": n, "context": context}
                if me.left_s < 20 and not me.rehearse:
                    me.row(**where, error="no time left")
                    continue
                with me.trying(**where):
                    me.row(**where, **await rounds(sides, n, context))
            captures = {f"{n} x {context}": each.captures for (n, context), each in sides.runners.items()}
            me.row(what="graphs", captures=captures)

"""One GPU by itself, and stages of several ranks each beside the bound that the slowest stage sets."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from generating.captured import Whole
from models.llama import Llama, kv_pool
from tensor_parallel.pipeline import PipelineLlama
from torch import Tensor

import layerzero as lz
from benchmarks.ganging.decoding import SKIPPED, crowd
from benchmarks.ganging.generation import BATCHES, ROUNDS, compared, pages_of, points, tokens_of, warmed
from benchmarks.ganging.rank import Rank, compiled, libraries

NEEDS = 0.9
PAGE = 16
Span = tuple[float, float]  # milliseconds: begin and end of a stage's part of a step


async def alone(me: Rank) -> None:
    """Steps of the whole model on one GPU, captured and read behind: what several GPUs are compared with."""
    async with lz.start(me.settings) as runtime:
        kernel = warmed(me, runtime, 1)
        me.row(what="setting", attention=kernel, libraries=libraries(), awaited_path=await compiled())
        for n, context in points(me):
            limit = context + tokens_of(me) + 8
            pool = kv_pool(me.config, me.device, me.like.dtype, (n + 2) * (-(-limit // PAGE) + 1), PAGE)
            whole: Any = Whole(Llama(me.config, me.weights(), pool), limit, n)
            taken = []
            for turn in range((1 if me.rehearse else ROUNDS) + 1):
                step_ms, _ = await crowd(whole, n, context, tokens_of(me), behind=True)
                taken += [round(step_ms, 4)] if turn else []
            whole.close()
            del whole, pool
            if me.device.type == "cuda":
                torch.cuda.empty_cache()
            me.row(
                what="alone", requests=n, context=context, step_ms=statistics.median(taken), rounds=taken,
                tokens_per_s=round(n / statistics.median(taken) * 1e3, 1),
            )  # fmt: skip


class TimedStage(PipelineLlama):
    """A stage that keeps what its part of each step took on its device, with a captured step a point."""

    def __init__(self, me: Rank, member: Any, **named: Any) -> None:
        self.spans: list[tuple[Any, Any]] = []
        super().__init__(me.config, me.weights(), member, me.like, pages_of(me) * BATCHES, [1], True, **named)
        # Tables as wide as a point needs them, made before any sequence: padding has the same pages.
        self.by_point = {
            (n, context): lz.StepRunner(
                self.greedy_step, self.cache, max_model_len=context + tokens_of(me) + 8, max_num_seqs=n,
                buckets=(n,), graphs=True,
            )
            for n, context in points(me)
        }  # fmt: skip

    def _run(self, runner: lz.StepRunner, ranges: list[Any], ids: Tensor, x: Tensor | None) -> Tensor:
        cuda = self.cache.device.type == "cuda"
        begin = _now(cuda)
        out = super()._run(runner, ranges, ids, x)
        self.spans.append((begin, _now(cuda)))
        return out

    def taken(self, n: list[int], context: list[int]) -> list[list[list[Span]]]:
        """When each rank's part of each step since the last call ran; the next ones are of this point.

        Begin and end in milliseconds of the host's clock, which the processes of a host share.
        """
        self._greedy_runner = self.by_point[n[0], context[0]]
        cuda = self.cache.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.cache.device)
        spans, self.spans = self.spans[SKIPPED:], []
        now = _now(cuda)
        if cuda:
            now.synchronize()
        clock_ms = time.perf_counter() * 1e3

        def at(moment: Any) -> float:
            return round(clock_ms - (moment.elapsed_time(now) if cuda else (now - moment) * 1e3), 4)

        ranks: list[Any] = [None] * self._member.ranks
        dist.all_gather_object(ranks, [(at(begin), at(end)) for begin, end in spans])
        return [ranks for _ in n]


def overlap(stages: list[list[Span]]) -> dict[str, Any]:
    """How far stages worked at the same time: each one's milliseconds a step and busy share, the share of
    the time in which at least two were busy, and the first steps of each, from the first one's begin.

    A span on a GPU also holds the pauses between its launches, where the host was late: a stage's time is
    its lower quartile, and the bound made of it is the devices' own.
    """
    begin = min(span[0] for spans in stages for span in spans)
    whole = max(span[1] for spans in stages for span in spans) - begin
    edges = sorted(
        (at, change) for spans in stages for one in spans for at, change in zip(one, (1, -1), strict=True)
    )
    busy, last, together, any_busy = 0, begin, 0.0, 0.0
    for at, change in edges:
        together += at - last if busy > 1 else 0.0
        any_busy += at - last if busy else 0.0
        busy, last = busy + change, at
    took = [[end - first for first, end in spans] for spans in stages]
    return {
        "stages_ms": [round(statistics.quantiles(each, n=4)[0], 4) for each in took],
        "busy": [round(sum(each) / whole, 4) for each in took],
        "at_once": round(together / whole, 4),
        "idle": round(1 - any_busy / whole, 4),
        "timeline_ms": [
            [(round(first - begin, 3), round(end - begin, 3)) for first, end in spans[: 2 * BATCHES]]
            for spans in stages
        ],
    }


def _now(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


async def grid(me: Rank) -> None:
    """Stages of two ranks each where there are four: tokens a second, and how much of the bound that is.

    The bound is the slowest stage, busy all the time. `BATCHES` are under way, more than stages, so that
    the time between a result and the next step of its requests is not the device's.
    """
    tp = 2 if me.ranks >= 4 else 1
    stages = me.ranks // tp
    async with lz.start(me.settings) as runtime:
        kernel = warmed(me, runtime, tp)
        async with lz.rank_group(timeout_s=120.0) as member:
            stage = TimedStage(me, member, tp=tp, batches=BATCHES)
            take = member.batched(stage.taken, name="taken")
            if member.rank:
                await member.follow()
                return
            me.row(
                what="setting", tp=tp, stages=stages, batches=BATCHES, layers=me.config.num_hidden_layers,
                attention=kernel, libraries=libraries(), awaited_path=await compiled(),
            )  # fmt: skip
            pages = pages_of(me) if me.rehearse else 64 * (-(-(1024 + 128) // PAGE) + 1)
            whole = Llama(me.config, me.weights(), kv_pool(me.config, me.device, me.like.dtype, pages, PAGE))
            with me.trying(what="grid logits"):  # while the pages of both are as they were made
                me.row(what="grid logits", **await compared(me, stage, whole, requests=2, tokens=6))
            del whole
            if me.device.type == "cuda":
                torch.cuda.empty_cache()
            numbers = itertools.count()
            for n, context in points(me):
                if me.left_s < 15 and not me.rehearse:
                    me.row(what="grid", requests=n * BATCHES, context=context, error="no time left")
                    continue
                with me.trying(what="grid", requests=n * BATCHES, context=context):
                    found: list[dict[str, Any]] = []
                    for turn in range((1 if me.rehearse else ROUNDS) + 1):
                        await take(next(numbers), n, context)
                        step_ms, _ = await crowd(stage, n * BATCHES, context, tokens_of(me), behind=True)
                        said = await take(next(numbers), n, context)
                        if turn:
                            seen = overlap(said[::tp])  # the first rank of each stage
                            of_bound = round(BATCHES * max(seen["stages_ms"]) / step_ms, 4)
                            found.append({"step_ms": step_ms, "of_bound": of_bound, **seen})
                    median = sorted(found, key=lambda each: each["of_bound"])[len(found) // 2]
                    me.row(
                        what="grid", requests=n * BATCHES, rows=n, context=context, needs=NEEDS, **median,
                        tokens_per_s=round(n * BATCHES / median["step_ms"] * 1e3, 1), rounds=found,
                        captures=stage.by_point[n, context].captures,
                    )  # fmt: skip

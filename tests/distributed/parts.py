"""What each rank runs of the tests of `layerzero.parallel`; the argument names scenarios, one after another.

Each rank prints one JSON line for each, `{"rank": r, "scenario": name, ...}`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

import layerzero as lz
from layerzero import parallel

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
EPOCHS = itertools.count()  # every scenario's rank group meets anew
WIDE, VOCABULARY, LAYERS, REQUESTS = 16, 24, 9, 8
TIMEOUT_S = 20.0


def numbers(*shape: int) -> Tensor:
    """The same numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Whole:
    """A model that one process has whole: a table, layers of a column- and a row-parallel product, a head."""

    def __init__(self) -> None:
        self.table, self.head = numbers(VOCABULARY, WIDE), numbers(VOCABULARY, WIDE)
        self.up = [numbers(4 * WIDE, WIDE + layer)[:, :WIDE].contiguous() / 8 for layer in range(LAYERS)]
        self.down = [numbers(WIDE + layer, 4 * WIDE)[:WIDE].contiguous() / 8 for layer in range(LAYERS)]

    def logits(self, ids: Tensor) -> Tensor:
        """(T, V) for ids (T,)."""
        x = self.table[ids]
        for up, down in zip(self.up, self.down, strict=True):
            x = x + (lz.sync.rms_norm(x) @ up.T).tanh() @ down.T
        return lz.sync.rms_norm(x) @ self.head.T


class Part:
    """One rank's part of it in a layout."""

    def __init__(self, layout: parallel.Layout) -> None:
        whole, group = Whole(), layout.tensor
        self.layout, self.group = layout, group

        def cut(weight: Tensor, axis: int) -> Tensor:
            return weight.chunk(group.ranks, axis)[group.rank].contiguous()

        self.table, self.head = cut(whole.table, 0), cut(whole.head, 0)
        layers = layout.layers(LAYERS)
        self.layers = [(cut(whole.up[n], 0), cut(whole.down[n], 1)) for n in layers]
        self.ran: list[int] = []
        self.before: Callable[[int], None] = lambda step: None

    def forward(self, x: Tensor | None, ids: Tensor) -> Tensor:
        """This stage's rows for the next one, or the logits."""
        self.ran.append(len(ids))
        self.before(len(self.ran))
        group = self.group
        x = group.embedding(ids, self.table) if x is None else x
        for up, down in self.layers:
            normed = group.gather_rows(lz.sync.rms_norm(x), len(ids))
            x = x + group.reduce(lz.sync.linear(lz.sync.linear(normed, up).tanh(), down))
        if not self.layout.last:
            return x
        normed = group.gather_rows(lz.sync.rms_norm(x), len(ids))
        return group.gather_columns(lz.sync.linear(normed, self.head))

    def batched(self, pipeline: parallel.Pipeline, **options: Any) -> Callable[..., Awaitable[Tensor]]:
        """`forward` as a step of all ranks."""
        return pipeline.batched(
            self.forward,
            name="forward",
            carries=lambda rows: torch.empty(self.group.share_of_rows(rows), WIDE),
            returns=lambda ids: torch.empty(len(ids), VOCABULARY),
            **options,
        )


def request_ids(number: int) -> Tensor:
    """The tokens of one request, one to three of them."""
    return torch.arange(number, number + 1 + number % 3)


def worst(number: int, logits: Tensor) -> float:
    """The largest difference from what one process computes."""
    return float((logits - Whole().logits(request_ids(number))).abs().max())


async def in_layout(tp: int, pp: int, sequence: bool = False) -> dict[str, Any]:
    """Every request twice, at once; what each rank ran and sent, and how far results are off."""
    async with lz.rank_group(epoch=next(EPOCHS), timeout_s=TIMEOUT_S) as member:
        layout = parallel.Layout(member, tp=tp, pp=pp, sequence=sequence)
        part, pipeline = Part(layout), parallel.Pipeline(layout)
        step = part.batched(pipeline)
        said: dict[str, Any] = {"layers": list(layout.layers(LAYERS))}
        if RANK:
            await member.follow()
        else:

            async def one(number: int) -> float:
                return max([worst(number, await step(number, request_ids(number))) for _ in range(2)])

            said["worst"] = max(await asyncio.gather(*map(one, range(REQUESTS))))
        stats = pipeline.stats
        return {**said, "ran": part.ran, "steps": stats.steps, "sent": stats.sent_bytes}


async def full() -> dict[str, Any]:
    """The last stage gives nothing before rank 0 has begun a batch for every stage."""
    async with lz.rank_group(epoch=next(EPOCHS), timeout_s=TIMEOUT_S) as member:
        layout = parallel.Layout(member, pp=RANKS)
        part, pipeline, store = Part(layout), parallel.Pipeline(layout), _get_default_store()
        store.set_timeout(timedelta(seconds=TIMEOUT_S))

        def gated(number: int) -> None:
            if RANK == 0 and number == RANKS:
                store.set("all stages have work", "1")
            elif layout.last and number == 1:
                store.wait(["all stages have work"])

        part.before = gated
        step = part.batched(pipeline, finish=lambda logits, ids: logits + ids.unsqueeze(1))
        if RANK:
            await member.follow()
            return {"ran": part.ran}
        tasks = [asyncio.ensure_future(step(n, request_ids(n))) for n in range(REQUESTS)]
        while len(part.ran) < RANKS:  # noqa: ASYNC110  the first batches begin on a worker's thread
            await asyncio.sleep(0.001)
        with_name: list[str] = []
        try:
            await step(1, request_ids(1))
        except ValueError as error:
            with_name.append(str(error))
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        again = await step(0, request_ids(0))
        offs = [
            worst(n, got - request_ids(n).unsqueeze(1))
            for n, got in enumerate([again, *results[1:]])
            if isinstance(got, Tensor)
        ]
        cancelled = isinstance(results[0], asyncio.CancelledError)
        return {"worst": max(offs), "results": len(offs), "cancelled": cancelled, "refused": with_name}


async def ahead() -> dict[str, Any]:
    """A stage that computes waits for its next rows already, and rank 0 forms its next batch meanwhile."""
    async with (
        lz.start(lz.Settings(inference=True), scoped=True) as runtime,
        lz.rank_group(epoch=next(EPOCHS), timeout_s=TIMEOUT_S) as member,
    ):
        layout = parallel.Layout(member, pp=RANKS)
        part, pipeline, until = Part(layout), parallel.Pipeline(layout), time.monotonic() + TIMEOUT_S
        seen: list[bool] = []

        def gated(number: int) -> None:
            if number == 1:
                while not (came := prepares_next()) and time.monotonic() < until:
                    time.sleep(0.001)
                seen.append(came)

        def prepares_next() -> bool:
            if RANK:
                return len(pipeline._posted) > 0
            return runtime.device().loop_drivers.by_loop[loop].batcher.inflight_batches == 2

        part.before = gated
        step = part.batched(pipeline)
        loop = asyncio.get_running_loop()
        if RANK:
            await member.follow()
            return {"came": seen}
        results = await asyncio.gather(*(step(n, request_ids(n)) for n in range(REQUESTS)))
        off = max(worst(n, logits) for n, logits in enumerate(results))
        limits = runtime.device().loop_drivers.by_loop[loop].batcher.limits
        return {"came": seen, "worst": off, "inflight afterwards": limits.max_inflight_batches}


async def dies() -> dict[str, Any]:
    """A stage in the middle dies without a word in its second step."""
    async with lz.rank_group(epoch=next(EPOCHS), timeout_s=TIMEOUT_S) as member:
        layout = parallel.Layout(member, pp=RANKS)
        part, pipeline = Part(layout), parallel.Pipeline(layout)
        part.before = lambda number: os._exit(9) if RANK == 1 and number == 2 else None
        step = part.batched(pipeline)
        if RANK:
            await member.follow()
            return {}
        tasks = [asyncio.ensure_future(step(n, request_ids(n))) for n in range(REQUESTS)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await step("later", request_ids(0))
        except lz.DeviceLostError as error:
            results.append(error)
        kinds = [type(result).__name__ for result in results]
        return {"kinds": kinds, "under_way": len(pipeline._late)}


async def other_checkpoint() -> dict[str, Any]:
    """Rank 1 brings another file of the same names and shapes; no process group is made."""
    folder = Path(os.environ["CHECKPOINTS"]) / ("other" if RANK == 1 else "same")
    made: list[Any] = []
    dist.new_group = lambda *ranks, **options: made.append(ranks)
    async with lz.rank_group(epoch=next(EPOCHS), timeout_s=TIMEOUT_S) as member:
        weights = parallel.FolderWeights(folder)
        try:
            parallel.Layout(member, pp=RANKS, same={"checkpoint": weights.digest})
        except lz.ConsistencyError as error:
            return {"made": len(made), "said": str(error), "reason": error.context["reason"]}
    return {"made": len(made)}


async def experts() -> dict[str, Any]:
    """Every rank has its own rows, rank 1 none, and two of the experts; one row chose an expert twice."""
    count, hidden = 2 * RANKS, 24
    rows = numbers(RANKS * 5, WIDE)
    x = rows[RANK * 5 : RANK * 5 + (0 if RANK == 1 else 5 - RANK)]
    w_up, w_down = numbers(count, 2 * hidden, WIDE), numbers(count, WIDE, hidden)
    chosen, scores = lz.sync.select_experts(x @ numbers(WIDE, count), top_k=3)
    expected = lz.sync.fused_experts(x, chosen, scores, w_up, w_down)
    group = parallel.TensorGroup(RANK, RANKS, dist.group.WORLD)
    own = slice(2 * RANK, 2 * RANK + 2)
    out = parallel.expert_parallel_moe(group, x, chosen, scores, w_up[own], w_down[own])
    off = float((out - expected).abs().max()) if len(x) else 0.0
    return {"rows": len(x), "off": off / float(expected.abs().max()) if len(x) else 0.0}


SCENARIOS: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
    "full": full,
    "ahead": ahead,
    "dies": dies,
    "other checkpoint": other_checkpoint,
    "experts": experts,
    **{
        f"{tp} x {pp}{' sequence' * sequence}": partial(in_layout, tp, pp, sequence)
        for tp, pp, sequence in itertools.product((1, 2, 4), (1, 2, 4), (False, True))
    },
}


async def scenario(name: str) -> dict[str, Any]:
    """Run one scenario on this rank."""
    async with lz.start(lz.Settings(inference=True)):
        return await SCENARIOS[name]()


def main() -> int:
    """Print what this rank saw; errors of the library are results here."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    for name in sys.argv[1].split(","):
        try:
            said = asyncio.run(scenario(name))
        except Exception as error:
            said = {"error": type(error).__name__, "message": str(error)}
        # One write: ranks share a pipe, and an unbuffered print writes the end of its line apart.
        sys.stdout.write(json.dumps({"rank": RANK, "scenario": name, **said}) + "\n")
        sys.stdout.flush()
    # gloo waits for its peers when it is taken down, and some of them may be gone.
    os._exit(0)


if __name__ == "__main__":
    main()

"""What agreeing costs between ranks with a GPU each, and a rank that differs, caught before its sum."""

from __future__ import annotations

import asyncio
import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

import layerzero as lz
from benchmarks import gang as measured
from benchmarks.ganging.rank import Rank
from benchmarks.harness import distribution
from layerzero.actors.group.config import GroupConfig
from layerzero.actors.group.rank_group import RankGroup
from layerzero.actors.group.steps import Steps
from layerzero.actors.remote.stores import TorchStore

WIDE = 256


async def agree(me: Rank) -> None:
    """Plans agreed and manifests sent: what `benchmarks/gang.py` measures, on this rank's device."""
    store = _get_default_store()
    with lz.start(me.settings) as runtime:
        gang = RankGroup(
            runtime.device(),
            TorchStore(store, "agree"),
            GroupConfig(rank=me.rank, ranks=me.ranks, timeout_s=60.0),
        )
        agreed, walk, gate = gang.join(), Steps(gang), measured.Gate(store, me.rank, me.ranks)
        taken = measured.agreements(gang, agreed, 60 if me.rehearse else 300, gate)
        if me.rank == 0:
            me.row(what="agreement", ranks=me.ranks, **distribution(taken))
        costs = measured.manifests(walk, 160 if me.rehearse else 1600, gate)
        found = {name: distribution(values) for name, values in costs.items()}
        me.row(what="manifest", rank=me.rank, requests=len(measured.REQUESTS), **found)
        gate()
        if me.rank:
            walk.next_step()
        walk.close()


async def reordered(me: Rank) -> None:
    """Every other rank takes the same requests in another order; without a manifest sums would be wrong."""
    order = list(range(6))
    await _divergent(me, order[::-1] if me.rank % 2 else order, other_choice=False)


async def other_choice(me: Rank) -> None:
    """Every other rank chooses a kernel for something that rank 0 does not run."""
    await _divergent(me, list(range(6)), other_choice=True)


async def _divergent(me: Rank, order: list[int], other_choice: bool) -> None:
    weight = torch.ones(8, WIDE, device=me.device, dtype=me.like.dtype)
    entered: list[int] = []
    noticed: list[tuple[str, float]] = []
    begun = 0.0

    def broken(why: str) -> None:
        noticed.append((why, time.perf_counter()))
        me.row(what="divergence noticed", rank=me.rank, why=why[:300], steps_entered=len(entered))
        # Whoever waits in a collective for this rank is let go, on this side and on the others.
        threading.Thread(target=_abort, args=(me,), daemon=True).start()

    def step(x: Tensor) -> Tensor:
        out: Tensor = lz.sync.linear(x, weight)
        if other_choice and me.rank % 2 and len(entered) == 1:
            lz.sync.rms_norm(out)
        entered.append(len(x))
        dist.all_reduce(out)
        return out

    wrong = 0
    error: BaseException | None = None
    async with lz.start(me.settings):
        lz.sync.linear(torch.ones(2, WIDE, device=me.device, dtype=me.like.dtype), weight)
        try:
            async with lz.rank_group(timeout_s=30.0, on_failure=broken) as gang:
                together = gang.batched(step, send=False)
                for turn in range(3):

                    async def one(number: int, turn: int = turn) -> float:
                        row = torch.full((1, WIDE), float(number + 1), device=me.device, dtype=me.like.dtype)
                        out = await together(turn * 100 + number, row)
                        return float((await lz.to_host(out.float()))[0, 0]) - (number + 1) * WIDE * me.ranks

                    mine = order if turn else list(range(6))
                    begun = time.perf_counter()
                    off = [abs(by) > 1 for by in await asyncio.gather(*map(one, mine))]
                    wrong += 0 if noticed else sum(off)  # what a broken collective leaves is no sum
        except (lz.LayerZeroError, RuntimeError) as raised:
            error = raised
        me.row(
            what="divergence",
            planted="other choice" if other_choice else "other order",
            rank=me.rank,
            raised=type(error).__name__ if error is not None else None,
            message=str(error)[:600] if error is not None else None,
            noticed=noticed[0][0][:300] if noticed else None,
            noticed_after_s=noticed[0][1] - begun if noticed else None,
            steps_entered=len(entered),
            wrong_sums=wrong,
        )


def _abort(me: Rank) -> None:
    if me.device.type != "cuda":
        if me.rank:  # gloo lets its peers go when one of them leaves
            dist.destroy_process_group()
        return
    dist.group.WORLD._get_backend(me.device).abort()  # type: ignore[union-attr]

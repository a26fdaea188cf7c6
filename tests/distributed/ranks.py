"""What the ranks of the rank group tests run; the argument names scenarios, one after another.

Each rank prints one JSON line for each, `{"rank": r, "scenario": name, ...}`. A column-parallel product of a
small matrix, summed by gloo's all-reduce, stands for a tensor-parallel model: rows that meet strangers give
wrong sums, and no error.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

import layerzero as lz
from layerzero.actors.device.memory import WorkspaceBudget
from layerzero.actors.group import plan, steps
from layerzero.ops import table as ops_table
from layerzero.spec.capability import Capability
from layerzero.spec.kernel import Efficiency, Kernel
from tests.distributed import trees

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WIDE, OUT, REQUESTS, TREES = 64, 8, 6, 40
GIB = 1 << 30
TIMEOUT_S = 30.0
HANGS_S = 8.0  # that rank 0 lives on without a word, unless the others have been told
EPOCHS = itertools.count()  # every scenario's rank group meets anew


class Shard:
    """This rank's columns of a product: partial sums, which the all-reduce completes."""

    def __init__(self) -> None:
        whole = torch.linspace(-1, 1, OUT * WIDE).view(OUT, WIDE)
        self.own = whole.chunk(RANKS, dim=1)[RANK].contiguous()
        self.whole = whole
        self.ran: list[int] = []
        self.kernels: set[str] = set()
        self.pause, self.alter, self.op = 0.0, 0, ""

    def step(self, x: Tensor) -> Tensor:
        """(N, OUT): the product of rows (N, WIDE) with the whole matrix."""
        self.ran.append(len(x))
        if self.alter and RANK % 2 and len(self.ran) == self.alter:
            # "late" alters once, by an op that no rank has run; "known" by one that all have, twice.
            x = lz.sync.rms_norm(x) if self.op == "late" else lz.sync.linear(x, torch.eye(WIDE)) * 2
        out: Tensor = lz.sync.linear(x.chunk(RANKS, dim=1)[RANK].contiguous(), self.own)
        chosen = lz.last_selection()
        self.kernels.add(chosen.kernel if chosen is not None else "")
        time.sleep(self.pause)
        dist.all_reduce(out)
        return out


def row(number: int) -> Tensor:
    """The input of one request."""
    return torch.full((1, WIDE), float(number + 1)) * torch.linspace(0, 1, WIDE)


def worst(results: list[tuple[int, Tensor]], shard: Shard) -> float:
    """The largest difference of any result from what one process computes."""
    return max(float((out - row(n) @ shard.whole.T).abs().max()) for n, out in results)


async def all_requests(step: Any, order: list[int], named: bool) -> list[tuple[int, Tensor]]:
    """One coroutine a request, started in `order`."""

    async def one(number: int) -> tuple[int, Tensor]:
        return number, await (step(number, row(number)) if named else step(row(number)))

    return list(await asyncio.gather(*map(one, order)))


async def together(runtime: lz.Runtime, shard: Shard, **options: Any) -> dict[str, Any]:
    """Rank 0 leads, everybody else follows."""
    async with lz.rank_group(epoch=next(EPOCHS), timeout_s=TIMEOUT_S, **options) as group:
        step = group.batched(shard.step)
        if RANK:
            await group.follow()
        results = [] if RANK else await all_requests(step, list(range(REQUESTS)), named=True)
        agreed = {"measured": group.agreed_plan.measured, "groups": sorted(group.agreed_plan.kernels)}
        said = {"ran": shard.ran, "plan": group.plan_digest, **agreed}
        return said if RANK else {**said, "worst": worst(results, shard)}


async def altered(runtime: lz.Runtime, shard: Shard, op: str) -> dict[str, Any]:
    """Odd ranks run an op more in their fourth step; what rank 0's callers got of each step."""
    shard.alter, shard.op = 4, op
    got: list[float | str] = []
    async with lz.rank_group(epoch=next(EPOCHS), timeout_s=TIMEOUT_S) as group:
        step = group.batched(shard.step)
        if RANK:
            await group.follow()
            return {}
        for number in range(8):
            try:
                got.append(worst([(number, await step(number, row(number)))], shard))
            except Exception as error:
                got.append(f"{type(error).__name__}: {error}")
    return {"got": got}


async def leaves(runtime: lz.Runtime, shard: Shard) -> dict[str, Any]:
    """Rank 1 meets an error of its own before the collective that rank 0 waits in."""
    async with lz.rank_group(epoch=next(EPOCHS), timeout_s=TIMEOUT_S, on_failure=broken) as group:

        def step(x: Tensor) -> Tensor:
            if RANK and len(shard.ran) == 2:
                raise ValueError("the pages of rank 1 are gone")
            return shard.step(x)

        called = group.batched(step, name="step")
        if RANK:
            await group.follow()
        for number in range(8):
            await called(number, row(number))
    return {}


async def hangs(runtime: lz.Runtime, shard: Shard, follows: bool) -> dict[str, Any]:
    """Rank 0 hangs up in a step whose sum a follower waits for, and lives on: gloo says nothing."""
    told: list[str] = []
    said: dict[str, Any] = {"told": told}
    steps.ENDS_BY_ITSELF_S = 0.2

    def step(x: Tensor) -> Tensor:
        if not RANK:
            raise ValueError("rank 0 leaves before its sum")
        dist.all_reduce(x)
        return x

    try:
        async with lz.rank_group(epoch=next(EPOCHS), timeout_s=TIMEOUT_S, on_failure=told.append) as group:
            called = group.batched(step, send=follows)
            if RANK and follows:
                await group.follow()
            await called(0, row(0))
    except Exception as error:
        said |= {"error": type(error).__name__, "message": str(error)}
    await lz.linear(torch.ones(1, WIDE), torch.ones(OUT, WIDE))  # the device goes on
    store, key = _get_default_store(), f"told {follows}"
    if RANK:
        store.set(key, "1")
    else:
        said["heard"] = False
        with suppress(dist.DistStoreError):  # it has not been told
            store.wait([key], timedelta(seconds=HANGS_S))
            said["heard"] = True
    return said


async def alone(runtime: lz.Runtime, shard: Shard, order: list[int]) -> dict[str, Any]:
    """No rank group: every rank batches by itself, rank 1 in another order."""
    step = lz.batched(shard.step)
    return {"ran": shard.ran, "worst": worst(await all_requests(step, order, named=False), shard)}


async def compared(
    runtime: lz.Runtime,
    shard: Shard,
    order: list[int],
    split: bool,
    on_failure: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Every rank batches by itself, and compares with rank 0's step message."""
    on_failure = on_failure or broken
    async with lz.rank_group(epoch=next(EPOCHS), timeout_s=TIMEOUT_S, on_failure=on_failure) as group:
        step = group.batched(shard.step, send=False)
        pieces = [order[:2], order[2:]] if split else [order]
        results = [pair for piece in pieces for pair in await all_requests(step, piece, named=True)]
        return {"ran": shard.ran, "worst": worst(results, shard)}


def broken_by_both(why: str) -> None:
    """As `broken`, of two ranks that cannot go on: when both have said so."""
    if RANK % 2:
        _get_default_store().set(f"refused {RANK}", why)
        _get_default_store().wait(["refused 1", "refused 3"], timedelta(seconds=TIMEOUT_S))
        dist.destroy_process_group()


def broken(why: str) -> None:
    """A follower that cannot go on leaves its collectives, so that nobody waits for it in them."""
    if RANK:
        dist.destroy_process_group()


async def killed(runtime: lz.Runtime, shard: Shard) -> dict[str, Any]:
    """Rank 1 dies without a word in the middle of a run."""
    async with lz.rank_group(epoch=next(EPOCHS), timeout_s=TIMEOUT_S) as group:
        step = group.batched(shard.step)
        if RANK:
            asyncio.get_running_loop().call_later(0.5, os._exit, 9)
            await group.follow()
        started = time.monotonic()
        try:
            while time.monotonic() - started < 30:
                await all_requests(step, list(range(REQUESTS)), named=True)
                await asyncio.sleep(0.01)
        except Exception as error:
            return {"error": type(error).__name__, "seconds": time.monotonic() - started}
        return {"error": ""}


def stated(workspace: int, request: Any) -> int:
    """What a planted kernel says it allocates."""
    return workspace


async def poor(runtime: lz.Runtime, shard: Shard) -> dict[str, Any]:
    """Each rank has less free memory than the one before; the best kernel needs more than the last has."""
    reference = ops_table.get("linear").reference
    for name, workspace, launch_us in (("big", 8 * GIB, 0.001), ("small", 0, 0.01)):
        runtime.add_kernel(
            Kernel(
                id=f"planted.linear.{name}",
                op="linear",
                backend="planted",
                capability=Capability(source="a test", features=frozenset({"bias"})),
                load=lambda: reference,
                efficiency=Efficiency(flops=1.0, bandwidth=1.0, launch_us=launch_us, source="a test"),
                workspace_bytes=partial(stated, workspace),
                tie_break_order=0,
            )
        )
    own = runtime.device("cpu")
    free = (64, 40, 20, 5)[RANK - RANKS] * GIB
    own._inputs.budget = WorkspaceBudget(own.device, own.hardware, own.clock.now, lambda _: free)
    own.workspace_budget.refresh(own.settings)
    own.refresh()
    shard.step(row(0))
    alone, shard.kernels = sorted(shard.kernels), set()
    said = await together(runtime, shard)
    return {**said, "alone": alone, "kernels": sorted(shard.kernels)}


async def measured(runtime: lz.Runtime, shard: Shard) -> dict[str, Any]:
    """Estimates say that one planted kernel is the best, each rank's file of measurements another."""
    for name, launch_us in (("guessed", 0.001), ("timed", 50.0)):
        runtime.add_kernel(planted(name, launch_us))
    own = runtime.device("cpu")
    own.wait_for_costs()
    own.refresh()
    said = await together(runtime, shard)
    return {**said, "kernels": sorted(shard.kernels)}


def planted(name: str, launch_us: float) -> Kernel:
    """A product that is the reference's, and that estimates price by `launch_us` alone."""
    reference = ops_table.get("linear").reference
    return Kernel(
        id=f"planted.linear.{name}",
        op="linear",
        backend="planted",
        capability=Capability(source="a test", features=frozenset({"bias"})),
        load=lambda: reference,
        efficiency=Efficiency(flops=1.0, bandwidth=1.0, launch_us=launch_us, source="a test"),
        tie_break_order=0,
    )


async def trees_together(runtime: lz.Runtime) -> dict[str, Any]:
    """Every rank verifies the trees that rank 0 drafted; what each of them found."""
    async with lz.rank_group(epoch=next(EPOCHS), timeout_s=TIMEOUT_S) as group:
        target, whole = trees.Target(RANK, RANKS), trees.Target(0, 1)
        walk = group.batched(target.walk, name="walk")
        if RANK:
            await group.follow()
        else:
            drafts = {number: trees.tree(number) for number in range(TREES)}
            target.drafted = {number: q for number, (_, q) in drafts.items()}
            whole.drafted = target.drafted
            await asyncio.gather(*(walk(n, n, own, 100 + n) for n, (own, _) in drafts.items()))
            with group.using_model("alone"):
                whole.walk(list(drafts), [own for own, _ in drafts.values()], [100 + n for n in drafts])
    said: dict[str, Any] = {"trees": [found for _, found in sorted(target.said.items())]}
    return said if RANK else {**said, "alone": [found for _, found in sorted(whole.said.items())]}


async def reorder_both(runtime: lz.Runtime, shard: Shard) -> dict[str, Any]:
    """Odd ranks batch in another order."""
    order = list(range(REQUESTS))[:: -1 if RANK % 2 else 1]
    return await compared(runtime, shard, order, split=False, on_failure=broken_by_both)


PLANTED: dict[str, Callable[[lz.Runtime, Shard], Awaitable[dict[str, Any]]]] = {
    "alter-late": partial(altered, op="late"),
    "alter-known": partial(altered, op="known"),
    "leaves": leaves,
    "reorder-both": reorder_both,
    "hangs-comparing": partial(hangs, follows=False),
    "hangs-following": partial(hangs, follows=True),
}


async def scenario(name: str) -> dict[str, Any]:
    """Run one scenario on this rank."""
    shard = Shard()
    order = list(range(REQUESTS))
    other = order[::-1] if RANK == 1 else order
    perfdb = os.environ.get("PLANTED_PERFDB")
    async with lz.start(lz.Settings(inference=True, perfdb=perfdb, memory_headroom=0.0)) as runtime:
        if name == "trees":
            return await trees_together(runtime)
        if name == "together":
            return await together(runtime, shard)
        if name == "measured":
            return await measured(runtime, shard)
        if name in PLANTED:
            return await PLANTED[name](runtime, shard)
        if name == "poor":
            return await poor(runtime, shard)
        if name == "invariant":
            said = await together(runtime, shard, tp_invariant=True)
            return {**said, "kernels": sorted(shard.kernels)}
        if name == "training":
            return await together(runtime, shard, mode="training")
        if name == "alone":
            return await alone(runtime, shard, other)
        if name == "reordered":
            return await compared(runtime, shard, other, split=False)
        if name == "split":
            return await compared(runtime, shard, order, split=RANK == 1)
        if name == "compared":
            return await compared(runtime, shard, order, split=False)
        return await killed(runtime, shard)


def plant_version(planted: str) -> None:
    """Let this rank say that it is another version of the library."""
    plan.VERSION = planted  # type: ignore[attr-defined]


def main() -> int:
    """Print what this rank saw; errors of the library are results here."""
    if "PLANTED_VERSION" in os.environ:
        plant_version(os.environ["PLANTED_VERSION"])
    torch.set_num_threads(int(os.environ.get("PLANTED_THREADS", "1")))
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    for name in sys.argv[1].split(","):
        try:
            said: dict[str, Any] = asyncio.run(scenario(name))
        except Exception as error:
            said = {"error": type(error).__name__, "message": str(error)}
        # One write: ranks share a pipe, and an unbuffered print writes the end of its line apart.
        sys.stdout.write(json.dumps({"rank": RANK, "scenario": name, **said}) + "\n")
        sys.stdout.flush()
    # gloo waits for its peers when it is taken down, and some of them may be gone.
    os._exit(0)


if __name__ == "__main__":
    main()

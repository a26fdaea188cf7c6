"""Models of rank groups on a device pool, imported by name in the devices: partial sums that an all-reduce
completes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import layerzero as lz
from layerzero.actors.group.join import RankHandle
from layerzero.actors.rpc.server import current_server
from layerzero.ops import table as ops_table
from layerzero.runtime import current
from layerzero.spec.capability import Capability
from layerzero.spec.kernel import Efficiency, Kernel
from tests.kernels import EVERYTHING

WIDE, OUT = 64, 8
WHOLE = torch.linspace(-1, 1, OUT * WIDE).view(OUT, WIDE)


class Shard:
    """One rank's columns of a product."""

    def __init__(self, member: RankHandle) -> None:
        self.member = member
        self.own = WHOLE.chunk(member.ranks, dim=1)[member.rank].contiguous()
        self.ran: list[int] = []
        self.step = member.batched(self.summed, name="summed")
        self._number = 0

    def summed(self, x: Tensor) -> Tensor:
        """(N, OUT): the product of rows (N, WIDE) with the whole matrix."""
        self.ran.append(len(x))
        out: Tensor = lz.sync.linear(
            x.chunk(self.member.ranks, dim=1)[self.member.rank].contiguous(), self.own
        )
        dist.all_reduce(out)
        return out

    def number(self) -> int:
        """A request's number of its own."""
        self._number += 1
        return self._number


def shard(member: RankHandle) -> Shard:
    torch.set_num_threads(1)
    return Shard(member)


def broken(member: RankHandle) -> Shard:
    if member.rank == 1:
        raise ValueError("no weights on this rank")
    return Shard(member)


async def plant(path: str) -> None:
    """Register a kernel that is chosen before all others, and hangs once on rank 1 when there is the file."""
    reference = ops_table.get("linear").reference

    def linear(*args: Any) -> Any:
        if current_server().name == "gpu-1" and os.path.exists(path):
            os.unlink(path)
            time.sleep(600)
        return reference(*args)

    current().add_kernel(
        Kernel(
            id="planted.linear.hang",
            op="linear",
            backend="planted",
            capability=Capability(source="a test", features=EVERYTHING, mixed_dtypes=True),
            load=lambda: linear,
            efficiency=Efficiency(flops=1.0, bandwidth=1.0, launch_us=0.001, source="a test"),
            tie_break_order=0,
        )
    )


def row(state: list[int], seed: int) -> Tensor:
    """What a step is asked after some tokens of a seeded text."""
    return torch.full((1, WIDE), float(sum(state) % 13 + seed % 5 + 1)) * torch.linspace(0, 1, WIDE)


def token(out: Tensor, state: list[int], seed: int) -> int:
    return int((seed * 31 + sum(state) * 7 + len(state) + round(float(out.sum()))) % 997)


def text(seed: int, n: int) -> list[int]:
    """The whole text, computed in one process."""
    state: list[int] = []
    while len(state) < n:
        state.append(token(row(state, seed) @ WHOLE.T, state, seed))
    return state


async def tokens(
    model: Shard, seed: int, n: int, pause: float = 0.0, so_far: list[int] | None = None
) -> AsyncIterator[int]:
    """A seeded text, every token through one step of the rank group."""
    number, state = model.number(), list(so_far or ())
    while len(state) < n:
        state.append(token(await model.step(number, row(state, seed)), state, seed))
        yield state[-1]
        await asyncio.sleep(pause)


async def facts(model: Shard) -> dict[str, Any]:
    """Of rank 0: what it is and what it ran."""
    member = model.member
    return {"ranks": member.ranks, "plan": member.plan_digest, "pid": os.getpid(), "ran": model.ran}


async def wrong(model: Shard) -> None:
    raise KeyError("the caller's own")


async def pid() -> int:
    return os.getpid()

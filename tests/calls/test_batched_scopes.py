"""Ops inside a batched function obey the policy and the runtime of its callers, alone or in company."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.calls.blocking import context_runtime
from tests.native.twins import both_paths as both_paths

WEIGHT = torch.randn(8, 8)
SEEN: list[tuple[int, str, bool]] = []


def projected(x: Tensor) -> Tensor:
    """Notes its rows, the kernel that its op took and whether its runtime is a strict one."""
    out = lz.sync.linear(x, WEIGHT)
    chosen = lz.last_selection()
    assert chosen is not None
    SEEN.append((len(x), chosen.kernel, context_runtime().settings.strict))
    return out


async def called(around: AbstractContextManager[Any]) -> Tensor:
    with around:
        return await lz.batched(projected)(torch.randn(1, 8))


@pytest.mark.asyncio
async def test_a_policy_around_the_callers_holds_in_their_run() -> None:
    """Callers of one policy share a run under it, whoever made it; those of another run apart from them."""
    async with lz.start(lz.Settings(warm="off")):
        for _ in range(2):  # of a known kind too
            SEEN.clear()
            crowd = [lz.disable("torch") for _ in range(3)] + [nullcontext() for _ in range(4)]
            await asyncio.gather(*map(called, crowd))
            assert sorted(rows for rows, _, _ in SEEN) == [3, 4]
            under = {rows: kernel for rows, kernel, _ in SEEN}
            assert not under[3].startswith("torch.") and under[4].startswith("torch.")


@pytest.mark.asyncio
async def test_a_run_alone_obeys_too() -> None:
    """Also where nobody may share it, on whatever thread."""
    async with lz.start(lz.Settings(warm="off", batching="off")):
        SEEN.clear()
        await asyncio.gather(*(called(lz.disable("torch")) for _ in range(3)))
        assert [kernel.startswith("torch.") for _, kernel, _ in SEEN] == [False] * 3


@pytest.mark.asyncio
async def test_a_function_sees_the_runtime_of_its_callers() -> None:
    """In a scoped runtime the ops of a shared run are that one's; beside it the process's is found again."""
    async with lz.start(lz.Settings(warm="off")):
        SEEN.clear()
        async with lz.start(lz.Settings(strict=True, warm="off"), scoped=True):
            await asyncio.gather(*(called(nullcontext()) for _ in range(3)))
        await asyncio.gather(*(called(nullcontext()) for _ in range(2)))
        assert [(rows, strict) for rows, _, strict in SEEN] == [(3, True), (2, False)]


def ruler(x: Tensor, tags: list[str]) -> list[tuple[int, torch.device]]:
    """Where it makes tensors, beside the rows of its run."""
    return [(len(x), torch.arange(3).device) for _ in tags]


@pytest.mark.asyncio
@pytest.mark.parametrize("limit_us", [0.0, 1e9], ids=["worker", "loop"])
async def test_a_function_makes_tensors_where_its_callers_would(limit_us: float) -> None:
    """A default device around the callers holds in their run, on whatever thread; the others have none."""

    async def call(around: AbstractContextManager[Any]) -> tuple[int, torch.device]:
        rows = torch.ones(1, 2, device="cpu")
        with around:
            return await lz.batched(ruler)(rows, "tag")

    async with lz.start(lz.Settings(warm="off", inline_limit_us=limit_us)):
        for _ in range(2):  # of a known kind too
            crowd = [torch.device("meta") for _ in range(3)] + [nullcontext() for _ in range(4)]
            seen = await asyncio.gather(*map(call, crowd))
            assert [place.type for _, place in seen] == ["meta"] * 3 + ["cpu"] * 4
            assert limit_us or [rows for rows, _ in seen] == [3] * 3 + [4] * 4  # short calls run at once
            assert (await call(torch.device("meta")))[1] == torch.device("meta")
            with lz.disable("torch"):
                assert (await call(torch.device("meta")))[1] == torch.device("meta")
        assert torch.arange(3).device == torch.device("cpu")

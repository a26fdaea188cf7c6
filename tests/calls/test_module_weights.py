"""Weights of modules want a gradient by default: what that costs is said, each way out shares launches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from tests.native.twins import both_paths as both_paths


class Layer(torch.nn.Module):
    """A module whose forward is plain torch, and another that awaits an op."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]

    async def one(self, x: Tensor) -> Tensor:
        return await lz.linear(x, self.inner.weight, self.inner.bias)


async def crowd(call: Any, size: int = 8) -> list[Tensor]:
    outs: list[Tensor] = []
    for _ in range(3):  # the first time nothing is known of the kind
        outs += await asyncio.gather(*(call(torch.randn(1, 8)) for _ in range(size)))
    return outs


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "runs_alone" in r.getMessage()]


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["one", "batched", "wants"])
async def test_an_inference_runtime_shares_runs_over_weights_that_want_a_gradient(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of ops and of functions, for rows that want one too: nobody can go backward, and nothing is said."""
    layer = Layer()
    async with lz.start(lz.Settings(inference=True, warm="off")) as runtime:
        call = layer.one if how == "one" else lz.batched(layer.forward)
        if how == "wants":
            outs = [
                out
                for _ in range(3)
                for out in await asyncio.gather(
                    *(call(torch.randn(1, 8, requires_grad=True)) for _ in range(8))
                )
            ]
        else:
            outs = await crowd(call)
        assert runtime.device("cpu").loop_drivers.stats().sizes == {8: 3}
    assert not any(out.requires_grad for out in outs) and said(caplog) == []


@pytest.mark.asyncio
async def test_that_weights_keep_ops_apart_is_said_once_with_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By default calls run alone; without grad, or frozen, they meet, and nothing is said."""
    layer = Layer()
    async with lz.start(lz.Settings(warm="off")) as runtime:
        stats = runtime.device("cpu").loop_drivers
        with torch.no_grad():
            await crowd(layer.one)
        assert stats.stats().sizes == {8: 3} and said(caplog) == []
        assert all(out.requires_grad for out in await crowd(layer.one))
        apart = stats.stats()
        assert apart.sizes == {8: 3, 1: 24 - apart.at_once}
        (message,) = said(caplog)
        for way in ("torch.no_grad()", "requires_grad_(False)", "Settings(inference=True)", "linear"):
            assert way in message
        layer.requires_grad_(False)
        await crowd(layer.one)
        assert stats.stats().sizes == {8: 6, 1: 24 - apart.at_once} and len(said(caplog)) == 1

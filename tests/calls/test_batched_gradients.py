"""A batched function over weights that want a gradient: nobody shares a graph, so each may go backward."""

from __future__ import annotations

import asyncio

import pytest
import torch

import layerzero as lz
from tests.native.twins import both_paths as both_paths


class Step(torch.nn.Module):
    """A module that notes the rows of its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.runs: list[int] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.runs.append(x.shape[0])
        return torch.tanh(self.inner(x)), x


async def crowd(step: Step, size: int = 4) -> list[torch.Tensor]:
    """The first results of callers that came together."""
    calls = [lz.batched(step.forward)(torch.randn(1, 4)) for _ in range(size)]
    return [first for first, _ in await asyncio.gather(*calls)]


async def without(step: Step) -> None:
    """One caller without a gradient."""
    with torch.no_grad():
        await lz.batched(step.forward)(torch.randn(1, 4))


@pytest.mark.asyncio
async def test_every_caller_goes_backward_by_itself() -> None:
    """Under a gradient calls run alone from the first crowd on; without one they share a run."""
    step = Step()
    for _ in range(3):
        for out in await crowd(step):
            out.sum().backward()
    assert step.runs == [1] * 12
    step.runs.clear()
    await asyncio.gather(*[without(step) for _ in range(4)])
    await asyncio.gather(*[without(step) for _ in range(4)])
    assert step.runs == [4, 4]


@pytest.mark.asyncio
async def test_frozen_weights_are_shared_again_and_thawed_ones_not() -> None:
    """What the last run gave decides, whatever the weights wanted when the function was wrapped."""
    step = Step()
    await crowd(step)
    step.requires_grad_(False)
    await crowd(step)
    step.runs.clear()
    await crowd(step)
    await crowd(step)
    assert step.runs == [4, 4]
    step.requires_grad_(True)
    await crowd(step)
    step.runs.clear()
    for out in await crowd(step):
        out.sum().backward()
    assert step.runs == [1] * 4


@pytest.mark.asyncio
async def test_that_nothing_is_shared_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not under `no_grad`, where runs are shared; and not at every call."""
    step = Step()
    await without(step)
    assert not caplog.records
    await crowd(step)
    await crowd(step)
    said = [record.getMessage() for record in caplog.records if "batched.runs_alone" in record.getMessage()]
    assert len(said) == 1 and "Step.forward" in said[0] and "no_grad" in said[0]


@pytest.mark.asyncio
async def test_a_list_with_graphs_is_noticed_like_a_tensor() -> None:
    """After one run that shows it, callers of a function that returns a list go backward by themselves."""
    hidden = {"weight": torch.randn(4, 4, requires_grad=True)}  # where nobody looks before the first run

    def listed(x: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        return list((x @ hidden["weight"]).tanh().split(counts))

    call = lz.batched(listed, key="listed")
    await asyncio.gather(*[call(torch.randn(1, 4)) for _ in range(4)])
    for _ in range(2):
        for out in await asyncio.gather(*[call(torch.randn(1, 4)) for _ in range(4)]):
            hidden["weight"].grad = None
            out.sum().backward()
            assert hidden["weight"].grad is not None

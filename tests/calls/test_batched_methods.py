"""Methods as batched functions: objects live as long as their wrapping, classes may wrap their own."""

from __future__ import annotations

import asyncio
import copy
import gc
import weakref
from typing import Any

import pytest
import torch

import layerzero as lz


class Model:
    """Adds its own number; `step` is wrapped where it is written."""

    def __init__(self, number: float) -> None:
        self.number = number
        self.runs: list[list[int]] = []

    @lz.batched
    def step(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Adds the number."""
        self.runs.append(counts)
        return x + self.number

    def plain(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        self.runs.append(counts)
        return x + self.number


class Child(Model):
    """Overrides the method and calls the one above."""

    @lz.batched
    def step(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        self.runs.append(counts)
        return x - self.number

    def above(self) -> Any:
        return super().step


ONE = torch.ones(1, 2)


@pytest.mark.asyncio
async def test_a_wrapping_keeps_its_object() -> None:
    """Of an object that nobody else holds: kept, and called where it is made."""
    async with lz.start(scoped=True):
        step = lz.batched(Model(2.0).plain)
        gc.collect()
        for _ in range(2):  # of a known kind too
            outs = await asyncio.gather(*(step(ONE) for _ in range(3)))
            assert [out[0, 0].item() for out in outs] == [3.0] * 3
        first, second = await asyncio.gather(lz.batched(Model(3.0).plain)(ONE), Model(4.0).step(ONE))
        assert (first[0, 0].item(), second[0, 0].item()) == (4.0, 5.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["kept", "decorated", "own attribute"])
async def test_no_table_keeps_an_object_that_was_let_go(kind: str) -> None:
    """Neither the wrappings, nor what was learned of them, nor the batcher's memory of their groups."""

    async def used() -> weakref.ref[Any]:
        model: Any = Model(2.0)
        step = lz.batched(model.plain) if kind == "kept" else model.step
        if kind == "own attribute":
            model.batched = lz.batched(model.plain)
            step = model.batched
        await asyncio.gather(*(step(ONE) for _ in range(4)))
        return weakref.ref(model)

    async with lz.start(scoped=True):
        gone = await used()
        for _ in range(1000):
            gc.collect()
            if gone() is None:
                break
            await asyncio.sleep(0.01)  # the worker's thread may still be leaving the run
        assert gone() is None


@pytest.mark.asyncio
async def test_a_class_wraps_its_own_method() -> None:
    """Each object has its own batches; callers of one share a run, and a subclass has its own method."""
    async with lz.start(scoped=True):
        models = Model(1.0), Model(2.0), Child(3.0)
        outs = await asyncio.gather(*(model.step(ONE) for model in models for _ in range(3)))
        assert [out[0, 0].item() for out in outs] == [2.0] * 3 + [3.0] * 3 + [-2.0] * 3
        assert [model.runs for model in models] == [[[1, 1, 1]]] * 3
        assert (await models[2].above()(ONE))[0, 0].item() == 4.0
        assert (await Model.step.__get__(models[0])(ONE))[0, 0].item() == 2.0
        copied = copy.deepcopy(models[0])
        copied.number = 9.0
        assert (await copied.step(ONE))[0, 0].item() == 10.0
    assert models[0].step is models[0].step and models[0].step is not models[1].step
    assert Model.step.__doc__ == "Adds the number."


def test_what_was_learned_of_a_method_outlives_its_wrapping() -> None:
    """Of one that is wrapped anew for each call, too."""
    model = Model(1.0)
    lz.batched(model.plain).us_per_row = 2.5
    model.step.us_per_row = 3.5
    gc.collect()
    assert (lz.batched(model.plain).us_per_row, model.step.us_per_row) == (2.5, 3.5)
    assert lz.batched(Model(1.0).plain).us_per_row == float("inf")


@pytest.mark.asyncio
async def test_what_is_no_plain_function_is_the_same_from_every_object() -> None:
    """A bound method or an object that is called binds to nothing, as in any class."""
    other = Model(5.0)
    holder: Any = type("Holder", (), {"step": lz.batched(other.plain)})
    async with lz.start(scoped=True):
        assert (await holder().step(ONE))[0, 0].item() == 6.0

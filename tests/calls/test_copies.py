"""What a program copies or sends computes with what was copied: functions of ops, batched methods."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
from collections.abc import Awaitable

import pytest
import torch
from torch import Tensor

import layerzero as lz


class Model(torch.nn.Module):
    """A model that keeps its wrappings, as one that a server copies for each of its versions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.step = lz.batched(self.rows)
        self.called = lz.batched(self.inner)
        self.of_all = lz.batched(torch.relu)

    def rows(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("name", ["step", "called"])
def test_the_copy_of_a_model_batches_its_own_weights(name: str) -> None:
    """Not those of the model that was copied, which may be gone."""
    model = Model()
    copied = copy.deepcopy(model)
    copied.inner.weight.data.zero_()
    copied.inner.bias.data.zero_()

    async def main(*models: Model) -> list[Tensor]:
        with torch.no_grad():
            calls: list[Awaitable[Tensor]] = [getattr(m, name)(torch.ones(1, 4)) for m in models]
            return await asyncio.gather(*calls)

    of_model, of_copy = asyncio.run(main(model, copied))
    assert of_model.any() and not of_copy.any()
    assert lz.batched(copied.rows) is copied.step and copied.of_all is model.of_all
    del model
    gc.collect()
    assert asyncio.run(crowd(copied)) == [1] * 3


async def crowd(model: Model) -> list[int]:
    """The rows of callers whose results want a gradient, which a copy knows before its first run."""
    outs = await asyncio.gather(*(model.step(torch.ones(1, 4)) for _ in range(3)))
    for out in outs:
        out.sum().backward()
    return [len(out) for out in outs]


@pytest.mark.parametrize("function", [lz.linear, lz.sync.linear])
def test_functions_of_ops_are_pickled_by_name(function: object) -> None:
    """So that a pool of processes may be given one, and a saved module may hold one."""
    assert pickle.loads(pickle.dumps(function)) is function

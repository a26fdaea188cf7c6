"""Reading results back on the CPU: what leaves a batch is compacted."""

from __future__ import annotations

import asyncio
import pickle

import pytest
import torch

import layerzero as lz


@pytest.mark.asyncio
async def test_a_row_that_leaves_carries_no_strangers_rows() -> None:
    """A pickled result is as large as itself, not as its batch."""
    weight = torch.randn(64, 64)

    async def one() -> torch.Tensor:
        return await lz.to_host(await lz.linear(torch.randn(1, 64), weight))

    async with lz.start(lz.Settings(inline_limit_us=1.0)):
        rows = await asyncio.gather(*[one() for _ in range(64)])
    assert all(row.untyped_storage().nbytes() == 64 * 4 for row in rows)
    assert len(pickle.dumps(rows[0])) < 2000


@pytest.mark.asyncio
async def test_a_tensor_of_its_own_is_not_copied() -> None:
    """What is compact already comes back as it is, without its graph."""
    x = torch.randn(3, 4, requires_grad=True)
    out = await lz.to_host(x)
    assert out.data_ptr() == x.data_ptr()
    assert not out.requires_grad


@pytest.mark.asyncio
async def test_what_is_no_tensor_is_named() -> None:
    """TypeError says what came."""
    with pytest.raises(TypeError, match=r"tensor needs a torch\.Tensor, got list"):
        await lz.to_host([1.0])  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_every_task_that_waits_for_a_read_gets_it() -> None:
    """One after another, also behind one that was cancelled; `wait_for` makes a task of it each time."""
    reading = lz.to_host(torch.arange(3))
    cancelled = asyncio.ensure_future(reading)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    first = await asyncio.create_task(reading)
    for wait in (asyncio.create_task(reading), asyncio.wait_for(reading, 30.0), reading):
        assert await wait is first
    reading.close()
    assert await asyncio.wait_for(reading, 30.0) is first


@pytest.mark.asyncio
async def test_a_step_that_writes_over_its_argument_changes_nothing_that_was_read() -> None:
    """Results of a loop ahead are kept as they were, as where a device's copies are."""

    async def step(ids: torch.Tensor) -> torch.Tensor:
        return ids.add_(1)

    async with lz.start():
        ahead = lz.run_ahead(step, torch.tensor([5]), max_steps=3)
        assert [int(ids) for ids in [each async for each in ahead]] == [6, 7, 8]


@pytest.mark.asyncio
async def test_a_step_that_cannot_be_called_is_named() -> None:
    """By its argument, before anything is awaited."""
    with pytest.raises(TypeError, match="step needs a function of the ids, got int"):
        await anext(lz.run_ahead(3, torch.ones(1)))  # type: ignore[arg-type]

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

"""An error that several callers share tells each of them of the batch, and nothing of the others."""

from __future__ import annotations

import asyncio

import pytest
import torch

import layerzero as lz
from tests.native.twins import both_paths as both_paths


def failing(rows: torch.Tensor) -> torch.Tensor:
    """No rows for anybody."""
    raise ValueError("no rows")


async def context(mishap: Exception | None) -> BaseException | None:
    """The context of the error of a call that is made while `mishap` is handled, as its caller finds it."""

    async def caught() -> BaseException | None:
        try:
            await lz.batched(failing)(torch.ones(1, 2))
        except ValueError as error:
            return error.__context__
        raise AssertionError("the call needs to fail")

    try:
        if mishap is not None:
            raise mishap
    except KeyError:
        return await caught()
    return await caught()


@pytest.mark.asyncio
async def test_nobody_sees_what_another_caller_was_handling() -> None:
    """The context of a shared error is the caller's own, in whatever order they are answered."""
    mishaps = [KeyError("first"), None, KeyError("second"), None]
    for _ in range(2):
        seen = await asyncio.gather(*[context(mishap) for mishap in mishaps])
        assert all(found in (None, own) for found, own in zip(seen, mishaps, strict=True))

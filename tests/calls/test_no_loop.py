"""Awaiting where no event loop runs, and spawning what is no coroutine: refused in words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.runtime import current
from tests.native.twins import both_paths as both_paths

ROWS, WEIGHT = torch.randn(2, 8), torch.randn(4, 8)


def doubled(rows: torch.Tensor) -> torch.Tensor:
    """Rows times two."""
    return rows * 2


async def known(make: Callable[[], Any]) -> None:
    """Await calls of one kind alone and together, so that both paths know them."""
    await make()
    for _ in range(2):
        await asyncio.gather(make(), make())


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize(
    "make", [lambda: lz.linear(ROWS, WEIGHT), lambda: lz.batched(doubled)(ROWS)], ids=["op", "batched"]
)
def test_without_a_loop_the_error_says_what_is_missing(
    make: Callable[[], Coroutine[Any, Any, torch.Tensor]], seen: bool
) -> None:
    """A call that no event loop drives names what is needed and the blocking ops, known or not."""
    if seen:
        asyncio.run(known(make))
    with pytest.raises(RuntimeError, match=r"needs a running event loop of asyncio or trio.*lz\.sync"):
        make().send(None)


@pytest.mark.asyncio
@pytest.mark.parametrize("wrong", [doubled, 3, None])
async def test_spawn_names_what_is_no_coroutine(wrong: Any) -> None:
    """A function that was not called, or anything else without steps, is a TypeError."""
    with pytest.raises(TypeError, match=f"coro needs a coroutine, got {type(wrong).__name__}"):
        current().spawn(wrong)

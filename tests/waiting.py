"""Waiting for what takes as long as the machine lets it."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

LIMIT_S = float(os.environ.get("LZ_WAIT_S", "240"))  # a mutation waits for less: it often never comes
EVERY_S = 0.005


async def until(condition: Callable[[], Any]) -> None:
    """Wait until `condition()`, awaited where it can be, holds. Raises: AssertionError: it never does."""
    now = asyncio.get_running_loop().time
    end = now() + LIMIT_S
    while now() < end:
        holds = condition()
        if await holds if inspect.isawaitable(holds) else holds:
            return
        await asyncio.sleep(EVERY_S)
    raise AssertionError(f"the condition did not come true within {LIMIT_S} s")


async def within(awaited: Awaitable[T]) -> T:
    """The result of `awaited`. Raises: AssertionError: it never ends."""
    try:
        return await asyncio.wait_for(awaited, LIMIT_S)
    except TimeoutError:
        raise AssertionError(f"{awaited} did not end within {LIMIT_S} s") from None

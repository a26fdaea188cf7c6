"""Waiting for what takes as long as the machine lets it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

LIMIT_S = 240.0
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

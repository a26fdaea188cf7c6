"""What a task that is alone awaits before it may run inline: one turn of its loop."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerzero.scheduler.loop_driver import LoopDriver


class YieldOnce:
    """One loop turn, taken only by a task that is alone on its front; see `LoopDriver.yield_once`."""

    __slots__ = ("_driver",)

    def __init__(self, driver: LoopDriver) -> None:
        self._driver = driver

    def __await__(self) -> Generator[None, None, bool]:
        driver = self._driver
        task = asyncio.current_task(driver.loop)
        if driver.sole_caller is None or driver.sole_caller is not task:
            return False
        yield
        if driver.sole_caller is not task:
            return False
        driver._inline_us = 0.0
        return True

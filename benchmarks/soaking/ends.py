"""How calls end: each of them once, as answered, as a named error, or as cancelled."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

import layerzero as lz

ANSWERED, WRONG, CANCELLED, STUCK, UNNAMED = "answered", "wrong", "cancelled", "stuck", "unnamed error"
NAMED = (lz.LayerZeroError, httpx.TransportError)  # what a caller is told of by name
LONGEST_S = 240.0  # a call that takes longer has no end


def kind_of(error: Exception) -> str:
    """The name of an error, as the record counts it."""
    if not isinstance(error, NAMED):
        return f"{UNNAMED}: {type(error).__name__}: {error}"[:300]
    kind = type(error).__name__
    if isinstance(error, lz.DeviceLostError):
        return f"{kind}, {'nothing of it ran' if error.retryable else 'it had begun'}"
    return kind


class Ends:
    """The calls of one kind of load: begun, ended and how, minute by minute."""

    def __init__(self, name: str, began_s: float) -> None:
        self.name = name
        self.begun = 0
        self.ended: Counter[str] = Counter()
        self.minutes: list[Counter[str]] = []
        self.tasks: set[asyncio.Future[Any]] = set()  # under way
        self._began_s = began_s

    async def call(
        self,
        work: Awaitable[Any],
        right: Callable[[Any], bool] = lambda value: True,
        cancel_s: float | None = None,
    ) -> str:
        """Await `work`; how it ended, which is counted once.

        `right` judges the answer; `cancel_s` seconds later its caller gives it up.
        """
        self.begun += 1
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        loop = asyncio.get_running_loop()
        cancel = None if cancel_s is None else loop.call_later(cancel_s, task.cancel)
        try:
            await asyncio.wait({task}, timeout=LONGEST_S)
            how = self._how(task, right)
        finally:
            self.tasks.discard(task)
            if cancel is not None:
                cancel.cancel()
        self.count(how)
        return how

    @staticmethod
    def _how(task: asyncio.Future[Any], right: Callable[[Any], bool]) -> str:
        if not task.done():
            task.cancel()
            return STUCK
        if task.cancelled():
            return CANCELLED
        error = task.exception()
        if error is None:
            return ANSWERED if right(task.result()) else WRONG
        if not isinstance(error, Exception):
            raise error
        return kind_of(error)

    def count(self, how: str) -> None:
        """One call has ended so."""
        self.ended[how] += 1
        minute = int((time.monotonic() - self._began_s) // 60)
        while len(self.minutes) <= minute:
            self.minutes.append(Counter())
        self.minutes[minute][how] += 1

    def cut(self, draw: random.Random) -> bool:
        """Let one caller give up what it waits for; False where nobody waits."""
        waited = [task for task in self.tasks if not task.done()]
        return bool(waited) and draw.choice(waited).cancel()

    def checks(self) -> dict[str, bool]:
        """What has to hold once nothing is under way."""
        bad = [how for how in self.ended if how in (WRONG, STUCK) or how.startswith(UNNAMED)]
        return {
            f"{self.name}: every call ended once": self.begun == sum(self.ended.values()) and not self.tasks,
            f"{self.name}: every end is an answer, a named error or a cancel": not bad,
            f"{self.name}: calls were answered": self.ended[ANSWERED] > 0,
        }

    def record(self) -> dict[str, Any]:
        """What is written down."""
        return {
            "begun": self.begun,
            "ended": dict(self.ended),
            "a minute": [dict(each) for each in self.minutes],
        }

"""A driver's two timers: for the nearest deadline of a call that waits, and for the end of a hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context


class DueTimer:
    """Calls `action` at the time that was set last; one timer of the loop at most."""

    __slots__ = ("_action", "_context", "_handle", "_loop", "at")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, action: Callable[[], object], context: Context
    ) -> None:
        self._loop = loop
        self._action = action
        self._context = context
        self._handle: asyncio.TimerHandle | None = None
        self.at = float("inf")  # infinite where nothing is set

    def set(self, at: float) -> None:
        """Be due at `at`, and no more at any other time."""
        if at == self.at:
            return
        self.cancel()
        self.at = at
        if at < float("inf"):
            self._handle = self._loop.call_at(at, self._on_time, context=self._context)

    def _on_time(self) -> None:
        self._handle = None
        self._action()

    def cancel(self) -> None:
        """Be due no more."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self.at = None, float("inf")

"""Calls that run in their callers' own steps, and the turns of the loop that they leave to others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from typing import TYPE_CHECKING, Any, Final

from layerzero.scheduler.core.at_once import GroupCosts
from layerzero.scheduler.core.pending_call import Batch, PendingCall
from layerzero.scheduler.modes.task_modes import TASK_MODES
from layerzero.scheduler.modes.torch_modes import restore

if TYPE_CHECKING:
    from layerzero.scheduler.loop_driver import LoopDriver

CALLERS_PER_TURN: Final = 4  # that may use up `max_inline_us` in one turn of the loop


class InlineRuns:
    """What a driver's callers run themselves.

    `used_us` is the work done so since the loop's last turn; `max_us` bounds it for a caller that is alone.
    Of several that need no queue each runs on until `CALLERS_PER_TURN` times that is used; then they pause,
    and continue in their order in the turns that follow.
    """

    __slots__ = (
        "_at_once", "_driver", "_paused", "_shares", "_shares_due", "groups", "inflight", "limit_us", "live",
        "max_us", "stats", "used_us",
    )  # fmt: skip

    def __init__(self, driver: LoopDriver, max_us: float, inflight: list[Batch]) -> None:
        self._driver = driver
        self._at_once = at_once = driver.batcher.at_once
        self.inflight = inflight  # the driver's batches elsewhere
        self.stats = driver.batcher.stats
        self.groups: dict[Hashable, GroupCosts] = {} if at_once is None else at_once.groups
        self.live: set[int] = set() if at_once is None else at_once.live  # the callers that there are
        self.set_max(max_us)
        self.used_us = 0.0
        self._paused: deque[Any] = deque()  # futures of callers that had their share of this turn
        self._shares, self._shares_due = 1, 0

    def set_max(self, max_us: float) -> None:
        """Bound what a caller does alone in a turn, in microseconds, and by it what several do."""
        self.max_us = max_us
        self.limit_us = CALLERS_PER_TURN * max_us

    def ready(self) -> bool:
        """Whether a call of `groups` may run now, in its caller's step.

        Not beside a batch of the worker: its caller may have left it behind, and it still writes.
        """
        return self.used_us < self.limit_us and not self.inflight

    async def share(self, call: PendingCall) -> bool:
        """Wait for a share of another turn, and for a batch of the worker; whether the call may run now."""
        driver = self._driver
        modes = call.modes
        leaks = modes.grad is not driver.ambient_grad and not modes.inference and not TASK_MODES.is_isolated()
        if driver.state != "running" or leaks:
            return False
        paused = driver.loop.create_future()
        self._paused.append(paused)
        driver.schedule_tick()
        await paused
        if not call.unchanged():
            restore(modes)
        return not self.inflight

    def joins(self, key: Hashable, costs: GroupCosts) -> bool:
        """Whether the current task, which is new to a group, may run its calls at once too; it is counted."""
        if self._at_once is None:
            return False
        self._at_once.call_ran(key, costs, self._driver.caller_here())
        return key in self.groups

    def run(self, call: PendingCall, run: Callable[[PendingCall], Any]) -> Any:
        """Run a call of `groups`; what it returns."""
        key = call.op if call.batch_key is None else call.batch_key
        driver, costs, at_once = self._driver, self.groups.get(key), self._at_once
        caller = driver.caller_here()
        self.stats.at_once += 1
        if costs is None or at_once is None:  # others have joined meanwhile
            self.used_us += call.expected_us
            return run(call)
        if costs.untimed:
            began_s = time.perf_counter()
            value = run(call)
            took_us = (time.perf_counter() - began_s) * 1e6
            self.used_us += took_us
            at_once.timed(key, costs, took_us)
            if not costs.untimed:
                driver.batcher.families.timed(key, at_once)
        else:
            value = run(call)
            self.used_us += costs.alone_us
        at_once.call_ran(key, costs, caller)
        return value

    def on_turn(self) -> bool:
        """A turn of the loop has passed: callers that paused continue; whether batches wait for them.

        Batches wait until each that was paused has had one share and has called, unless a call hurries.
        """
        used_us, self.used_us = self.used_us, 0.0
        if not self._paused or self.inflight:  # the end of what is in flight brings a turn
            return False
        # Nothing says when a share is used up: where the last ones took little, more continue at once.
        self._shares = 2 * self._shares if used_us < self.limit_us / 2 else 1
        shares = min(self._shares, self._shares_due, len(self._paused))
        for _ in range(shares):
            self._shares_due -= 1
            paused = self._paused.popleft()
            if not paused.done():
                paused.set_result(None)
        self._driver.schedule_tick()
        return shares > 0 and not self._driver.batcher.hurries

    def on_batches(self) -> None:
        """What could run has run: those that are paused have their share before the next batch."""
        self._shares_due = len(self._paused)

    def close(self, error: Exception | None) -> None:
        """No caller continues: what is paused fails with `error`; None where its loop is closed."""
        for paused in () if error is None else self._paused:
            if not paused.done():
                paused.set_exception(error)
        self._paused.clear()


class YieldAwaitable:
    """One loop turn, taken only by a task that is alone on its front; see `LoopDriver.yield_once`."""

    __slots__ = ("_driver",)

    def __init__(self, driver: LoopDriver) -> None:
        self._driver = driver

    def __await__(self) -> Generator[None, None, bool]:
        driver = self._driver
        task = driver._current_task(driver.loop)
        if driver.sole_caller is None or driver.sole_caller is not task:
            return False
        yield
        if driver.sole_caller is not task:
            return False
        driver.inline.used_us = 0.0
        return True

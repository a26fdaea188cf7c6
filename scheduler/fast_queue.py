"""The compiled way of a call into its batch queue, and Python's answer where nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from layerzero.native import FAST_PATH
from layerzero.scheduler.core.at_once import GroupCosts
from layerzero.scheduler.core.batcher import Batcher
from layerzero.scheduler.core.limits import BatcherStats, BatchLimits
from layerzero.scheduler.core.pending_call import Caller, PendingCall
from layerzero.scheduler.core.round_robin import BatchQueue, ProgramPoint, RoundRobin
from layerzero.scheduler.inline_runs import InlineRuns
from layerzero.scheduler.loop_driver import LoopDriver


class FastQueue:
    """The shortest way into a batcher's queue.

    `try_submit(driver, call)` queues a call without a deadline whose caller, batch queue and program point
    are known, and returns whether it did; where it did not, `LoopDriver.submit` does the work.
    """

    __slots__ = ("try_submit",)

    def __init__(self) -> None:
        self.try_submit: Callable[[LoopDriver, PendingCall], bool] = _not_queued

    def install(self, module: Any) -> None:
        """Queue by the compiled twin, or with None not at all."""
        if module is None:
            self.try_submit = _not_queued
            return
        module.attributes(
            LoopDriver, Batcher, BatchQueue, ProgramPoint, Caller, BatchLimits, BatcherStats, RoundRobin,
            InlineRuns, GroupCosts,
        )  # fmt: skip
        self.try_submit = module.queue


def _not_queued(driver: LoopDriver, call: PendingCall) -> bool:
    return False


FAST_QUEUE: Final = FastQueue()
FAST_PATH.on_ready(FAST_QUEUE.install)

"""Why a batch was launched when it was, and what it was held for: the batcher's own words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from layerzero.scheduler.core.expected_callers import ExpectedCallers
    from layerzero.scheduler.core.pending_call import PendingCall
    from layerzero.scheduler.core.round_robin import BatchQueue

TURN: Final = "turn"  # the callers that were resumed have had their turn
ALL_HERE: Final = "all_here"  # every caller that takes part has called
LIMIT: Final = "limit"  # a batch holds no more
GRACE_OVER: Final = "grace_over"  # waiting any longer for who is away costs more than a batch of its own
DEVICE_DRY: Final = "device_dry"  # the device would be idle, and who is away costs less than that
NOBODY_EXPECTED: Final = "nobody_expected"  # who is away calls elsewhere next
ALONE: Final = "alone"  # its call shares no batch
PRIORITY: Final = "priority"  # of a call that overtakes
DEADLINE: Final = "deadline"  # of a call that would have started too late
REASONS: Final = (
    TURN, ALL_HERE, LIMIT, GRACE_OVER, DEVICE_DRY, NOBODY_EXPECTED, ALONE, PRIORITY, DEADLINE
)  # fmt: skip
DEVICE_RUNS: Final = "device_runs"  # the device still runs the last batch of callers that are away
CALLERS_READ: Final = "callers_read"  # it has run it, and they read its results
CAUSES: Final = (DEVICE_RUNS, CALLERS_READ)  # of holds


def launch_reason(queue: BatchQueue, chosen: PendingCall | None, expected: ExpectedCallers | None) -> str:
    """Why the batch that was taken from `queue` just now, for `chosen` where it overtook, is launched now."""
    if chosen is not None:
        return DEADLINE if chosen.priority else PRIORITY
    if queue.solo:
        return ALONE
    if queue.count:
        return LIMIT
    return TURN if expected is None else expected.released.get(queue, ALL_HERE)

"""Which calls of a queue go into one batch, and the batch's way through their states."""

from __future__ import annotations

from itertools import islice
from typing import Any

from layerzero.native import FAST_PATH
from layerzero.scheduler.core.limits import BatchLimits
from layerzero.scheduler.core.pending_call import (
    CANCELLED,
    DETACHED,
    DONE,
    FAILED,
    RUNNING,
    Failure,
    PendingCall,
)
from layerzero.scheduler.core.round_robin import BatchQueue


def takes_all(queue: BatchQueue, limits: BatchLimits) -> bool:
    """Whether one batch takes all that waits in `queue`."""
    return (
        queue.count <= limits.max_batch_size
        and queue.tokens <= limits.max_num_batched_tokens
        and queue.bytes <= limits.max_batch_bytes
        and not queue.solo
    )


def as_many_as_fit(
    queue: BatchQueue, limits: BatchLimits, first: PendingCall | None, now_s: float
) -> list[PendingCall]:
    """As many pending calls as the caps allow, at least one; none overtakes one of its class.

    `first`, where it is given, comes before all others.
    """
    limit = 1 if queue.solo else limits.max_batch_size
    order = in_order(queue, limits, now_s)
    if first is not None:
        order = [first, *(call for call in order if call is not first)]
    tokens = size = 0
    for index, call in enumerate(order):
        tokens += call.tokens
        size += call.bytes
        if index and (
            index >= limit or tokens > limits.max_num_batched_tokens or size > limits.max_batch_bytes
        ):
            return order[:index]
    return order


def in_order(queue: BatchQueue, limits: BatchLimits, now_s: float) -> list[PendingCall]:
    """The first calls of a queue, best class first, oldest first inside one; more than one batch takes."""
    queues = [waiting for waiting in queue.by_priority if waiting]
    if len(queues) == 1:
        waiting = queues[0]
        return (
            list(waiting)
            if len(waiting) <= limits.max_batch_size
            else list(islice(waiting, limits.max_batch_size + 1))
        )
    aging_s = limits.priority_aging_s

    def order_key(call: PendingCall) -> tuple[int, int]:
        risen = int((now_s - call.submitted_at) / aging_s) if aging_s else 2
        return max(0, call.priority - risen), call.seq

    return sorted(
        (call for waiting in queues for call in islice(waiting, limits.max_batch_size + 1)), key=order_key
    )


def begin(calls: list[PendingCall]) -> tuple[float, float, int, float]:
    """Mark pending calls as running; the sum and the least of their submission times, their tokens and
    microseconds."""
    native = FAST_PATH.module
    totals: tuple[float, float, int, float] | None = native.begin(calls) if native is not None else None
    return _begin(calls) if totals is None else totals


def _begin(calls: list[PendingCall]) -> tuple[float, float, int, float]:
    since: list[float] = []
    tokens, expected_us = 0, 0.0
    for call in calls:
        call.state = RUNNING
        call.point = None  # type: ignore[assignment]  # read of queued calls alone
        since.append(call.submitted_at)
        tokens += call.tokens
        expected_us += call.expected_us
    return sum(since), min(since), tokens, expected_us


def land(calls: list[PendingCall], outcomes: list[Any]) -> tuple[int, int]:
    """Give pending calls their outcomes; how many are values, and how many no caller waits for."""
    native = FAST_PATH.module
    counts: tuple[int, int] | None = native.land(calls, outcomes, Failure) if native is not None else None
    return _land(calls, outcomes) if counts is None else counts


def _land(calls: list[PendingCall], outcomes: list[Any]) -> tuple[int, int]:
    values = cancelled = 0
    for call, outcome in zip(calls, outcomes, strict=True):
        call.args = ()
        if call.state == DETACHED:
            call.state = CANCELLED
            cancelled += 1
            continue
        call.value = outcome
        if outcome.__class__ is Failure:
            call.state = FAILED
        else:
            call.state = DONE
            values += 1
    return values, cancelled

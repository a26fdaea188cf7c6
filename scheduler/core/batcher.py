"""The batcher: which waiting calls run next, decided without a loop, a clock or a thread.

Every method takes `now` in seconds; a driver feeds it events and runs the batches it hands out. The rule is
"one turn, then sweep": after a batch the callers it resumed get one turn to submit their next call, then
slots are served in the order in which they first appeared: a sweep in program order picks up who it passes.

All waiting calls of a group may join whichever of its slots is served. Where callers are away with a device
that answers early, what they will ask next is held for them (`expected_callers.py`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Set
from typing import Any

from layerzero.scheduler.core.at_once import ImmediateGroups
from layerzero.scheduler.core.batch_filling import as_many_as_fit, begin, in_order, land, takes_all
from layerzero.scheduler.core.deadlines import Deadlines
from layerzero.scheduler.core.expected_callers import ExpectedCallers
from layerzero.scheduler.core.families import Families
from layerzero.scheduler.core.launch_reasons import launch_reason
from layerzero.scheduler.core.limits import BatcherStats as BatcherStats
from layerzero.scheduler.core.limits import BatchLimits as BatchLimits
from layerzero.scheduler.core.pending_call import (
    CANCELLED,
    DETACHED,
    EXPIRED,
    FAILED,
    NEW,
    QUEUED,
    REJECTED,
    RUNNING,
    WAITING,
    Batch,
    Caller,
    PendingCall,
)
from layerzero.scheduler.core.round_robin import BatchQueue, ProgramPoint, RoundRobin

SAME_TIME_S = 1e-7  # what the times of calls may be later than the first one, together, to count as one time
_NEWEST = 0.125  # weight of the newest batch in the running mean of batch times: about the last eight count


class Batcher:
    """The queue in front of one device."""

    __slots__ = (
        "_last_was_urgent", "_turn_due", "_urgent", "_waiting_for_room", "at_once", "deadlines",
        "deferred_until", "draining", "expected_callers", "families", "inflight_batches", "limits",
        "mean_batch_s", "queued", "queued_bytes", "round_robin", "running_calls", "stats",
    )  # fmt: skip

    def __init__(self, limits: BatchLimits | None = None) -> None:
        self.limits = limits or BatchLimits()
        self.stats = BatcherStats()
        self.round_robin = RoundRobin(self.limits.max_program_points)
        self.expected_callers: ExpectedCallers | None = None  # of a device that answers before it has run
        self.at_once: ImmediateGroups | None = None  # where a call may also run on its caller's thread
        self.families = Families(self.round_robin)
        # When `next_batch` may find what it held back; infinite where it held nothing.
        self.deferred_until = math.inf
        self.queued = self.queued_bytes = self.inflight_batches = self.running_calls = 0
        self.mean_batch_s = 0.0
        self.draining = False
        self._turn_due = False
        self._last_was_urgent = False
        self._waiting_for_room: OrderedDict[PendingCall, None] = OrderedDict()
        self._urgent: dict[PendingCall, None] = {}
        self.deadlines = Deadlines()

    @property
    def unfinished(self) -> int:
        """Calls that have not ended: waiting for room, queued, or running."""
        return self.stats.submitted - self.stats.ended

    @property
    def next_deadline(self) -> float:
        """The nearest deadline of a pending call that has not started; infinite without one."""
        return self.deadlines.nearest

    @property
    def hurries(self) -> bool:
        """Whether a call that waits has a deadline or the first priority."""
        return bool(self._urgent or self.deadlines.by_seq)

    @property
    def retry_after_s(self) -> float:
        """About how long the queue takes to drain."""
        return max(self.mean_batch_s * (len(self.round_robin.active_points) + 1), 1e-3)

    # -- events ------------------------------------------------------------------------------------

    def submit(self, call: PendingCall, now_s: float) -> bool:
        """Take a new pending call; False where it was rejected (the queue is full, or the batcher drains)."""
        if call.state != NEW:
            raise ValueError("a pending call is submitted once")
        stats = self.stats
        stats.submitted = call.seq = stats.submitted + 1
        call.submitted_at = now_s
        queued = self.queued
        if not queued:
            if not self.inflight_batches:
                self._turn_due = True
            full = False
        else:
            limits = self.limits
            full = queued >= limits.max_queue_size or self.queued_bytes + call.bytes > limits.max_queue_bytes
        if full or self._waiting_for_room or self.draining:
            if self.draining or self.limits.reject_when_full:
                return self._reject(call)
            call.state = WAITING
            self._waiting_for_room[call] = None
        else:
            self._enqueue(call)
        if call.deadline is not None:
            self.deadlines.watch(call)
        return True

    def on_turn(self, now_s: float) -> None:
        """A loop turn has passed since the last batch ended or the batcher left idleness."""
        self._turn_due = False

    def next_batch(self, now_s: float) -> Batch | None:
        """The next batch to run, or None: nothing waits, a turn is owed, enough is in flight, or all is
        held for expected callers, until `deferred_until` or news of the device."""
        self.deferred_until = math.inf
        if not self.queued or self._turn_due or self.inflight_batches >= self.limits.max_inflight_batches:
            return None
        expected = self.expected_callers
        deferred: Set[BatchQueue] = frozenset()
        if expected is not None:
            deferred = expected.held(self.round_robin.active_points, now_s)
        chosen = None if self._last_was_urgent else self._pick_urgent(now_s, deferred)
        queue: BatchQueue | None = None
        if chosen is None:
            queue = self.round_robin.next_queue(deferred)
            if queue is None and self._last_was_urgent:  # the round cannot continue: no call is overtaken
                chosen = self._pick_urgent(now_s, deferred)
        self._last_was_urgent = chosen is not None
        if chosen is not None:
            queue = chosen.point.queue
        if queue is None:
            if expected is not None:
                self.deferred_until = min(expected.until, self._latest_start())
            return None
        calls = self._take_batch(queue, chosen, now_s)
        self.round_robin.on_batch_taken(queue, len(calls))
        batch = self._start_batch(calls, now_s)
        batch.queue = queue
        if queue.costs is not None:
            batch.expected_us = queue.costs.expected_us(len(calls), batch.expected_us)
        batch.why = launch_reason(queue, chosen, expected)
        self.stats.count_launch(batch.why, queue.hold, now_s)
        queue.hold = None
        if expected is not None:
            batch.launch = expected.launched(calls, queue, now_s)
        return batch

    def on_batch_late(self, batch: Batch) -> None:
        """A batch has run, and its results come later: the next one may run before them."""
        batch.is_late = True
        self.inflight_batches -= 1

    def on_batch_done(self, batch: Batch, outcomes: list[Any], now_s: float) -> None:
        """A batch has ended with one outcome a pending call: its value, or `Failure`.

        Raises: ValueError: another number of outcomes than of calls.
        """
        calls = batch.calls
        if len(outcomes) != len(calls):
            raise ValueError(f"outcomes needs {len(calls)} entries, got {len(outcomes)}")
        stats = self.stats
        values, cancelled = land(calls, outcomes)
        ended = len(calls)
        stats.done += values
        stats.cancelled += cancelled
        stats.failed += ended - values - cancelled
        self.running_calls -= ended
        self.inflight_batches -= not batch.is_late
        self._turn_due = True
        took = max(now_s - batch.started, 0.0)
        queue = batch.queue
        if self.at_once is not None and queue is not None:
            self.at_once.batch_ran(batch, queue)
        if queue is not None and queue.family is not None:
            self.families.batch_ran(queue, calls, self.at_once)
        mean_s = self.mean_batch_s
        self.mean_batch_s = mean_s + _NEWEST * (took - mean_s) if mean_s else took

    def cancel(self, call: PendingCall) -> bool:
        """Its caller has gone: remove a queued pending call, detach a running one; False if it has ended."""
        state = call.state
        if state == QUEUED:
            self._remove(call)
            self._admit()
        elif state == WAITING:
            self._stop_waiting(call)
            self._admit()
        elif state == RUNNING:
            call.state = DETACHED
            self.stats.detached += 1
            return True
        else:
            return False
        call.state = CANCELLED
        call.args = ()
        self.stats.cancelled += 1
        return True

    def expire(self, now_s: float) -> list[PendingCall]:
        """End every pending call whose deadline has passed before it started; those calls."""
        expired: list[PendingCall] = []
        while self.deadlines.nearest <= now_s:
            call = self.deadlines.first()
            if call.state == QUEUED:
                self._remove(call)
            else:
                self._stop_waiting(call)
            call.state = EXPIRED
            call.args = ()
            expired.append(call)
        self.stats.expired += len(expired)
        if expired:
            self._admit()
        return expired

    def drain(self) -> None:
        """Reject what is submitted from here on; what is in the batcher still runs."""
        self.draining = True

    def abandon(self) -> list[PendingCall]:
        """End every pending call that has not started as failed; the pending calls, for their error."""
        self.draining = True
        queues = self.round_robin.all_queues()
        calls = [call for queue in queues for waiting in queue.by_priority for call in waiting]
        for call in calls:
            self._remove(call)
        calls += self._waiting_for_room
        self._waiting_for_room.clear()
        self.deadlines.by_seq.clear()
        for call in calls:
            call.state = FAILED
            call.args = ()
        self.stats.failed += len(calls)
        return calls

    # -- the queue ---------------------------------------------------------------------------------

    def _reject(self, call: PendingCall) -> bool:
        call.state = REJECTED
        call.args = ()
        self.stats.rejected += 1
        return False

    def _enqueue(self, call: PendingCall) -> None:
        key = call.batch_key
        solo = key is None
        round_robin = self.round_robin
        queues = round_robin.queues
        if solo:
            key, queues = call.op, round_robin.solo_queues
        queue = queues.get(key)
        if queue is None:
            apart = self.expected_callers is not None  # where a group's callers are expected by themselves
            queue = queues[key] = BatchQueue(key, solo, family=None if apart else self.families.of(key))
        caller = call.caller = call.caller or Caller()
        if caller.last_queue is None and self.expected_callers is not None:
            self.expected_callers.begins(caller, queue, call.submitted_at)
        predecessor: BatchQueue | None = caller.last_queue
        point = queue.points.get(predecessor)
        if point is None:
            point = round_robin.add_point(queue, predecessor, self.stats.submitted, caller.point)
        caller.last_queue = queue
        caller.point = point
        if point.count:
            point.count += 1
        else:
            point.count = 1
            round_robin.active_points[point] = None
            round_robin.activated.append(point)
            queue.active_points[point] = None
        call.point = point
        call.state = QUEUED
        priority = call.priority
        queue.by_priority[priority][call] = None
        if not priority:
            self._urgent[call] = None
        queue.count += 1
        queue.tokens += call.tokens
        size = call.bytes
        queue.bytes += size
        self.queued += 1
        self.queued_bytes += size

    def _remove(self, call: PendingCall) -> None:
        """Take one pending call out of the queue; its state is the caller's to write."""
        point: ProgramPoint = call.point
        queue = point.queue
        del queue.by_priority[call.priority][call]
        self._urgent.pop(call, None)
        self.deadlines.by_seq.pop(call.seq, None)
        queue.count -= 1
        queue.tokens -= call.tokens
        queue.bytes -= call.bytes
        if not queue.count:
            queue.hold = None
        self.queued -= 1
        self.queued_bytes -= call.bytes
        point.count -= 1
        if not point.count:
            point.last_used = self.stats.submitted
            del queue.active_points[point]
            if point.order == queue.top:
                queue.top = max((other.order for other in queue.active_points), default=-1)
            del self.round_robin.active_points[point]

    def _stop_waiting(self, call: PendingCall) -> None:
        del self._waiting_for_room[call]
        self.deadlines.by_seq.pop(call.seq, None)

    def _admit(self) -> None:
        """Move pending calls that wait for room into the queue, in order, while they fit."""
        limits, backlog = self.limits, self._waiting_for_room
        while backlog:
            call = next(iter(backlog))
            full = self.queued_bytes + call.bytes > limits.max_queue_bytes
            if self.queued and (full or self.queued >= limits.max_queue_size):
                return
            del backlog[call]
            self._enqueue(call)

    # -- the pick rule -----------------------------------------------------------------------------

    def _pick_urgent(self, now_s: float, deferred: Set[BatchQueue]) -> PendingCall | None:
        """A pending call that may not wait for the sweep; a deadline ends a hold too, a priority does not."""
        if self.deadlines.by_seq and now_s >= self._latest_start():
            return self.deadlines.first()
        if not deferred:
            return next(iter(self._urgent), None)
        return next((call for call in self._urgent if call.point.queue not in deferred), None)

    def _latest_start(self) -> float:
        """When the queued call with the nearest deadline may not wait any longer; infinite without one."""
        nearest = self.deadlines.nearest
        if nearest == math.inf:
            return math.inf
        call = self.deadlines.first()
        if call.state != QUEUED:
            return math.inf
        drains_s = self.mean_batch_s * (len(self.round_robin.active_points) + 1)
        return nearest - drains_s - call.expected_us * 1e-6

    def _take_batch(self, queue: BatchQueue, first: PendingCall | None, now_s: float) -> list[PendingCall]:
        """The calls of `queue` that go into one batch, best class first, oldest first inside a class."""
        limits = self.limits
        if takes_all(queue, limits):
            calls = in_order(queue, limits, now_s)
        else:
            calls = as_many_as_fit(queue, limits, first, now_s)
            if len(calls) < queue.count:
                for call in calls:
                    self._remove(call)
                return calls
        for waiting in queue.by_priority:
            waiting.clear()
        self.queued -= queue.count
        self.queued_bytes -= queue.bytes
        queue.count = queue.tokens = queue.bytes = 0
        pending, seq = self.round_robin.active_points, self.stats.submitted
        for point in queue.active_points:
            point.count = 0
            point.last_used = seq
            del pending[point]
        queue.active_points.clear()
        queue.top = -1
        if self._urgent or self.deadlines.by_seq:
            for call in calls:
                self._urgent.pop(call, None)
                self.deadlines.by_seq.pop(call.seq, None)
        return calls

    def _start_batch(self, calls: list[PendingCall], now_s: float) -> Batch:
        since, oldest, tokens, expected_us = begin(calls)
        stats, size = self.stats, len(calls)
        stats.wait_s += size * now_s - since
        stats.wait_max_s = max(stats.wait_max_s, now_s - oldest)
        stats.batches += 1
        stats.tokens += tokens
        stats.sizes[size] = stats.sizes.get(size, 0) + 1
        self.inflight_batches += 1
        self.running_calls += size
        if self._waiting_for_room:
            self._admit()
        batch = Batch(calls, now_s, expected_us)
        batch.tokens = tokens
        if since - oldest * size < SAME_TIME_S:
            batch.submitted_at = oldest
        return batch

"""The lane: which waiting calls run next, decided without a loop, a clock or a thread.

Every method takes `now` in seconds; a driver feeds it events and runs the batches it hands out. The rule is
"one turn, then sweep": after a batch the callers it resumed get one turn to submit their next call, then
slots are served in the order in which they first appeared, round and round. Models are loops over the same
ops, so a sweep in program order walks with the largest group of callers and picks up every one it passes.

All waiting tickets of a group may join whichever of its slots is being served. Where callers are away with
a device that answers early, what they will ask next is held for them (`expected_callers.py`).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Set
from itertools import islice
from typing import Any

from layerzero.native import HOT
from layerzero.scheduler.core.expected_callers import ExpectedCallers
from layerzero.scheduler.core.limits import Caps as Caps
from layerzero.scheduler.core.limits import Stats as Stats
from layerzero.scheduler.core.pending_call import (
    CANCELLED,
    DETACHED,
    DONE,
    EXPIRED,
    FAILED,
    NEW,
    QUEUED,
    REJECTED,
    RUNNING,
    WAITING,
    Batch,
    Caller,
    Failed,
    Ticket,
)
from layerzero.scheduler.core.round_robin import Group, Slot, Sweep

# Weight of the newest batch in the running mean of batch times: about the last eight count.
_NEWEST = 0.125


class Lane:
    """The queue in front of one device."""

    __slots__ = (
        "_backlog", "_cut_last", "_deadlines", "_seq", "_turn_owed", "_urgent", "_watched", "batch_s", "caps",
        "draining", "expected", "held_until", "in_flight", "queued", "queued_bytes", "running", "stats",
        "sweep",
    )  # fmt: skip

    def __init__(self, caps: Caps | None = None) -> None:
        self.caps = caps or Caps()
        self.stats = Stats()
        self.sweep = Sweep(self.caps.slots)
        self.expected: ExpectedCallers | None = None  # of a device that answers before it has run
        self.held_until = (
            math.inf
        )  # when `next_batch` may find what it held back; infinite where it held nothing
        self.queued = self.queued_bytes = 0
        self.in_flight = self.running = 0  # batches, tickets
        self.batch_s = 0.0
        self.draining = False
        self._seq = 0
        self._turn_owed = False
        self._cut_last = False
        # A plain dict looks through all that it has lost for its first key.
        self._backlog: OrderedDict[Ticket, None] = OrderedDict()
        self._urgent: dict[Ticket, None] = {}
        # The heap holds numbers only, so that an ended ticket is not kept alive until its deadline.
        self._deadlines: list[tuple[float, int]] = []
        self._watched: dict[int, Ticket] = {}

    @property
    def live(self) -> int:
        """Tickets that have not ended: waiting for room, queued, or running."""
        return self.stats.submitted - self.stats.ended

    @property
    def idle(self) -> bool:
        return not self.queued and not self.in_flight and not self._backlog

    @property
    def next_deadline(self) -> float:
        """The nearest deadline of a ticket that has not started; infinite without one."""
        heap, watched = self._deadlines, self._watched
        while heap and heap[0][1] not in watched:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    @property
    def retry_after_s(self) -> float:
        """About how long the queue takes to drain by one batch from every waiting slot."""
        return max(self.batch_s * (len(self.sweep.pending) + 1), 1e-3)

    # -- events ------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket, now: float) -> bool:
        """Take a new ticket; False where it was rejected (the queue is full, or the lane drains)."""
        if ticket.state != NEW:
            raise ValueError("a ticket is submitted once")
        self.stats.submitted += 1
        self._seq = ticket.seq = self._seq + 1
        ticket.at = now
        queued = self.queued
        if not queued:
            if not self.in_flight:
                self._turn_owed = True
            full = False
        else:
            caps = self.caps
            full = queued >= caps.queue_items or self.queued_bytes + ticket.bytes > caps.queue_bytes
        if full or self._backlog or self.draining:
            if self.draining or self.caps.reject:
                return self._reject(ticket)
            ticket.state = WAITING
            self._backlog[ticket] = None
        else:
            self._enqueue(ticket)
        if ticket.deadline is not None:
            self._watch(ticket)
        return True

    def turn(self, now: float) -> None:
        """A loop turn has passed since the last batch ended or the lane left idleness."""
        self._turn_owed = False

    def next_batch(self, now: float) -> Batch | None:
        """The next batch to run, or None: nothing waits, a turn is owed, enough is in flight, or all that
        waits is held for callers that are expected, until `held_until` or news of the device."""
        self.held_until = math.inf
        if not self.queued or self._turn_owed or self.in_flight >= self.caps.ahead:
            return None
        expected = self.expected
        held: Set[Group] = frozenset()
        if expected is not None:
            held = expected.held(self.sweep.pending, now)
        chosen = None if self._cut_last else self._cut_in(now, held)
        group: Group | None = None
        if chosen is None:
            group = self.sweep.next_group(held)
            if group is None and self._cut_last:  # the sweep cannot go on: nobody is overtaken
                chosen = self._cut_in(now, held)
        self._cut_last = chosen is not None
        if chosen is not None:
            group = chosen.slot.group
        if group is None:
            if expected is not None:
                self.held_until = min(expected.until, self._must_start())
            return None
        tickets = self._take(group, chosen, now)
        self.sweep.served(group, len(tickets))
        batch = self._started(tickets, now)
        if expected is not None:
            batch.launch = expected.launched(tickets, group, now)
        return batch

    def done(self, batch: Batch, outcomes: list[Any], now: float) -> None:
        """A batch has ended with one outcome a ticket: its value, or `Failed`.

        Raises: ValueError: another number of outcomes than of tickets.
        """
        tickets = batch.tickets
        if len(outcomes) != len(tickets):
            raise ValueError(f"outcomes needs {len(tickets)} entries, got {len(outcomes)}")
        stats = self.stats
        hot = HOT.module
        landed = hot.land(tickets, outcomes, Failed) if hot is not None else None
        values, left = landed if landed is not None else _land(tickets, outcomes)
        ended = len(tickets)
        stats.done += values
        stats.cancelled += left
        stats.failed += ended - values - left
        self.running -= ended
        self.in_flight -= 1
        self._turn_owed = True
        took = max(now - batch.started, 0.0)
        self.batch_s = took if not self.batch_s else self.batch_s + _NEWEST * (took - self.batch_s)

    def cancel(self, ticket: Ticket) -> bool:
        """Its caller has gone: remove a queued ticket, detach a running one; False if it has ended."""
        state = ticket.state
        if state == QUEUED:
            self._remove(ticket)
            self._admit()
        elif state == WAITING:
            self._unwait(ticket)
            self._admit()
        elif state == RUNNING:
            ticket.state = DETACHED
            self.stats.detached += 1
            return True
        else:
            return False
        ticket.state = CANCELLED
        ticket.args = ()
        self.stats.cancelled += 1
        return True

    def expire(self, now: float) -> list[Ticket]:
        """End every ticket whose deadline has passed before it started; the tickets."""
        expired: list[Ticket] = []
        while self.next_deadline <= now:
            ticket = self._watched[self._deadlines[0][1]]
            if ticket.state == QUEUED:
                self._remove(ticket)
            else:
                self._unwait(ticket)
            ticket.state = EXPIRED
            ticket.args = ()
            expired.append(ticket)
        self.stats.expired += len(expired)
        if expired:
            self._admit()
        return expired

    def drain(self) -> None:
        """Reject what is submitted from here on; what is in the lane still runs."""
        self.draining = True

    def abandon(self) -> list[Ticket]:
        """End every ticket that has not started as failed; the tickets, for their error."""
        self.draining = True
        tickets = [t for group in self.sweep.all_groups() for line in group.lines for t in line]
        for ticket in tickets:
            self._remove(ticket)
        tickets += self._backlog
        self._backlog.clear()
        self._watched.clear()
        for ticket in tickets:
            ticket.state = FAILED
            ticket.args = ()
        self.stats.failed += len(tickets)
        return tickets

    # -- the queue ---------------------------------------------------------------------------------

    def _reject(self, ticket: Ticket) -> bool:
        ticket.state = REJECTED
        ticket.args = ()
        self.stats.rejected += 1
        return False

    def _enqueue(self, ticket: Ticket) -> None:
        key = ticket.group
        solo = key is None
        sweep = self.sweep
        groups = sweep.groups
        if solo:
            key, groups = ticket.op, sweep.solos
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(key, solo)
        caller = ticket.caller
        if caller is None:
            caller = ticket.caller = Caller()
        before: Group | None = caller.last
        slot = group.slots.get(before)
        if slot is None:
            slot = sweep.new_slot(group, before, self._seq, caller.slot)
        caller.last = group
        caller.slot = slot
        if slot.count:
            slot.count += 1
        else:
            slot.count = 1
            sweep.pending[slot] = None
            sweep.arrived.append(slot)
            group.busy[slot] = None
        ticket.slot = slot
        ticket.state = QUEUED
        priority = ticket.priority
        group.lines[priority][ticket] = None
        if not priority:
            self._urgent[ticket] = None
        group.count += 1
        group.tokens += ticket.tokens
        size = ticket.bytes
        group.bytes += size
        self.queued += 1
        self.queued_bytes += size

    def _remove(self, ticket: Ticket) -> None:
        """Take one ticket out of the queue; its state is the caller's to write."""
        slot: Slot = ticket.slot
        group = slot.group
        del group.lines[ticket.priority][ticket]
        self._urgent.pop(ticket, None)
        self._watched.pop(ticket.seq, None)
        group.count -= 1
        group.tokens -= ticket.tokens
        group.bytes -= ticket.bytes
        self.queued -= 1
        self.queued_bytes -= ticket.bytes
        slot.count -= 1
        if not slot.count:
            slot.used = self._seq
            del group.busy[slot]
            del self.sweep.pending[slot]

    def _unwait(self, ticket: Ticket) -> None:
        del self._backlog[ticket]
        self._watched.pop(ticket.seq, None)

    def _admit(self) -> None:
        """Move tickets that wait for room into the queue, in order, while they fit."""
        caps, backlog = self.caps, self._backlog
        while backlog:
            ticket = next(iter(backlog))
            full = self.queued >= caps.queue_items or self.queued_bytes + ticket.bytes > caps.queue_bytes
            if full and self.queued:
                return
            del backlog[ticket]
            self._enqueue(ticket)

    def _watch(self, ticket: Ticket) -> None:
        heap, watched = self._deadlines, self._watched
        watched[ticket.seq] = ticket
        if len(heap) > 64 and len(heap) > 2 * len(watched):
            heap[:] = [entry for entry in heap if entry[1] in watched]
            heapq.heapify(heap)
        heapq.heappush(heap, (ticket.deadline or 0.0, ticket.seq))

    # -- the pick rule -----------------------------------------------------------------------------

    def _cut_in(self, now: float, held: Set[Group]) -> Ticket | None:
        """A ticket that may not wait for the sweep; a deadline ends a hold too, a priority does not."""
        if self._watched and now >= self._must_start():
            return self._watched[self._deadlines[0][1]]
        if not held:
            return next(iter(self._urgent), None)
        return next((ticket for ticket in self._urgent if ticket.slot.group not in held), None)

    def _must_start(self) -> float:
        """When the queued ticket with the nearest deadline may not wait any longer; infinite without one."""
        nearest = self.next_deadline
        if nearest == math.inf:
            return math.inf
        ticket = self._watched[self._deadlines[0][1]]
        if ticket.state != QUEUED:
            return math.inf
        return nearest - self.batch_s * (len(self.sweep.pending) + 1) - ticket.expected_us * 1e-6

    def _take(self, group: Group, first: Ticket | None, now: float) -> list[Ticket]:
        """The tickets of `group` that go into one batch, best class first, oldest first inside a class."""
        caps = self.caps
        fits = group.count <= caps.items and group.tokens <= caps.tokens and group.bytes <= caps.max_bytes
        if fits and not group.solo:
            tickets = self._in_order(group, now)
        else:
            tickets = self._fill(group, first, now)
            if len(tickets) < group.count:
                for ticket in tickets:
                    self._remove(ticket)
                return tickets
        for line in group.lines:
            line.clear()
        self.queued -= group.count
        self.queued_bytes -= group.bytes
        group.count = group.tokens = group.bytes = 0
        pending, seq = self.sweep.pending, self._seq
        for slot in group.busy:
            slot.count = 0
            slot.used = seq
            del pending[slot]
        group.busy.clear()
        if self._urgent:
            for ticket in tickets:
                self._urgent.pop(ticket, None)
        if self._watched:
            for ticket in tickets:
                self._watched.pop(ticket.seq, None)
        return tickets

    def _fill(self, group: Group, first: Ticket | None, now: float) -> list[Ticket]:
        """As many tickets as the caps allow, at least one; none overtakes one of its class."""
        caps = self.caps
        limit = 1 if group.solo else caps.items
        order = self._in_order(group, now)
        if first is not None:
            order = [first, *(ticket for ticket in order if ticket is not first)]
        tokens = size = 0
        for index, ticket in enumerate(order):
            tokens += ticket.tokens
            size += ticket.bytes
            if index and (index >= limit or tokens > caps.tokens or size > caps.max_bytes):
                return order[:index]
        return order

    def _in_order(self, group: Group, now: float) -> list[Ticket]:
        lines = [line for line in group.lines if line]
        if len(lines) == 1:
            line = lines[0]
            return list(line) if len(line) <= self.caps.items else list(islice(line, self.caps.items + 1))
        ageing = self.caps.ageing_s

        def rank(ticket: Ticket) -> tuple[int, int]:
            risen = int((now - ticket.at) / ageing) if ageing else 2
            return max(0, ticket.priority - risen), ticket.seq

        return sorted((t for line in lines for t in islice(line, self.caps.items + 1)), key=rank)

    def _started(self, tickets: list[Ticket], now: float) -> Batch:
        hot = HOT.module
        begun = hot.begin(tickets) if hot is not None else None
        since, oldest, tokens, expected_us = begun if begun is not None else _begin(tickets)
        stats, size = self.stats, len(tickets)
        stats.wait_s += size * now - since
        stats.wait_max_s = max(stats.wait_max_s, now - oldest)
        stats.batches += 1
        stats.tokens += tokens
        stats.sizes[size] = stats.sizes.get(size, 0) + 1
        self.in_flight += 1
        self.running += size
        if self._backlog:
            self._admit()
        return Batch(tickets, now, expected_us)


def _begin(tickets: list[Ticket]) -> tuple[float, float, int, float]:
    """Mark tickets as running; the sum and the least of their `at`, their tokens and microseconds."""
    since: list[float] = []
    tokens, expected_us = 0, 0.0
    for ticket in tickets:
        ticket.state = RUNNING
        ticket.slot = None
        since.append(ticket.at)
        tokens += ticket.tokens
        expected_us += ticket.expected_us
    return sum(since), min(since), tokens, expected_us


def _land(tickets: list[Ticket], outcomes: list[Any]) -> tuple[int, int]:
    """Give tickets their outcomes; how many are values, and how many tickets nobody waits for."""
    values = left = 0
    for ticket, outcome in zip(tickets, outcomes, strict=True):
        ticket.args = ()
        if ticket.state == DETACHED:
            ticket.state = CANCELLED
            left += 1
            continue
        ticket.value = outcome
        if outcome.__class__ is Failed:
            ticket.state = FAILED
        else:
            ticket.state = DONE
            values += 1
    return values, left

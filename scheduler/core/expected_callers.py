"""Who is expected to call again: the callers of what a device still runs, or has just run.

A device that answers before it has computed makes its callers look idle. A batcher that ran whatever waits
would be served in two batches, and each costs a pass of the weights. So a group of waiting calls is held
while callers are expected that came from where its own calls come from:

- while the device still runs their last batch: what is held would wait behind it in any case. Where most
  callers have called it goes in time for the device not to pause: the few that are away run a batch later.
  So does a batch that is full, while it runs theirs: callers of a better class may come before it is needed;
- for a grace after that, since they have to read the result, write to a socket, draw a breath. The grace is
  what each caller has been seen to need, as long as waiting costs less than a batch of its own would. A
  caller that stays away longer is not expected before its next call: it costs the others one grace, once.

A request may be a task a step (`asyncio.wait_for`, a task group, a callback). Where callers that ended behind
a group were followed by new ones, a new one is expected in place of each that ends, and takes over what is
known of it: of one that was made by the same task, where that task calls or reads as well. Another's place is
free when the device has run its batch: before that, another request has come.

Nothing here reads a clock or a device. `launched` and `completed` say what happened, `held` what follows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence, Set
from typing import Final

from layerzero.scheduler.core.launch_reasons import (
    CALLERS_READ,
    DEVICE_DRY,
    DEVICE_RUNS,
    GRACE_OVER,
    LIMIT,
    NOBODY_EXPECTED,
)
from layerzero.scheduler.core.limits import BatchLimits
from layerzero.scheduler.core.pending_call import Caller, PendingCall
from layerzero.scheduler.core.round_robin import BatchQueue, ProgramPoint

# Shares of the time between two batches of a group, which is what a batch of its own would cost a latecomer.
FIRST_GRACE: Final = 0.25  # for a caller that nothing is known of
WORTH: Final = 0.6  # beyond it a latecomer runs on its own
SLACK: Final = 0.1  # on top of what a caller has been seen to need
GONE: Final = 8.0  # after so many batches without a call a caller takes part no longer
LONG: Final = 2.0  # times a batch of the group usually runs
MARGIN: Final = 1.5  # launches that a hold ends before the device runs dry
TIMER_S: Final = 1e-3  # by so much an event loop's timer may be late
HEIRS: Final = 0.5  # of those that ended behind a group, whose place others must have taken
FOLLOWS: Final = 0.25  # batches after what the device ran, in which another takes the place of who has ended
ONE_OF: Final = 1 / 8  # weight of one of them
_MAX_RUNNING: Final = 256
_MAX_ENDED: Final = 1024  # callers of a group whose place may be taken, and groups of such callers
_FOLLOWED: Final = 4  # of them, whose times add to when the device pauses; beyond them a caller never asks
NEWEST: Final = 0.25  # weight of the newest in running means: about the last four count


class Launch:
    """A batch that was handed to the device: its number, its group, when, and since when it is done.

    `launched_at` is when the host began, `handed_at` when the device had all of it; it has `tokens`.
    """

    __slots__ = ("done_at", "group", "handed_at", "launched_at", "number", "tokens")

    def __init__(self, number: int, group: BatchQueue, launched_at: float, tokens: int) -> None:
        self.number = number
        self.group = group
        self.tokens = tokens
        self.launched_at = self.handed_at = launched_at
        self.done_at: float | None = None


class ExpectedCallers:
    """Callers between the launch of their last batch and their next call.

    `until` is when the first hold that `held` has reported ends by itself; infinite without one.
    `needs_device` says that a hold ends only when the device is known to have run what was launched.
    """

    __slots__ = (
        "_done", "_ended", "_last_done_at", "_limits", "_running", "_waiting", "launch_s", "launches",
        "needs_device", "released", "until",
    )  # fmt: skip

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._waiting: dict[Caller, Launch] = {}
        # By group: callers that have ended behind it, oldest first, whose place another may take.
        self._ended: dict[BatchQueue, dict[Caller, None]] = {}
        self.launches = self._done = 0
        # Not known to be done, the newest of them: without read-backs nothing says what is done.
        self._running: deque[Launch] = deque(maxlen=_MAX_RUNNING)
        self._last_done_at = -math.inf
        self.launch_s = 0.0  # what the host has needed for a launch
        self.until = math.inf
        self.needs_device = False
        self.released: dict[BatchQueue, str] = {}  # why a group is not held; all are here without it

    def __len__(self) -> int:
        ended = set().union(*self._ended.values())
        return len(self._waiting.keys() - ended)

    def launched(self, tickets: Sequence[PendingCall], group: BatchQueue, now_s: float) -> Launch:
        """A batch goes to the device; its callers are expected back."""
        self.launches += 1
        launch = Launch(self.launches, group, now_s, sum([ticket.tokens for ticket in tickets]))
        self._running.append(launch)
        if group.launched_at is not None:
            period_s = now_s - group.launched_at
            group.period_s = _mean(group.period_s, min(period_s, 4 * group.period_s or period_s))
        group.launched_at = now_s
        for ticket in tickets:
            caller = ticket.caller
            if caller is None:
                continue
            before = caller.launch
            if before is not None:
                done_at = before.done_at
                late_s = max(ticket.submitted_at - done_at, 0.0) if done_at is not None else 0.0
                caller.late_s = late_s if caller.late_s is None else _mean(caller.late_s, late_s)
            caller.launch = launch
            self._waiting[caller] = launch
        return launch

    def completed(self, number: int, now_s: float) -> None:
        """The device has run every launch up to `number`."""
        if number <= self._done:
            return
        self._done = number
        while self._running and self._running[0].number < number:
            self._running.popleft()
        # The one that the device has just ended, and those that callers came from without a question.
        ended = [self._running.popleft()] if self._running and self._running[0].number == number else []
        for launch in dict.fromkeys([*ended, *self._waiting.values()]):
            if launch.number <= number and launch.done_at is None:
                # A device runs one batch after another: behind the one before, and not before it has it. A
                # pause of the device before that is no time that the batch needs.
                began_at = max(launch.handed_at, self._last_done_at)
                group, run_s = launch.group, now_s - began_at
                # Where no question came in time, it has been done for long.
                usual_s = LONG * group.run_times.of(launch.tokens) or run_s
                run_s = min(run_s, usual_s)
                launch.done_at = began_at + run_s
                group.last_run = max(group.last_run, launch.number)
                group.run_times.add(launch.tokens, run_s)
                group.run_s = _mean(group.run_s or run_s, run_s)
        self._last_done_at = now_s
        self._expire(now_s)

    def handed_over(self, launch: Launch, now_s: float) -> None:
        """The host has launched all of a batch."""
        launch.handed_at = now_s
        seconds = now_s - launch.launched_at
        self.launch_s = _mean(self.launch_s or seconds, seconds)

    def busy_s(self, now_s: float) -> float:
        """For about how many seconds the device still runs its newest batches; 0 where nothing is known."""
        until_s = self._last_done_at
        for launch in list(self._running)[-_FOLLOWED:]:
            until_s = max(until_s, launch.handed_at) + launch.group.run_times.of(launch.tokens)
        return max(until_s - now_s, 0.0)

    def forget(self, caller: Caller) -> None:
        """A caller was cancelled: none is expected in its place."""
        self._waiting.pop(caller, None)

    def ended(self, caller: Caller) -> None:
        """A caller has ended; where others use to follow, one of them is expected in its place."""
        group, launch = caller.last_queue, self._waiting.get(caller)
        if group is None or launch is None:
            return
        if group.heirs is None:
            group.heirs = 1.0 if caller.late_s is None else 0.0  # a task of one call is a piece of a request
        if group.heirs < HEIRS:
            del self._waiting[caller]
        self._ended.setdefault(group, {})[caller] = None
        if caller.tree is not None:
            caller.tree.ended[caller] = None
        if len(self._ended[group]) > _MAX_ENDED:
            self._leave(next(iter(self._ended[group])))
        elif len(self._ended) > _MAX_ENDED:
            for one in list(self._ended[next(iter(self._ended))]):
                self._leave(one)

    def begins(self, caller: Caller, group: BatchQueue, now_s: float) -> None:
        """A caller calls `group` first of all: it takes the place of one that has ended, if there is one."""
        self._expire(now_s)
        sources = [group, *(source for source in group.points if source is not None)]
        if len(sources) == 1 and group not in self._ended:
            sources += self._ended
        tree: dict[Caller, None] = {} if caller.tree is None else caller.tree.ended
        for source in sources:
            ended = self._place(caller, tree, source)
            if ended is not None:
                return self._inherit(caller, ended)
        for source in sources:
            ended = self._place(caller, self._ended.get(source, {}), source)
            if ended is not None:
                return self._inherit(caller, ended)

    def _place(self, caller: Caller, ended: dict[Caller, None], source: BatchQueue) -> Caller | None:
        """Whose place among `ended`, oldest first, a caller takes that comes from `source`: of the last batch
        that the device has run; who has stayed away for longer stays away. Of a batch that still runs, where
        both were made in one tree, or neither's is known."""
        away: Caller | None = None
        for each in ended:
            if each.last_queue is not source:
                continue
            number = 0 if each.launch is None else each.launch.number
            if number == source.last_run:
                return each
            if number > source.last_run:
                break
            away = each
        newest = next((each for each in reversed(ended) if each.last_queue is source), None)
        return newest if newest is not None and newest.tree is caller.tree else away

    def _inherit(self, caller: Caller, ended: Caller) -> None:
        """`caller` takes the place of one that has ended."""
        caller.launch, caller.late_s = ended.launch, ended.late_s
        caller.last_queue, caller.point = ended.last_queue, ended.point
        self._leave(ended, followed=1.0)

    def _leave(self, caller: Caller, followed: float = 0.0) -> None:
        """A caller is not expected any more; where it has ended, whether another has taken its place."""
        self._waiting.pop(caller, None)
        if caller.tree is not None:
            caller.tree.ended.pop(caller, None)
        group = caller.last_queue
        ended = None if group is None else self._ended.get(group)
        if group is None or ended is None or caller not in ended:
            return
        group.heirs = ONE_OF * followed + (1.0 - ONE_OF) * (group.heirs or 0.0)
        del ended[caller]
        if not ended:
            del self._ended[group]

    def _expire(self, now_s: float) -> None:
        """No caller follows any more those that ended long ago, or since which the device is idle."""
        for group, ended in list(self._ended.items()):
            batch_s = max(group.period_s, group.run_s)
            share = WORTH if group.heirs is not None and group.heirs >= HEIRS else FOLLOWS
            is_late = now_s > self._last_done_at + share * batch_s
            gone: list[Caller] = []  # oldest first, and nearly always none
            for caller in ended:
                done_at = None if caller.launch is None else caller.launch.done_at
                if done_at is None or not (is_late or now_s > done_at + GONE * batch_s):
                    break
                gone.append(caller)
            for caller in gone:
                self._leave(caller)

    def held(self, pending: Iterable[ProgramPoint], now_s: float) -> set[BatchQueue]:
        """The groups among those of `pending` that wait for callers."""
        self.until, self.needs_device = math.inf, False
        self.released.clear()
        held: set[BatchQueue] = set()
        groups = dict.fromkeys(slot.queue for slot in pending)  # in order: one history, one outcome
        present = {group: {t.caller for line in group.by_priority for t in line} for group in groups}
        everybody = set().union(*present.values())
        absent = [caller for caller in self._waiting if caller not in everybody]
        if not absent:
            return held
        by_source: dict[BatchQueue | None, list[Caller]] = {}
        for caller in absent:
            by_source.setdefault(caller.last_queue, []).append(caller)
        for group in groups:
            if group.solo:
                self.released[group] = LIMIT
                continue
            sources = (source for source in group.points if source is not None and source in by_source)
            expected = [caller for source in sources for caller in by_source[source]]
            if group not in group.points:  # a caller's first call may follow another's last one
                follows = group.heirs is not None and group.heirs >= HEIRS
                expected += [each for each in by_source.get(group, ()) if follows or self._is_running(each)]
            self.released[group] = NOBODY_EXPECTED
            until, is_full = now_s, self._is_full(group)
            if is_full:
                self.released[group] = LIMIT
                if any(self._is_running(caller) for caller in expected):
                    until = self._pauses_at(now_s)
                    self.needs_device |= until > now_s  # it may end before it is expected to
            elif expected:
                until = self._until(group, present[group], expected, now_s)
            if until > now_s:
                held.add(group)
                if group.hold is None:
                    cause = CALLERS_READ if self.released[group] == GRACE_OVER else DEVICE_RUNS
                    group.hold = cause, now_s
                self.until = min(self.until, until)
                self.needs_device |= until == math.inf
        return held

    def _is_running(self, caller: Caller) -> bool:
        """Whether the device still runs the batch that `caller` is expected from."""
        launch = self._waiting.get(caller)
        return launch is not None and launch.number > self._done

    def _until(
        self, group: BatchQueue, present: Set[Caller | None], absent: Collection[Caller], now_s: float
    ) -> float:
        """Until when `group` waits for the absent; infinite where only news of the device ends it."""
        batch_s = max(group.period_s, group.run_s)
        newest, until = 0, -math.inf
        for caller in absent:
            launch = self._waiting.get(caller)
            if launch is None:  # it takes part no longer: another group has found that just now
                continue
            if launch.done_at is None:
                newest = max(newest, launch.number)
            elif now_s > launch.done_at + GONE * batch_s:
                self._leave(caller)
                continue
            else:
                until = max(until, launch.done_at + self._grace_s(caller, batch_s))
        if until == -math.inf and not newest:
            return now_s
        launches = [caller.launch.number for caller in present if caller is not None and caller.launch]
        newest = max(newest, *launches, 0)
        if newest <= self._done:
            self.released[group] = GRACE_OVER
            return until
        self.released[group] = DEVICE_DRY
        return self._runs_dry_at(group, len(present), absent, now_s)

    def _runs_dry_at(
        self, group: BatchQueue, present: int, absent: Collection[Caller], now_s: float
    ) -> float:
        """When `group` has to be launched so that the device never pauses; infinite where its few rows
        are worth less than those that are still away.

        Who waits for the result of the running batch comes after it, and after that comes the launch: the
        device is idle so long. Who is left behind runs with everybody in the batch after this one.
        """
        if not self.launch_s or not self.busy_s(now_s):
            return math.inf
        late_s = max((caller.late_s or 0.0 for caller in absent), default=0.0)
        pause_s = self.launch_s + late_s
        if len(absent) * group.run_s > present * pause_s:
            return math.inf
        return self._pauses_at(now_s)

    def _pauses_at(self, now_s: float) -> float:
        """When the next batch has to be launched so that the device continues without a pause."""
        return now_s + self.busy_s(now_s) - MARGIN * self.launch_s - TIMER_S

    def _grace_s(self, caller: Caller, batch_s: float) -> float:
        """How long after its last batch it is worth waiting for `caller`."""
        worth_s = min(WORTH * batch_s, self._limits.max_defer_s)
        if caller.late_s is None:
            return FIRST_GRACE / WORTH * worth_s
        if caller.late_s > worth_s:
            return 0.0
        return min(2.0 * caller.late_s + SLACK * batch_s, worth_s)

    def _is_full(self, group: BatchQueue) -> bool:
        limits = self._limits
        return (
            group.count >= limits.max_batch_size
            or group.tokens >= limits.max_num_batched_tokens
            or group.bytes >= limits.max_batch_bytes
        )


def _mean(mean: float, newest: float) -> float:
    return mean + NEWEST * (newest - mean)

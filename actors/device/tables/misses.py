"""TableMisses: calls that a dispatch table does not cover, measured in idle time and folded in."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from layerzero._util import log
from layerzero._util.clock_timer import ClockTimer
from layerzero.measure.calls import Call
from layerzero.measure.recorder import CALL_NOT_DESCRIBED
from layerzero.measure.solving import solve_op
from layerzero.measure.timing import QUICK
from layerzero.measure.tuner import Tuner
from layerzero.measure.tuning import publish
from layerzero.ops import table as ops_table
from layerzero.ops.op import Args
from layerzero.perfdb.record import Measurement
from layerzero.perfdb.table_file import content_hash
from layerzero.selection.active_table import ActiveDispatchTable, kernels_differ
from layerzero.selection.dispatch_table import Bucket, DispatchTable, limits_of
from layerzero.selection.solver.families import family_of
from layerzero.selection.solver.ranges import Entry, Ranges, compile_lookup
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.reasons import Reason

if TYPE_CHECKING:
    from layerzero.actors.device.local_device import LocalDevice
    from layerzero.selection.plan import Plan

FOLDED = "dispatch_table.folded"
NOT_FOLDED = "dispatch_table.range_not_folded"
NOT_WRITTEN = "dispatch_table.not_written"
# One call at most is measured in so many seconds, and so many in the life of a device.
EVERY_S = 1.0
MAX_CALLS = 256
# A process that used less than this share of one core since the last look is idle.
IDLE_SHARE = 0.1


class TableMisses:
    """What the table of one device missed: `note` keeps each new call, a timer measures one at a time.

    Once none is left, the families of calls that were missed are solved, and what the table does not cover
    is added to it. The new table is put in force and written to `Settings.next_dispatch_table`; its policy is
    the old one's. Nothing is measured while another policy
    holds than the table's, or while the process computes.
    """

    def __init__(self, device: LocalDevice) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._seen: set[Hashable] = set()
        self._waiting: list[tuple[Call, CallSpec]] = []
        self._measured: list[tuple[CallSpec, tuple[Measurement, ...]]] = []
        self._looked_at = self._times()
        self._timer = ClockTimer(device.clock, self._due_at, self._look)

    def note(self, plan: Plan, args: Args) -> None:
        """Keep a call that the table has no bucket for; a capture's is not read."""
        miss, request = plan.selection.table_miss, plan.request
        if miss is None or miss.reason is not Reason.DISPATCH_TABLE_MISS or "capture" in request.modes:
            return
        bucket = self._device.table(plan.op).bucket(request)
        place = family_of(bucket), tuple(sorted(bucket.dims.items()))
        with self._lock:
            if place in self._seen or len(self._seen) >= MAX_CALLS:
                return
            self._seen.add(place)
            try:
                self._waiting.append((Call.of(plan.op, args), request))
            except ConfigurationError as error:  # a function among its arguments
                log.warning(CALL_NOT_DESCRIBED, op=plan.op.name, why=str(error))
                return
        self._timer.arm()

    def stop(self) -> None:
        """Measure nothing more."""
        self._timer.stop()

    def _due_at(self) -> float | None:
        return self._device.clock.now() + EVERY_S if self._waiting or self._measured else None

    def _times(self) -> tuple[float, float]:
        """Seconds of the clock, and of processor time of this process."""
        return self._device.clock.now(), time.process_time()

    def _look(self) -> None:
        """Continue in the background where the process was idle since the last look."""
        (clock_s, used_s), self._looked_at = self._looked_at, self._times()
        passed_s, taken_s = self._looked_at[0] - clock_s, self._looked_at[1] - used_s
        if taken_s <= IDLE_SHARE * passed_s and self._table() is not None:
            self._device.loader.submit(self._go_on)

    def _table(self) -> ActiveDispatchTable | None:
        """The table in force, where it is the file's own under the policy of the process."""
        active, policy = self._device.dispatch_table, self._device.snapshot.policy
        holds = active is not None and not active.refusal and not active.solved_again
        return active if active is not None and holds and active.is_solved_under(policy) else None

    def _go_on(self) -> None:
        """On the background thread: measure a call, or fold in what was measured."""
        active = self._table()
        if self._device.closed or active is None or active.table is None:
            return
        if self._waiting:
            call, request = self._waiting.pop(0)
            results = Tuner(self._device, ("eager",), QUICK).measure(call)
            self._measured.append((request, tuple(row for each in results for row in each.rows)))
        elif self._measured:
            missed, self._measured = self._measured, []
            publish(self._device, [row for _, rows in missed for row in rows])
            self._fold([request for request, _ in missed], active, active.table)
        self._looked_at = self._times()  # this work is no sign of a busy process

    def _fold(self, requests: list[CallSpec], before: ActiveDispatchTable, table: DispatchTable) -> None:
        device = self._device
        families = {family_of(request) for request in requests}
        ops = [ops_table.get(name) for name in sorted({family.op for family in families})]
        solved = [
            bucket
            for op in ops
            for bucket in solve_op(
                device, op, [request for request in requests if request.op == op.name], only=families
            ).buckets
        ]
        buckets = [bucket for bucket in table.buckets if bucket.family not in families]
        for family in families:
            old, new = ([b for b in each if b.family == family] for each in (table.buckets, solved))
            buckets += add_around(old, new)
        limits = {
            op.name: limits_of(op.name, device.registry.for_op(op.name), device.hardware.platform)
            for op in ops
            if op.name not in table.limits
        }
        buckets.sort(key=lambda b: (b.op, b.dtype, b.capture, b.features, tuple(sorted(b.ranges.items()))))
        after = msgspec.structs.replace(
            table, buckets=tuple(buckets), content=content_hash(tuple(buckets)), limits=limits | table.limits
        )
        path = device.settings.next_dispatch_table or before.path
        differs = kernels_differ(after, path, device.hardware.platform, device.registry.of)
        if not device.table_updater.replace(before, ActiveDispatchTable(after, path, differs=differs)):
            return  # another table came in force meanwhile, whose misses are its own
        log.info(FOLDED, path=path, calls=len(requests), buckets=len(buckets), content=after.content[:12])
        try:
            after.save(path)
        except OSError as error:
            log.error(NOT_WRITTEN, path=path, why=f"{type(error).__name__}: {error}")


def add_around(old: Sequence[Bucket], new: Iterable[Bucket]) -> list[Bucket]:
    """The buckets of one family with what `new` ones cover beside them: what was decided stays.

    A piece that no comparison tells from the others is left out; calls in it are still missed.
    """
    together = list(old)
    for bucket in new:
        pieces = [bucket.ranges]
        for other in together:
            pieces = [rest for piece in pieces for rest in _outside(piece, other.ranges)]
        for piece in pieces:
            added = [*together, msgspec.structs.replace(bucket, ranges=piece)]
            try:
                compile_lookup([Entry(each.ranges, each) for each in added])
            except ValueError as error:
                log.debug(NOT_FOLDED, op=bucket.op, ranges=piece, why=str(error))
            else:
                together = added
    return together


def _outside(box: Ranges, other: Ranges) -> Iterator[dict[str, tuple[int, int]]]:
    """The parts of a box that lie outside of another one."""
    inside = dict(box)
    if any(last < other[axis][0] or first > other[axis][1] for axis, (first, last) in box.items()):
        yield inside
        return
    for axis, (first, last) in box.items():
        from_, to = other[axis]
        if first < from_:
            yield {**inside, axis: (first, from_ - 1)}
        if last > to:
            yield {**inside, axis: (to + 1, last)}
        inside[axis] = max(first, from_), min(last, to)

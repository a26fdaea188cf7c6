"""Recording what a live run asks: each distinct call as it was executed (batches merged), and how often."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from layerzero._util import log
from layerzero.measure.calls import Call, Workload
from layerzero.ops.op import Args, Op
from layerzero.selection.plan import signature_of
from layerzero.selection.record import Selection
from layerzero.spec.errors import ConfigurationError

MAX_CALLS = 10_000
CALLS_DROPPED = "recording.calls_dropped"
CALL_NOT_DESCRIBED = "recording.call_not_described"


class Recorder:
    """Counts calls by signature while a device is watched; operands are described, never kept."""

    reads_arguments = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[Hashable, Call] = {}
        self._counts: dict[Hashable, int] = {}
        self.dropped = 0

    def wrap(self, op: Op, selection: Selection, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, counted; under graph capture nothing may be read, so such plans are left alone."""
        if "capture" in selection.request.modes:
            return call

        def recorded(*args: Any) -> Any:
            self._count(op, args)
            return call(*args)

        return recorded

    def _count(self, op: Op, args: Args) -> None:
        signature = signature_of(op, args)
        with self._lock:
            if signature in self._counts:
                self._counts[signature] += 1
                return
            if len(self._counts) >= MAX_CALLS:
                self.dropped += 1
                if self.dropped == 1:
                    log.warning(CALLS_DROPPED, kept=MAX_CALLS)
                return
            try:
                self._calls[signature] = Call.of(op, args)
            except ConfigurationError as error:  # a function among its arguments
                self.dropped += 1
                log.warning(CALL_NOT_DESCRIBED, op=op.name, why=str(error))
            self._counts[signature] = 1

    def workload(self, name: str = "") -> Workload:
        """What was seen so far, the most frequent first."""
        with self._lock:
            order = sorted(self._counts, key=lambda s: -self._counts[s])
            calls = tuple(
                Call(self._calls[s].op, self._calls[s].args, self._counts[s])
                for s in order
                if s in self._calls
            )
        return Workload(calls, name)

    def save(self, path: str | Path, name: str = "") -> Workload:
        """Write what was seen as JSON, for `lz tune --trace`."""
        workload = self.workload(name)
        workload.save(path)
        return workload

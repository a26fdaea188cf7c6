"""Calls and host time by kernel: a middleware that counts each call, on by `Settings.kernel_times`."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from layerzero.observe.counters import Counters
from layerzero.observe.histograms import MAX_PENDING
from layerzero.ops.op import Op
from layerzero.selection.record import Selection

KERNEL_SECONDS = "kernel_seconds"


class KernelTimes:
    """Observes `kernel_seconds` by op and kernel: on a GPU it is what launching took.

    A captured graph runs no Python when it is replayed, so plans for captures are left as they are.
    """

    reads_arguments = False

    def __init__(self, counters: Counters) -> None:
        self._histograms = counters.histograms

    def wrap(self, op: Op, selection: Selection, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, counted and timed; a call that raises counts as well."""
        if "capture" in selection.request.modes:
            return call
        series = self._histograms.series(KERNEL_SECONDS, op=op.name, kernel=selection.kernel)
        pending, note = series.pending, series.pending.append  # as `observe` does, without its frame

        def timed(*args: Any) -> Any:
            begin = perf_counter()
            try:
                return call(*args)
            finally:
                note(perf_counter() - begin)
                if len(pending) >= MAX_PENDING:
                    series.fold()

        return timed

    def close(self) -> None:
        """Nothing is kept."""

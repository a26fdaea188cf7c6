"""Threads that meet at one decision for certain: whoever decides waits until all others wait for it."""

from __future__ import annotations

import threading
import time
from typing import Any

from layerzero.actors.device.local_device import LocalDevice
from layerzero.ops.op import Op
from layerzero.selection.decide import roofline_cost
from layerzero.selection.dispatch import PlanTable
from layerzero.spec.call_spec import CallSpec, WorkEstimate
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel


class Crowd:
    """A cost model for a device with one kernel an op: each call of it is one decision.

    A decision goes on once `count` threads have asked, each either deciding or waiting for who decides; or
    at once where one of them decides what another decides already, which `decisions` then shows.
    """

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count = count
        self.error = error
        self.decisions = 0
        self._table: PlanTable | None = None
        self._lock = threading.Lock()

    def watch(self, own: LocalDevice, op: Op) -> None:
        """Whose threads are counted."""
        self._table = own.table(op)

    def __call__(
        self, one: Kernel, work: WorkEstimate, request: CallSpec, hardware: Hardware
    ) -> tuple[float, str]:
        with self._lock:
            self.decisions += 1
        while not self._gathered():
            time.sleep(0.0005)
        if self.error is not None:
            raise self.error
        return roofline_cost(one, work, request, hardware)

    def _gathered(self) -> bool:
        if self._table is None:
            return True
        flights = list(self._table._pending.values())
        events: list[Any] = [flight.done for flight in flights]  # nothing public says who waits for an event
        waiting = sum(len(event._cond._waiters) for event in events)
        return waiting + len(flights) >= self.count or self.decisions > len(flights)

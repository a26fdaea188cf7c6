"""The deadlines of calls that have not started."""

from __future__ import annotations

import heapq
import math

from layerzero.scheduler.core.pending_call import PendingCall

_SMALL = 64  # entries up to which nothing is tidied


class Deadlines:
    """Calls with a deadline that have not started; `by_seq` holds them by their number."""

    __slots__ = ("_heap", "by_seq")

    def __init__(self) -> None:
        # The heap holds numbers only, so that an ended pending call is not kept alive until its deadline.
        self._heap: list[tuple[float, int]] = []
        self.by_seq: dict[int, PendingCall] = {}

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def nearest(self) -> float:
        """The nearest of all; infinite without one."""
        heap, by_seq = self._heap, self.by_seq
        while heap and heap[0][1] not in by_seq:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def first(self) -> PendingCall:
        """The call with the nearest deadline, where `nearest` is finite."""
        return self.by_seq[self._heap[0][1]]

    def watch(self, call: PendingCall) -> None:
        """Know a call that has a deadline."""
        heap, by_seq = self._heap, self.by_seq
        by_seq[call.seq] = call
        if len(heap) > _SMALL and len(heap) > 2 * len(by_seq):
            heap[:] = [entry for entry in heap if entry[1] in by_seq]
            heapq.heapify(heap)
        heapq.heappush(heap, (call.deadline or 0.0, call.seq))

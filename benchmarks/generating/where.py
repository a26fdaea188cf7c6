"""Where a thread's time goes: its stack every millisecond, put down to the innermost part that is known.

The signal's handler runs between two bytecodes, so a long call into C counts for the line that made it.
"""

from __future__ import annotations

import signal
from collections import Counter
from types import FrameType, TracebackType
from typing import Any

# The first fragment that a frame's file contains names the part; frames are asked from the innermost out.
PARTS = (
    ("selectors.py", "waiting for the worker, the device or a timer"),
    ("layerzero/backends/", "kernels and their launches"),
    ("layerzero/ops/batching", "rows joined and split"),
    ("layerzero/ops/paged_batching", "rows joined and split"),
    ("layerzero/ops/host_copies", "rows joined and split"),
    ("layerzero/ops/", "an op's arguments, guard or reference"),
    ("scheduler/batch_executor.py", "a batch run"),
    ("layerzero/graphs/", "graphs filled and replayed"),
    ("layerzero/selection/dispatch.py", "plans looked up and run"),
    ("actors/device/local_device.py", "plans looked up and run"),
    ("layerzero/selection/", "plans looked up and run"),
    ("layerzero/calls/batched.py", "awaits: batched functions"),
    ("layerzero/calls/functions.py", "awaits: batched functions"),
    ("layerzero/api/", "awaits: ops"),
    ("scheduler/modes/torch_modes.py", "torch's modes"),
    ("scheduler/modes/readback.py", "results read back"),
    ("scheduler/", "the lane"),
    ("layerzero/kvcache/", "pages and places"),
    ("examples/", "the model's own Python"),
    ("generating/captured.py", "pages and places"),
    ("generating/by_hand.py", "the loop by hand"),
    ("generating/", "the request's own Python"),
    ("asyncio/", "the event loop"),
)


class Where:
    """A context manager for the main thread; `shares` says afterwards what part of the samples fell where."""

    def __init__(self, every_s: float = 0.001) -> None:
        self.every_s = every_s
        self.seen: Counter[str] = Counter()

    def __enter__(self) -> Where:
        self._before: Any = signal.signal(signal.SIGALRM, self._look)
        signal.setitimer(signal.ITIMER_REAL, self.every_s, self.every_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._before)

    def _look(self, number: int, frame: FrameType | None) -> None:
        while frame is not None:
            name = frame.f_code.co_filename
            for fragment, part in PARTS:
                if fragment in name:
                    self.seen[part] += 1
                    return
            frame = frame.f_back
        self.seen["elsewhere"] += 1

    def shares(self) -> dict[str, float]:
        """Each part's share of the samples, the largest first."""
        total = max(1, self.seen.total())
        return {part: round(count / total, 4) for part, count in self.seen.most_common()}

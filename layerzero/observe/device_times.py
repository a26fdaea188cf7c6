"""When a CUDA stream ran what it was given, in the host's time: by events around each launch.

An event is recorded while the timeline runs and read after it: asking for it earlier would make host and
device meet, and is forbidden while another thread captures a graph.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

READ_S: Final = 1.0  # how long a device that still runs is waited for
# Times between events are floats: a long span of them would be read to tens of microseconds.
ANCHOR_MS: Final = 2000.0


class TimedEvent(Protocol):
    """A CUDA event that keeps the time."""

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


@dataclass(eq=False, slots=True)
class DeviceSpan:
    """What one launch took on its stream; `begin_ns` and `end_ns` are there after `DeviceTimes.resolve`."""

    device: int
    stream: int
    begin: TimedEvent
    end: TimedEvent | None = None
    begin_ns: int | None = None
    end_ns: int | None = None


class DeviceTimes:
    """The launches of a timeline; as many are kept as its ring may hold.

    `unread` counts those whose device had not run them when the timeline ended.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self._spans: deque[DeviceSpan] = deque(maxlen=limit)
        self.unread = 0

    def begin(self, stream: Any) -> DeviceSpan:
        """Note what a stream runs from here on."""
        span = DeviceSpan(stream.device_index, stream.cuda_stream, self._record(stream))
        self._spans.append(span)
        return span

    def end(self, span: DeviceSpan, stream: Any) -> None:
        """The launch has been given to the stream."""
        span.end = self._record(stream)

    def _record(self, stream: Any) -> TimedEvent:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def resolve(self) -> None:
        """Read the times of all launches that the devices have run."""
        by_device: dict[int, list[DeviceSpan]] = {}
        for span in self._spans:
            by_device.setdefault(span.device, []).append(span)
        for device, spans in by_device.items():
            anchor, anchor_ns = self._now(device)
            limit_s = time.monotonic() + READ_S
            for span in reversed(spans):
                if span.end is None or not _has_run(span.end, limit_s):
                    self.unread += 1
                    continue
                to_anchor_ms = span.begin.elapsed_time(anchor)
                span.begin_ns = anchor_ns - round(to_anchor_ms * 1e6)
                span.end_ns = span.begin_ns + round(span.begin.elapsed_time(span.end) * 1e6)
                if to_anchor_ms > ANCHOR_MS:
                    anchor, anchor_ns = span.begin, span.begin_ns

    def _now(self, device: int) -> tuple[TimedEvent, int]:
        """An event of this moment, and the moment in the host's time."""
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()  # empty: it waits for nothing
            event = self._record(stream)
            stream.synchronize()
        return event, time.monotonic_ns()


def _has_run(event: TimedEvent, limit_s: float) -> bool:
    while not event.query():
        if time.monotonic() > limit_s:
            return False
        time.sleep(0.001)
    return True

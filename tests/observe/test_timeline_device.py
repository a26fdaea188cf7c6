"""Rows of CUDA streams and of copies to the host, on a device whose clock the test owns."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerzero._util import log
from layerzero.actors.device.worker import Worker
from layerzero.observe import device_times
from layerzero.observe.device_times import DeviceTimes
from layerzero.observe.timeline import NO_NVTX, Timeline
from layerzero.scheduler.core.pending_call import PENDING_CALL
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.modes.readback import Readback
from layerzero.scheduler.watching import BatchWatch
from layerzero.spec.settings import Settings
from tests.observe.trace_check import arrows_into, read_trace, row_names, slices
from tests.scheduler.devices import Double, Later

OP = Double()
STREAM = SimpleNamespace(device_index=0, cuda_stream=7)
MS = 1_000_000


class Event:
    """A CUDA event at a time of the device, in milliseconds; one that never happens has none."""

    def __init__(self, at_ms: float | None) -> None:
        self.at_ms = at_ms

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds between two events, as torch gives them: with the precision of a float of 32 bits."""
        assert self.at_ms is not None
        return float(torch.tensor(end_event.at_ms - self.at_ms, dtype=torch.float32))


class Clock(DeviceTimes):
    """Device times whose events are numbers; now is `now_ms`, 0 of the host's time is 0 of the device's."""

    def __init__(self, now_ms: float = 0.0) -> None:
        super().__init__()
        self.now_ms = now_ms

    def _record(self, stream: Any) -> Event:
        return Event(self.now_ms)

    def _now(self, device: int) -> tuple[Event, int]:
        return Event(self.now_ms), round(self.now_ms * MS)


def test_device_times_are_exact_over_an_hour() -> None:
    """Each is read from a neighbour: an hour in one float would be off by a quarter of a millisecond."""
    clock = Clock()
    spans = []
    for step in range(3600):
        clock.now_ms = step * 1000.0 + 0.125
        span = clock.begin(STREAM)
        clock.now_ms += 8.15
        clock.end(span, STREAM)
        spans.append(span)
    clock.now_ms = 3_600_000.0
    clock.resolve()
    assert clock.unread == 0
    for step, span in enumerate(spans):
        assert span.begin_ns is not None and span.end_ns is not None
        assert abs(span.begin_ns - (step * 1000 + 0.125) * MS) < 0.02 * MS
        assert abs(span.end_ns - span.begin_ns - 8.15 * MS) < 0.001 * MS


def test_what_the_device_has_not_run_is_counted_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that hangs does not hang the end of a timeline."""
    monkeypatch.setattr(device_times, "READ_S", 0.0)
    clock = Clock()
    ran, hangs, launching = (clock.begin(STREAM) for _ in range(3))
    clock.end(ran, STREAM)
    hangs.end = Event(None)
    clock.resolve()
    assert clock.unread == 2
    assert ran.end_ns is not None and hangs.end_ns is None and launching.end_ns is None


class StreamDevice(Later):
    """A device with one stream."""

    def stream_for(self, modes: Any) -> Any:
        return STREAM


@pytest.mark.asyncio
async def test_a_batch_has_its_time_on_its_stream_and_readers_their_copies(
    tmp_path: Path, worker: Worker
) -> None:
    """A row a stream, with an arrow from the launch; a row of copies to the host."""
    path = tmp_path / "trace.json"
    loop = asyncio.get_running_loop()
    timeline = Timeline(path, list)
    clock = timeline.device_times = Clock()
    async with timeline:
        device = StreamDevice(loop, 0.001)
        streams: Any = device
        driver = LoopDriver(loop, device, worker, Settings(), always_inline=True, streams=streams)
        driver.watch = BatchWatch(driver, streams, timeline, "cuda:0")
        readback = Readback(driver, device, device)  # type: ignore[arg-type]
        begin_ns = timeline._begin_ns

        async def token() -> float:
            clock.now_ms = begin_ns / MS + 1.0
            value = await driver.submit(PENDING_CALL.cls(OP, (torch.ones(1),), "g", 1.0))
            return float(await readback.start(value, (0, 0, 0)))

        assert await asyncio.gather(token(), token()) == [2.0, 2.0]
        clock.now_ms += 1.0
        await asyncio.sleep(0.005)
    trace = read_trace(path)
    (span,) = slices(trace, "stream")
    assert row_names(trace)[span["pid"], span["tid"]] == "cuda:0 stream 7"
    assert span["name"] == "double" and span["args"] == {"rows": 2}
    (batch,) = slices(trace, "batches")
    (arrow,) = arrows_into(trace, span)
    assert arrow["tid"] == batch["tid"]
    (copy,) = slices(trace, "copies")
    assert copy["name"] == "to_host" and copy["args"] == {"readers": 2}


def test_nvtx_without_cuda_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The timeline itself works all the same."""
    if torch.cuda.is_available():
        pytest.skip("torch finds a CUDA device here")
    with caplog.at_level(logging.WARNING, log.LOGGER_NAME):
        timeline = Timeline(tmp_path / "trace.json", list, nvtx=True)
    assert not timeline.nvtx and NO_NVTX in caplog.text


def test_nvtx_marks_batches_and_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every range that is opened is closed, also where what it holds raises."""
    marks: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", marks.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: marks.append("pop"))
    timeline = Timeline(tmp_path / "trace.json", list, nvtx=True)

    def broken() -> None:
        raise LookupError("no luck")

    selection: Any = SimpleNamespace(kernel="acme.norm", request=SimpleNamespace(modes=()))
    with pytest.raises(LookupError, match="no luck"):
        timeline.wrap(OP, selection, broken)()  # type: ignore[arg-type]
    assert marks == ["acme.norm", "pop"]

"""Callers on several CUDA streams in one batch: who waits for whom, and when a batch counts as done.

Callers of one stream are launched on it, which orders everything by itself. Where a batch has callers of
several, it runs on the batcher's own stream: that one waits for each caller's stream before the first kernel,
each caller's waits for it after the last. Outputs belong to the batcher's stream, so the allocator is
notified of every stream that reads them: it must not give their memory away while a slow one still does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from layerzero.actors.device.worker import Worker
from layerzero.scheduler.core.pending_call import PendingCall
from layerzero.scheduler.modes.torch_modes import Modes, Stream, with_stream

HOST: Final = "host"


@dataclass(eq=False, slots=True)
class CrossStreamModes:
    """The modes of a batch whose callers are on several streams."""

    modes: Modes
    streams: frozenset[Stream]


class DeviceStreams:
    """The streams of one CUDA device: the batcher's own, and the thread that waits for events.

    `completion` "stream" answers callers when their batch is launched, "host" when it has run.
    """

    __slots__ = ("_batch_stream", "_event_thread", "_index", "completion")

    def __init__(self, index: int, reaper: Worker, completion: str) -> None:
        self._index = index
        self._event_thread = reaper
        self._batch_stream: Any = None
        self.completion = completion

    def default_stream(self) -> Stream:
        """The device's default stream: what the loop's thread is on while callers of other streams wait.

        What is in force when a loop driver is made would not do: its first caller may be inside its own
        stream.
        """
        default = torch.cuda.default_stream(self._index)
        return default.stream_id, default.device_index, default.device_type

    def modes_of(self, calls: Sequence[PendingCall]) -> Modes | CrossStreamModes:
        """The modes of a batch: the first caller's, or `CrossStreamModes` where their streams differ."""
        modes = calls[0].modes
        if all(call.modes is modes for call in calls):
            return modes
        return CrossStreamModes(modes, frozenset(s for call in calls if (s := call.modes.stream) is not None))

    @contextmanager
    def across_streams(self, modes: CrossStreamModes) -> Iterator[Modes]:
        """Modes on the batcher's stream, between waiting for the callers' streams and being waited for."""
        batch_stream = self.stream_for(modes)
        caller_streams = [stream_of(stream_id) for stream_id in modes.streams]
        for stream in caller_streams:
            wait_for_stream(batch_stream, stream)
        try:
            yield with_stream(
                modes.modes, (batch_stream.stream_id, batch_stream.device_index, batch_stream.device_type)
            )
        finally:
            # Also after a failure: what was launched before it reads what the callers may free now.
            for stream in caller_streams:
                wait_for_stream(stream, batch_stream)

    def record_streams(self, outcomes: Sequence[Any], modes: CrossStreamModes) -> None:
        """Tell the allocator that every caller's stream reads these outcomes."""
        streams = [stream_of(stream_id) for stream_id in modes.streams]
        seen: set[int] = set()
        for tensor in tensors_in(outcomes):
            place = tensor.untyped_storage().data_ptr()
            if place not in seen:
                seen.add(place)
                for stream in streams:
                    record_stream(tensor, stream)

    def stream_for(self, modes: Modes | CrossStreamModes) -> Any:
        """The stream that a batch under `modes` runs on."""
        if not isinstance(modes, CrossStreamModes):
            return stream_of(modes.stream)
        if self._batch_stream is None:
            with torch.cuda.device(self._index):
                self._batch_stream = torch.cuda.Stream()
        return self._batch_stream

    def notify_when_done(
        self, modes: Modes | CrossStreamModes, on_done: Callable[[Exception | None], object]
    ) -> None:
        """Call `on_done` from the event thread once a batch under `modes` has run, with what went wrong."""
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream_for(modes))

        def wait_for_it() -> None:
            error: Exception | None = None
            try:
                event.synchronize()
            except Exception as raised:
                error = raised
            on_done(error)

        self._event_thread.submit(wait_for_it)


def stream_of(stream_id: Stream | None) -> Any:
    """The stream object of what `current` gave."""
    assert stream_id is not None
    number, index, kind = stream_id
    make: Any = torch.cuda.Stream  # its constructor has no annotations
    return make(stream_id=number, device_index=index, device_type=kind)


def set_stream(stream_id: Stream | None) -> None:
    """Make a stream the current one of this thread."""
    assert stream_id is not None
    number, index, kind = stream_id
    torch._C._cuda_setStream(stream_id=number, device_index=index, device_type=kind)


class AmbientModes(Protocol):
    """What is in force for tasks that begin while others wait."""

    ambient_grad: bool
    ambient_stream: Stream | None


def suspend_modes(modes: Modes, driver: AmbientModes) -> None:
    """Put the loop's own grad mode and stream in force while a caller waits."""
    if not modes.inference:
        # A loop driver whose first caller was inside a block without gradients took that for the loop's own
        # mode.
        driver.ambient_grad = driver.ambient_grad or modes.grad
        torch._C._set_grad_enabled(driver.ambient_grad)
    if modes.stream != driver.ambient_stream:
        set_stream(driver.ambient_stream)


def resume_modes(modes: Modes, driver: AmbientModes) -> None:
    """Put a caller's own grad mode and stream in force again."""
    if not modes.inference:
        torch._C._set_grad_enabled(modes.grad)
    if modes.stream != driver.ambient_stream:
        set_stream(modes.stream)


def wait_for_stream(later: Any, earlier: Any) -> None:
    """What `later` is given from here on begins after what `earlier` has been given so far."""
    later.wait_stream(earlier)


def record_stream(tensor: Tensor, stream: Any) -> None:
    """The tensor's memory is not given away before `stream` has done what it is given until then."""
    tensor.record_stream(stream)


def tensors_in(outcomes: Sequence[Any]) -> Iterator[Tensor]:
    """Every CUDA tensor among values, however deep in tuples and lists."""
    for value in outcomes:
        if isinstance(value, Tensor):
            if value.is_cuda:
                yield value
        elif isinstance(value, tuple | list):
            yield from tensors_in(value)


class HostReader(Protocol):
    """What copies results of one device to the host for one event loop."""

    def start(self, tensor: Tensor, stream: Stream) -> PendingCall:
        """Copy `tensor`, which `stream` writes; await what comes back for the copy, or what it raised."""
        ...

    def flush(self, launches: int | None = None) -> None:
        """Launch the copies that were started and are not launched yet, behind so many batches or all."""
        ...

    def lose(self, error: Exception | None) -> None:
        """Fail every read that is waited for, and later ones until `lose(None)`."""
        ...

"""Callers on several CUDA streams in one batch: who waits for whom, and when a batch counts as done.

Callers of one stream are launched on it, which orders everything by itself. Where a batch has callers of
several, it runs on the lane's own stream: that one waits for each caller's stream before the first kernel,
each caller's waits for it after the last. Outputs belong to the lane's stream, so the allocator is told of
every stream that reads them: it must not give their memory away while a slow one still does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from layerzero.actors.device.worker import Worker
from layerzero.scheduler.core.pending_call import Ticket
from layerzero.scheduler.torch_modes import Modes, Stream, on_stream

HOST: Final = "host"


class Across:
    """The modes of a batch whose callers are on several streams."""

    __slots__ = ("modes", "streams")

    def __init__(self, modes: Modes, streams: frozenset[Stream]) -> None:
        self.modes = modes
        self.streams = streams


class Streams:
    """The streams of one CUDA device: the lane's own, and the thread that waits for events.

    `completion` "stream" answers callers when their batch is launched, "host" when it has run.
    """

    __slots__ = ("_index", "_own", "_reaper", "completion")

    def __init__(self, index: int, reaper: Worker, completion: str) -> None:
        self._index = index
        self._reaper = reaper
        self._own: Any = None
        self.completion = completion

    def ambient(self) -> Stream:
        """The device's default stream: what the loop's thread is on while callers of other streams wait.

        What is in force when a front is made would not do: its first caller may be inside its own stream.
        """
        default = torch.cuda.default_stream(self._index)
        return default.stream_id, default.device_index, default.device_type

    def of(self, tickets: Sequence[Ticket]) -> Any:
        """The modes of a batch: the first caller's, or `Across` where their streams differ."""
        modes, snapshot = tickets[0].modes
        if all(ticket.modes[0] is modes for ticket in tickets):
            return modes, snapshot
        return Across(modes, frozenset(ticket.modes[0].stream for ticket in tickets)), snapshot

    @contextmanager
    def crossing(self, across: Across) -> Iterator[Modes]:
        """Modes on the lane's stream, between waiting for the callers' streams and being waited for."""
        if self._own is None:
            with torch.cuda.device(self._index):
                self._own = torch.cuda.Stream()
        own, theirs = self._own, [stream_of(known) for known in across.streams]
        for stream in theirs:
            wait(own, stream)
        try:
            yield on_stream(across.modes, (own.stream_id, own.device_index, own.device_type))
        finally:
            # Also after a failure: what was launched before it reads what the callers may free now.
            for stream in theirs:
                wait(stream, own)

    def hand_over(self, outcomes: Sequence[Any], across: Across) -> None:
        """Tell the allocator that every caller's stream reads these outcomes."""
        streams = [stream_of(known) for known in across.streams]
        seen: set[int] = set()
        for tensor in tensors_in(outcomes):
            place = tensor.untyped_storage().data_ptr()
            if place not in seen:
                seen.add(place)
                for stream in streams:
                    keep_for(tensor, stream)

    def reap(self, modes: tuple[Modes | Across, Any], told: Callable[[Exception | None], object]) -> None:
        """Call `told` from the reaper's thread once a batch under `modes` has run, with what went wrong."""
        ran = modes[0]
        event = torch.cuda.Event(blocking=True)
        event.record(self._own if isinstance(ran, Across) else stream_of(ran.stream))

        def wait_for_it() -> None:
            error: Exception | None = None
            try:
                event.synchronize()
            except Exception as raised:
                error = raised
            told(error)

        self._reaper.submit(wait_for_it)


def stream_of(known: Stream | None) -> Any:
    """The stream object of what `current` gave."""
    assert known is not None
    number, index, kind = known
    make: Any = torch.cuda.Stream  # its constructor has no annotations
    return make(stream_id=number, device_index=index, device_type=kind)


def set_stream(known: Stream | None) -> None:
    """Make a stream the current one of this thread."""
    assert known is not None
    number, index, kind = known
    torch._C._cuda_setStream(stream_id=number, device_index=index, device_type=kind)


class Ambient(Protocol):
    """What is in force for tasks that begin while others wait."""

    ambient_grad: bool
    ambient_stream: Stream | None


def leave(modes: Modes, front: Ambient) -> None:
    """Put the loop's own grad mode and stream in force while a caller waits."""
    if not modes.inference:
        # A front whose first caller was inside a block without gradients took that for the loop's own mode.
        front.ambient_grad = front.ambient_grad or modes.grad
        torch._C._set_grad_enabled(front.ambient_grad)
    if modes.stream != front.ambient_stream:
        set_stream(front.ambient_stream)


def come_back(modes: Modes, front: Ambient) -> None:
    """Put a caller's own grad mode and stream in force again."""
    if not modes.inference:
        torch._C._set_grad_enabled(modes.grad)
    if modes.stream != front.ambient_stream:
        set_stream(modes.stream)


def wait(later: Any, earlier: Any) -> None:
    """What `later` is given from here on begins after what `earlier` has been given so far."""
    later.wait_stream(earlier)


def keep_for(tensor: Tensor, stream: Any) -> None:
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

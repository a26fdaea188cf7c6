"""Reading results back: the copies that one loop turn asks for share one event and one wake.

On the CPU a result is there already; it is only freed of the batch it is a view of. On CUDA each tensor is
copied into pinned memory without blocking; a thread sleeps on the event behind the last copy and wakes the
loop once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.actors.worker import Worker
from layerzero.scheduler.modes import Stream
from layerzero.scheduler.streams import stream_of, wait


def compacted(tensor: Tensor) -> Tensor:
    """The tensor by itself: a copy where it is a piece of a larger allocation, else as it is.

    A row that leaves must not keep 63 strangers' rows alive, nor carry them into a pickle.
    """
    own = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() > own:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


class Readback:
    """The read-backs of one event loop from one CUDA device."""

    __slots__ = ("_loop", "_pending", "_sources", "_worker")

    def __init__(self, loop: Any, worker: Worker) -> None:
        self._loop = loop
        self._worker = worker
        self._pending: list[tuple[Tensor, Any]] = []
        self._sources: set[Stream] = set()

    def add(self, tensor: Tensor, stream: Stream) -> Any:
        """A future of this loop for the host copy of `tensor`, which `stream` writes."""
        future = self._loop.create_future()
        if not self._pending:
            self._loop.call_soon(self._launch)
        self._pending.append((tensor, future))
        self._sources.add(stream)
        return future

    def _launch(self) -> None:
        pending, self._pending = self._pending, []
        sources, self._sources = self._sources, set()
        here = torch.cuda.current_stream(pending[0][0].device)
        for source in sources:
            wait(here, stream_of(source))
        copies: list[Tensor] = []
        for tensor, _ in pending:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            # On `here`, the current stream; `pending` holds the source until the copy has ended.
            copies.append(host.copy_(tensor, non_blocking=True))
        event = torch.cuda.Event(blocking=True)
        event.record(here)
        self._worker.submit(lambda: self._wait(event, pending, copies))

    def _wait(self, event: Any, pending: list[tuple[Tensor, Any]], copies: list[Tensor]) -> None:
        error: Exception | None = None
        try:
            event.synchronize()
        except Exception as raised:
            error = raised
        self._loop.call_soon_threadsafe(self._land, pending, copies, error)

    @staticmethod
    def _land(pending: list[tuple[Tensor, Any]], copies: list[Tensor], error: Exception | None) -> None:
        for (_, future), copy in zip(pending, copies, strict=True):
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(copy)

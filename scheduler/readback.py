"""Reading results back: the copies that one loop turn asks for share one event and one wake.

On the CPU a result is there already; it is only freed of the batch it is a view of. On CUDA tensors are
copied into pinned memory without blocking, small rows of one batch in one piece; a thread sleeps on the event
behind the last copy and wakes the loop once. Until then the lane expects the callers back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from layerzero.actors.device.worker import Worker
from layerzero.native import HOT
from layerzero.scheduler.core.pending_call import CANCELLED, DONE, FAILED, RUNNING, TICKETS, Failed, Ticket
from layerzero.scheduler.loop_driver import Cancelled, Front
from layerzero.scheduler.streams import stream_of, wait
from layerzero.scheduler.torch_modes import Stream

# Rows up to this size are copied with their neighbours and cut apart on the host.
SMALL_BYTES = 4096
# A piece of a batch is copied whole where at most this share of it is nobody's.
MOST_UNASKED = 0.5
# Who waits for an event asleep is woken late; where cores are plenty one of them asks without pause.
ASLEEP: Final = (os.cpu_count() or 1) < 4


def compacted(tensor: Tensor) -> Tensor:
    """The tensor by itself: a copy where it is a piece of a larger allocation, else as it is.

    A row that leaves must not keep 63 strangers' rows alive, nor carry them into a pickle.
    """
    if HOT.module is not None:
        copied: Tensor = HOT.module.own(tensor)
        if copied is not NotImplemented:
            return copied
    own = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() > own:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


class Piece:
    """Rows of one batch that are copied at once: `whole` covers them, `counts` cuts it into them again.

    `indices` says which of the tensors asked for each cut is, None for rows between them.
    """

    __slots__ = ("counts", "indices", "whole")

    def __init__(self, whole: Tensor, counts: list[int], indices: list[int | None]) -> None:
        self.whole = whole
        self.counts = counts
        self.indices = indices


def pieces(tensors: Sequence[Tensor]) -> list[Piece]:
    """What to copy so that every one of `tensors` arrives: neighbours in memory together, the rest alone."""
    alone: list[int] = []
    near: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if 0 < tensor.nbytes <= SMALL_BYTES and tensor.dim() and tensor.is_contiguous():
            place = tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.shape[1:]
            near.setdefault(place, []).append(index)
        else:
            alone.append(index)
    made: list[Piece] = []
    for indices in near.values():
        piece = _joined(tensors, indices) if len(indices) > 1 else None
        if piece is None:
            alone += indices
        else:
            made.append(piece)
    made += [Piece(tensors[index], [], [index]) for index in alone]
    return made


def _joined(tensors: Sequence[Tensor], indices: Iterable[int]) -> Piece | None:
    """One piece over rows of one storage; None where they overlap, lie askew or far apart."""
    order = sorted(indices, key=lambda index: tensors[index].storage_offset())
    first = tensors[order[0]]
    begin, row = int(first.storage_offset()), first.numel() // first.shape[0]
    counts: list[int] = []
    cuts: list[int | None] = []
    at = asked = 0
    for index in order:
        tensor = tensors[index]
        start, askew = divmod(int(tensor.storage_offset()) - begin, row)
        if askew or start < at:
            return None
        if start > at:
            counts.append(start - at)
            cuts.append(None)
        counts.append(tensor.shape[0])
        cuts.append(index)
        at = start + tensor.shape[0]
        asked += tensor.shape[0]
    if at - asked > MOST_UNASKED * at:
        return None
    shape = (at, *first.shape[1:])
    return Piece(first.as_strided(shape, (row, *first.stride()[1:]), begin), counts, cuts)


def apart(piece: Piece, host: Tensor) -> Iterable[tuple[int, Tensor]]:
    """The tensors asked for, by index, out of the host copy of a piece; each by itself."""
    if not piece.counts:
        index = piece.indices[0]
        assert index is not None
        return [(index, host)]
    views = NotImplemented if HOT.module is None else HOT.module.split(host, piece.counts, False)
    rows: Sequence[Tensor] = host.split(piece.counts) if views is NotImplemented else views
    return [
        (index, compacted(row)) for index, row in zip(piece.indices, rows, strict=True) if index is not None
    ]


class Copies(Protocol):
    """How tensors get from a device to the host without anybody waiting."""

    def launch(self, tensors: list[Tensor], sources: set[Stream]) -> tuple[list[Tensor], Any]:
        """Host copies, valid once `synchronize()` of what comes with them has returned."""
        ...


class CudaCopies:
    """Copies into pinned memory, on the stream that is current behind all of `sources`."""

    __slots__ = ()

    def launch(self, tensors: list[Tensor], sources: set[Stream]) -> tuple[list[Tensor], Any]:
        """Host copies, and the event behind them."""
        here = torch.cuda.current_stream(tensors[0].device)
        for source in map(stream_of, sources):
            if source != here:
                wait(here, source)
        copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        event = torch.cuda.Event(blocking=ASLEEP)
        event.record(here)
        return copies, event


class Readback:
    """The read-backs of one event loop from one device: tickets of its own, which no lane sees."""

    __slots__ = ("_copies", "_front", "_pending", "_sources", "_worker", "loop")

    name = "to_host"

    def __init__(self, front: Front, worker: Worker, copies: Copies | None = None) -> None:
        self._front = front
        self.loop = front.loop
        self._worker = worker
        self._copies = copies or CudaCopies()
        self._pending: list[Ticket] = []
        self._sources: set[Stream] = set()

    async def read(self, tensor: Tensor, stream: Stream) -> Tensor:
        """The host copy of `tensor`, which `stream` writes."""
        ticket = TICKETS.kind(self, (tensor,))
        ticket.front = self
        ticket._loop = self.loop
        if not self._pending:
            self.loop.call_soon(self._launch)
        self._pending.append(ticket)
        self._sources.add(stream)
        copied: Tensor = await ticket
        return copied

    def cancel(self, ticket: Ticket, message: object = None) -> bool:
        """Let a reader go; its copy is made all the same, and dropped."""
        if ticket.state > RUNNING:
            return False
        ticket.state = CANCELLED
        error = Cancelled() if message is None else Cancelled(message)
        self._front.end(ticket, error)
        return True

    def _launch(self) -> None:
        pending, self._pending = self._pending, []
        sources, self._sources = self._sources, set()
        try:
            parts = pieces([ticket.args[0] for ticket in pending])
            hosts, event = self._copies.launch([part.whole for part in parts], sources)
        except Exception as error:
            self._land(pending, [], error)
            return
        # `pending` holds the sources until the copies have ended.
        launches = self._front.launches
        self._worker.submit(lambda: self._wait(event, pending, parts, hosts, launches))

    def _wait(
        self, event: Any, pending: list[Ticket], parts: list[Piece], hosts: list[Tensor], launches: int
    ) -> None:
        """On the reaper's thread."""
        error: Exception | None = None
        found: list[tuple[int, Tensor]] = []
        try:
            event.synchronize()
            for part, host in zip(parts, hosts, strict=True):
                found += apart(part, host)
        except Exception as raised:
            error = raised
        self.loop.call_soon_threadsafe(self._land, pending, found, error, launches)

    def _land(
        self,
        pending: list[Ticket],
        found: list[tuple[int, Tensor]],
        error: Exception | None,
        launches: int = 0,
    ) -> None:
        """Give who still waits a copy, or what went wrong, and send all of them on in one callback."""
        for index, copy in found:
            ticket = pending[index]
            if ticket.state <= RUNNING:
                ticket.state, ticket.value = DONE, copy
        ended = [ticket for ticket in pending if ticket.state == DONE]
        if error is not None:
            ended = [ticket for ticket in pending if ticket.state <= RUNNING]
            for ticket in ended:
                ticket.state, ticket.value = FAILED, Failed(error)
        for ticket in pending:
            ticket.args = ()
        # The copies stood behind every batch that was launched before them.
        self._front.completed(launches)
        self._front.resume(ended)

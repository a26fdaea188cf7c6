"""Reading results back: the copies that one loop turn asks for share one event and one wake.

On the CPU a result is there already; it is only freed of the batch it is a view of. On CUDA tensors are
copied into pinned memory without blocking, small rows of one batch in one piece; a thread sleeps on the event
behind the last copy and wakes the loop once. Until then the batcher expects the callers back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from layerzero.actors.device.worker import Worker
from layerzero.native import FAST_PATH
from layerzero.scheduler.core.pending_call import (
    CANCELLED,
    DONE,
    FAILED,
    PENDING_CALL,
    RUNNING,
    Failure,
    PendingCall,
    TaskTree,
)
from layerzero.scheduler.loop_driver import Cancelled, LoopDriver
from layerzero.scheduler.modes.streams import stream_of, wait_for_stream
from layerzero.scheduler.modes.torch_modes import Stream

# Rows up to this size are copied with their neighbours and cut apart on the host.
SMALL_BYTES = 4096
# A piece of a batch is copied whole where at most this share of it is no caller's.
MAX_UNREQUESTED_SHARE = 0.5
# Who waits for an event asleep is woken late; where cores are plenty one of them asks without pause.
BLOCKING_EVENTS: Final = (os.cpu_count() or 1) < 4


def compact(tensor: Tensor) -> Tensor:
    """The tensor by itself: a copy where it is a piece of a larger allocation, else as it is.

    A row that leaves must not keep 63 strangers' rows alive, nor carry them into a pickle.
    """
    if FAST_PATH.module is not None:
        copied: Tensor = FAST_PATH.module.own(tensor)
        if copied is not NotImplemented:
            return copied
    needed_bytes = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() > needed_bytes:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


@dataclass(eq=False, slots=True)
class CopyBlock:
    """Rows of one batch that are copied at once: `whole` covers them, `counts` cuts it into them again.

    `indices` says which of the tensors asked for each cut is, None for rows between them.
    """

    whole: Tensor
    counts: list[int]
    indices: list[int | None]


def copy_blocks(tensors: Sequence[Tensor]) -> list[CopyBlock]:
    """What to copy so that every one of `tensors` arrives: neighbours in memory together, the rest alone."""
    alone: list[int] = []
    by_storage: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if 0 < tensor.nbytes <= SMALL_BYTES and tensor.dim() and tensor.is_contiguous():
            place = tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.shape[1:]
            by_storage.setdefault(place, []).append(index)
        else:
            alone.append(index)
    blocks: list[CopyBlock] = []
    for indices in by_storage.values():
        block = _block_over_rows(tensors, indices) if len(indices) > 1 else None
        if block is None:
            alone += indices
        else:
            blocks.append(block)
    blocks += [CopyBlock(tensors[index], [], [index]) for index in alone]
    return blocks


def _block_over_rows(tensors: Sequence[Tensor], indices: Iterable[int]) -> CopyBlock | None:
    """One piece over rows of one storage; None where they overlap, lie askew or far apart."""
    order = sorted(indices, key=lambda index: tensors[index].storage_offset())
    first = tensors[order[0]]
    begin, row = int(first.storage_offset()), first.numel() // first.shape[0]
    counts: list[int] = []
    cuts: list[int | None] = []
    end = requested = 0
    for index in order:
        tensor = tensors[index]
        start, askew = divmod(int(tensor.storage_offset()) - begin, row)
        if askew or start < end:
            return None
        if start > end:
            counts.append(start - end)
            cuts.append(None)
        counts.append(tensor.shape[0])
        cuts.append(index)
        end = start + tensor.shape[0]
        requested += tensor.shape[0]
    if end - requested > MAX_UNREQUESTED_SHARE * end:
        return None
    shape = (end, *first.shape[1:])
    return CopyBlock(first.as_strided(shape, (row, *first.stride()[1:]), begin), counts, cuts)


def split_block(block: CopyBlock, host: Tensor) -> Iterable[tuple[int, Tensor]]:
    """The tensors asked for, by index, out of the host copy of a piece; each by itself."""
    if not block.counts:
        index = block.indices[0]
        assert index is not None
        return [(index, host)]
    views = NotImplemented if FAST_PATH.module is None else FAST_PATH.module.split(host, block.counts, False)
    rows: Sequence[Tensor] = host.split(block.counts) if views is NotImplemented else views
    return [
        (index, compact(row)) for index, row in zip(block.indices, rows, strict=True) if index is not None
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
        stream = torch.cuda.current_stream(tensors[0].device)
        for source in map(stream_of, sources):
            if source != stream:
                wait_for_stream(stream, source)
        pinned: Any = {"device": "cpu", "pin_memory": True}
        copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, **pinned).copy_(tensor, non_blocking=True)
            for tensor in tensors
        ]
        event = torch.cuda.Event(blocking=BLOCKING_EVENTS)
        event.record(stream)
        return copies, event


class Readback:
    """The read-backs of one event loop from one device: pending calls of its own, which no batcher sees."""

    __slots__ = ("_copies", "_driver", "_launched", "_lost", "_pending", "_sources", "_worker", "loop")

    name = "to_host"

    def __init__(self, driver: LoopDriver, worker: Worker, copies: Copies | None = None) -> None:
        self._driver = driver
        self.loop = driver.loop
        self._worker = worker
        self._copies = copies or CudaCopies()
        self._pending: list[PendingCall] = []
        self._sources: set[Stream] = set()
        self._launched: dict[int, list[PendingCall]] = {}  # whose copies the device has not made yet
        self._lost: Exception | None = None  # why nothing is read

    def start(self, tensor: Tensor, stream: Stream) -> PendingCall:
        """Copy `tensor`, which `stream` writes; what comes back is awaited for the copy.

        The copy is behind what the stream has been given until this turn of the loop ends, or until the next
        batch is launched, whichever comes first.
        """
        call = PENDING_CALL.cls(self, (tensor,))
        call.driver = self
        call._loop = self.loop
        if self._lost is not None:
            call.state, call.value = FAILED, Failure(self._lost)
            return call
        TaskTree.begin(self._driver._current_task(self.loop))  # the reader's next tasks are known by it
        if not self._pending:
            self.loop.call_soon(self.flush)
        self._pending.append(call)
        self._sources.add(stream)
        return call

    def cancel(self, call: PendingCall, message: object = None) -> bool:
        """Let a reader go; its copy is made all the same, and dropped."""
        if call.state > RUNNING:
            return False
        call.state = CANCELLED
        error = Cancelled() if message is None else Cancelled(message)
        self._driver.fail(call, error)
        return True

    def flush(self, launches: int | None = None) -> None:
        """Launch the copies that have been asked for: they do not wait for a batch that comes after them.

        They come behind the first `launches` batches; behind all, where not given.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        sources, self._sources = self._sources, set()
        try:
            blocks = copy_blocks([call.args[0] for call in pending])
            hosts, event = self._copies.launch([block.whole for block in blocks], sources)
        except Exception as error:
            self._complete(pending, [], error)
            return
        # They hold the sources until the copies have ended.
        self._launched[id(pending)] = pending
        launches, watch = self._driver.launches if launches is None else launches, self._driver.watch
        copied = None if watch is None else watch.copying(len(pending))
        self._worker.submit(lambda: self._wait(event, pending, blocks, hosts, launches, copied))

    def lose(self, error: Exception | None) -> None:
        """Fail every read that is waited for, and later ones until `lose(None)`: nothing says what the device
        writes, or whether it ever answers. What a batcher holds for news of it continues. The loop calls
        this, in no task."""
        self._lost = error
        if error is None:
            return
        waiting = [
            call
            for calls in (*self._launched.values(), self._pending)
            for call in calls
            if call.state <= RUNNING
        ]
        for call in waiting:
            call.state, call.value = FAILED, Failure(error)
        self._driver.completed(self._driver.launches)
        self._driver.resume(waiting)

    def _wait(
        self,
        event: Any,
        pending: list[PendingCall],
        blocks: list[CopyBlock],
        hosts: list[Tensor],
        launches: int,
        copied: Callable[[], None] | None,
    ) -> None:
        """On the event thread."""
        error: Exception | None = None
        results: list[tuple[int, Tensor]] = []
        try:
            event.synchronize()
            for block, host in zip(blocks, hosts, strict=True):
                results += split_block(block, host)
        except Exception as raised:
            error = raised
        try:
            self.loop.call_soon_threadsafe(self._complete, pending, results, error, launches, copied)
        except RuntimeError:
            self._driver.note_loop_closed(len(pending))

    def _complete(
        self,
        pending: list[PendingCall],
        results: list[tuple[int, Tensor]],
        error: Exception | None,
        launches: int = 0,
        copied: Callable[[], None] | None = None,
    ) -> None:
        """Give who still waits a copy, or what went wrong, and send all of them on in one callback."""
        self._launched.pop(id(pending), None)
        if copied is not None:
            copied()
        for index, copy in results:
            call = pending[index]
            if call.state <= RUNNING:
                call.state, call.value = DONE, copy
        ended = [call for call in pending if call.state == DONE]
        if error is not None:
            ended = [call for call in pending if call.state <= RUNNING]
            for call in ended:
                call.state, call.value = FAILED, Failure(error)
        for call in pending:
            call.args = ()
        # The copies stood behind every batch that was launched before them.
        self._driver.completed(launches)
        self._driver.resume(ended)

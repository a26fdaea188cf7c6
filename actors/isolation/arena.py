"""Memory that this process and a worker both have: tensors are put there for a call.

On the CPU it is a file in memory without a name, passed by descriptor and sealed, so that a worker cannot cut
it under the process that reads it. On a card it is one allocation, shared by its CUDA IPC handle; an event in
each direction puts the copies in order, and the host waits for none of them.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
CALL_SLOT = 2 * ALIGNMENT  # bytes at the head of what is shared on the CPU
_LEAST = 1 << 20
_MAX_PLACES = 1024
# F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW: /usr/include/linux/fcntl.h
_SEALS = 0x1 | 0x2 | 0x4
# Where what one core writes is seen by another in its order; Python has no fences for the others.
_IN_ORDER = platform.machine() in ("x86_64", "AMD64")
_FAULT = 1 << 63
_SHORT = 1 << 16  # bytes that are compared in a few microseconds
_ASKED, _FRAME, _ANSWERED, _ASLEEP = 0, 1, 8, 9  # a line of memory for each side


def room_for(needed: int) -> int:
    """The size of an arena that holds `needed` bytes: a power of two, so that few are made."""
    return max(_LEAST, 1 << (needed - 1).bit_length())


class CallSlot:
    """A call that was made before, and its answer, as numbers in shared memory: no message is needed.

    A hint alone: what is overlooked, or comes too late, goes by the socket, under the same number.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._words = memoryview(memory)[:CALL_SLOT].cast("Q")
        self.answers = 0  # the number of the request that is waited for

    def ask(self, number: int, frame: int) -> bool:
        """Ask for a call; False where the other side sleeps, and is to be woken."""
        self._words[_FRAME] = frame
        self._words[_ASKED] = self.answers = number
        return not self._words[_ASLEEP]

    def answer(self) -> int | None:
        """Whether the last call has been answered: 0 for done, 1 where a message says more, None not yet."""
        word = self._words[_ANSWERED]
        return word >> 63 if word & ~_FAULT == self.answers else None

    def asked(self, after: int) -> tuple[int, int] | None:
        """On the worker: the number of a call that was asked for after another, and of its frame."""
        number = self._words[_ASKED]
        return (number, self._words[_FRAME]) if number > after else None

    def reply(self, number: int, fault: bool) -> None:
        """On the worker: answer a call."""
        self._words[_ANSWERED] = number | _FAULT * fault

    def sleeps(self, asleep: bool) -> None:
        """On the worker: say whether it looks here."""
        self._words[_ASLEEP] = asleep


class HostArena:
    """Shared memory of the CPU, mapped from a descriptor; both sides have one over the same pages."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(descriptor, size)
        self.slot = CallSlot(self._memory) if _IN_ORDER else None
        # The second lets other threads run meanwhile, which takes longer than a short comparison.
        self._compare, self._compare_long = ctypes.PyDLL(None).memcmp, ctypes.CDLL(None).memcmp
        for compare in (self._compare, self._compare_long):
            compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._places: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @classmethod
    def create(cls, needed: int) -> tuple[HostArena, int]:
        """A new arena with its descriptor, which the caller passes on and closes."""
        size = room_for(needed)
        sealed = hasattr(os, "memfd_create")
        if sealed:
            descriptor = os.memfd_create("layerzero", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:  # a Python without files in memory: one without a name, which cannot be sealed
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        try:
            os.ftruncate(descriptor, size)
            if sealed:
                import fcntl  # where there are files in memory, there is this

                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(descriptor, size), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    def keep_from_forks(self) -> None:
        """Where the system can: what forks from this process has not these pages, so it writes no answer."""
        if hasattr(mmap, "MADV_DONTFORK"):
            self._memory.madvise(mmap.MADV_DONTFORK)

    def write(self, offset: int, tensor: Tensor) -> None:
        """Put a tensor's elements there, in order of its shape.

        What is there already stays: a line of memory that is written goes from core to core anew, which takes
        longer than to compare it, and weights are the same in every call.
        """
        if not tensor.is_contiguous() or tensor.is_neg():
            tensor = tensor.detach().resolve_neg().contiguous()
        place, source, count = self._address + offset, tensor.data_ptr(), tensor.nbytes
        compare = self._compare if count <= _SHORT else self._compare_long
        if compare(place, source, count):
            ctypes.memmove(place, source, count)

    def read(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of its own with what is there."""
        place = self._places.get((offset, shape, dtype))
        if place is None:
            if len(self._places) >= _MAX_PLACES:
                self._places.clear()
            place = self._places[offset, shape, dtype] = self.view(offset, shape, dtype)
        return place.clone()

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The place as a tensor."""
        count = math.prod(shape)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))

    def before_send(self) -> None:
        """What is written is there."""

    def after_reply(self) -> None:
        """What was answered is there."""

    after_receive = before_reply = after_read = before_send


class DeviceArena:
    """Shared memory of a card; the process that makes it calls a kernel, the one that opens it runs it.

    `sent` is recorded behind the operands, `answered` behind the outputs, `done` when they have been read.
    """

    def __init__(self, memory: Tensor, sent: Any, answered: Any) -> None:
        self.size = memory.numel()
        self._memory = memory
        self._sent, self.answered = sent, answered
        self._done: Any = torch.cuda.Event()

    @classmethod
    def create(cls, needed: int, device: torch.device) -> tuple[DeviceArena, list[Any]]:
        """A new arena, and what a worker opens it with; `answered` is the worker's."""
        memory = torch.empty(room_for(needed), dtype=torch.uint8, device=device)
        with torch.cuda.device(device):
            sent = torch.cuda.Event(interprocess=True)
            sent.record()
            storage: Any = memory.untyped_storage()
            handle = [*storage._share_cuda_(), memory.storage_offset(), memory.numel(), sent.ipc_handle()]
        return cls(memory, sent, None), handle

    @classmethod
    def open(cls, device: torch.device, handle: Sequence[Any]) -> tuple[DeviceArena, bytes]:
        """The arena of another process, and the handle of the event that this one records."""
        *shared, offset, size, sent = handle
        with torch.cuda.device(device):
            storage: Any = torch.UntypedStorage
            opened = storage._new_shared_cuda(*shared)
            empty = torch.empty(0, dtype=torch.uint8, device=device)
            memory = empty.set_(opened, offset, (size,), (1,))
            answered = torch.cuda.Event(interprocess=True)
            answered.record()
            sent_event = torch.cuda.Event.from_ipc_handle(device, sent)
            return cls(memory, sent_event, answered), answered.ipc_handle()

    def take_answer(self, device: torch.device, handle: bytes) -> None:
        """Know the event that the worker records."""
        self.answered = torch.cuda.Event.from_ipc_handle(device, handle)

    def write(self, offset: int, tensor: Tensor) -> None:
        """Put a tensor's elements there, in order of its shape and of the current stream."""
        self._done.wait()
        self.view(offset, tensor.shape, tensor.dtype).copy_(tensor.detach())

    def read(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of its own with what will be there."""
        return self.view(offset, shape, dtype).clone()

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The place as a tensor."""
        count = dtype.itemsize * math.prod(shape)
        return self._memory[offset : offset + count].view(dtype).view(tuple(shape))

    def before_send(self) -> None:
        """The worker's stream will wait for what was written."""
        self._sent.record()

    def after_reply(self) -> None:
        """This stream waits for what was answered."""
        self.answered.wait()  # pyright: ignore[reportCallIssue]

    def after_read(self) -> None:
        """The next call waits until this one's outputs have been read, on whatever stream."""
        self._done.record()

    def after_receive(self) -> None:
        """On the worker: its stream waits for the operands."""
        self._sent.wait()

    def before_reply(self) -> None:
        """On the worker: the caller's stream will wait for the outputs."""
        self.answered.record()  # pyright: ignore[reportCallIssue]


Arena = HostArena | DeviceArena

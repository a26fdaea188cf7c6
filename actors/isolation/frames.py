"""What passes between a process and its worker: values by msgpack, tensors by their place in shared memory.

No pickle: a message holds numbers, words, lists and bytes, and what it asks for is one of a few verbs.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from layerzero.actors.isolation.arena import ALIGNMENT, CALL_SLOT
from layerzero.ops.op import Args
from layerzero.spec.call_spec import CallSpec, OutputSpec

PROTOCOL: Final = 3
# The first byte of a request.
CALL, HOST_ARENA, DEVICE_ARENA, LOAD, COMPILE, DESCRIBE = b"C", b"H", b"D", b"L", b"U", b"P"
# A request begins with its number, from 1, and so does its reply; the greeting has none.
NUMBER = struct.Struct("=Q")
# The first byte behind it.
DONE, FAULT = b"\0", b"\1"
MAX_MESSAGE: Final = 1 << 18
MOST_FRAMES: Final = 1024  # that each side remembers
_TENSOR, _DTYPE, _GROUP = "t", "d", "g"


class Hello(msgspec.Struct, frozen=True):
    """What a worker says of itself before anything is asked of it."""

    protocol: int
    version: str
    python: str
    torch: str
    cuda: str | None
    pid: int


class LoadCommand(msgspec.Struct, frozen=True):
    """A kernel to load: its id there, its op, and the plugins that may have it."""

    kernel: str
    op: str
    plugins: tuple[str, ...] = ()
    origin: str = ""


class CompileCommand(msgspec.Struct, frozen=True):
    """What is to be compiled of a loaded kernel."""

    kernel: str
    request: CallSpec


class Fault(msgspec.Struct, frozen=True):
    """An error of the worker's: its class's name, its text, its traceback, a reason code if any."""

    kind: str
    message: str
    traceback: str
    reason: str = ""


class Output(msgspec.Struct, frozen=True, array_like=True):
    """Where an output goes, and what it has to be."""

    device: str
    offset: int
    dtype: str
    shape: tuple[int, ...]


class CallCommand(msgspec.Struct, frozen=True, array_like=True):
    """One call: the kernel, its arguments with tensors by place, and where the outputs go."""

    kernel: str
    args: list[Any]
    outputs: list[Output]


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name in messages."""
    return str(dtype).removeprefix("torch.")


class Frame:
    """One shape of call, laid out once: its message, its tensors' places, the bytes that it needs."""

    __slots__ = ("bytes_on", "cards", "grouped", "message", "number", "operands", "outputs")
    _numbers = itertools.count(1)

    def __init__(self, kernel: str, args: Args, outputs: Sequence[OutputSpec]) -> None:
        """Raises: TypeError: an argument is no tensor, number, word, dtype or tuple of those.

        ValueError: they are more than a message holds.
        """
        self.bytes_on: dict[str, int] = {}
        self.number = next(self._numbers)
        self.grouped = any(isinstance(value, tuple | list) for value in args)
        # Which of the flattened arguments each tensor is, and where it goes.
        self.operands: list[tuple[int, str, int]] = [
            (position, str(value.device), self._take(str(value.device), value.nbytes))
            for position, value in enumerate(flatten(args))
            if isinstance(value, Tensor)
        ]
        places = iter(self.operands)
        device = args[0].device
        self.outputs: list[tuple[str, int, tuple[int, ...], torch.dtype]] = []
        encoded = [self._encode(value, places) for value in args]
        described = []
        for spec in outputs:
            dtype: torch.dtype = getattr(torch, spec.dtype)
            offset = self._take(str(device), dtype.itemsize * math.prod(spec.shape))
            self.outputs.append((str(device), offset, tuple(spec.shape), dtype))
            described.append(Output(str(device), offset, spec.dtype, tuple(spec.shape)))
        self.cards = [name for name in self.bytes_on if name != "cpu"]
        command = msgspec.msgpack.encode(CallCommand(kernel, encoded, described))
        self.message = CALL + NUMBER.pack(self.number) + command
        if len(self.message) > MAX_MESSAGE:
            raise ValueError(
                f"a call needs a message of at most {MAX_MESSAGE} bytes, got {len(self.message)}"
            )

    def _take(self, device: str, count: int) -> int:
        offset = self.bytes_on.get(device, CALL_SLOT if device == "cpu" else 0)
        self.bytes_on[device] = offset + -(-max(count, 1) // ALIGNMENT) * ALIGNMENT
        return offset

    def _encode(self, value: Any, places: Iterator[tuple[int, str, int]]) -> Any:
        if isinstance(value, Tensor):
            _, device, offset = next(places)
            return [_TENSOR, device, offset, name_of(value.dtype), list(value.shape)]
        if isinstance(value, tuple | list):
            return [_GROUP, [self._encode(part, places) for part in value]]
        if isinstance(value, torch.dtype):
            return [_DTYPE, name_of(value)]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"a kernel in a process of its own takes tensors and plain values, got {type(value)}")


def flatten(args: Sequence[Any]) -> Iterator[Any]:
    """The arguments with those of their groups in place of the groups."""
    for value in args:
        if isinstance(value, tuple | list):
            yield from flatten(value)
        else:
            yield value


def decode(value: Any, place: Callable[[str, int, Sequence[int], torch.dtype], Tensor]) -> Any:
    """On the worker: an argument out of a message; `place` finds a tensor in shared memory."""
    if not isinstance(value, list):
        return value
    kind = value[0]
    if kind == _TENSOR:
        _, device, offset, dtype, shape = value
        return place(device, offset, shape, getattr(torch, dtype))
    if kind == _DTYPE:
        return getattr(torch, value[1])
    return tuple(decode(part, place) for part in value[1])


def key_of(args: Args) -> tuple[Any, ...]:
    """What decides the frame of a call: shapes, dtypes, devices and plain values with their types."""
    key: list[Any] = []
    for value in args:
        if isinstance(value, Tensor):
            key += (value.shape, value.dtype, value.device)
        elif value.__class__ in (tuple, list):
            key.append(key_of(value))  # type: ignore[arg-type]
        else:
            key += (value.__class__, value)
    return tuple(key)

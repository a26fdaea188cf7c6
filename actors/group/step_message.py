"""Step messages: which requests a step runs, in which order, under which plan; rank 0 writes them, the rest
obey.

Two ranks that batch by their own clocks add the rows of A to the rows of B: both get wrong sums and no error.
So one rank decides, and every other compares what it is about to run with the step message of that step,
before the first collective of the step.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from layerzero.actors.group.agreement import differing
from layerzero.ops.checks import MAX_ALIGNMENT
from layerzero.spec.errors import ConsistencyError

RequestId = int | str


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """One step: `asked` are its requests, encoded, `name` what runs, `plan` and `decided` are digests.

    `epoch` and `number` say which step of which incarnation of the rank group; `decided` is the digest of
    what rank 0's selections were up to here; `values` are the step's arguments for ranks that have no
    coroutines of their own, packed by `pack`, empty where each rank brings its own. An empty `name` ends the
    rank group.
    """

    epoch: int
    number: int
    name: str
    request_ids: msgspec.Raw
    plan_digest: str
    selections_digest: str
    values: bytes = b""

    @property
    def requests(self) -> tuple[RequestId, ...]:
        """The requests in the order of their rows; only who compares needs them one by one.

        Raises: ConsistencyError: they are none.
        """
        try:
            return _REQUESTS.decode(self.request_ids)
        except msgspec.DecodeError as error:
            raise ConsistencyError(f"the requests of a step message need to decode, got {error}") from error


class StepSequence:
    """The place of one rank in the sequence of step messages; knows neither sockets nor clocks."""

    __slots__ = ("epoch", "number", "plan_digest", "rank")

    def __init__(self, rank: int, epoch: int) -> None:
        self.rank = rank
        self.epoch = epoch
        self.number = 0
        self.plan_digest = ""

    def next_message(
        self, name: str, requests: Sequence[RequestId], selections_digest: str, values: bytes = b""
    ) -> StepMessage:
        """The next step message, on rank 0.

        Raises: ValueError: a request is in it twice.
        """
        if len(set(requests)) != len(requests):
            repeated = sorted({str(r) for r in requests if list(requests).count(r) > 1})
            raise ValueError(f"requests needs each id once in a step, got {', '.join(repeated)} again")
        # Counted where it can be said: followers would miss the number of one that cannot.
        request_ids = msgspec.Raw(_ENCODER.encode(requests))
        self.number += 1
        return StepMessage(
            self.epoch, self.number, name, request_ids, self.plan_digest, selections_digest, values
        )

    def accept(self, message: StepMessage, selections_digest: str) -> None:
        """Take the next step message on a follower that expects it.

        Raises: ConsistencyError: it is of another epoch, not the next one, under another plan, or rank 0's
            selections up to here were not this rank's.
        """
        if message.epoch != self.epoch:
            self._differs(message, "epoch", message.epoch, self.epoch)
        if message.number != self.number + 1:
            self._differs(message, "step", message.number, self.number + 1)
        if message.name and message.plan_digest != self.plan_digest:  # the end comes under any plan
            self._differs(message, "plan", message.plan_digest, self.plan_digest)
        if message.selections_digest and selections_digest and message.selections_digest != selections_digest:
            self._differs(message, "selections", message.selections_digest, selections_digest)
        self.number = message.number

    def compare(self, message: StepMessage, name: str, requests: Sequence[RequestId]) -> None:
        """Compare a step message with the batch that this rank has formed itself.

        Raises: ConsistencyError: it would run something else, other requests, or the same in another order.
        """
        if message.name != name:
            self._differs(message, "function", message.name, name)
        if message.requests != tuple(requests):
            self._differs(message, "requests", list(message.requests), list(requests))

    def _differs(self, message: StepMessage, what: str, leader: Any, local: Any) -> None:
        raise ConsistencyError(
            f"{what} of rank 0's step {message.number} needs {leader!r}, got {local!r} on rank {self.rank}",
            votes={0: str(leader), self.rank: str(local)},
        )


# -- what a follower says after a step ------------------------------------------------------------------

STEP_END_MARK = b"\0"
_STEP_END = struct.Struct("!cQ")  # before the digest of what it ran


def step_end(number: int, ran: bytes) -> bytes:
    """The frame that says that step `number` has ended, and the digest of the ops that ran in it."""
    return _STEP_END.pack(STEP_END_MARK, number) + ran


class StepReports:
    """The last step that each follower has ended, and the digest of what it ran; b"" is not compared."""

    def __init__(self, followers: Iterable[int]) -> None:
        self._last = {rank: (0, b"") for rank in followers}

    def add(self, rank: int, frame: bytes) -> None:
        """Take what a follower says after a step.

        Raises: ConsistencyError: it says nothing of one, or of one that it has ended before.
        """
        if len(frame) < _STEP_END.size:
            raise ConsistencyError(f"a word after a step needs {_STEP_END.size} bytes, got {len(frame)}")
        _, number = _STEP_END.unpack_from(frame)
        if number <= (last := self._last[rank][0]):
            raise ConsistencyError(f"a word after a step needs one behind step {last}, got {number}")
        self._last[rank] = number, frame[_STEP_END.size :]

    def behind(self, number: int) -> list[int]:
        """Who has not ended step `number`."""
        return sorted(rank for rank, (last, _) in self._last.items() if last < number)

    def need_same(self, number: int, ran: bytes) -> None:
        """Compare what all ran in step `number` with what rank 0 did.

        Raises: ConsistencyError: one ran others; it names all who did.
        """
        others = {
            rank: words.decode(errors="replace") if last == number else f"the end of step {last}"
            for rank, (last, words) in self._last.items()
            if last != number or (words and words != ran)
        }
        if others:
            got, who = differing(others, others), "it" if len(others) == 1 else "they"
            raise ConsistencyError(
                f"ops of rank 0's step {number} need {ran.decode()!r}, got {got}: {who} ran others, or in "
                "another order, and their sums are not handed out",
                votes={0: ran.decode(), **others},
            )


# -- frames ---------------------------------------------------------------------------------------------

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StepMessage)
_REQUESTS = msgspec.msgpack.Decoder(tuple[RequestId, ...])


def encode(message: StepMessage) -> bytes:
    """The step message as bytes."""
    return _ENCODER.encode(message)


def decode(frame: bytes) -> StepMessage:
    """The step message of a frame.

    Raises: ConsistencyError: it is none.
    """
    try:
        return _DECODER.decode(frame)
    except msgspec.DecodeError as error:
        raise ConsistencyError(f"a step message needs to decode, got {error}") from error


_TENSOR = 1
_DTYPES = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
# Code of the dtype, count of the axes, their sizes.
_HEADS = [struct.Struct(f"<BB{axes}q") for axes in range(16)]
MAX_VALUES = 1 << 20


_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # what msgpack has integers for
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


def check_request(request: RequestId) -> None:
    """Check what one caller names its request.

    Raises: TypeError: it is no int or str. ValueError: one that no message takes.
    """
    if isinstance(request, bool) or not isinstance(request, int | str):
        raise TypeError(f"request needs an int or a str, got {type(request).__name__}")
    check_sendable((request,), "request")


def check_sendable(values: Sequence[Any], what: str, unsent: frozenset[int] = frozenset()) -> None:
    """Check one caller's arguments, without their data, but for those at the places `unsent`.

    Raises: TypeError: one is no tensor of a dtype that travels, number, text or list of those. ValueError: an
        integer of more than 64 bits, a text with half a character.
    """
    for index, value in enumerate(values):
        kind = value.__class__
        if index in unsent:
            continue
        if kind in _PLAIN or (kind is list and not value):
            if (kind is int and not _LEAST <= value <= _MOST) or (kind is str and not value.isascii()):
                pack([value], what)
            continue
        if kind is not Tensor and not isinstance(value, Tensor):
            pack([value], what)
        elif value.dtype not in _CODES or value.dim() >= len(_HEADS):
            _code_of(value, what)


def _code_of(tensor: Tensor, what: str) -> int:
    code = _CODES.get(tensor.dtype)
    if code is None or tensor.ndim >= len(_HEADS):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise TypeError(
            f"{what} needs tensors of {names} with at most {len(_HEADS) - 1} axes, got {tensor.dtype} with "
            f"{tensor.ndim}"
        )
    return code


def _packed(what: str, value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{what} needs tensors, numbers, texts and lists of those in every argument, got "
            f"{type(value).__name__}; give followers what they can build it from"
        )
    # What changes nothing costs all the same, and every step pays: so does asking numpy for the bytes.
    tensor = (value if value.is_cpu else value.to("cpu")).contiguous()
    head = _HEADS[tensor.ndim].pack(_code_of(tensor, what), tensor.ndim, *tensor.shape)
    return msgspec.msgpack.Ext(_TENSOR, head + ctypes.string_at(tensor.data_ptr(), tensor.nbytes))


@functools.lru_cache(maxsize=256)
def _packer(what: str) -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=functools.partial(_packed, what))


def pack(values: Sequence[Any], what: str) -> bytes:
    """A step's arguments as bytes: ids, positions, page tables; what is large stays on its rank.

    Raises: TypeError: an argument is no tensor, number, text or list of those. ValueError: over 1 MiB; an
        integer or a text that no message takes.
    """
    try:
        packed = _packer(what).encode(values)
    except (OverflowError, UnicodeEncodeError) as error:
        raise ValueError(
            f"{what} needs integers of 64 bits and texts of whole characters in every argument: {error}"
        ) from error
    if len(packed) > MAX_VALUES:
        raise ValueError(
            f"{what} needs arguments of at most {MAX_VALUES} bytes in a step message, got {len(packed)}; "
            "send ids and places, not activations"
        )
    return packed


def aligned_contiguous(tensor: Tensor) -> Tensor:
    """The tensor as it is laid out on every rank of a step: contiguous, from an address that divides by 64.

    Rows that one rank took out of a larger batch could else mean another kernel there than elsewhere.
    """
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    plain = tensor.stride() == tuple(reversed(strides)) and tensor.data_ptr() % MAX_ALIGNMENT == 0
    return tensor if plain else tensor.clone(memory_format=torch.contiguous_format)


def _unpacked(device: torch.device, code: int, data: memoryview) -> Tensor:
    """The tensor that `_packed` packed, on `device`, from an address that divides by 64."""
    if code != _TENSOR:
        raise ConsistencyError(f"a step message's value needs a known kind, got {code}")
    dtype, axes = data[0], data[1]
    head = _HEADS[axes]
    # A GPU fetches it in its turn; out of ordinary memory it would wait for all that was launched before.
    pinned = device.type == "cuda"
    shape = head.unpack_from(data)[2:]
    tensor = torch.empty(shape, dtype=_DTYPES[dtype], device="cpu", pin_memory=pinned)
    data_bytes = bytes(data[head.size :])
    if len(data_bytes) != tensor.nbytes:
        raise ConsistencyError(f"a step message's tensor needs {tensor.nbytes} bytes, got {len(data_bytes)}")
    ctypes.memmove(tensor.data_ptr(), data_bytes, len(data_bytes))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=pinned)


@functools.lru_cache(maxsize=64)
def _unpacker(device: torch.device | str) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(ext_hook=functools.partial(_unpacked, torch.device(device)))


def unpack(packed: bytes, device: torch.device | str = "cpu") -> list[Any]:
    """The arguments of a step, tensors on `device`."""
    values: list[Any] = _unpacker(device).decode(packed)
    return values

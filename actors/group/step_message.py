"""Manifests: which requests a step runs, in which order, under which plan; rank 0 writes them, the rest obey.

Two ranks that batch by their own clocks add the rows of A to the rows of B: both get wrong sums and no error.
So one rank decides, and every other compares what it is about to run with the manifest of that step, before
the first collective of the step.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from layerzero.ops.checks import MAX_ALIGNMENT
from layerzero.spec.errors import ConsistencyError

Request = int | str


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """One step: `asked` are its requests, encoded, `name` what runs, `plan` and `decided` are digests.

    `epoch` and `number` say which step of which life of the gang; `decided` is the digest of what rank 0's
    selections were up to here; `values` are the step's arguments for ranks that have no coroutines of their
    own, packed by `pack`, empty where each rank brings its own. An empty `name` ends the gang.
    """

    epoch: int
    number: int
    name: str
    asked: msgspec.Raw
    plan: str
    decided: str
    values: bytes = b""

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests in the order of their rows; only who compares needs them one by one.

        Raises: ConsistencyError: they are none.
        """
        try:
            return _REQUESTS.decode(self.asked)
        except msgspec.DecodeError as error:
            raise ConsistencyError(f"the requests of a manifest need to decode, got {error}") from error


class Position:
    """Where one rank stands in the sequence of manifests; knows neither sockets nor clocks."""

    __slots__ = ("epoch", "number", "plan", "rank")

    def __init__(self, rank: int, epoch: int) -> None:
        self.rank = rank
        self.epoch = epoch
        self.number = 0
        self.plan = ""

    def issue(self, name: str, requests: Sequence[Request], decided: str, values: bytes = b"") -> Manifest:
        """The next manifest, on rank 0.

        Raises: ValueError: a request stands in it twice.
        """
        if len(set(requests)) != len(requests):
            twice = sorted({str(r) for r in requests if list(requests).count(r) > 1})
            raise ValueError(f"requests needs each id once in a step, got {', '.join(twice)} again")
        self.number += 1
        asked = msgspec.Raw(_ENCODER.encode(requests))
        return Manifest(self.epoch, self.number, name, asked, self.plan, decided, values)

    def admit(self, manifest: Manifest, decided: str) -> None:
        """Take the next manifest on a follower that stands where it should.

        Raises: ConsistencyError: it is of another epoch, not the next one, under another plan, or rank 0's
            selections up to here were not this rank's.
        """
        if manifest.epoch != self.epoch:
            self._differs(manifest, "epoch", manifest.epoch, self.epoch)
        if manifest.number != self.number + 1:
            self._differs(manifest, "step", manifest.number, self.number + 1)
        if manifest.name and manifest.plan != self.plan:  # the end comes under any plan
            self._differs(manifest, "plan", manifest.plan, self.plan)
        if manifest.decided and decided and manifest.decided != decided:
            self._differs(manifest, "selections", manifest.decided, decided)
        self.number = manifest.number

    def compare(self, manifest: Manifest, name: str, requests: Sequence[Request]) -> None:
        """Compare a manifest with the batch that this rank has formed itself.

        Raises: ConsistencyError: it would run something else, other requests, or the same in another order.
        """
        if manifest.name != name:
            self._differs(manifest, "function", manifest.name, name)
        if manifest.requests != tuple(requests):
            self._differs(manifest, "requests", list(manifest.requests), list(requests))

    def _differs(self, manifest: Manifest, what: str, leader: Any, own: Any) -> None:
        raise ConsistencyError(
            f"{what} of rank 0's step {manifest.number} needs {leader!r}, got {own!r} on rank {self.rank}",
            votes={0: str(leader), self.rank: str(own)},
        )


# -- frames ---------------------------------------------------------------------------------------------

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Manifest)
_REQUESTS = msgspec.msgpack.Decoder(tuple[Request, ...])


def encode(manifest: Manifest) -> bytes:
    """The manifest as bytes."""
    return _ENCODER.encode(manifest)


def decode(frame: bytes) -> Manifest:
    """The manifest of a frame.

    Raises: ConsistencyError: it is none.
    """
    try:
        return _DECODER.decode(frame)
    except msgspec.DecodeError as error:
        raise ConsistencyError(f"a manifest needs to decode, got {error}") from error


_TENSOR = 1
_DTYPES = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
# Code of the dtype, count of the axes, their sizes.
_HEADS = [struct.Struct(f"<BB{axes}q") for axes in range(16)]
MAX_VALUES = 1 << 20


_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


def need_sendable(values: Sequence[Any], what: str) -> None:
    """Check one caller's arguments, without their data.

    Raises: TypeError: one is no tensor of a dtype that travels, number, text or list of those.
    """
    rest = []
    for value in values:
        kind = value.__class__
        if kind in _PLAIN or (kind is list and not value):
            continue
        if kind is not Tensor and not isinstance(value, Tensor):
            rest.append(value)
        elif value.dtype not in _CODES or value.dim() >= len(_HEADS):
            _code_of(value, what)
    if rest:
        pack(rest, what)


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
    """What msgpack keeps of a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{what} needs tensors, numbers, texts and lists of those in every argument, got "
            f"{type(value).__name__}; give followers what they can build it from"
        )
    # What changes nothing costs all the same, and every step pays: so does asking numpy for the bytes.
    held = (value if value.is_cpu else value.to("cpu")).contiguous()
    head = _HEADS[held.ndim].pack(_code_of(held, what), held.ndim, *held.shape)
    return msgspec.msgpack.Ext(_TENSOR, head + ctypes.string_at(held.data_ptr(), held.nbytes))


@functools.lru_cache(maxsize=256)
def _packer(what: str) -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=functools.partial(_packed, what))


def pack(values: Sequence[Any], what: str) -> bytes:
    """A step's arguments as bytes: ids, positions, page tables; what is large stays on its rank.

    Raises: TypeError: an argument is no tensor, number, text or list of those. ValueError: over 1 MiB.
    """

    packed = _packer(what).encode(values)
    if len(packed) > MAX_VALUES:
        raise ValueError(
            f"{what} needs arguments of at most {MAX_VALUES} bytes in a manifest, got {len(packed)}; "
            "send ids and places, not activations"
        )
    return packed


def laid(tensor: Tensor) -> Tensor:
    """The tensor as it lies on every rank of a step: contiguous, from an address that divides by 64.

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
        raise ConsistencyError(f"a manifest's value needs a known kind, got {code}")
    dtype, axes = data[0], data[1]
    head = _HEADS[axes]
    # A GPU fetches it in its turn; out of ordinary memory it would wait for all that was launched before.
    pinned = device.type == "cuda"
    found = torch.empty(head.unpack_from(data)[2:], dtype=_DTYPES[dtype], pin_memory=pinned)
    held = bytes(data[head.size :])
    if len(held) != found.nbytes:
        raise ConsistencyError(f"a manifest's tensor needs {found.nbytes} bytes, got {len(held)}")
    ctypes.memmove(found.data_ptr(), held, len(held))
    return found if device.type == "cpu" else found.to(device, non_blocking=pinned)


@functools.lru_cache(maxsize=64)
def _unpacker(device: torch.device | str) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(ext_hook=functools.partial(_unpacked, torch.device(device)))


def unpack(packed: bytes, device: torch.device | str = "cpu") -> list[Any]:
    """The arguments of a step, tensors on `device`."""
    found: list[Any] = _unpacker(device).decode(packed)
    return found

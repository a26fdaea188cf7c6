"""A call as values: shapes, dtypes, strides and flags, and how to make its operands again.

Small index tensors (block tables, offsets) are kept by value, since they decide what a kernel reads;
everything else is drawn anew, so that no recorded data leaves the process.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from layerzero._util.files import decode_json, pretty_json, read_given, replace_own
from layerzero.ops import table as ops_table
from layerzero.ops.op import Args, Op
from layerzero.perfdb.record import BenchmarkCase
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.hardware import Hardware

MAX_LITERAL = 65_536
_PERMUTED_ABOVE = 4096
Fill = Literal["normal", "literal", "below", "permutation", "constant", "ramp"]
Plain = int | float | bool | str | None | tuple[int, ...]


class Operand(msgspec.Struct, frozen=True, tag="tensor"):
    """One tensor: `fill` says what is in it.

    "normal" is drawn times `scale`; "literal" holds `values`; "below" is drawn from 0 to `bound` - 1;
    "permutation" is distinct numbers below `bound`; "constant" is `bound`; "ramp" is 0, `bound`, 2 * `bound`.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    fill: Fill = "normal"
    scale: float = 1.0
    bound: int = 1
    values: tuple[int, ...] = ()

    def make(self, device: torch.device, generator: torch.Generator) -> Tensor:
        """The tensor on `device`; equal for equal generators of one device type."""
        dtype = getattr(torch, self.dtype)
        if self.strides is not None:
            whole = torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)
            return whole.copy_(msgspec.structs.replace(self, strides=None).make(device, generator))
        if self.fill == "normal":
            wide = torch.randn(self.shape, generator=generator, device=device, dtype=torch.float32)
            if dtype == torch.bool:
                return wide > 0
            return wide.mul_(self.scale).to(dtype)
        return self._whole_numbers(device, generator).to(dtype)

    def _whole_numbers(self, device: torch.device, generator: torch.Generator) -> Tensor:
        count = math.prod(self.shape)
        if self.fill == "literal":
            return torch.tensor(self.values, device=device).view(self.shape)
        if self.fill == "below":
            return torch.randint(0, self.bound, self.shape, generator=generator, device=device)
        if self.fill == "permutation":
            return torch.randperm(self.bound, generator=generator, device=device)[:count].view(self.shape)
        if self.fill == "constant":
            return torch.full(self.shape, self.bound, device=device)
        return (torch.arange(count, device=device) * self.bound).view(self.shape)


class Call(msgspec.Struct, frozen=True):
    """One call of an op: `args` by parameter name, `count` how often it was seen."""

    op: str
    args: dict[str, Operand | Plain]
    count: int = 1

    @classmethod
    def of(cls, op: Op, args: Args, count: int = 1) -> Call:
        """The call that a full argument tuple makes; reads index tensors."""
        names = inspect.signature(op.build).parameters
        return cls(op.name, {n: _describe(v) for n, v in zip(names, args, strict=True)}, count)

    def make(self, device: torch.device | str = "cpu", seed: int = 0) -> Args:
        """The full argument tuple, drawn from `seed`."""
        where = torch.device(device)
        generator = torch.Generator(where).manual_seed(seed)
        operands = {
            n: v.make(where, generator) if isinstance(v, Operand) else v for n, v in self.args.items()
        }
        args: Args = ops_table.get(self.op).build(**operands)[1]
        return args

    def request(self, hardware: Hardware) -> CallSpec:
        """What the call asks of a device; no tensor is made for the answer."""
        op = ops_table.get(self.op)
        named: dict[str, Any] = dict(self.args)
        for name, value in self.args.items():
            if isinstance(value, Operand):
                named[name] = torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
        request = op.check(op.build(**named)[1])
        return request.replace(platform=hardware.platform, device=hardware.device)

    def benchmark_case(self, hardware: Hardware) -> BenchmarkCase:
        """Where its measurements on a device are stored."""
        return BenchmarkCase.of_request(self.request(hardware))

    def operand_bytes(self) -> int:
        """What its tensors hold together."""
        operands = (value for value in self.args.values() if isinstance(value, Operand))
        return sum(math.prod(each.shape) * getattr(torch, each.dtype).itemsize for each in operands)

    def __str__(self) -> str:
        parts = [
            f"{n}={'x'.join(map(str, v.shape))}:{v.dtype}" if isinstance(v, Operand) else f"{n}={v}"
            for n, v in self.args.items()
            if v is not None and v is not False
        ]
        return f"{self.op} {' '.join(parts)}"


class Workload(msgspec.Struct, frozen=True):
    """Calls to tune for; what `lz.record()` writes and `lz.tune` reads."""

    calls: tuple[Call, ...]
    name: str = ""

    def save(self, path: str | Path) -> None:
        """Write it as JSON, whole or not at all.

        Raises: FileExistsError: another kind of file is at `path`. OSError: it cannot be written.
        """
        replace_own(Path(path), pretty_json(self), "calls")

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Read what `save` wrote.

        Raises: ConfigurationError: the file cannot be read or holds no workload.
        """
        try:
            return decode_json(read_given(path), Workload)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            message = f"{path}: needs calls, as lz.record() saves them: {error}"
            raise ConfigurationError(message, path=str(path)) from error


def tensor(
    *shape: int, dtype: str = "bfloat16", fill: Fill = "normal", bound: int = 1, scale: float = 1.0
) -> Operand:
    """An operand of that shape."""
    return Operand(shape, dtype, None, fill, scale, bound)


def call(op: str, /, **args: Operand | Plain) -> Call:
    """A call by named arguments; what is left out has its default.

    Raises: TypeError: an argument is missing or unknown.
    """
    bound = _signature(op).bind(**args)
    bound.apply_defaults()
    return Call(op, dict(bound.arguments))


def workload_of(what: Workload | str | Path | Iterable[Call]) -> Workload:
    """A workload out of what a caller may give: itself, a file, or calls."""
    if isinstance(what, Workload):
        return what
    if isinstance(what, str | Path):
        return Workload.load(what)
    if not isinstance(what, Iterable):
        raise TypeError(f"workload needs a recorded workload, its file, or calls, got {type(what).__name__}")
    calls = tuple(what)
    for call_ in calls:
        if not isinstance(call_, Call):
            raise TypeError(f"workload needs calls, got {type(call_).__name__}")
        ops_table.get(call_.op)
    return Workload(calls)


@functools.cache
def _signature(op: str) -> inspect.Signature:
    return inspect.signature(ops_table.get(op).build)


def _describe(value: Any) -> Operand | Plain:
    if not isinstance(value, Tensor):
        if isinstance(value, torch.dtype):
            return str(value).removeprefix("torch.")
        if not isinstance(value, int | float | bool | str | tuple | None):
            raise ConfigurationError(f"a call is described by values, got a {type(value).__name__}")
        return value
    dtype = str(value.dtype).removeprefix("torch.")
    strides = None if value.is_contiguous() else tuple(value.stride())
    shape = tuple(value.shape)
    if value.dtype.is_floating_point or value.dtype == torch.bool or value.numel() == 0:
        scale = shape[-1] ** -0.5 if len(shape) == 2 and shape[0] > 1 else 1.0
        return Operand(shape, dtype, strides, "normal", scale)
    if value.is_meta:
        return Operand(shape, dtype, strides, "below", bound=1)
    if value.numel() <= _PERMUTED_ABOVE:
        return Operand(shape, dtype, strides, "literal", values=tuple(value.flatten().tolist()))
    top = int(value.max()) + 1
    if value.numel() <= MAX_LITERAL and value.dim() == 1:
        return Operand(shape, dtype, strides, "literal", values=tuple(value.tolist()))
    distinct = value.numel() <= top and value.dim() == 2
    return Operand(shape, dtype, strides, "permutation" if distinct else "below", bound=top)

"""A quantized tensor: codes, scales and what they need to be read, checked once when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from layerzero.formats import checks, rounding
from layerzero.formats.elements import pack_pairs
from layerzero.formats.errors import FormatError
from layerzero.formats.table import FORMATS, Format, format_of
from layerzero.spec.reasons import Reason

_TENSORS = ("codes", "scale", "zero_point", "tensor_scale")
Index = int | slice


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Numbers (..., R, C) of a format of `FORMATS`, quantized along the last axis.

    Args: codes in the format's storage, (..., R, C) or, of four bits, (..., R, C / 2) with the even place in
        the low half of a byte; scale of shape (), (..., R, 1) or (..., R, G), each for C / G neighbours, or
        with block_size b (..., ceil(R / b), ceil(C / b)); zero_point, of int4, codes 0 to 15 as uint8 in
        scale's shape, 8 where there is none; tensor_scale, of nvfp4, float32 of shape () or (...) without R
        and C. A number is (code - zero_point) * scale * tensor_scale.
    Raises: FormatError: something does not fit the format or each other; a scale that is not a positive,
        finite number is among it; nf4 and nvfp4 have zero, too. `reason` says which.
    """

    codes: Tensor
    scale: Tensor
    format: str
    zero_point: Tensor | None = None
    tensor_scale: Tensor | None = None
    block_size: int = 0

    def __post_init__(self) -> None:
        checks.need_tensor("codes", self.codes)
        _need_format(self.format)
        form, shape = self.form, tuple(self.shape)
        checks.check_scale("scale", self.scale, form, shape, self.block_size)
        checks.check_zero_point("zero_point", self.zero_point, form, self.scale)
        checks.check_second_scale("tensor_scale", self.tensor_scale, form, shape)
        for name in _TENSORS[1:]:
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != self.codes.device:
                raise ValueError(f"{name} needs to be on {self.codes.device} like codes, got {tensor.device}")
        checks.check_scale_values("scale", self.scale, form)
        if self.tensor_scale is not None:
            checks.check_scale_values("tensor_scale", self.tensor_scale)
        if self.zero_point is not None:
            checks.check_zero_point_values("zero_point", self.zero_point)

    @classmethod
    def quantize(
        cls,
        x: Tensor,
        format: str,
        *,
        granularity: str | None = None,
        group_size: int | None = None,
        symmetric: bool = True,
    ) -> QuantizedTensor:
        """Round `x` (..., R, C) to a format, by default with the format's usual scales.

        Args: group_size is a block's side, too. symmetric=False gives int4 a zero point for each scale.
        Raises: FormatError: the format has no such scales, the group does not divide or is given where
            nothing is grouped, or x is not finite. TypeError: x is none of floating point numbers.
        """
        form = _need_format(format)
        granularity, size = usual_scales(form, granularity, group_size)
        checks.need_floating("x", checks.need_tensor("x", x).dtype)
        x, shape = x.detach(), tuple(x.shape)  # codes have no gradient
        if not shape or shape[-1] == 0:
            needs = "a last axis of at least 1"
            raise FormatError("x", needs, f"shape {shape}", Reason.PACKED_LAYOUT_MISMATCH)
        checks.check_grouping(form, granularity, size, shape)
        if not bool(x.isfinite().all()):
            raise FormatError("x", "finite numbers", "NaN or infinity", Reason.SCALE_NOT_FINITE)
        block = size if granularity == "block" else 0
        if not symmetric:
            codes, scale, zero_point = _with_zero_points(x, form, granularity, size)
            return cls(codes, scale, format, zero_point)
        second = _second_scale(x, form) if form.two_level else None
        codes, scale = rounding.round_to_format(x, form, granularity, size, None, second)
        return cls(codes, scale, format, None, second, block)

    @property
    def form(self) -> Format:
        """The format as data."""
        return format_of(self.codes.dtype, self.format)

    @property
    def shape(self) -> torch.Size:
        """Of the numbers."""
        codes = self.codes.shape
        if not codes:
            raise FormatError("codes", "at least 1 dimension", "a scalar", Reason.PACKED_LAYOUT_MISMATCH)
        return torch.Size((*codes[:-1], codes[-1] * self.form.packed))

    @property
    def device(self) -> torch.device:
        """Where all parts are."""
        return self.codes.device

    @property
    def granularity(self) -> str:
        """What shares a scale: tensor, row, group or block."""
        return self._layout[0]

    @property
    def group_size(self) -> int:
        """Numbers of a row that share a scale, a block's side, or 0."""
        return self._layout[1]

    @property
    def _layout(self) -> tuple[str, int]:
        return rounding.layout_of_scale(self.scale, self.shape[-1], self.block_size, self.form)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(tensor.nbytes for tensor in self._parts().values())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, computed in float32, or float64 for that `dtype`, and rounded to it."""
        checks.need_floating("dtype", dtype)
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        granularity, size = self._layout
        zero, second = self.zero_point, self.tensor_scale
        if second is not None and second.dim():
            second = second[..., None, None]
        numbers = rounding.restore(self.codes, self.scale, self.form, granularity, size, zero, second, kind)
        return numbers.to(dtype)

    def arguments(self) -> dict[str, Any]:
        """What `quantized_linear` takes beside its rows: `lz.quantized_linear(x, **weight.arguments())`."""
        return {
            "weight": self.codes, "scale": self.scale, "format": self.format, "zero_point": self.zero_point,
            "tensor_scale": self.tensor_scale, "block_size": self.block_size,
        }  # fmt: skip

    def to(self, device: torch.device | str | int) -> QuantizedTensor:
        """The same on a device; itself where it is there. Codes and scales have dtypes of their own.

        Raises: ValueError: `device` is none of torch's, such as a dtype or a tensor.
        """
        where = checks.need_device(device)
        moved = {name: tensor.to(where) for name, tensor in self._parts().items()}
        return self if moved["codes"] is self.codes else _unchecked(self, **moved)

    def cpu(self) -> QuantizedTensor:
        """The same on the CPU."""
        return self.to("cpu")

    def cuda(self) -> QuantizedTensor:
        """The same on the current GPU."""
        return self.to("cuda")

    def clone(self) -> QuantizedTensor:
        """A copy with memory of its own."""
        return _unchecked(self, **{name: tensor.clone() for name, tensor in self._parts().items()})

    def __getitem__(self, index: Index | tuple[Index, ...]) -> QuantizedTensor:
        """A part along the leading axes and whole groups of the last, without a copy.

        Raises: FormatError: the part cuts through what shares a scale. IndexError: too many indices.
        """
        return _unchecked(self, **_part_of(self, index if isinstance(index, tuple) else (index,)))

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        granularity, size = self._layout
        shared = f"{granularity} of {size}" if size else granularity
        return f"QuantizedTensor({self.format}, {tuple(self.shape)}, scale by {shared}, {self.device})"

    def state_dict(self, prefix: str = "") -> dict[str, Any]:
        """Its parts by name, as `torch.save` knows them; the inverse is `from_state_dict`."""
        described = {"format": self.format, "block_size": self.block_size}
        return {prefix + name: value for name, value in {**self._parts(), **described}.items()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], prefix: str = "") -> QuantizedTensor:
        """The tensor whose parts are under `prefix`; other names are left alone.

        Raises: KeyError: codes, scale or format are missing. FormatError: they do not fit.
        """
        names = [field.name for field in fields(cls)]
        missing = [name for name in names[:3] if prefix + name not in state]
        if missing:
            raise KeyError(
                f"state needs {', '.join(prefix + name for name in missing)}, got {', '.join(state)}"
            )
        return cls(**{name: state[prefix + name] for name in names if prefix + name in state})

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, tuple(_as_bytes(getattr(self, field.name)) for field in fields(self))

    def _parts(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in _TENSORS}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def _need_format(name: Any) -> Format:
    if not isinstance(name, str) or name not in FORMATS:
        needs = f"one of {', '.join(FORMATS)}"
        raise FormatError("format", needs, repr(name), Reason.QUANT_FORMAT_UNSUPPORTED)
    return FORMATS[name]


def usual_scales(form: Format, granularity: str | None, group_size: int | None) -> tuple[str, int]:
    """The scales that are meant where they are not named: the format's usual ones."""
    granularity = form.granularities[0] if granularity is None else granularity
    if group_size is None:
        group_size = form.group_sizes[0] if granularity in ("group", "block") else 0
    return granularity, group_size


def _second_scale(x: Tensor, form: Format) -> Tensor:
    """So that the largest first-level scale is the largest of its dtype: NVFP4 as ModelOpt makes it."""
    top = torch.finfo(form.scales[0]).max * form.element.max_value
    largest = x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)
    if not bool(largest > 0):
        return torch.ones_like(largest)
    return (largest / top).clamp_min(rounding.SMALLEST_SCALE)


def _with_zero_points(x: Tensor, form: Format, granularity: str, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes between the least and the largest number of each group, zero always among the values."""
    if not form.zero_points:
        needs = f"True for {form.name}, which has no zero points"
        raise FormatError("symmetric", needs, False, Reason.ZERO_POINT_MISMATCH)
    wide = x.float()
    grouped = wide.unflatten(-1, (-1, size)) if granularity == "group" else wide.unsqueeze(-2)
    low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
    scale = ((high - low) / 15).clamp_min(rounding.SMALLEST_SCALE)
    zero = (-low / scale).round().clamp(0, 15)
    codes = (grouped / scale.unsqueeze(-1)).round().add(zero.unsqueeze(-1)).clamp(0, 15)
    return pack_pairs(codes.to(torch.uint8).view(x.shape)), scale, zero.to(torch.uint8)


def _unchecked(like: QuantizedTensor, **changes: Any) -> QuantizedTensor:
    """A tensor of parts that were checked before: looking at values again would wait for a GPU."""
    part = object.__new__(QuantizedTensor)
    for field in fields(QuantizedTensor):
        object.__setattr__(part, field.name, changes.get(field.name, getattr(like, field.name)))
    return part


def _part_of(whole: QuantizedTensor, index: tuple[Index, ...]) -> dict[str, Any]:
    """The parts of `whole[index]`.

    Raises: FormatError: it cuts through a byte, a group or a block. IndexError, TypeError: no such index.
    """
    shape = whole.shape
    if len(index) > len(shape):
        raise IndexError(f"index needs at most {len(shape)} parts, got {len(index)}")
    if any(isinstance(part, bool) or not isinstance(part, int | slice) for part in index):
        raise TypeError(f"index needs ints and slices, got {index!r}")
    if any(isinstance(part, slice) and (1 if part.step is None else part.step) < 1 for part in index):
        raise ValueError(f"index needs a step of at least 1, got {index!r}")
    lead = len(shape) - 2
    if len(index) == len(shape) and not isinstance(index[-1], slice):
        raise FormatError("index", "a slice for the last axis", index[-1], Reason.GROUP_DOES_NOT_DIVIDE)
    if whole.granularity == "block" and len(index) > lead and not isinstance(index[lead], slice):
        raise FormatError("index", "a slice for rows of blocks", index[lead], Reason.GROUP_DOES_NOT_DIVIDE)
    steps: list[Any] = [slice(None)] * len(shape)
    steps[: len(index)] = list(index)
    side = whole.group_size
    codes, scales = list(steps), list(steps)
    last = len(shape) - 1
    if not range(*steps[last].indices(shape[last])):
        needs = "at least one number of the last axis"
        raise FormatError("index", needs, steps[last], Reason.GROUP_DOES_NOT_DIVIDE)
    codes[last] = _units(steps[last], shape[last], whole.form.packed, "codes of a byte")
    if whole.granularity == "block":
        scales[last - 1] = _units(steps[last - 1], shape[last - 1], side, "a block")
    if side:
        scales[last] = _units(steps[last], shape[last], side, f"a {whole.granularity}")
    else:
        scales[last] = slice(None)

    def of_scale(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.dim() == 0 else tensor[tuple(scales)]

    second = whole.tensor_scale
    if second is not None and second.dim():
        second = second[tuple(steps[:lead])]
    return {
        "codes": whole.codes[tuple(codes)], "scale": of_scale(whole.scale),
        "zero_point": of_scale(whole.zero_point), "tensor_scale": second,
    }  # fmt: skip


def _units(part: Index, size: int, unit: int, what: str) -> slice:
    """A slice of numbers as one of units of `unit` numbers, the last of which may be smaller."""
    assert isinstance(part, slice)
    start, stop, step = part.indices(size)
    if unit == 1:
        return part
    if step != 1 or start % unit or (stop % unit and stop != size):
        needs = f"step 1, and a start and an end at a multiple of {unit}, {what},"
        raise FormatError("index", needs, f"{start}:{stop}:{step}", Reason.GROUP_DOES_NOT_DIVIDE)
    return slice(start // unit, -(-max(stop, start) // unit))


def _as_bytes(value: Any) -> Any:
    """A float8 tensor as bytes and its dtype's name: `torch.load` with weights_only reads no others."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.itemsize > 1:
        return value
    return value.view(torch.uint8), str(value.dtype).removeprefix("torch.")


def _restored(*values: Any) -> QuantizedTensor:
    pairs = (value if isinstance(value, tuple) else (value, None) for value in values)
    return QuantizedTensor(
        *(value if name is None else value.view(getattr(torch, name)) for value, name in pairs)
    )


# `torch.load` reads what `torch.save` wrote of it without a list of what to trust.
torch.serialization.add_safe_globals([_restored])

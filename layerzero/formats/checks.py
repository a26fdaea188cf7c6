"""Whether scales and zero points fit a format: shapes and dtypes at each call, values once."""

# Values whose shape the code has checked, or that a table names.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from layerzero.formats.elements import dtype_name
from layerzero.formats.errors import FormatError
from layerzero.formats.rounding import layout_of_scale, scale_shape
from layerzero.formats.table import Format
from layerzero.spec.reasons import Reason


def need_tensor(name: str, value: Any) -> Tensor:
    """`value` as a tensor.

    Raises: TypeError: it is none.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} needs a torch.Tensor, got {type(value).__name__}: {value!r:.60}")
    return value


def need_floating(name: str, dtype: Any) -> None:
    """Refuse a dtype whose numbers have no fraction, two parts, or a scale beside them.

    Raises: FormatError: a TypeError, too.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize == 1:
        needs, reason = "a floating point dtype of at least 16 bits", Reason.QUANT_FORMAT_UNSUPPORTED
        raise FormatError(name, needs, str(dtype).removeprefix("torch."), reason, kind=TypeError)


def need_device(device: Any) -> torch.device:
    """`device` as torch's.

    Raises: ValueError: it is none.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device needs one of torch's, got {device!r:.80}") from error


def check_scale(
    name: str, scale: Any, form: Format, shape: tuple[int, ...], block_size: int = 0
) -> tuple[str, int]:
    """(granularity, group size) of the scales of numbers of `shape`.

    Raises: FormatError: a dtype that the format does not have, or a shape that says no granularity of it.
    """
    need_tensor(name, scale)
    if block_size:
        form.need_granularity("block")
        _need_size("block_size", block_size)
        expected = [scale_shape(shape, "block", block_size)] if len(shape) > 1 else []
    else:
        expected = _expected_shapes(scale, form, shape)
    need_scale_of(name, scale, form, expected)
    granularity, size = layout_of_scale(scale, shape[-1], block_size, form)
    if granularity == "group":
        form.need_group(shape[-1], size, "the tensor")
    return granularity, size


def _need_size(name: str, size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise FormatError(name, "an int >= 1", repr(size), Reason.QUANT_GROUP_UNSUPPORTED)


def check_grouping(form: Format, granularity: str, group_size: Any, shape: tuple[int, ...]) -> None:
    """Refuse to round numbers x of `shape` to a format by a granularity that it or they do not have.

    Raises: FormatError: by name.
    """
    form.need_granularity(granularity)
    if granularity in ("group", "block"):
        _need_size("group_size", group_size)
    elif group_size != 0:
        needs = f"0 for granularity={granularity!r}"
        raise FormatError("group_size", needs, repr(group_size), Reason.QUANT_GROUP_UNSUPPORTED)
    if granularity == "group":
        form.need_group(shape[-1], group_size)
    if granularity == "block" and len(shape) < 2:
        needs = "at least 2 dimensions for granularity='block'"
        raise FormatError("x", needs, f"shape {shape}", Reason.SCALE_LAYOUT_MISMATCH)
    if shape[-1] % form.packed:
        needs = f"a last axis of whole bytes of {form.packed} codes each"
        raise FormatError("x", needs, shape[-1], Reason.PACKED_LAYOUT_MISMATCH)


def need_scale_of(name: str, scale: Tensor, form: Format, shapes: Collection[tuple[int, ...]]) -> None:
    """`scale` in a dtype of the format and one of `shapes`.

    Raises: FormatError: it is not.
    """
    if scale.dtype not in form.scales:
        needs = f"dtype {', '.join(dtype_name(dtype) for dtype in form.scales)}"
        reason = Reason.SCALE_DTYPE_MISMATCH
        raise FormatError(name, needs, dtype_name(scale.dtype), reason, kind=TypeError)
    if tuple(scale.shape) not in shapes:
        needs = " or ".join(str(each) for each in dict.fromkeys(shapes)) or "that of a matrix's blocks"
        raise FormatError(name, f"shape {needs}", tuple(scale.shape), Reason.SCALE_SHAPE_MISMATCH)


def _expected_shapes(scale: Tensor, form: Format, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    expected: list[tuple[int, ...]] = []
    if "tensor" in form.granularities:
        expected.append(())
    if not form.open_groups:
        expected += [(*shape[:-1], shape[-1] // size) for size in form.group_sizes if shape[-1] % size == 0]
        return expected or [(*shape[:-1], -(-shape[-1] // form.group_sizes[0]))]
    groups = scale.shape[-1] if scale.dim() else 1
    divides = groups >= 1 and shape[-1] % groups == 0
    return [*expected, (*shape[:-1], groups if divides else 1)]


def check_zero_point(name: str, zero_point: Any, form: Format, scale: Tensor) -> None:
    """Refuse zero points of a format that has none, or of another shape or dtype than they need.

    Raises: FormatError: by name.
    """
    if zero_point is None:
        return
    need_tensor(name, zero_point)
    mismatch = Reason.ZERO_POINT_MISMATCH
    if not form.zero_points:
        raise FormatError(name, f"None for {form.name}, which has no zero points", "a tensor", mismatch)
    if zero_point.dtype != torch.uint8:
        raise FormatError(name, "dtype uint8", dtype_name(zero_point.dtype), mismatch, kind=TypeError)
    if zero_point.shape != scale.shape:
        raise FormatError(name, f"shape {tuple(scale.shape)} like scale", tuple(zero_point.shape), mismatch)


def check_second_scale(name: str, scale: Any, form: Format, shape: tuple[int, ...]) -> None:
    """Refuse a second scale of a format that has none, or of another shape or dtype than it needs.

    Raises: FormatError: by name.
    """
    if scale is None:
        return
    need_tensor(name, scale)
    if not form.two_level:
        needs = f"None for {form.name}, whose scales have one level"
        raise FormatError(name, needs, "a tensor", Reason.SCALE_LAYOUT_MISMATCH)
    if scale.dtype != torch.float32:
        got = dtype_name(scale.dtype)
        raise FormatError(name, "dtype float32", got, Reason.SCALE_DTYPE_MISMATCH, kind=TypeError)
    expected = dict.fromkeys([(), shape[:-2]])
    if tuple(scale.shape) not in expected:
        needs = f"shape {' or '.join(map(str, expected))}"
        raise FormatError(name, needs, tuple(scale.shape), Reason.SCALE_SHAPE_MISMATCH)


def check_scale_values(name: str, scale: Tensor, form: Format | None = None) -> None:
    """Refuse scales that are not positive, finite numbers; reads them, and so waits for a GPU.

    Zero is one where a `form` is given whose blocks of zeros have it.
    Raises: FormatError: with the first place.
    """
    wide = scale.float()
    may_be_zero = form is not None and form.zero_scales
    needs_sign = "positive numbers or zero" if may_be_zero else "positive numbers"
    for wrong, needs, reason in (
        (~wide.isfinite(), "finite numbers", Reason.SCALE_NOT_FINITE),
        (wide < 0 if may_be_zero else wide <= 0, needs_sign, Reason.SCALE_NOT_POSITIVE),
    ):
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            where = f" at {place}" if place else ""
            raise FormatError(name, needs, f"{float(wide[place])}{where}", reason)


def check_zero_point_values(name: str, zero_point: Tensor) -> None:
    """Refuse zero points that are no codes of four bits; reads them, as `check_scale_values` does.

    Raises: FormatError.
    """
    largest = int(zero_point.max()) if zero_point.numel() else 0
    if largest > 15:
        raise FormatError(name, "codes of 0 to 15", largest, Reason.ZERO_POINT_MISMATCH)

"""A part of a quantized tensor: what it holds of codes, scales and zero points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from layerzero.formats.errors import FormatError
from layerzero.spec.reasons import Reason

if TYPE_CHECKING:
    from layerzero.formats.quantized_tensor import QuantizedTensor

Index = int | slice


def part_of(whole: QuantizedTensor, index: tuple[Index, ...]) -> dict[str, Any]:
    """The parts of `whole[index]`.

    Raises: FormatError: it cuts through a byte, a group or a block. IndexError, TypeError: no such index.
    """
    shape = whole.shape
    if len(index) > len(shape):
        raise IndexError(f"index needs at most {len(shape)} parts, got {len(index)}")
    if any(isinstance(part, bool) or not isinstance(part, int | slice) for part in index):
        raise TypeError(f"index needs ints and slices, got {index!r}")
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

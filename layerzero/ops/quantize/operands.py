"""What the ops over quantized weights share: their checks, and the features that kernels answer to."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.formats import checks as format_checks
from layerzero.formats.errors import FormatError
from layerzero.formats.table import FORMATS, Format, format_of
from layerzero.ops import checks
from layerzero.spec.reasons import Reason

# How rows meet a weight: as they are; rounded to the weight's own format; or rounded by row to eight bits.
INPUTS = ("float", "dynamic", "int8", "fp8_e4m3")
# The features of kernels that take every format, part of a weight, way of inputs, or mixture of experts.
FORMAT_FEATURES = " ".join(f"quant_{name}" for name in FORMATS)
SCALE_FEATURES = "scale_per_tensor scale_per_row scale_per_group scale_per_block"
PART_FEATURES = f"{SCALE_FEATURES} scale_16bit zero_point tensor_scale"
INPUT_FEATURES = "inputs_float inputs_quantized inputs_int8 inputs_fp8_e4m3"
_GATES = "act_swiglu act_geglu act_geglu_tanh act_reglu"
EXPERT_FEATURES = f"gate_second weighed_inputs local_experts shared_experts {_GATES}"


def need_codes(
    name: str, value: Any, form: str | None, *, rank: int | None = None
) -> tuple[Format, tuple[int, ...]]:
    """(format, shape of the numbers) of codes (..., C) of that format, or of the one that their dtype says.

    Raises: ValueError, TypeError: by name.
    """
    checks.need_tensor(name, value, rank=rank, floating=False)
    if form is not None and not isinstance(form, str):
        raise TypeError(f"format needs a format's name or None, got {type(form).__name__}")
    detected = format_of(value.dtype, form, name)
    if value.dim() == 0 or value.shape[-1] == 0:
        raise ValueError(f"{name} needs a last axis of at least 1, got shape {tuple(value.shape)}")
    return detected, (*value.shape[:-1], value.shape[-1] * detected.packed)


def weight_features(
    form: Format,
    shape: tuple[int, ...],
    scale: Any,
    zero_point: Any,
    tensor_scale: Any,
    block_size: Any,
    names: tuple[str, str, str] = ("scale", "zero_point", "tensor_scale"),
) -> tuple[set[str], int]:
    """(features, numbers that share a scale along a row or 0) of checked parts of a weight.

    Raises: FormatError, TypeError: by name.
    """
    checks.need_int("block_size", block_size, low=0)
    for name, part in zip(names, (scale, zero_point, tensor_scale), strict=True):
        if part is not None or name == names[0]:
            checks.need_tensor(name, part, floating=False)
    granularity, size = format_checks.check_scale(names[0], scale, form, shape, block_size)
    format_checks.check_zero_point(names[1], zero_point, form, scale)
    format_checks.check_second_scale(names[2], tensor_scale, form, shape)
    features = {f"quant_{form.name}", f"scale_per_{granularity}"}
    features |= {"scale_16bit"} if scale.dtype in (torch.float16, torch.bfloat16) else set()
    features |= {"zero_point"} if zero_point is not None else set()
    features |= {"tensor_scale"} if tensor_scale is not None else set()
    return features, size


# Parts of weights whose values were read, by identity while they live, and how often each was written then.
_READ: dict[int, tuple[weakref.ref[Tensor], int]] = {}


def need_part_values(names: Sequence[str], parts: Sequence[Tensor | None], form: Format) -> None:
    """Refuse scales that are none of a format's, and zero points that are no codes; of CPUs alone.

    A part is read when it comes first and when torch has counted a change of it; what is written through
    `.data`, or to a tensor of inference mode, is not seen.
    Raises: FormatError: by name, with the first place.
    """
    for name, part in zip(names, parts, strict=True):
        if part is None or not checks.can_read_values(part):
            continue
        version, place = 0 if part.is_inference() else part._version, id(part)
        entry = _READ.get(place)
        if entry is not None and entry[0]() is part and entry[1] == version:
            continue
        if name.endswith("zero_point"):
            format_checks.check_zero_point_values(name, part)
        else:
            is_second = name.endswith("tensor_scale")
            format_checks.check_scale_values(name, part, None if is_second else form)
        _READ[place] = weakref.ref(part, functools.partial(_forget, place)), version


def _forget(place: int, _: weakref.ref[Tensor]) -> None:
    _READ.pop(place, None)


def inputs_feature(inputs: Any, form: Format) -> str:
    """The feature of how rows meet a weight of a format.

    Raises: ValueError, TypeError: no such way, or none for that format.
    """
    checks.need_choice("inputs", inputs, INPUTS)
    if inputs == "dynamic" and form.name in ("int4", "nf4"):
        needs = f"float, int8 or fp8_e4m3 for {form.name}, in which no rows are kept"
        raise FormatError("inputs", needs, repr(inputs), Reason.QUANT_FORMAT_UNSUPPORTED)
    return {"float": "inputs_float", "dynamic": "inputs_quantized"}.get(inputs, f"inputs_{inputs}")


def per_matrix(tensor_scale: Tensor | None) -> Tensor | None:
    """A second scale as it multiplies the scales of its matrices."""
    return tensor_scale if tensor_scale is None or tensor_scale.dim() == 0 else tensor_scale[..., None, None]

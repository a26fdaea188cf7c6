"""The formats: an element, its scales and what they may be shared by, a zero point, a second scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from layerzero.formats.elements import ELEMENTS, OCP, Element, dtype_name
from layerzero.formats.errors import FormatError
from layerzero.spec.reasons import Reason

# What one scale is shared by: all; a row (a channel of a weight, a token of activations); `group_size`
# neighbours of a row; a square of `group_size` rows and columns, smaller at the edges.
GRANULARITIES = ("tensor", "row", "group", "block")


@dataclass(frozen=True, slots=True)
class Format:
    """A number format: `name`, its element and its scales, the most usual granularity first.

    `group_sizes` are those that the format allows, the usual one first; any where `open_groups`. `scales` are
    the dtypes of scales, the one that `quantize` gives first; zero is a scale where `zero_scales`. With
    `two_level` scales are multiplied by one of float32 for the whole tensor. `zero_points` says that codes
    may be shifted, by a code for each scale.
    """

    name: str
    element: Element
    granularities: tuple[str, ...]
    source: str
    group_sizes: tuple[int, ...] = (128, 64, 32)
    open_groups: bool = True
    scales: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    two_level: bool = False
    zero_points: bool = False
    zero_scales: bool = False

    @property
    def packed(self) -> int:
        """Codes in one element of storage."""
        return 8 // self.element.bits

    def need_granularity(self, granularity: str) -> None:
        """Refuse a granularity that the format does not have.

        Raises: FormatError.
        """
        if granularity not in self.granularities:
            needs = ", ".join(self.granularities)
            raise FormatError("granularity", f"one of {needs} for {self.name}", repr(granularity), _LAYOUT)

    def need_group(self, width: int, group_size: int, name: str = "x") -> None:
        """Refuse a `group_size` that the format does not allow, or that does not divide `width`.

        Raises: FormatError.
        """
        if group_size < 1 or not (self.open_groups or group_size in self.group_sizes):
            sizes = "an int >= 1" if self.open_groups else " or ".join(map(str, self.group_sizes))
            raise FormatError(
                "group_size", f"{sizes} for {self.name}", group_size, Reason.QUANT_GROUP_UNSUPPORTED
            )
        if width % group_size:
            needs = f"to divide {name}'s last axis of {width}"
            raise FormatError("group_size", needs, group_size, Reason.GROUP_DOES_NOT_DIVIDE)


_LAYOUT = Reason.SCALE_LAYOUT_MISMATCH


_FP8_SCALES, _INT4_SCALES = ("row", "block", "group", "tensor"), ("group", "row")
_FP8_SOURCE = "arXiv 2209.05433"
_MX: dict[str, Any] = {"group_sizes": (32,), "open_groups": False, "scales": (torch.float8_e8m0fnu,)}
_FORMATS = (
    Format("int8", ELEMENTS["int8"], ("row", "group", "tensor", "block"), "arXiv 2208.07339"),
    Format("fp8_e4m3", ELEMENTS["e4m3"], _FP8_SCALES, f"{_FP8_SOURCE}; blocks: arXiv 2412.19437"),
    Format("fp8_e5m2", ELEMENTS["e5m2"], _FP8_SCALES, _FP8_SOURCE),
    Format("int4", ELEMENTS["int4"], _INT4_SCALES, "arXiv 2210.17323", zero_points=True),
    # bitsandbytes writes the largest magnitude of a block of zeros as it is.
    Format(
        "nf4", ELEMENTS["nf4"], _INT4_SCALES, "arXiv 2305.14314", (64, 128, 32), zero_scales=True
    ),
    Format("mxfp4", ELEMENTS["e2m1"], ("group",), OCP, **_MX),
    Format("mxfp8", ELEMENTS["e4m3"], ("group",), OCP, **_MX),
    Format(
        "nvfp4", ELEMENTS["e2m1"], ("group",), "docs.nvidia.com, TensorRT: NVFP4", (16,), False,
        # A block far below the tensor's largest number has a scale below the least of float8_e4m3fn.
        (torch.float8_e4m3fn,), two_level=True, zero_scales=True,
    ),
)  # fmt: skip
FORMATS: Mapping[str, Format] = MappingProxyType({form.name: form for form in _FORMATS})
# Codes whose dtype says the format.
_BY_DTYPE = MappingProxyType(
    {FORMATS[name].element.storage: FORMATS[name] for name in ("int8", "fp8_e4m3", "fp8_e5m2")}
)


def format_of(codes: torch.dtype, name: str | None = None, argument: str = "codes") -> Format:
    """The format of that name, or the one that a dtype of codes says by itself.

    Raises: FormatError: no such format, codes of another format, or a dtype that several formats share.
    """
    form = _BY_DTYPE.get(codes) if name is None else FORMATS.get(name)
    stored, unsupported = dtype_name(codes), Reason.QUANT_FORMAT_UNSUPPORTED
    if form is None and name is not None:
        raise FormatError("format", f"one of {', '.join(FORMATS)}", repr(name), unsupported)
    if form is None and codes == torch.uint8:
        packed = ", ".join(form.name for form in FORMATS.values() if form.packed > 1)
        raise FormatError("format", f"one of {packed} for packed codes", "none", unsupported)
    if form is None:
        needs = f"dtype {', '.join(dtype_name(dtype) for dtype in _BY_DTYPE)}"
        raise FormatError(argument, needs, stored, unsupported, kind=TypeError)
    if codes != form.element.storage:
        needs = f"dtype {dtype_name(form.element.storage)} for {form.name}"
        raise FormatError(argument, needs, stored, Reason.PACKED_LAYOUT_MISMATCH, kind=TypeError)
    return form

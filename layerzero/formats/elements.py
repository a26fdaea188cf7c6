"""What one code stands for: elements of eight bits as torch has them, and of four bits as tables.

Four-bit codes lie two in a byte along the last axis, the earlier one in the low half.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Element:
    """One code: its bits, its storage, the largest magnitude in use; `values` by code where bits are four.

    `exponent` is that of the largest power of two that it holds, which power-of-two scales are made with.
    `ties_to_even` says where a number halfway between two codes goes: to the even code, else to the lower.
    """

    name: str
    bits: int
    storage: torch.dtype
    max_value: float
    exponent: int
    source: str
    values: tuple[float, ...] = ()
    ties_to_even: bool = True


# Quantiles of the normal distribution, scaled to [-1, 1]: QLoRA, arXiv 2305.14314, appendix E.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP8 = "OCP 8-bit floating point specification 1.0"
OCP = "OCP microscaling formats specification 1.0"

# The code of int4 is the number plus 8, the zero point of symmetric weights in every checkpoint of this kind.
_INT4 = tuple(float(code - 8) for code in range(16))
_SIGNED_E2M1 = (*_E2M1, *(-value for value in _E2M1))
_ELEMENTS = (
    Element("int8", 8, torch.int8, 127.0, 6, "two's complement"),  # without -128, so that codes are symmetric
    Element("e4m3", 8, torch.float8_e4m3fn, 448.0, 8, _FP8),
    Element("e5m2", 8, torch.float8_e5m2, 57344.0, 15, _FP8),
    Element("int4", 4, torch.uint8, 7.0, 2, "number + 8", values=_INT4),
    Element("nf4", 4, torch.uint8, 1.0, 0, "arXiv 2305.14314", values=_NF4, ties_to_even=False),
    Element("e2m1", 4, torch.uint8, 6.0, 2, OCP, values=_SIGNED_E2M1),
)
ELEMENTS: Mapping[str, Element] = MappingProxyType({element.name: element for element in _ELEMENTS})


def dtype_name(dtype: torch.dtype) -> str:
    """`"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=64)
def table_of(element: Element, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What every code of a four-bit element stands for, (16,)."""
    return torch.tensor(element.values, dtype=dtype, device=device)


@functools.lru_cache(maxsize=64)
def _middles(element: Element, device: torch.device) -> Tensor:
    """Halfway between the values that a rounded number may have, ascending, float32."""
    # e2m1 rounds magnitudes: its sign is a bit of its own.
    ascending = _E2M1 if element.name == "e2m1" else element.values
    values = torch.tensor(ascending, dtype=torch.float64, device="cpu")
    return ((values[1:] + values[:-1]) / 2).to(device, torch.float32)


def pack_pairs(codes: Tensor) -> Tensor:
    """Four-bit codes (..., C) of uint8 as bytes (..., C / 2), the even place in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_pairs(packed: Tensor) -> Tensor:
    """Bytes (..., C / 2) as four-bit codes (..., C) of uint8."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def encode_values(values: Tensor, element: Element) -> Tensor:
    """Numbers of float32 as codes, rounded to the nearest; NaN becomes 0, what lies beyond is clamped.

    Returns: codes in values' shape in the element's storage; four-bit ones are not packed yet.
    """
    if element.name == "int4":
        low, high = element.values[0], element.values[-1]
        rounded = values.nan_to_num(nan=0.0, posinf=high, neginf=low).round().clamp(low, high)
        return (rounded + 8).to(torch.uint8)
    top = element.max_value
    # A float8 cast of what lies beyond the format gives NaN on a GPU and the largest number on some CPUs.
    bounded = values.nan_to_num(nan=0.0, posinf=top, neginf=-top).clamp(-top, top)
    if element.bits == 8:
        return (bounded.round() if element.storage == torch.int8 else bounded).to(element.storage)
    middles, bounded = _middles(element, values.device), bounded.contiguous()  # bucketize warns of others
    if element.name == "nf4":
        return torch.bucketize(bounded, middles, out_int32=True).to(torch.uint8)
    magnitude = bounded.abs()
    low_code = torch.bucketize(magnitude, middles, out_int32=True)
    tie = torch.bucketize(magnitude, middles, out_int32=True, right=True) - low_code
    return (low_code + (tie & low_code) + 8 * bounded.signbit()).to(torch.uint8)


def decode_codes(codes: Tensor, element: Element, dtype: torch.dtype = torch.float32) -> Tensor:
    """What codes stand for without their scales; four-bit ones come packed, (..., C / 2)."""
    if element.bits == 8:
        return codes.to(dtype)
    return table_of(element, dtype, codes.device)[unpack_pairs(codes).int()]

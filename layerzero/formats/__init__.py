"""Number formats of quantized tensors, as data: codes, scales, packing, conventions of checkpoints."""

from __future__ import annotations

from layerzero.formats.elements import (
    ELEMENTS,
    Element,
    decode_codes,
    encode_values,
    pack_pairs,
    unpack_pairs,
)
from layerzero.formats.quantized_tensor import QuantizedTensor
from layerzero.formats.table import FORMATS, Format, format_of

__all__ = [
    "ELEMENTS",
    "FORMATS",
    "Element",
    "Format",
    "QuantizedTensor",
    "decode_codes",
    "encode_values",
    "format_of",
    "pack_pairs",
    "unpack_pairs",
]

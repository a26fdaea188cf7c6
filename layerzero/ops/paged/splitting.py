"""How decoding cuts few long sequences, so that a device is full: what its kernels on GPUs share."""

from __future__ import annotations

_PROGRAMS_A_PROCESSOR = 4
_MOST_PARTS = 64
LEAST_PART = 128  # tokens, below which a second launch costs more than it wins


def parts_of(programs: int, most_tokens: int, processors: int) -> int:
    """Into how many parts each sequence is cut: a power of two, 1 where `programs` fill the device.

    It follows from shapes alone: the host reads no length.
    """
    parts = min(
        _PROGRAMS_A_PROCESSOR * processors // max(programs, 1), most_tokens // LEAST_PART, _MOST_PARTS
    )
    return 1 << (max(parts, 1).bit_length() - 1)

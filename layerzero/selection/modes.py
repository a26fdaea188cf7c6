"""torch's modes that can change a choice, as bits: read once at every call."""

from __future__ import annotations

import threading
from typing import Any

import torch

GRAD, DETERMINISTIC, AUTOCAST, CAPTURE, FORWARD = 1, 2, 4, 8, 16
MODE_COUNT = 16  # what a plan is remembered under; FORWARD never is
_is_grad_enabled = torch.is_grad_enabled
_is_deterministic = torch.are_deterministic_algorithms_enabled
_is_autocast = torch._C._is_any_autocast_enabled
_forward_ad: Any = torch.autograd.forward_ad
# What `torch.cuda.is_current_stream_capturing` calls; a torch without CUDA has only that.
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


# Each device reads one of these four at every call, in one frame.


def mode_bits() -> int:
    """The bits of torch's modes that can change a choice, on a device that captures no graph."""
    bits = 1 if _is_grad_enabled() else 0
    if _is_deterministic():
        bits |= DETERMINISTIC
    if _is_autocast():
        bits |= AUTOCAST
    if _forward_ad._current_level >= 0:
        bits |= FORWARD
    return bits


def mode_bits_without_grad() -> int:
    """`mode()` of a runtime that never differentiates."""
    bits = DETERMINISTIC if _is_deterministic() else 0
    return bits | AUTOCAST if _is_autocast() else bits


class _Rehearsal(threading.local):
    """Whether this thread plans for a capture that has not begun; `layerzero/graphs/rehearsal.py` sets it.

    `waits` is whether it waits for a kernel that must be loaded first, and for its compiler.
    """

    on = False
    waits = True


REHEARSAL = _Rehearsal()


def capturing_mode_bits() -> int:
    """`mode()` on CUDA, where the current stream may be capturing."""
    bits = mode_bits()
    return bits | CAPTURE if REHEARSAL.on or _is_capturing() else bits


def capturing_mode_bits_without_grad() -> int:
    """`capturing_mode_bits()` of a runtime that never differentiates."""
    bits = DETERMINISTIC if _is_deterministic() else 0
    if _is_autocast():
        bits |= AUTOCAST
    return bits | CAPTURE if REHEARSAL.on or _is_capturing() else bits

"""What a CUDA graph reads beside its operands: it stays where it is for as long as the graph may be replayed.

A kernel that keeps small tensors of its own from call to call (page ids, offsets, tables) lets the longest
unused go. A graph that was captured with one of them has its address, and reads whatever lies there later.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_PASSING: ContextVar[bool] = ContextVar("passing", default=False)
_READ_BY_GRAPHS: dict[int, Tensor] = {}


@contextmanager
def passing_captures() -> Generator[None]:
    """Captures inside make no claim on what they read: their graphs end before other calls come.

    For who measures: each claim would keep memory until `release`.
    """
    token = _PASSING.set(True)
    try:
        yield
    finally:
        _PASSING.reset(token)


def is_capturing() -> bool:
    """Whether the current CUDA stream captures a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_claiming() -> bool:
    """Whether the current CUDA stream captures a graph that keeps what it reads."""
    return is_capturing() and not _PASSING.get()


def keep_if_captured(*tensors: Tensor) -> None:
    """Keep `tensors` until `release`, where a graph that will read them is being captured."""
    if is_claiming():
        _READ_BY_GRAPHS.update((id(tensor), tensor) for tensor in tensors)


def release(device: torch.device | None = None) -> None:
    """Let go what graphs of a device (of all) read; these graphs must be gone."""
    for place, tensor in list(_READ_BY_GRAPHS.items()):
        if device is None or tensor.device.index == (device.index or 0):
            del _READ_BY_GRAPHS[place]

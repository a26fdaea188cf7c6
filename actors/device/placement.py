"""Calls made on the GPU that owns their tensors, whichever one the calling thread has current."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def on_owning_device(device: torch.device, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, made with `device` as the thread's current one where there are several.

    Kernels that torch does not launch, those of Triton among them, go to the thread's current device; a new
    thread begins with the first.
    """
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return run
    index = device.index or 0
    current = torch.cuda.current_device

    def call(*args: Any) -> Any:
        if current() == index:
            return run(*args)
        with torch.cuda.device(index):
            return run(*args)

    return call

"""The kernels: what each can take, as data, and how it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.spec.kernel import Kernel


def _load() -> Callable[..., Any]:
    """Import the compiled part; called when the kernel is first wanted."""
    from acme_layerzero import _gate

    def run(x: Tensor, gate: Tensor) -> Tensor:
        out = torch.empty_like(x)
        _gate.gate(x.data_ptr(), gate.data_ptr(), out.data_ptr(), x.numel())
        return out

    return run


def kernels() -> list[Kernel]:
    """What this distribution adds; the entry point names it."""
    return [
        Kernel.of(
            "acme.acme_gate.c",
            _load,
            (0.5, 0.5, 2.0),  # share of the device's arithmetic and bandwidth, microseconds a launch
            "an estimate; `lz tune` measures it",
            source="gate.c",
            platforms="cpu",
            dtypes="float32",
            contiguous=True,
            gradient=False,
            autocast=False,
            distributions=("acme-layerzero>=1.0",),
        )
    ]

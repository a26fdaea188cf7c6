"""Kernels and devices that tests make up: faulty ones, slow ones, ones with random limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.registry import Registry
from layerzero.ops import table as ops_table
from layerzero.scheduler.scheduled_device import ScheduledDevice
from layerzero.spec.capability import Capability
from layerzero.spec.kernel import Efficiency, Kernel
from layerzero.spec.settings import Settings

EVERYTHING = frozenset(
    {
        "causal", "mask_bool", "mask_float", "mask_and_causal", "empty_rows", "gqa", "dropout", "scale",
        "window", "softcap", "alibi", "lse", "bias", "no_weight", "interleaved", "partial_rotary",
        "padding_idx", "label_smoothing", "class_weights", "seed_per_row", "top_k", "top_p",
        "top_k_and_top_p", "act_swiglu", "act_geglu",
        "act_reglu", "act_gelu", "act_gelu_tanh", "act_silu", "act_relu",
    }
)  # fmt: skip


def kernel(
    kernel_id: str,
    run: Callable[..., Any] | None = None,
    *,
    op: str | None = None,
    launch_us: float = 5.0,
    cold: bool = False,
    default: bool = False,
    rank: int = 50,
    load: Callable[[], Callable[..., Any]] | None = None,
    **capability: Any,
) -> Kernel:
    """A kernel of the test's own: `run` defaults to the op's reference, limits to none."""
    name = op or kernel_id.split(".")[1]
    body = run or ops_table.get(name).reference
    capability.setdefault("features", EVERYTHING)
    capability.setdefault("layouts", frozenset({"BHSD", "BSHD"}) if name == "attention" else frozenset())
    capability.setdefault("mixed_dtypes", True)
    return Kernel(
        id=kernel_id,
        op=name,
        backend=kernel_id.split(".")[0],
        capability=Capability(source="a test", **capability),
        load=load or (lambda: body),
        efficiency=Efficiency(flops=0.5, bandwidth=0.5, launch_us=launch_us, source="a test"),
        tie_break_order=rank,
        slow_import=cold,
        default=default,
    )


def device(
    kernels: Iterable[Kernel], settings: Settings | None = None, on: str = "cpu", **more: Any
) -> LocalDevice:
    """A device, of the CPU unless told, that knows only `kernels`, with its batchers."""
    registry = Registry(kernels, lambda _: [])
    return ScheduledDevice(
        torch.device("cuda:0" if on == "cuda" else on), settings or Settings(), registry, **more
    )

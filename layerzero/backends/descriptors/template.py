"""One mould for kernels and devices that are data alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layerzero.spec.capability import Capability
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Efficiency, Kernel
from layerzero.spec.reasons import Reason

HALF = frozenset({"float16", "bfloat16"})
# Between those of the kernels that ran; they order candidates and promise nothing.
GUESS = "a guess: no run of it is known here"


def described(
    kernel_id: str,
    capability: Capability,
    *,
    flops: float = 0.5,
    bandwidth: float = 0.7,
    launch_us: float = 10.0,
    rank: int = 45,
    distribution: str = "",
    default: bool = False,
) -> Kernel:
    """A kernel that can be judged and priced, and not loaded."""
    backend, op = kernel_id.split(".")[:2]

    def load() -> Callable[..., Any]:
        raise BackendNotAvailableError(
            f"{kernel_id} is a descriptor only: this project has no code that calls it",
            backend=backend,
            reason=Reason.DESCRIPTOR_ONLY,
        )

    return Kernel(
        id=kernel_id,
        op=op,
        backend=backend,
        capability=capability,
        load=load,
        efficiency=Efficiency(flops, bandwidth, launch_us, GUESS),
        tie_break_order=rank,
        slow_import=True,
        default=default,
        distributions=(distribution,) if distribution else (),
        descriptor=True,
    )


def device(
    name: str,
    platform: str,
    vendor: str,
    half: float,
    bandwidth: float,
    gigabytes: float,
    *,
    single: float | None = None,
    **more: Any,
) -> Hardware:
    """A device with its dense half precision FLOP/s and bytes/s out of its vendor's data sheet.

    `single` is its float32 rate where that is not a sixteenth of `half`.
    """
    full = single or half / 16
    return Hardware(
        platform=platform,
        device="cpu" if platform == "cpu" else f"{'cuda' if platform == 'rocm' else platform}:0",
        name=name,
        vendor=vendor,
        torch=str(torch.__version__),
        memory_bytes=int(gigabytes * 1e9),
        peak_flops={"float16": half, "bfloat16": half, "float32": full, "float64": full / 2},
        bandwidth=bandwidth,
        **more,
    )

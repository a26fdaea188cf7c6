"""Timing plans of one block against each other, in turns, on the caller's own arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero._util import log
from layerzero.actors.device.local_device import LocalDevice
from layerzero.measure.timing import TimingBudget, time_kernels
from layerzero.perfdb.record import Launch

NOT_TIMED = "plan.not_timed"
_EFFORT = TimingBudget(samples=15, sample_us=1000.0, budget_s=0.1, warmup=3)


def measure_plans(
    runs: Mapping[str, Callable[..., Any]], tensors: list[Tensor], device: LocalDevice, launch: str,
    kernels: Iterable[str],
) -> dict[str, float]:  # fmt: skip
    """The median of each plan, in microseconds a call; plans that cannot run so are left out, and logged.

    Args: launch is "eager" or "graph"; on the CPU both are wall time. Where no graph can be captured, or one
        of the plans' kernels is not known to be safe in one, plans are launched eagerly.
    Raises: RuntimeError: none can run.
    """
    how: Launch = "graph" if launch == "graph" else "eager"
    if how == "graph" and (unsafe := _unsafe_in_graphs(device, kernels)):
        # A capture that fails leaves torch's generator of random numbers unusable.
        log.warning(NOT_TIMED, plan="all", launch=how, why=f"no graph may hold {', '.join(unsafe)}")
        how = "eager"
    with torch.no_grad():
        timings, failed = time_kernels(dict(runs), [tuple(tensors)], device.device, how, _EFFORT)
        _say(failed, how)
        if not timings and how == "graph":
            timings, failed = time_kernels(dict(runs), [tuple(tensors)], device.device, "eager", _EFFORT)
            _say(failed, "eager")
    if not timings:
        raise RuntimeError(f"no plan could be timed: {'; '.join(failed.values())}")
    return {name: timing.median_us for name, timing in timings.items()}


def _unsafe_in_graphs(device: LocalDevice, kernels: Iterable[str]) -> list[str]:
    """Those that were not proved or declared safe under capture; none on other devices than GPUs."""
    if device.device.type != "cuda":
        return []
    registered = tuple(filter(None, map(device.registry.get, sorted(set(kernels)))))
    judged = device.proofs.apply(registered, strict=device.settings.graph_strict)
    return [kernel.id for kernel in judged if not kernel.capability.graph_safe]


def _say(failed: Mapping[str, str], launch: Launch) -> None:
    for name, why in failed.items():
        log.warning(NOT_TIMED, plan=name, launch=launch, why=why)

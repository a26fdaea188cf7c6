"""Timing plans of one block against each other, in turns, on the caller's own arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero._util import log
from layerzero.measure.timing import Effort, time_kernels
from layerzero.perfdb.record import Launch

NOT_TIMED = "plan.not_timed"
_EFFORT = Effort(samples=15, sample_us=1000.0, budget_s=0.1, warmup=3)


def measure_plans(
    runs: Mapping[str, Callable[..., Any]], tensors: list[Tensor], device: torch.device, launch: str
) -> dict[str, float]:
    """The median of each plan, in microseconds a call; plans that cannot run so are left out, and logged.

    Args: launch is "eager" or "graph"; on the CPU both are wall time. Where no graph can be captured, plans
        are launched eagerly.
    Raises: RuntimeError: none can run.
    """
    how: Launch = "graph" if launch == "graph" else "eager"
    with torch.no_grad():
        timings, failed = time_kernels(dict(runs), [tuple(tensors)], device, how, _EFFORT)
        _say(failed, how)
        if not timings and how == "graph":
            timings, failed = time_kernels(dict(runs), [tuple(tensors)], device, "eager", _EFFORT)
            _say(failed, "eager")
    if not timings:
        raise RuntimeError(f"no plan could be timed: {'; '.join(failed.values())}")
    return {name: timing.median_us for name, timing in timings.items()}


def _say(failed: Mapping[str, str], launch: Launch) -> None:
    for name, why in failed.items():
        log.warning(NOT_TIMED, plan=name, launch=launch, why=why)

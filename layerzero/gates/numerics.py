"""Every kernel that takes a call, run once: what does its output lack, and how near is it to float64?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from layerzero.actors.device.local_device import LocalDevice
from layerzero.measure.calls import Call, Operand
from layerzero.measure.correctness import LIMITS, clone_tensors, poison
from layerzero.measure.shapes import standard_calls
from layerzero.ops import table as ops_table
from layerzero.ops.op import Args, Op

# Elements that are compared at once: they stay in a cache, and torch starts no threads for so few.
_PART = 1 << 15


class KernelRun(msgspec.Struct, frozen=True):
    """One kernel on one call: relative L2 error against float64, what its outputs lack, what it raised."""

    op: str
    dtype: str
    kernel: str
    call: str
    error: float = 0.0
    contract: str = ""
    raised: str = ""


def run_kernels(device: LocalDevice, ops: Sequence[str]) -> Iterator[KernelRun]:
    """Every kernel that takes one of the quick standard calls of `ops` (all ops that have some, by default).

    Raises: UnknownOpError: an op is unknown.
    """
    calls = standard_calls(ops or None, device.hardware.platform, quick=True)
    halves = [_in_dtype(call, "bfloat16") for call in calls] if device.device.type == "cpu" else []
    for call in {str(call): call for call in (*calls, *halves)}.values():
        with torch.no_grad():
            yield from _run_call(device, call)


def _in_dtype(call: Call, dtype: str) -> Call:
    """The call with its float32 operands in another dtype; tables of rotary embeddings stay."""
    tables = ("cos", "sin", "logits")
    args = {
        name: msgspec.structs.replace(value, dtype=dtype)
        if isinstance(value, Operand) and value.dtype == "float32" and name not in tables
        else value
        for name, value in call.args.items()
    }
    return msgspec.structs.replace(call, args=args)


def _run_call(device: LocalDevice, call: Call) -> Iterator[KernelRun]:
    op = ops_table.get(call.op)
    args = call.make(device.device)
    table = device.table(op)
    request = table.describe(args, device.mode())
    selection = table.recompute(request)
    expected = _outputs(op.reference(*clone_tensors(args)))
    truth = _outputs(op.reference(*map(_wide, clone_tensors(args)))) if not op.stochastic else expected
    for candidate in selection.trace:
        if not candidate.eligible:
            continue
        run = KernelRun(op.name, request.dtype, candidate.kernel, str(call))
        try:
            arguments = clone_tensors(args)
            poison(arguments)
            outputs = _outputs(device.callable_for(op, selection, candidate.kernel)(*arguments))
        except Exception as error:  # a kernel may raise anything; the finding has it
            yield msgspec.structs.replace(run, raised=f"{type(error).__name__}: {error}"[:300])
            continue
        contract = _contract(op, args, arguments, outputs, expected)
        distance = 0.0 if contract or op.stochastic else _error(outputs, truth)
        yield msgspec.structs.replace(run, contract=contract, error=distance)


def _wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _outputs(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _contract(op: Op, args: Args, after: Args, outputs: tuple[Any, ...], expected: tuple[Any, ...]) -> str:
    """What the outputs lack, or which operand was written to; empty where all is as the schema says."""
    if len(outputs) != len(expected):
        return f"{len(outputs)} outputs, not {len(expected)}"
    for place, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
        if not isinstance(theirs, Tensor):
            continue
        if not isinstance(ours, Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            got = f"{tuple(ours.shape)} {ours.dtype}" if isinstance(ours, Tensor) else type(ours).__name__
            return f"output {place} is {got}, not {tuple(theirs.shape)} {theirs.dtype}"
        if bool(ours.isnan().any()) and not bool(theirs.isnan().any()):
            return f"output {place} has NaN where the reference has none: memory that is not written"
    if op.pure:
        for place, (before, later) in enumerate(zip(args, after, strict=True)):
            if isinstance(before, Tensor) and not torch.equal(before, later):
                return f"operand {place} was written to"
    return ""


def _error(outputs: tuple[Any, ...], truth: tuple[Any, ...]) -> float:
    """The largest relative L2 error of an output; infinite where other places are finite."""
    worst = 0.0
    for ours, exact in zip(outputs, truth, strict=True):
        if not isinstance(ours, Tensor) or not ours.is_floating_point() or ours.numel() == 0:
            continue
        difference = size = 0.0
        for part, exact_part in zip(*(each.reshape(-1).split(_PART) for each in (ours, exact)), strict=True):
            wide, exact_wide, finite = part.double(), exact_part.double(), exact_part.isfinite()
            if not torch.equal(wide.isfinite(), finite):
                return float("inf")
            if not finite.all():
                wide, exact_wide = (torch.where(finite, each, 0.0) for each in (wide, exact_wide))
            difference += float(torch.linalg.vector_norm(wide - exact_wide)) ** 2
            size += float(torch.linalg.vector_norm(exact_wide)) ** 2
        worst = max(worst, (difference / size if size else difference) ** 0.5)
    return worst


def default_limit(dtype: str) -> float:
    """The relative L2 error that rounding in a dtype explains."""
    return LIMITS.get(getattr(torch, dtype), 0.0)

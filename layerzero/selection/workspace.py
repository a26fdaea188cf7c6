"""Room for workspaces: what a call allocates beyond its outputs, held against what may be taken.

A kernel states its workspace; the transforms before it make temporaries, a dense copy or a wider one. Free
memory changes all the time, choices must not: the budget is known in powers of two, and moves only when free
memory has clearly left its step. A choice made with one room is made anew with another.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerzero.selection.context import SelectionOptions
from layerzero.selection.record import Transform, format_bytes
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason, Rejected

# How far free memory has to go beyond a step's ends before the room follows it.
_SLACK = 1.25
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def workspace_bytes(kernel: Kernel, request: CallSpec) -> int:
    """Bytes that a kernel states it allocates beyond its outputs; 0 where it states nothing."""
    return kernel.workspace_bytes(request) if kernel.workspace_bytes is not None else 0


def transform_bytes(transforms: Sequence[Transform], request: CallSpec, moved: float) -> int:
    """Bytes that transforms allocate for a call that moves so many: at most a copy of all that it touches.

    A layout is a view and costs nothing. A cast widens whatever it copies, outputs included.
    """
    total = 0.0
    for transform in transforms:
        if transform.kind in ("contiguous", "split"):  # the parts of a split are joined into outputs anew
            total += moved
        elif transform.kind == "cast":
            total += moved * _BYTES.get(transform.after, 4) / _BYTES.get(request.dtype, 4)
        elif transform.kind == "dequantize":
            total += transform.size
    return int(total)


def exceeds_budget(
    kernel: Kernel, request: CallSpec, options: SelectionOptions, temporary: int = 0
) -> Rejected | None:
    """The reason against a kernel whose workspace, with the temporaries before it, does not fit, or None.

    An agreed budget is a rank group's least.
    """
    budget, on_every_rank = options.workspace_budget, options.budget_is_agreed
    if budget is None or (kernel.workspace_bytes is None and not temporary):
        return None
    required = workspace_bytes(kernel, request) + temporary
    if required <= budget:
        return None
    return Rejected(
        Reason.MEMORY_HEADROOM_EXCEEDED,
        "workspace",
        f"at most {format_bytes(budget)}"
        + (" (the least of any rank of the rank group)" if on_every_rank else ""),
        format_bytes(required) + (f" ({format_bytes(temporary)} of it for copies)" if temporary else ""),
        f"{format_bytes(required)} of memory free" + (" on every rank" if on_every_rank else ""),
    )


def workspace_budget(free: int, total: int, headroom: float, limit: int | None, before: int | None) -> int:
    """Bytes that workspaces may take: free memory less the headroom, a power of two, and at most `limit`.

    `before` is the room so far, which is kept while free memory is near its step.
    """
    usable = max(0, int(free - headroom * total))
    step = 1 << (usable.bit_length() - 1) if usable else 0
    if before and before / _SLACK <= usable < before * 2 * _SLACK:
        step = before
    return step if limit is None else min(step, limit)

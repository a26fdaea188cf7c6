"""Room for workspaces: what a kernel allocates beyond its outputs, held against what may be taken.

Free memory changes all the time, choices must not: room is known in powers of two, and moves only when free
memory has clearly left its step. A choice made with one room is made anew with another.
"""

from __future__ import annotations

from layerzero.kernel import Kernel
from layerzero.ops.request import Request
from layerzero.reasons import Reason, Rejected

# How far free memory has to go beyond a step's ends before the room follows it.
_SLACK = 1.25


def needs(kernel: Kernel, request: Request) -> int:
    """Bytes that a kernel states it allocates beyond its outputs; 0 where it states nothing."""
    return kernel.workspace_bytes(request) if kernel.workspace_bytes is not None else 0


def too_large(kernel: Kernel, request: Request, room: int | None, *, agreed: bool = False) -> Rejected | None:
    """The reason against a kernel whose workspace does not fit, or None; `agreed` room is a gang's least."""
    if room is None or kernel.workspace_bytes is None:
        return None
    wanted = needs(kernel, request)
    if wanted <= room:
        return None
    return Rejected(
        Reason.MEMORY_HEADROOM_EXCEEDED,
        "workspace",
        f"at most {in_words(room)}" + (" (the least of any rank of the gang)" if agreed else ""),
        in_words(wanted),
        f"{in_words(wanted)} of memory free" + (" on every rank" if agreed else ""),
    )


def room_for(free: int, total: int, headroom: float, limit: int | None, before: int | None) -> int:
    """Bytes that workspaces may take: free memory less the headroom, a power of two, and at most `limit`.

    `before` is the room so far, which is kept while free memory is near its step.
    """
    usable = max(0, int(free - headroom * total))
    step = 1 << (usable.bit_length() - 1) if usable else 0
    if before and before / _SLACK <= usable < before * 2 * _SLACK:
        step = before
    return step if limit is None else min(step, limit)


def in_words(count: int) -> str:
    """A number of bytes for people."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"

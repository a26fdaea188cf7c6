"""The record of one choice: every kernel's verdict, what it would cost, and why one was taken.

`explain`, `which`, logs, metrics and reports all read this record, so that they cannot disagree. Nothing in
it points back, so the collector leaves it alone: it would walk all verdicts in the middle of some call.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Literal

import msgspec

from layerzero.spec.call_spec import CallSpec
from layerzero.spec.reasons import Reason, Rejected, as_plain


class Transform(msgspec.Struct, frozen=True, tag=True, gc=False):
    """One change of the operands before a kernel runs: `kind`, from what to what, priced in microseconds.

    A "split" runs the kernel once for each part of at most `size` along one axis; a "dequantize" writes
    `size` bytes of numbers, which codes stand for.
    """

    kind: Literal["layout", "cast", "contiguous", "split", "dequantize"]
    before: str
    after: str
    cost_us: float = 0.0
    size: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.before} -> {self.after}"


class Accepted(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A kernel that can serve the request, and what it is expected to cost, in microseconds.

    `kernel_us` is the kernel alone, `transform_us` the changes it needs, `total_us` the sum after the
    policy's boost, which is what is compared; `source` says where the expectation comes from.
    `workspace_bytes` is what the kernel states that it allocates, `temporary_bytes` what its transforms do.
    """

    kernel_us: float
    transform_us: float
    total_us: float
    source: str
    transforms: tuple[Transform, ...] = ()
    ready: bool = True
    note: str = ""
    workspace_bytes: int = 0
    temporary_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """What the call allocates beyond its outputs."""
        return self.workspace_bytes + self.temporary_bytes


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One kernel's verdict: accepted with its cost, or rejected with every reason."""

    kernel: str
    backend: str
    accepted: Accepted | None = None
    rejected: tuple[Rejected, ...] = ()

    @property
    def eligible(self) -> bool:
        """Whether the kernel could be chosen now."""
        return self.accepted is not None and not self.rejected


class Selection(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The choice for one request: the kernel, its transforms, expected microseconds, and the whole trace.

    `why` is one sentence; `when_warm` names the kernel that takes over once it is loaded; `order` lists
    the kernels that take the request from the chosen one down, as fallbacks try them. `table_miss` says
    why the dispatch table that is in force leaves the request to run time: it has no bucket for it, or was
    solved under another policy. `overlay` begins the digest of the capability overlay in force, empty where
    there is none. `ahead` says that a dispatch table decided, so that only its kernel was judged: `trace` and
    `order` hold that one. `fused_ops` are the ops of a block that this one does the work of, empty outside
    plans.
    """

    op: str
    kernel: str
    request: CallSpec
    why: str
    expected_us: float = 0.0
    transforms: tuple[Transform, ...] = ()
    trace: tuple[Candidate, ...] = ()
    order: tuple[str, ...] = ()
    when_warm: str | None = None
    version: int = 0
    policy: str = ""
    fallback: str = ""
    table_miss: Rejected | None = None
    overlay: str = ""
    ahead: bool = False
    fused_ops: tuple[str, ...] = ()

    @property
    def transform_cost_total(self) -> float:
        """What all transforms of the chosen kernel are expected to cost, in microseconds."""
        return sum(transform.cost_us for transform in self.transforms)

    def __repr__(self) -> str:
        kernel = self.kernel or "no kernel"
        return (
            f"<Selection {self.op} -> {kernel}, {self.expected_us:.1f} us, {len(self.trace)} kernels judged>"
        )

    def __str__(self) -> str:
        return render(self)

    def _repr_html_(self) -> str:
        return html(self)

    def candidate(self, kernel: str) -> Candidate:
        """The verdict on one kernel.

        Raises: KeyError: the kernel is not registered for this op.
        """
        for candidate in self.trace:
            if candidate.kernel == kernel:
                return candidate
        raise KeyError(kernel)

    def as_plain(self) -> dict[str, Any]:
        """The whole record as JSON-ready values."""
        return {
            "op": self.op,
            "kernel": self.kernel,
            "why": self.why,
            "expected_us": round(self.expected_us, 3),
            "transforms": [str(t) for t in self.transforms],
            "transform_cost_total": round(self.transform_cost_total, 3),
            "fused_ops": list(self.fused_ops),
            "when_warm": self.when_warm,
            "fallback": self.fallback or None,
            "table_miss": as_plain(self.table_miss) if self.table_miss is not None else None,
            "version": self.version,
            "policy": self.policy,
            "overlay": self.overlay,
            "ahead": self.ahead,
            "request": msgspec.to_builtins(self.request),
            "candidates": [_candidate_plain(c) for c in self.trace],
        }


def _candidate_plain(candidate: Candidate) -> dict[str, Any]:
    accepted = candidate.accepted
    return {
        "kernel": candidate.kernel,
        "backend": candidate.backend,
        "accepted": None if accepted is None else msgspec.to_builtins(accepted),
        "rejected": [as_plain(reason) for reason in candidate.rejected],
    }


def empty_selection(request: CallSpec) -> Selection:
    """The record of a call with no element to compute: no kernel was asked."""
    return Selection(op=request.op, kernel="", request=request, why="nothing to compute: no kernel runs")


def render(selection: Selection) -> str:
    """The explanation of one choice; lines are sorted from the chosen kernel to the least able."""
    lines = [headline(selection.request), f"-> {selection.kernel or 'no kernel'}: {selection.why}"]
    if selection.transforms:
        lines.append(f"   transforms: {', '.join(str(t) for t in selection.transforms)}")
    if selection.when_warm:
        lines.append(f"   chosen when warm: {selection.when_warm}")
    if selection.policy:
        lines.append(f"   policy {selection.policy}, version {selection.version}")
    shown, elsewhere = fold_other_platforms(selection)
    width = max((len(c.kernel) for c in shown), default=0)
    for candidate in shown:
        mark = "*" if candidate.kernel == selection.kernel else " "
        lines.append(f" {mark} {candidate.kernel:<{width}}  {_verdict(candidate)}")
    if elsewhere:
        lines.append(f"   {elsewhere}")
    return "\n".join(lines)


def html(selection: Selection) -> str:
    """The explanation as an HTML table, for notebooks."""
    shown, elsewhere = fold_other_platforms(selection)
    rows = "".join(
        f"<tr><td>{'<b>' if c.kernel == selection.kernel else ''}{escape(c.kernel)}"
        f"{'</b>' if c.kernel == selection.kernel else ''}</td><td>{escape(_verdict(c))}</td></tr>"
        for c in shown
    )
    note = f"<p>{escape(elsewhere)}</p>" if elsewhere else ""
    chosen = f"<b>{escape(selection.kernel or 'no kernel')}</b>: {escape(selection.why)}"
    return (
        f"<p>{escape(headline(selection.request))}<br>&rarr; {chosen}</p>"
        f"<table><tr><th>kernel</th><th>verdict</th></tr>{rows}</table>{note}"
    )


def headline(request: CallSpec) -> str:
    """The request in a line: op, device, dtype, sizes by axis, and what it asks for."""
    sizes = " ".join(f"{name}={size}" for name, size in request.dims.items())
    asks = " ".join(sorted(request.features | request.modes))
    asking = f", asking {asks}" if asks else ""
    return f"{request.op} on {request.device}, {request.dtype}, {sizes}{asking}"


def fold_other_platforms(selection: Selection) -> tuple[list[Candidate], str]:
    """The candidates to show, ranked, and one line that names those for other kinds of device, if any.

    Where no kernel takes the call, every kernel is shown with its reasons.
    """
    every = rank_candidates(selection.trace, selection.kernel)
    mismatch = Reason.PLATFORM_MISMATCH
    others = [c for c in every if selection.kernel and any(r.reason is mismatch for r in c.rejected)]
    names = ", ".join(sorted(c.kernel for c in others))
    shown = [c for c in every if c not in others]
    return shown, f"for other kinds of device: {names}" if others else ""


def rank_candidates(trace: Sequence[Candidate], chosen: str) -> list[Candidate]:
    """The chosen kernel, then those that accept by cost, then those that refuse by number of reasons."""

    def order(candidate: Candidate) -> tuple[int, float, str]:
        if candidate.kernel == chosen:
            return (0, 0.0, candidate.kernel)
        if candidate.eligible and candidate.accepted is not None:
            return (1, candidate.accepted.total_us, candidate.kernel)
        return (2, float(len(candidate.rejected)), candidate.kernel)

    return sorted(trace, key=order)


def _verdict(candidate: Candidate) -> str:
    accepted = candidate.accepted
    if candidate.rejected or accepted is None:
        parts = [
            str(r) + (f" (accepted if {r.counterfactual})" if r.counterfactual else "")
            for r in candidate.rejected
        ]
        return "no   " + "; ".join(parts)
    parts = [f"{accepted.kernel_us:9.1f} us {accepted.source}"]
    if accepted.transforms:
        parts.append(f"+ {accepted.transform_us:.1f} us for {', '.join(str(t) for t in accepted.transforms)}")
    if abs(accepted.total_us - accepted.kernel_us - accepted.transform_us) > 1e-9:
        parts.append(f"policy makes it {accepted.total_us:.1f} us")
    if accepted.memory_bytes:
        parts.append(f"allocating {format_bytes(accepted.memory_bytes)}")
    if accepted.note:
        parts.append(f"({accepted.note})")
    return "yes  " + " ".join(parts)


def format_bytes(count: int) -> str:
    """A number of bytes for people."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"

"""A selection as text for people: the choice in a sentence, then one line a kernel with its reasons.

Where a kernel was found, those made for another kind of device share one line; the trace has their reasons.
"""

from __future__ import annotations

from collections.abc import Sequence

from layerzero.selection.record import Candidate, Selection
from layerzero.selection.workspace import format_bytes
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.reasons import Reason


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
    from html import escape

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
    return f"{request.op} on {request.device}, {request.dtype}, {sizes}" + (
        f", asking {asks}" if asks else ""
    )


def fold_other_platforms(selection: Selection) -> tuple[list[Candidate], str]:
    """The candidates to show, ranked, and one line that names those for other kinds of device, if any.

    Where nobody takes the call, every kernel is shown with its reasons.
    """
    every = rank_candidates(selection.trace, selection.kernel)
    others = [c for c in every if selection.kernel and _is_other_platform(c)]
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


def _is_other_platform(candidate: Candidate) -> bool:
    return any(rejected.reason is Reason.PLATFORM_MISMATCH for rejected in candidate.rejected)


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

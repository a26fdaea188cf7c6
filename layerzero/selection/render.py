"""A selection as text for people: the choice in a sentence, then one line a kernel with its reasons."""

from __future__ import annotations

from layerzero.selection.memory import in_words
from layerzero.selection.record import Candidate, Selection


def render(selection: Selection) -> str:
    """The explanation of one choice; lines are sorted from the chosen kernel to the least able."""
    request = selection.request
    sizes = " ".join(f"{name}={size}" for name, size in request.dims.items())
    asks = " ".join(sorted(request.features | request.modes))
    lines = [
        f"{selection.op} on {request.device}, {request.dtype}, {sizes}"
        + (f", asking {asks}" if asks else ""),
        f"-> {selection.kernel or 'no kernel'}: {selection.why}",
    ]
    if selection.transforms:
        lines.append(f"   transforms: {', '.join(str(t) for t in selection.transforms)}")
    if selection.when_warm:
        lines.append(f"   chosen when warm: {selection.when_warm}")
    if selection.policy:
        lines.append(f"   policy {selection.policy}, generation {selection.generation}")
    width = max((len(c.kernel) for c in selection.trace), default=0)
    for candidate in sorted(selection.trace, key=lambda c: _order(c, selection.kernel)):
        mark = "*" if candidate.kernel == selection.kernel else " "
        lines.append(f" {mark} {candidate.kernel:<{width}}  {_verdict(candidate)}")
    return "\n".join(lines)


def _order(candidate: Candidate, chosen: str) -> tuple[int, float, str]:
    if candidate.kernel == chosen:
        return (0, 0.0, candidate.kernel)
    if candidate.accepted is not None and not candidate.rejected:
        return (1, candidate.accepted.total_us, candidate.kernel)
    return (2, float(len(candidate.rejected)), candidate.kernel)


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
        parts.append(f"allocating {in_words(accepted.memory_bytes)}")
    if accepted.note:
        parts.append(f"({accepted.note})")
    return "yes  " + " ".join(parts)

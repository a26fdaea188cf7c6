"""Deciding: judge every kernel, price those that accept, and take one; pure, so that it can be asked again.

Order of authority: a lock, then denials and allow lists, then capability, then health and readiness, then
expected microseconds after boosts. Among costs, the library default keeps its place unless beaten by a
minimum gain (the tie band, where both were timed at the very size), and differences inside the tie band are
settled by tie-break order and name, so that noise decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import msgspec

from layerzero.ops.op import Op
from layerzero.selection.context import CostModel, SelectionContext, SelectionOptions
from layerzero.selection.cost.roofline import ESTIMATE_MARGIN, ROOFLINE, TIMED, ideal_us, roofline_us
from layerzero.selection.policy.policy import RequestPolicy
from layerzero.selection.policy.rules import Rule
from layerzero.selection.record import Accepted, Candidate, Selection, Transform
from layerzero.selection.transform import adapt
from layerzero.selection.workspace import exceeds_budget, transform_bytes, workspace_bytes
from layerzero.spec.call_spec import CallSpec, WorkEstimate
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.gpu_map import preferred_on
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Reason, Rejected

if TYPE_CHECKING:
    from layerzero.selection.dispatch_table import Bucket

# Said of a kernel that is data alone, wherever it is accepted or chosen.
DESCRIPTOR_ONLY = "descriptor only"
# Where the price of a dispatch table's kernel comes from.
AHEAD = "dispatch table"


def roofline_cost(
    kernel: Kernel, work: WorkEstimate, request: CallSpec, hardware: Hardware
) -> tuple[float, str]:
    """The estimate that needs no measurement."""
    return roofline_us(kernel, work, request, hardware), ROOFLINE


def decide(
    op: Op,
    request: CallSpec,
    context: SelectionContext,
    *,
    bucketed: CallSpec | None = None,
    cost: CostModel = roofline_cost,
    table_entry: Bucket | Rejected | None = None,
) -> Selection:
    """Choose a kernel for `request` and keep every verdict.

    `bucketed` is the request whose sizes costs are estimated for (the key's grid point). `table_entry` is
    what a dispatch table says of the call, or why it leaves the choice to run time; None where there is none.
    Raises: NoKernelFoundError: no kernel may and can serve it, or the governing lock cannot hold; the
    message lists every kernel with its reasons, `.trace` carries them.
    """
    policy, options = context.policy, context.options
    rules = policy.for_request(request)
    lock = rules.lock
    judge = _Judge(op, request, bucketed or request, context, rules, cost, op.work(bucketed or request))
    trace = tuple(judge.candidate(kernel) for kernel in context.kernels)
    by_id = {kernel.id: kernel for kernel in context.kernels}
    eligible = [c for c in trace if c.accepted is not None and not c.rejected]
    if not eligible:
        raise NoKernelFoundError(
            no_kernel_message(op, request, trace, lock), trace=trace, op=op.name, request=request
        )
    ready = [c for c in eligible if c.accepted is not None and c.accepted.ready]
    sm = context.hardware.sm
    preferred = preferred_on(op.name, sm) if sm is not None else ()
    pool = ready or eligible
    chosen, why = pick(pool, by_id, options, preferred)
    best_warm, unrepaid = _best_once_loaded(eligible, chosen, by_id, request, options, preferred)
    if lock is not None:
        why = f"locked by {lock.source}" + (f": {lock.note}" if lock.note else "")
    elif isinstance(table_entry, Rejected):
        why = f"{table_entry.reason.value}, chosen at run time: {why}"
    elif table_entry is not None:
        chosen, best_warm, why = _by_dispatch_table(table_entry, trace, pool, chosen, best_warm, why)
    if by_id[chosen.kernel].descriptor:
        why = f"{DESCRIPTOR_ONLY}, no code here calls it: {why}"
    others = sorted((c for c in pool if c is not chosen), key=lambda c: (_accepted_of(c).total_us, c.kernel))
    return _selection(
        request, context, chosen,
        why=why, order=(chosen.kernel, *(c.kernel for c in others)),
        trace=tuple(unrepaid.get(c.kernel, c) for c in trace) if unrepaid else trace,
        when_warm=best_warm.kernel if best_warm.kernel != chosen.kernel else None,
        table_miss=table_entry if lock is None and isinstance(table_entry, Rejected) else None,
    )  # fmt: skip


def _selection(request: CallSpec, context: SelectionContext, chosen: Candidate, **fields: Any) -> Selection:
    accepted = _accepted_of(chosen)
    return Selection(
        op=request.op,
        kernel=chosen.kernel,
        request=request,
        transforms=accepted.transforms,
        expected_us=accepted.kernel_us + accepted.transform_us,
        policy=context.policy.digest[:12] if context.policy else "",
        overlay=context.options.overlay[:12],
        **fields,
    )


def decide_ahead(
    op: Op, request: CallSpec, context: SelectionContext, *, bucketed: CallSpec, entry: Bucket
) -> Selection | None:
    """The selection of a dispatch table's kernel, with which no other kernel is judged.

    None where all must be judged: a lock governs the call, or the kernel may not, cannot or need not serve it
    now (it is on probation, or not loaded).
    """
    kernel = next((known for known in context.kernels if known.id == entry.kernel), None)
    rules = context.policy.for_request(request)
    if kernel is None or rules.lock is not None or kernel.id in context.status.probing:
        return None

    def cost(kernel: Kernel, work: WorkEstimate, request: CallSpec, hardware: Hardware) -> tuple[float, str]:
        if not entry.multiple:
            return entry.expected_us, AHEAD
        return math.hypot(entry.floor_us, entry.multiple * ideal_us(work, request, hardware)), AHEAD

    candidate = _Judge(op, request, bucketed, context, rules, cost, op.work(bucketed)).candidate(kernel)
    accepted = candidate.accepted
    if accepted is None or candidate.rejected or not accepted.ready or kernel.descriptor:
        return None
    order, why = (kernel.id,), _why_ahead(entry)
    return _selection(request, context, candidate, why=why, trace=(candidate,), order=order, ahead=True)


def _why_ahead(entry: Bucket) -> str:
    return f"the dispatch table's kernel for this bucket: {entry.why}"


def _by_dispatch_table(
    entry: Bucket,
    trace: Sequence[Candidate],
    pool: Sequence[Candidate],
    chosen: Candidate,
    best_warm: Candidate,
    why: str,
) -> tuple[Candidate, Candidate, str]:
    """What a dispatch table makes of the choice, now and once everything is loaded: its own kernel."""
    named = next((c for c in trace if c.kernel == entry.kernel), None)
    if named is not None and named in pool:
        return named, named, _why_ahead(entry)
    because = "; ".join(map(str, named.rejected)) if named is not None else "it is not registered"
    why = f"instead of {entry.kernel}, which the dispatch table names ({because or 'not loaded'}): {why}"
    return chosen, named if named is not None and named.eligible else best_warm, why


@dataclass(frozen=True, slots=True)
class _Judge:
    """One request before every kernel, with what is the same for all of them."""

    op: Op
    request: CallSpec
    bucketed: CallSpec
    context: SelectionContext
    rules: RequestPolicy
    cost: CostModel
    work: WorkEstimate

    def candidate(self, kernel: Kernel) -> Candidate:
        """The verdict on one kernel: its price where it can be adapted, and every reason against it."""
        request, context, bucketed = self.request, self.context, self.bucketed
        options, hardware = context.options, context.hardware
        verdict = self.rules.verdict(kernel.id, kernel.backend)
        reasons: list[Rejected] = list(verdict.reasons)
        blocked = context.status.blocked.get(kernel.id)
        if blocked is not None:
            reasons.append(blocked)
        refusals = rejections(kernel, request, hardware)
        adapted: tuple[CallSpec, tuple[Transform, ...]] | None = (request, ())
        if refusals:
            adapted = adapt(self.op, kernel, request, refusals, hardware, bucketed)
        transforms = adapted[1] if adapted is not None else ()
        temporary = transform_bytes(transforms, request, self.work.bytes) if transforms else 0
        oversize = exceeds_budget(kernel, bucketed, options, temporary)
        if oversize is not None:
            reasons.append(oversize)
        if adapted is None or (transforms and options.strict):
            reasons.extend(refusals)
            if transforms:
                needs = ", ".join(map(str, transforms))
                reasons.append(
                    Rejected(Reason.STRICT_NEEDS_TRANSFORM, "strict", "no transforms", needs, "strict=False")
                )
            return Candidate(kernel.id, kernel.backend, None, tuple(reasons))
        priced = bucketed.replace(dtype=adapted[0].dtype, features=adapted[0].features)
        work = self.work if priced.features == bucketed.features else self.op.work(priced)
        kernel_us, source = self.cost(kernel, work, priced, hardware)
        transform_us = sum(t.cost_us for t in transforms)
        total = verdict.boost.apply(kernel_us + transform_us)
        ready = context.status.is_ready(kernel, request)
        note = DESCRIPTOR_ONLY if kernel.descriptor else "" if ready else "chosen when warm"
        workspace = workspace_bytes(kernel, bucketed)
        accepted = Accepted(
            kernel_us, transform_us, total, source, transforms, ready, note, workspace, temporary
        )
        return Candidate(kernel.id, kernel.backend, accepted, tuple(reasons))


def pick(
    pool: Sequence[Candidate],
    by_id: Mapping[str, Kernel],
    options: SelectionOptions,
    preferred: Sequence[str] = (),
) -> tuple[Candidate, str]:
    """The candidate to take and one sentence why; `preferred` are globs of what the hardware runs best."""
    best = min(pool, key=lambda c: (_accepted_of(c).total_us, by_id[c.kernel].tie_break_order, c.kernel))
    floor = _accepted_of(best).total_us
    if len(pool) == 1:
        return best, "the only kernel that takes the request"
    for candidate in _of_globs(pool, preferred) if _accepted_of(best).source == ROOFLINE else ():
        total = _accepted_of(candidate).total_us
        if _accepted_of(candidate).source == ROOFLINE and total <= floor * ESTIMATE_MARGIN:
            gain = (total / floor - 1) * 100 if floor else 0.0
            if candidate is best:
                return best, f"preferred on this hardware, and the cheapest at {floor:.1f} us expected"
            why = f"preferred on this hardware: {best.kernel} gains only {gain:.1f} %, by estimates"
            return candidate, why
    for default in (c for c in pool if by_id[c.kernel].default):
        total = _accepted_of(default).total_us
        if default is best:
            return default, f"the library default, and the cheapest at {floor:.1f} us expected"
        timed = _accepted_of(default).source in TIMED and _accepted_of(best).source in TIMED
        needed = min(options.default_gain, options.tie_band) if timed else options.default_gain
        if total <= floor * (1 + needed):
            gain = (total / floor - 1) * 100 if floor else 0.0
            return default, f"the library default: {best.kernel} gains only {gain:.1f} %"
    band = [c for c in pool if _accepted_of(c).total_us <= floor * (1 + options.tie_band)]
    first = min(band, key=lambda c: (by_id[c.kernel].tie_break_order, c.kernel))
    if len(band) > 1:
        why = f"first in fixed order among {len(band)} within {options.tie_band:.0%} of {floor:.1f} us"
        return first, why
    return best, f"cheapest at {floor:.1f} us expected"


def _best_once_loaded(
    eligible: Sequence[Candidate],
    chosen: Candidate,
    by_id: Mapping[str, Kernel],
    request: CallSpec,
    options: SelectionOptions,
    preferred: Sequence[str],
) -> tuple[Candidate, dict[str, Candidate]]:
    """What to take once all that is worth it is loaded; by id the better kernels that are not, with why."""
    pool, unrepaid = list(eligible), dict[str, Candidate]()
    while True:
        best, _ = pick(pool, by_id, options, preferred)
        if best is chosen or _accepted_of(best).ready:  # nothing that has to be loaded is taken instead
            return chosen, unrepaid
        note = _why_not_compiled(best, chosen, by_id[best.kernel], request, options)
        if not note:
            return best, unrepaid
        accepted = msgspec.structs.replace(_accepted_of(best), note=note)
        unrepaid[best.kernel] = msgspec.structs.replace(best, accepted=accepted)
        pool.remove(best)


def _why_not_compiled(
    better: Candidate, chosen: Candidate, kernel: Kernel, request: CallSpec, options: SelectionOptions
) -> str:
    """The price at which a module is left uncompiled; empty where it is built, repaid or asked for."""
    accepted, calls = _accepted_of(better), options.payback_calls
    if calls is None or kernel.on_disk is None:
        return ""
    if accepted.total_us < accepted.kernel_us + accepted.transform_us:  # the policy favours it
        return ""
    gain_us = _accepted_of(chosen).total_us - accepted.total_us
    if kernel.compile_s * 1e6 <= gain_us * calls or kernel.on_disk(request):
        return ""
    needed = f"after {kernel.compile_s * 1e6 / gain_us:,.0f} calls" if gain_us > 0 else "never"
    return f"not compiled: {kernel.compile_s:g} s are repaid {needed}, of {calls:,} expected"


def _of_globs(pool: Sequence[Candidate], globs: Sequence[str]) -> list[Candidate]:
    """The candidates that globs name, in their order, the cheapest of each first."""
    cheapest_first = sorted(pool, key=lambda c: (_accepted_of(c).total_us, c.kernel)) if globs else ()
    return [c for glob in globs for c in cheapest_first if fnmatchcase(c.kernel, glob)]


def _accepted_of(candidate: Candidate) -> Accepted:
    assert candidate.accepted is not None
    return candidate.accepted


def no_kernel_message(op: Op, request: CallSpec, trace: Sequence[Candidate], lock: Rule | None) -> str:
    """The message of NoKernelFoundError: each kernel with its reasons, nearest first, and what would help."""
    if not trace:
        return f"no candidates found for {op.name}: no kernel is registered for it on {request.platform}"
    ordered = sorted(trace, key=lambda c: (len(c.rejected), c.kernel))
    sizes = ", ".join(f"{name}={size}" for name, size in request.dims.items())
    head = f"no kernel takes this {op.name} call on {request.device} ({request.dtype}, {sizes})"
    if lock is not None:
        head = f"the lock `{lock}` cannot hold: {head}"
    lines = [f"  {c.kernel}: {'; '.join(str(r) for r in c.rejected)}" for c in ordered]
    hints = [r.counterfactual for r in ordered[0].rejected if r.counterfactual]
    near = f"\nnearest: {ordered[0].kernel} takes it given {' and '.join(hints)}" if hints else ""
    return head + "\n" + "\n".join(lines) + near

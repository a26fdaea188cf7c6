"""Deciding: judge every kernel, price those that accept, and take one; pure, so that it can be asked again.

Order of authority: a lock, then denials and allow lists, then capability, then health and readiness, then
expected microseconds after boosts. Among costs, the library default keeps its place unless beaten by a
minimum gain (the tie band, where both were timed at the very size), and differences inside the tie band are
settled by rank and name, so that noise decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from layerzero.ops.op import Op
from layerzero.selection.cost.roofline import ROOFLINE, TIMED, roofline_us
from layerzero.selection.policy.policy import Policy, RequestPolicy
from layerzero.selection.policy.rules import Rule
from layerzero.selection.record import Accepted, Candidate, Selection
from layerzero.selection.transform import adapt
from layerzero.selection.workspace import exceeds_budget, transform_bytes, workspace_bytes
from layerzero.spec.call_spec import CallSpec, WorkEstimate
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Reason, Rejected

# Said of a kernel that is data alone, wherever it is accepted or chosen.
DESCRIPTOR_ONLY = "descriptor only"

CostModel = Callable[[Kernel, WorkEstimate, CallSpec, Hardware], tuple[float, str]]


def roofline_cost(
    kernel: Kernel, work: WorkEstimate, request: CallSpec, hardware: Hardware
) -> tuple[float, str]:
    """The estimate that needs no measurement."""
    return roofline_us(kernel, work, request, hardware), ROOFLINE


@dataclass(frozen=True, slots=True)
class KernelStatus:
    """What holds for kernels beyond their capability, at one moment.

    `blocked` maps a kernel to why it may not run (missing backend, failed load, open circuit, quarantine);
    `unready` are those that would have to be loaded first, `probing` those on probation. `built` holds
    (kernel, unit) of what has been compiled; None counts everything as compiled.
    """

    blocked: Mapping[str, Rejected] = field(default_factory=dict)
    unready: frozenset[str] = frozenset()
    probing: frozenset[str] = frozenset()
    compiled: frozenset[tuple[str, str]] | None = None

    def is_ready(self, kernel: Kernel, request: CallSpec) -> bool:
        """Whether `kernel` could run `request` without loading or compiling anything."""
        if kernel.id in self.unready:
            return False
        return (
            self.compiled is None
            or kernel.compile_key is None
            or (kernel.id, kernel.compile_key(request)) in self.compiled
        )


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """The settings that bear on a decision; `room` is what a workspace may take, in bytes.

    `agreed` says that the room is what the poorest rank of a rank group has. `overlay` is the digest of what
    the deployment took from the kernels' capabilities.
    """

    strict: bool = False
    tie_band: float = 0.03
    default_gain: float = 0.05
    workspace_budget: int | None = None
    budget_is_agreed: bool = False
    overlay: str = ""


def decide(
    op: Op,
    request: CallSpec,
    kernels: Sequence[Kernel],
    hardware: Hardware,
    policy: Policy,
    status: KernelStatus,
    options: SelectionOptions,
    *,
    bucketed: CallSpec | None = None,
    cost: CostModel = roofline_cost,
    table_entry: str | Rejected | None = None,
) -> Selection:
    """Choose a kernel for `request` and keep every verdict.

    `priced_as` is the request whose sizes costs are estimated for (the key's grid point). `solved` is the
    kernel that a dispatch table names, or why it leaves the choice to run time; None where there is no table.
    Raises: NoKernelFoundError: no kernel may and can serve it, or the governing lock cannot hold; the
    message lists every kernel with its reasons, `.trace` carries them.
    """
    rules = policy.for_request(request)
    lock = rules.lock
    bucketed_request = bucketed or request
    work = op.work(bucketed_request)
    trace = tuple(
        _verdict(op, kernel, request, bucketed_request, work, hardware, rules, status, options, cost)
        for kernel in kernels
    )
    by_id = {kernel.id: kernel for kernel in kernels}
    eligible = [c for c in trace if c.accepted is not None and not c.rejected]
    if not eligible:
        raise NoKernelFoundError(
            no_kernel_message(op, request, trace, lock), trace=trace, op=op.name, request=request
        )
    ready = [c for c in eligible if c.accepted is not None and c.accepted.ready]
    best_warm, _ = pick(eligible, by_id, options)
    pool = ready or eligible
    chosen, why = pick(pool, by_id, options)
    if lock is not None:
        why = f"locked by {lock.source}" + (f": {lock.note}" if lock.note else "")
    elif isinstance(table_entry, Rejected):
        why = f"{table_entry.reason.value}, chosen at run time: {why}"
    elif table_entry is not None:
        chosen, best_warm, why = _by_dispatch_table(table_entry, trace, pool, chosen, best_warm, why)
    if by_id[chosen.kernel].descriptor:
        why = f"{DESCRIPTOR_ONLY}, no code here calls it: {why}"
    accepted = _accepted_of(chosen)
    order = [
        chosen.kernel,
        *sorted((c.kernel for c in pool if c is not chosen), key=lambda k: _total_us(pool, k)),
    ]
    return Selection(
        op=op.name,
        kernel=chosen.kernel,
        request=request,
        transforms=accepted.transforms,
        expected_us=accepted.kernel_us + accepted.transform_us,
        why=why,
        trace=trace,
        order=tuple(order),
        when_warm=best_warm.kernel if best_warm.kernel != chosen.kernel else None,
        policy=policy.digest[:12] if policy else "",
        table_miss=table_entry if lock is None and isinstance(table_entry, Rejected) else None,
        overlay=options.overlay[:12],
    )


def _by_dispatch_table(
    named_kernel: str,
    trace: Sequence[Candidate],
    pool: Sequence[Candidate],
    chosen: Candidate,
    best_warm: Candidate,
    why: str,
) -> tuple[Candidate, Candidate, str]:
    """What a dispatch table makes of the choice, now and once everything is loaded: its own kernel."""
    named = next((c for c in trace if c.kernel == named_kernel), None)
    if named is not None and named in pool:
        return named, named, "the dispatch table's kernel for this bucket"
    because = "; ".join(map(str, named.rejected)) if named is not None else "it is not registered"
    why = f"instead of {named_kernel}, which the dispatch table names ({because or 'not loaded'}): {why}"
    return chosen, named if named is not None and named.eligible else best_warm, why


def _verdict(
    op: Op,
    kernel: Kernel,
    request: CallSpec,
    bucketed: CallSpec,
    work: WorkEstimate,
    hardware: Hardware,
    rules: RequestPolicy,
    status: KernelStatus,
    options: SelectionOptions,
    cost: CostModel,
) -> Candidate:
    verdict = rules.verdict(kernel.id, kernel.backend)
    reasons: list[Rejected] = list(verdict.reasons)
    blocked = status.blocked.get(kernel.id)
    if blocked is not None:
        reasons.append(blocked)
    refusals = rejections(kernel, request, hardware)
    adapted = adapt(op, kernel, request, refusals, hardware, bucketed) if refusals else (request, ())
    temporary = transform_bytes(adapted[1], request, work.bytes) if adapted is not None and adapted[1] else 0
    oversize = exceeds_budget(
        kernel, bucketed, options.workspace_budget, temporary, budget_is_agreed=options.budget_is_agreed
    )
    if oversize is not None:
        reasons.append(oversize)
    if adapted is None:
        reasons.extend(refusals)
    elif adapted[1] and options.strict:
        transform_list = ", ".join(str(t) for t in adapted[1])
        reasons.extend(refusals)
        reasons.append(
            Rejected(Reason.STRICT_NEEDS_TRANSFORM, "strict", "no transforms", transform_list, "strict=False")
        )
    if adapted is None or (adapted[1] and options.strict):
        return Candidate(kernel.id, kernel.backend, None, tuple(reasons))
    transforms = adapted[1]
    kernel_us, source = cost(kernel, work, bucketed.replace(dtype=adapted[0].dtype), hardware)
    transform_us = sum(t.cost_us for t in transforms)
    total = verdict.boost.apply(kernel_us + transform_us)
    ready = status.is_ready(kernel, request)
    note = DESCRIPTOR_ONLY if kernel.descriptor else "" if ready else "chosen when warm"
    workspace = workspace_bytes(kernel, bucketed)
    accepted = Accepted(kernel_us, transform_us, total, source, transforms, ready, note, workspace, temporary)
    return Candidate(kernel.id, kernel.backend, accepted, tuple(reasons))


def pick(
    pool: Sequence[Candidate], by_id: Mapping[str, Kernel], options: SelectionOptions
) -> tuple[Candidate, str]:
    """The candidate to take and one sentence why."""
    best = min(pool, key=lambda c: (_accepted_of(c).total_us, by_id[c.kernel].tie_break_order, c.kernel))
    floor = _accepted_of(best).total_us
    if len(pool) == 1:
        return best, "the only kernel that takes the request"
    defaults = [c for c in pool if by_id[c.kernel].default]
    for default in defaults:
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
        return (
            first,
            f"first in fixed order among {len(band)} within {options.tie_band:.0%} of {floor:.1f} us",
        )
    return best, f"cheapest at {floor:.1f} us expected"


def _accepted_of(candidate: Candidate) -> Accepted:
    assert candidate.accepted is not None
    return candidate.accepted


def _total_us(pool: Sequence[Candidate], kernel: str) -> tuple[float, str]:
    return next((_accepted_of(c).total_us, c.kernel) for c in pool if c.kernel == kernel)


def no_kernel_message(op: Op, request: CallSpec, trace: Sequence[Candidate], lock: Rule | None) -> str:
    """The message of NoKernelFoundError: each kernel with its reasons, nearest first, and what would help."""
    if not trace:
        return f"no candidates found for {op.name}: no kernel is registered for it on {request.platform}"
    ordered = sorted(trace, key=lambda c: (len(c.rejected), c.kernel))
    head = f"no kernel takes this {op.name} call on {request.device} ({request.dtype}, {_sizes(request)})"
    if lock is not None:
        head = f"the lock `{lock}` cannot hold: {head}"
    lines = [f"  {c.kernel}: {'; '.join(str(r) for r in c.rejected)}" for c in ordered]
    hints = [r.counterfactual for r in ordered[0].rejected if r.counterfactual]
    near = f"\nnearest: {ordered[0].kernel} takes it given {' and '.join(hints)}" if hints else ""
    return head + "\n" + "\n".join(lines) + near


def _sizes(request: CallSpec) -> str:
    return ", ".join(f"{name}={size}" for name, size in request.dims.items())

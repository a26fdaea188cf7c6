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
from layerzero.selection.workspace import needs, temporaries, too_large
from layerzero.spec.call_spec import Request, Work
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel, judge
from layerzero.spec.reasons import Reason, Rejected

# Said of a kernel that is data alone, wherever it is accepted or chosen.
DESCRIPTOR_ONLY = "descriptor only"

CostModel = Callable[[Kernel, Work, Request, Hardware], tuple[float, str]]


def roofline(kernel: Kernel, work: Work, request: Request, hardware: Hardware) -> tuple[float, str]:
    """The estimate that needs no measurement."""
    return roofline_us(kernel, work, request, hardware), ROOFLINE


@dataclass(frozen=True, slots=True)
class Standing:
    """What holds for kernels beyond their capability, at one moment.

    `blocked` maps a kernel to why it may not run (missing backend, failed load, open circuit, quarantine);
    `unready` are those that would have to be loaded first, `probing` those on probation. `built` holds
    (kernel, unit) of what has been compiled; None counts everything as compiled.
    """

    blocked: Mapping[str, Rejected] = field(default_factory=dict)
    unready: frozenset[str] = frozenset()
    probing: frozenset[str] = frozenset()
    built: frozenset[tuple[str, str]] | None = None

    def is_ready(self, kernel: Kernel, request: Request) -> bool:
        """Whether `kernel` could run `request` without loading or compiling anything."""
        if kernel.id in self.unready:
            return False
        return self.built is None or kernel.unit is None or (kernel.id, kernel.unit(request)) in self.built


@dataclass(frozen=True, slots=True)
class Knobs:
    """The settings that bear on a decision; `room` is what a workspace may take, in bytes.

    `agreed` says that the room is what the poorest rank of a gang has. `overlay` is the digest of what the
    deployment took from the kernels' capabilities.
    """

    strict: bool = False
    tie_band: float = 0.03
    default_gain: float = 0.05
    room: int | None = None
    agreed: bool = False
    overlay: str = ""


def decide(
    op: Op,
    request: Request,
    kernels: Sequence[Kernel],
    hardware: Hardware,
    policy: Policy,
    standing: Standing,
    knobs: Knobs,
    *,
    priced_as: Request | None = None,
    cost: CostModel = roofline,
    solved: str | Rejected | None = None,
) -> Selection:
    """Choose a kernel for `request` and keep every verdict.

    `priced_as` is the request whose sizes costs are estimated for (the key's grid point). `solved` is the
    kernel that a dispatch table names, or why it leaves the choice to run time; None where there is no table.
    Raises: NoKernelFoundError: no kernel may and can serve it, or the governing lock cannot hold; the
    message lists every kernel with its reasons, `.trace` carries them.
    """
    facing = policy.facing(request)
    lock = facing.lock
    basis = priced_as or request
    work = op.work(basis)
    trace = tuple(
        _verdict(op, kernel, request, basis, work, hardware, facing, standing, knobs, cost)
        for kernel in kernels
    )
    by_id = {kernel.id: kernel for kernel in kernels}
    takes = [c for c in trace if c.accepted is not None and not c.rejected]
    if not takes:
        raise NoKernelFoundError(refusal(op, request, trace, lock), trace=trace, op=op.name, request=request)
    ready = [c for c in takes if c.accepted is not None and c.accepted.ready]
    best_warm, _ = pick(takes, by_id, knobs)
    pool = ready or takes
    chosen, why = pick(pool, by_id, knobs)
    if lock is not None:
        why = f"locked by {lock.source}" + (f": {lock.note}" if lock.note else "")
    elif isinstance(solved, Rejected):
        why = f"{solved.reason.value}, chosen at run time: {why}"
    elif solved is not None:
        chosen, best_warm, why = _as_solved(solved, trace, pool, chosen, best_warm, why)
    if by_id[chosen.kernel].descriptor:
        why = f"{DESCRIPTOR_ONLY}, no code here calls it: {why}"
    accepted = _cost_of(chosen)
    order = [
        chosen.kernel,
        *sorted((c.kernel for c in pool if c is not chosen), key=lambda k: _total(pool, k)),
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
        plan_miss=solved if lock is None and isinstance(solved, Rejected) else None,
        overlay=knobs.overlay[:12],
    )


def _as_solved(
    solved: str,
    trace: Sequence[Candidate],
    pool: Sequence[Candidate],
    chosen: Candidate,
    best_warm: Candidate,
    why: str,
) -> tuple[Candidate, Candidate, str]:
    """What a dispatch table makes of the choice, now and once everything is loaded: its own kernel."""
    own = next((c for c in trace if c.kernel == solved), None)
    if own is not None and own in pool:
        return own, own, "the dispatch table's kernel for this bucket"
    because = "; ".join(map(str, own.rejected)) if own is not None else "it is not registered"
    why = f"instead of {solved}, which the dispatch table names ({because or 'not loaded'}): {why}"
    return chosen, own if own is not None and own.takes else best_warm, why


def _verdict(
    op: Op,
    kernel: Kernel,
    request: Request,
    basis: Request,
    work: Work,
    hardware: Hardware,
    facing: RequestPolicy,
    standing: Standing,
    knobs: Knobs,
    cost: CostModel,
) -> Candidate:
    verdict = facing.verdict(kernel.id, kernel.backend)
    reasons: list[Rejected] = list(verdict.reasons)
    blocked = standing.blocked.get(kernel.id)
    if blocked is not None:
        reasons.append(blocked)
    own = judge(kernel, request, hardware)
    adapted = adapt(op, kernel, request, own, hardware, basis) if own else (request, ())
    temporary = temporaries(adapted[1], request, work.bytes) if adapted is not None and adapted[1] else 0
    oversize = too_large(kernel, basis, knobs.room, temporary, agreed=knobs.agreed)
    if oversize is not None:
        reasons.append(oversize)
    if adapted is None:
        reasons.extend(own)
    elif adapted[1] and knobs.strict:
        needed = ", ".join(str(t) for t in adapted[1])
        reasons.extend(own)
        reasons.append(
            Rejected(Reason.STRICT_NEEDS_TRANSFORM, "strict", "no transforms", needed, "strict=False")
        )
    if adapted is None or (adapted[1] and knobs.strict):
        return Candidate(kernel.id, kernel.backend, None, tuple(reasons))
    transforms = adapted[1]
    kernel_us, source = cost(kernel, work, basis.replace(dtype=adapted[0].dtype), hardware)
    transform_us = sum(t.cost_us for t in transforms)
    total = verdict.boost.apply(kernel_us + transform_us)
    ready = standing.is_ready(kernel, request)
    note = DESCRIPTOR_ONLY if kernel.descriptor else "" if ready else "chosen when warm"
    workspace = needs(kernel, basis)
    accepted = Accepted(kernel_us, transform_us, total, source, transforms, ready, note, workspace, temporary)
    return Candidate(kernel.id, kernel.backend, accepted, tuple(reasons))


def pick(pool: Sequence[Candidate], by_id: Mapping[str, Kernel], knobs: Knobs) -> tuple[Candidate, str]:
    """The candidate to take and one sentence why."""
    best = min(pool, key=lambda c: (_cost_of(c).total_us, by_id[c.kernel].rank, c.kernel))
    floor = _cost_of(best).total_us
    if len(pool) == 1:
        return best, "the only kernel that takes the request"
    defaults = [c for c in pool if by_id[c.kernel].default]
    for default in defaults:
        total = _cost_of(default).total_us
        if default is best:
            return default, f"the library default, and the cheapest at {floor:.1f} us expected"
        timed = _cost_of(default).source in TIMED and _cost_of(best).source in TIMED
        needed = min(knobs.default_gain, knobs.tie_band) if timed else knobs.default_gain
        if total <= floor * (1 + needed):
            gain = (total / floor - 1) * 100 if floor else 0.0
            return default, f"the library default: {best.kernel} gains only {gain:.1f} %"
    band = [c for c in pool if _cost_of(c).total_us <= floor * (1 + knobs.tie_band)]
    first = min(band, key=lambda c: (by_id[c.kernel].rank, c.kernel))
    if len(band) > 1:
        return first, f"first in fixed order among {len(band)} within {knobs.tie_band:.0%} of {floor:.1f} us"
    return best, f"cheapest at {floor:.1f} us expected"


def _cost_of(candidate: Candidate) -> Accepted:
    assert candidate.accepted is not None
    return candidate.accepted


def _total(pool: Sequence[Candidate], kernel: str) -> tuple[float, str]:
    return next((_cost_of(c).total_us, c.kernel) for c in pool if c.kernel == kernel)


def refusal(op: Op, request: Request, trace: Sequence[Candidate], lock: Rule | None) -> str:
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


def _sizes(request: Request) -> str:
    return ", ".join(f"{name}={size}" for name, size in request.dims.items())

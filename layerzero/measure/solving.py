"""Deciding whole ranges of sizes ahead: samples of them, decided as a call would be, and a tree over these.

A family of calls is sampled on the key's grid: every size that was measured or asked for, and between and
around them as many more as a tree needs to know where one kernel takes over from another. What the tree is
worth is shown by measured calls that it was not made from: they are taken out of the cost model, the family
is solved without them, and their own times say what the decision loses.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from layerzero._util import log
from layerzero.ops.op import Op
from layerzero.selection.context import CostModel, SelectionOptions
from layerzero.selection.cost.latency_model import fit as fit_latency
from layerzero.selection.cost.measured import MeasuredCosts
from layerzero.selection.cost.roofline import MEASURED, SHIPPED, TIMED, ideal_us
from layerzero.selection.dispatch_table import Bucket, HeldOutResult
from layerzero.selection.plan import load_until_best
from layerzero.selection.record import Selection
from layerzero.selection.solver.families import Family, ends_of, family_of, grid_below, grid_points
from layerzero.selection.solver.tree import Floats, Node, Samples, choices, collapse, fit, leaves_of
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings

if TYPE_CHECKING:
    from layerzero.measure.tuner import TunableDevice

BUCKET_REFUSED = "solve.bucket_refused"
# How far beyond what was measured a table decides, in octaves of each size: as far as times are interpolated
# with some right. A size that was asked for is not exceeded.
REACH = 1
# The most samples of one family, and of one that is solved only to be judged; more sizes are drawn from.
MAX_SAMPLES = 160
MAX_JUDGED = 64
# Measured calls are held out in as many parts, each once.
FOLDS = 4

Sizes = tuple[tuple[str, int], ...]


class _Point(msgspec.Struct, frozen=True):
    """A call to decide for: what it asks, on the grid, and each kernel's time where it was measured."""

    request: CallSpec
    times: dict[str, float] = {}


class _Priced(msgspec.Struct):
    """Samples of one family, decided: what each of `kernels` costs there, in microseconds.

    `raw` holds prices before a policy, `totals` after it with everything as cheap as the best that the
    margins of a choice do not tell from it. Both are infinite where a kernel may not or cannot. Behind
    `kernels`, `raw` alone has those of `refused`, which nothing but the policy is against.
    """

    requests: list[CallSpec]
    kernels: tuple[str, ...]
    refused: tuple[str, ...]
    raw: Floats
    totals: Floats
    sources: list[dict[str, str]]


class SolvedOp(msgspec.Struct, frozen=True):
    """The buckets of one op, and how good they are where they were not made from."""

    buckets: tuple[Bucket, ...]
    held_out: HeldOutResult | None


class _KernelFamily(msgspec.Struct):
    """Calls that one tree answers: the points to decide for, and the samples that it is made from."""

    points: list[_Point]
    samples: list[CallSpec] = []

    @property
    def measured(self) -> list[_Point]:
        """The points at which there is something to lose."""
        return [point for point in self.points if len(point.times) > 1]


class _Judged(msgspec.Struct, frozen=True):
    """What is lost at a measured call that was held out: by each way to decide it, and by each kernel.

    The ways are the tree, the one kernel that is best at the family's other measured calls, and the one that
    is best at the op's.
    """

    ways: tuple[float, float, float]
    by_kernel: dict[str, float]


def solve_op(
    device: TunableDevice,
    op: Op,
    requests: Iterable[CallSpec] = (),
    *,
    only: Collection[Family] | None = None,
) -> SolvedOp:
    """Decide every family of an op that was measured or is asked for, each over ranges of its sizes.

    `requests` are asked for: their sizes bound what is decided. `only` names the families to decide. Every
    measured or asked call is warmed: a better kernel is loaded and compiled before anything is decided, so
    that none is passed over for being cold. A family whose tree loses more, at measured calls that it does
    not know, than one kernel for all of it or of the op, gets that one kernel.
    """
    families = [
        family
        for family in _families(device, op, requests)
        if only is None or family_of(family.points[0].request) in only
    ]
    for family in families:
        for point in family.points:
            _warm(device, op, point.request)
        family.samples = _samples(op, family.points, MAX_SAMPLES)
    judged = _held_out(device, op, families)
    buckets: list[Bucket] = []
    for family, losses in zip(families, judged, strict=True):
        priced = _price(device, op, family.samples, device.costs)
        if priced is not None:
            best = _best_way(losses)
            measurements = family.measured if best == 1 else [p for other in families for p in other.measured]
            fixed = _best_fixed(measurements, priced.kernels) if best else None
            buckets += _buckets(device, op, priced, fixed)
    return SolvedOp(tuple(buckets), _summary(judged))


def _families(device: TunableDevice, op: Op, requests: Iterable[CallSpec]) -> list[_KernelFamily]:
    """The measured and the asked calls, those together that differ in sizes which are no part of a key."""
    costs = device.costs
    measured = costs.measured_buckets(op.name) if isinstance(costs, MeasuredCosts) else []
    by_sizes: dict[Hashable, dict[Sizes, _Point]] = {}
    points = [_Point(device.table(op).bucket(request)) for request in requests]
    # A kernel that was timed in a wider type than its operands have is priced by that; no call asks it.
    points += [_Point(r, us) for r, us in measured if r.dtype in (r.dtypes or (r.dtype,))]
    for point in points:
        sizes = tuple(sorted(point.request.dims.items()))
        exact = tuple((axis, size) for axis, size in sizes if axis in op.exact_dims)
        by_sizes.setdefault((family_of(point.request), exact), {})[sizes] = point
    return [_KernelFamily(list(family.values())) for family in by_sizes.values()]


def _samples(op: Op, points: Sequence[_Point], limit: int) -> list[CallSpec]:
    """The calls to decide: every point, and the grid around and between them, or a part of it."""
    measured = [point.request.dims for point in points if point.times]
    requests = [point.request.dims for point in points if not point.times]
    values: dict[str, list[int]] = {}
    for axis in points[0].request.dims:
        lows, highs = [], []
        for group, reach in ((measured, 0 if axis in op.exact_dims else REACH), (requests, 0)):
            if group:
                first, last = ends_of(group)[axis]
                lows.append(max(first >> reach, min(first, 1)))
                highs.append(last << reach)
        exact = axis in op.exact_dims
        values[axis] = [lows[0]] if exact else grid_points(min(lows), max(highs))
    axes = tuple(values)
    chosen: dict[Sizes, None] = {tuple((axis, p.request.dims[axis]) for axis in axes): None for p in points}
    # No more can be drawn than there are: where the points leave nearly none of them, all are taken.
    if math.prod(map(len, values.values())) <= limit + len(chosen):
        every = itertools.product(*values.values())
        chosen |= {tuple(zip(axes, sizes, strict=True)): None for sizes in every}
    else:
        draw = random.Random(len(points))  # the same samples from the same points, on every machine
        most = limit + len(chosen)
        while len(chosen) < most:
            chosen[tuple((axis, draw.choice(sizes)) for axis, sizes in values.items())] = None
    template = points[0].request
    return [template.replace(dims=dict(sizes)) for sizes in chosen]


def _warm(device: TunableDevice, op: Op, request: CallSpec) -> None:
    """Load what is better than what is ready; a kernel that does not load is no longer better."""
    try:
        load_until_best(lambda: device.table(op).recompute(request, use_dispatch_table=False), device.warm)
    except NoKernelFoundError as error:
        log.warning(BUCKET_REFUSED, op=op.name, why=str(error).partition("\n")[0])
        return
    device.counters.add("buckets_warmed", op=op.name)


def _price(device: TunableDevice, op: Op, requests: Sequence[CallSpec], cost: CostModel) -> _Priced | None:
    """Every sample decided; None where no kernel takes any of them."""
    table = device.table(op)
    decided: list[tuple[CallSpec, Selection]] = []
    for request in requests:
        try:
            decided.append((request, table.recompute(request, use_dispatch_table=False, cost=cost)))
        except NoKernelFoundError:
            continue  # said of the points that were asked for or measured
    eligible = {c.kernel for _, selection in decided for c in selection.trace if c.eligible}
    kernels = sorted(
        (k for k in table.kernels if k.id in eligible), key=lambda k: (not k.default, k.tie_break_order, k.id)
    )
    if not kernels:
        return None
    of_policy = {
        c.kernel
        for _, s in decided
        for c in s.trace
        if c.accepted and {r.field for r in c.rejected} == {"policy"}
    }
    refused = [k for k in table.kernels if k.id in of_policy - eligible]
    raw = np.full((len(decided), len(kernels) + len(refused)), np.inf)
    totals, sources = raw[:, : len(kernels)].copy(), []
    for row, (_, selection) in enumerate(decided):
        by_id = {candidate.kernel: candidate for candidate in selection.trace}
        sources.append({k: c.accepted.source for k, c in by_id.items() if c.accepted is not None})
        for column, kernel in enumerate((*kernels, *refused)):
            candidate = by_id[kernel.id]
            if candidate.accepted is None:
                continue
            raw[row, column] = candidate.accepted.kernel_us + candidate.accepted.transform_us
            if candidate.eligible:
                totals[row, column] = candidate.accepted.total_us
        _level(totals[row], kernels, sources[-1], device.settings)
    names, others = (tuple(k.id for k in each) for each in (kernels, refused))
    return _Priced([r for r, _ in decided], names, others, raw, totals, sources)


def _level(totals: Floats, kernels: Sequence[Kernel], sources: Mapping[str, str], settings: Settings) -> None:
    """Make as cheap as the best what a choice's margins do not tell from it: the tie band, the default."""
    options = SelectionOptions(tie_band=settings.tie_band, default_gain=settings.default_gain)
    best = int(np.argmin(totals))
    for column, kernel in enumerate(kernels):
        margin = options.tie_band
        if kernel.default:
            timed = sources.get(kernel.id) in TIMED and sources.get(kernels[best].id) in TIMED
            margin = min(options.default_gain, options.tie_band) if timed else options.default_gain
        if totals[column] <= totals[best] * (1 + margin):
            totals[column] = totals[best]


def _tree_input(priced: _Priced) -> Samples:
    axes = tuple(sorted(priced.requests[0].dims))
    sizes = np.array([[r.dims[axis] for axis in axes] for r in priced.requests], dtype=np.int64)
    return Samples(axes, priced.kernels, sizes, priced.totals)


def _buckets(device: TunableDevice, op: Op, priced: _Priced, fixed: str | None) -> Iterator[Bucket]:
    """The leaves of the tree of one family, as buckets; of one leaf where its kernel is `fixed`."""
    samples = _tree_input(priced)
    root = collapse(fit(samples).root) if fixed is None else Node(priced.kernels.index(fixed), 0.0, 0)
    losses = samples.losses()
    family = family_of(priced.requests[0])
    bounds = []
    for column, axis in enumerate(samples.axes):
        first, last = int(samples.sizes[:, column].min()), int(samples.sizes[:, column].max())
        bounds.append((first if axis in op.exact_dims or first == 0 else grid_below(first) + 1, last))
    for leaf, box in leaves_of(root, bounds):
        low, high = np.array([r[0] for r in box]), np.array([r[1] for r in box])
        inside = ((samples.sizes >= low) & (samples.sizes <= high)).all(axis=1)
        rows = np.flatnonzero(inside & np.isfinite(priced.totals[:, leaf.choice]))
        if len(rows):
            ranges = dict(zip(samples.axes, box, strict=True))
            loss = float(losses[rows, leaf.choice].mean())
            yield _bucket(device, op, family, ranges, priced, leaf.choice, rows, loss)


def _bucket(
    device: TunableDevice, op: Op, family: Family, ranges: dict[str, tuple[int, int]], priced: _Priced,
    choice: int, rows: Any, loss: float,
) -> Bucket:  # fmt: skip
    raw = priced.raw[rows]
    kernel, times = priced.kernels[choice], raw[:, choice]
    requests = [priced.requests[row] for row in rows]
    ideals = [ideal_us(op.work(request), request, device.hardware) for request in requests]
    model = fit_latency(list(zip(ideals, map(float, times), strict=True)))
    expected = float(np.median(times))
    ratios = (raw / times[:, None]).mean(axis=0)
    sources = Counter(priced.sources[row][kernel] for row in rows)
    source = next((s for s in (MEASURED, SHIPPED) if s in sources), sources.most_common(1)[0][0])
    return Bucket(
        op=op.name, kernel=kernel, expected_us=round(expected, 3), cost_source=source,
        why=f"least loss over {len(rows)} sizes, {loss:.1%} on the mean",
        dtype=family.dtype, ranges=ranges, dtypes=family.dtypes, features=family.features,
        layout=family.layout, contiguous=family.contiguous, capture=family.capture,
        floor_us=round(model.floor_us, 3), multiple=round(model.multiple, 4),
        costs={
            name: round(expected * float(ratio), 3)
            for name, ratio in zip((*priced.kernels, *priced.refused), ratios, strict=True)
            if math.isfinite(ratio)
        },
    )  # fmt: skip


def _held_out(device: TunableDevice, op: Op, families: Sequence[_KernelFamily]) -> list[list[_Judged]]:
    """What is lost at every measured call by decisions that do not know it, family by family."""
    judged: list[list[_Judged]] = [[] for _ in families]
    costs = device.costs
    # A preference is no matter of time: what it costs is no loss, and no reason to decide otherwise.
    preferred = any(r.action == "boost" and r.concerns(op.name) for r in device.table(op).policy.rules)
    if preferred or not isinstance(costs, MeasuredCosts):
        return judged
    for fold in range(FOLDS):
        folds = [family.measured[fold::FOLDS] if len(family.measured) > 1 else [] for family in families]
        places = [point for points in folds for point in points]
        if not places:
            continue
        keys = {costs.key_of(kernel, point.request) for point in places for kernel in point.times} - {None}
        others = costs.without(keys)
        rest = [p for family in families for p in family.measured if all(p is not place for place in places)]
        for family, points, losses in zip(families, folds, judged, strict=True):
            if points:
                losses += _judge(device, op, family, points, others, rest)
    return judged


def _judge(
    device: TunableDevice, op: Op, family: _KernelFamily, folds: Sequence[_Point], others: MeasuredCosts,
    rest: Sequence[_Point],
) -> Iterator[_Judged]:  # fmt: skip
    """Solve a family by the `others` of its measurements, and see what that loses at those held out."""
    places = [point.request.dims for point in folds]
    samples = _samples(op, family.points, MAX_JUDGED)
    priced = _price(device, op, [sample for sample in samples if sample.dims not in places], others)
    if priced is None:
        return
    tree_input = _tree_input(priced)
    root = fit(tree_input).root
    own_points = [point for point in family.measured if point.request.dims not in places]
    fixed = [_best_fixed(points, priced.kernels) for points in (own_points, rest)]
    sizes = np.array([[dims[axis] for axis in tree_input.axes] for dims in places], dtype=np.int64)
    for point, choice in zip(folds, choices(root, sizes), strict=True):
        lost = _lost(point.times, priced.kernels)
        tree = lost.get(priced.kernels[choice])
        if tree is not None:
            alone, of_op = (lost.get(kernel, tree) if kernel else tree for kernel in fixed)
            yield _Judged((tree, alone, of_op), lost)


def _best_way(losses: Sequence[_Judged]) -> int:
    """The number of the way that loses least; the tree where nothing is known or all lose alike."""
    sums = [sum(lost.ways[way] for lost in losses) for way in range(3)]
    return sums.index(min(sums))


def _best_fixed(points: Sequence[_Point], kernels: Collection[str]) -> str | None:
    """The kernel that loses least over measured points, of those that were measured at all of them."""
    losses = [_lost(point.times, kernels) for point in points]
    everywhere = set.intersection(*map(set, losses)) if losses else set()
    return min(sorted(everywhere), key=lambda kernel: sum(lost[kernel] for lost in losses), default=None)


def _lost(times: Mapping[str, float], kernels: Collection[str]) -> dict[str, float]:
    """By how much each of the kernels that may be chosen is slower than the best of them."""
    allowed = {kernel: us for kernel, us in times.items() if kernel in kernels}
    best = min(allowed.values(), default=0.0)
    return {kernel: us / best - 1.0 for kernel, us in allowed.items()}


def _summary(judged: Iterable[Sequence[_Judged]]) -> HeldOutResult | None:
    """The mean loss of what is decided, beside that of the one kernel that is best over all calls."""
    losses: list[_Judged] = []
    decided = 0.0
    for family in judged:
        losses += family
        decided += sum(lost.ways[_best_way(family)] for lost in family)
    if not losses:
        return None
    everywhere = set.intersection(*(set(lost.by_kernel) for lost in losses))
    fixed = [sum(lost.by_kernel[kernel] for lost in losses) / len(losses) for kernel in everywhere]
    return HeldOutResult(
        calls=len(losses),
        loss=round(decided / len(losses), 5),
        fixed_loss=round(min(fixed), 5) if fixed else None,
    )

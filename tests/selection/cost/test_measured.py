"""Costs out of measurements: exact where measured, near in between, the same however they are asked."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerzero.backends import load_builtin
from layerzero.ops import table as ops_table
from layerzero.perfdb import BenchmarkCase, Measurement, implausible_reason
from layerzero.selection.context import SelectionContext
from layerzero.selection.cost.cost_model import load_costs
from layerzero.selection.cost.measured import MeasuredCosts, SourcedMeasurement, measurement_key
from layerzero.selection.cost.roofline import MEASURED, ROOFLINE, SHIPPED
from layerzero.selection.decide import decide
from layerzero.selection.modes import mode_bits
from layerzero.selection.plan import signature_of
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import NoKernelFoundError
from layerzero.spec.hardware import probe
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings
from tests.kernels import device, kernel
from tests.perfdb.rows import row, site
from tests.selection.test_soundness import ATTENTION, POLICIES, calls, outcome, registries

CPU = probe("cpu")
NORM = ops_table.get("rms_norm")
FAST, SLOW, DEFAULT = (
    kernel("fast.rms_norm", launch_us=50.0),
    kernel("slow.rms_norm", launch_us=1.0),
    kernel("usual.rms_norm", launch_us=2.0, default=True),
)
KERNELS = {k.id: k for k in (FAST, SLOW, DEFAULT)}


def costs(*rows: Measurement, source: str = MEASURED) -> MeasuredCosts:
    return MeasuredCosts([SourcedMeasurement(r, source) for r in rows], KERNELS, CPU)


def request(**dims: int) -> CallSpec:
    sizes = dims or {"N": 64, "C": 512}
    return CallSpec(op="rms_norm", dtype="float32", dtypes=("float32",), dims=sizes)


def priced(model: MeasuredCosts, which: Kernel, **dims: int) -> tuple[float, str]:
    asked = request(**dims)
    return model(which, NORM.work(asked), asked, CPU)


def test_what_was_measured_is_expected() -> None:
    """At a measured size the expectation is the measurement, and says so."""
    model = costs(row("fast.rms_norm", 12.5), row("slow.rms_norm", 99.0))
    assert priced(model, FAST) == (pytest.approx(12.5), MEASURED)
    assert priced(model, SLOW) == (pytest.approx(99.0), MEASURED)


def test_models_of_equal_rows_have_one_fingerprint() -> None:
    """Two readers of one file price alike; a time, a size, a source or a spread tells them apart."""
    rows = [row("fast.rms_norm", 12.5), row("slow.rms_norm", 99.0), row("slow.rms_norm", 80.0, timestamp=5)]
    own = costs(*rows).fingerprint("rms_norm")
    assert own is not None and own == costs(*rows).fingerprint("rms_norm")
    others = [
        costs(row("fast.rms_norm", 12.6), *rows[1:]),
        costs(row("fast.rms_norm", 12.5, case=site(N=65, C=512)), *rows[1:]),
        costs(row("fast.rms_norm", 12.5, launch="graph"), *rows[1:]),
        costs(rows[0], rows[1], row("slow.rms_norm", 80.0, timestamp=5, variance=80.0)),
        costs(*rows, source=SHIPPED),
    ]
    assert own not in {other.fingerprint("rms_norm") for other in others}
    assert costs(*rows).fingerprint("linear") is None


def test_between_sizes_the_neighbours_speak() -> None:
    """Near a measured size the expectation lies between those of its neighbours, marked as near."""
    model = costs(
        row("fast.rms_norm", 10.0, case=site(N=64, C=512)),
        row("fast.rms_norm", 40.0, case=site(N=256, C=512)),
    )
    us, source = priced(model, FAST, N=128, C=512)
    assert 10.0 < us < 40.0 and source == MEASURED + ", interpolated"


def test_far_away_nothing_is_known() -> None:
    """Beyond the radius, in another dtype or with another feature the estimate speaks."""
    model = costs(row("fast.rms_norm", 10.0))
    assert priced(model, FAST, N=64 * 1024, C=512)[1] == ROOFLINE
    double = msgspec.structs.replace(request(), dtype="float64", dtypes=("float64",))
    assert model(FAST, NORM.work(double), double, CPU)[1] == ROOFLINE
    bare = msgspec.structs.replace(request(), features=frozenset({"no_weight"}))
    assert model(FAST, NORM.work(bare), bare, CPU)[1] == ROOFLINE


def test_a_kernel_known_at_many_sizes_is_priced_by_its_curve_far_away() -> None:
    """Four measured sizes price a fifth beyond the radius, by the roofs and not by the launch."""
    sizes = {1: 50.0, 4: 50.0, 16: 51.0, 2**16: 60_000.0, 2**17: 120_000.0}
    rows = [row("fast.rms_norm", us, case=site(N=n, C=512)) for n, us in sizes.items()]
    us, source = priced(costs(*rows), FAST, N=2**24, C=512)
    assert source == MEASURED + ", extrapolated" and us == pytest.approx(120_000.0 * 2**7, rel=0.5)
    us, source = priced(costs(*rows), FAST, N=2**10, C=512)
    assert us < 10_000.0, "between the regimes"


def test_a_call_without_a_mask_counts_less_for_a_causal_one() -> None:
    """Calls without a mask stand in for causal ones, and pull less than causal ones that stand as near."""

    def cost(*features: str, us: float, sq: int = 256) -> Measurement:
        dims = (("B", 1), ("D", 64), ("Hk", 8), ("Hq", 8), ("Sk", sq), ("Sq", sq))
        at = BenchmarkCase(op="attention", dtype="float32", dtypes=("float32",), features=features, dims=dims)
        return row("own.attention", us, case=at)

    own = kernel("own.attention", op="attention")
    asked = CallSpec(
        op="attention", dtype="float32", dtypes=("float32",), features=frozenset({"causal"}),
        dims={"B": 1, "D": 64, "Hk": 8, "Hq": 8, "Sk": 256, "Sq": 256},
    )  # fmt: skip
    work = ops_table.get("attention").work(asked)

    def price(*rows: Measurement) -> tuple[float, str]:
        model = MeasuredCosts([SourcedMeasurement(r, MEASURED) for r in rows], {own.id: own}, CPU)
        return model(own, work, asked, CPU)

    us, source = price(cost(us=900.0))
    assert source == MEASURED + ", interpolated" and 300.0 < us < 1200.0
    far = [cost("causal", us=100.0, sq=1024), cost("causal", us=110.0, sq=64)]
    alone, _ = price(*far)
    plain, _ = price(*far, cost(us=90_000.0, sq=512))
    causal, _ = price(*far, cost("causal", us=90_000.0, sq=512))
    assert alone < plain < causal / 2


def test_the_other_half_precision_stands_in() -> None:
    """bfloat16 measurements price float16 calls where nothing of float16 is there, as near ones."""
    half = BenchmarkCase(op="rms_norm", dtype="bfloat16", dtypes=("bfloat16",), dims=(("C", 512), ("N", 64)))
    model = costs(row("fast.rms_norm", 10.0, case=half))
    asked = msgspec.structs.replace(request(), dtype="float16", dtypes=("float16",))
    assert model(FAST, NORM.work(asked), asked, CPU)[1] == MEASURED + ", interpolated"


def test_an_estimate_is_held_against_measurements() -> None:
    """A kernel that was not measured is priced by how far estimates miss here, and a margin on top."""
    model = costs(row("slow.rms_norm", 1000.0))
    estimate, source = priced(model, FAST)
    plain, _ = priced(costs(), FAST)
    missed = 1000.0 / priced(costs(), SLOW)[0]
    assert source == ROOFLINE and estimate == pytest.approx(plain * missed * 1.3)


def test_the_machine_comes_before_the_shipped_table() -> None:
    """Own rows replace shipped ones of the same size and kernel; others of the table still count."""
    own, shipped = row("fast.rms_norm", 10.0), row("fast.rms_norm", 77.0)
    other = row("slow.rms_norm", 20.0)
    model = MeasuredCosts(
        [
            SourcedMeasurement(shipped, SHIPPED),
            SourcedMeasurement(other, SHIPPED),
            SourcedMeasurement(own, MEASURED),
        ],
        KERNELS,
        CPU,
    )
    assert priced(model, FAST) == (pytest.approx(10.0), MEASURED)
    assert priced(model, SLOW) == (pytest.approx(20.0), SHIPPED)


def test_a_captured_call_is_priced_by_replays() -> None:
    """Under capture the host is not paid: rows of replays speak there, rows of launches elsewhere."""
    model = costs(
        row("fast.rms_norm", 50.0), row("fast.rms_norm", 5.0, launch="graph"),
        row("slow.rms_norm", 20.0), row("slow.rms_norm", 15.0, launch="graph"),
    )  # fmt: skip
    captured = request().replace(modes=frozenset({"capture"}))
    work = NORM.work(captured)
    assert priced(model, FAST)[0] > priced(model, SLOW)[0]
    assert model(FAST, work, captured, CPU)[0] < model(SLOW, work, captured, CPU)[0]


def test_the_median_of_several_tunes_counts() -> None:
    """One disturbed tune among three does not move an expectation."""
    rows = [row("fast.rms_norm", us, timestamp=at) for at, us in enumerate((10.0, 400.0, 11.0))]
    assert priced(costs(*rows), FAST)[0] == pytest.approx(11.0)


@pytest.mark.parametrize(
    "poison",
    [
        {"us": -1.0}, {"us": 0.0}, {"us": math.inf}, {"us": math.nan}, {"us": 1e-30}, {"us": 1e12},
        {"samples": 1}, {"variance": math.nan}, {"us": 10.0, "variance": 1e6}, {"p95_us": -3.0},
    ],
)  # fmt: skip
def test_no_poisoned_row_moves_a_choice(poison: dict[str, Any]) -> None:
    """No time, too few samples, too much spread, faster than the machine: left out and counted."""
    honest = (row("fast.rms_norm", 10.0), row("slow.rms_norm", 20.0), row("usual.rms_norm", 30.0))
    poisoned = row("slow.rms_norm", **poison)
    model = costs(*honest, poisoned)
    assert priced(model, SLOW)[0] == pytest.approx(20.0)
    assert model.distrusted.total() == 1
    assert implausible_reason(honest[0]) == ""


def test_a_choice_follows_the_measurements() -> None:
    """What estimates prefer loses to what measures faster; the default keeps its place in a near tie."""
    own = device(KERNELS.values())
    x = torch.zeros(64, 512), torch.ones(512), 1e-6
    signature = signature_of(NORM, x)
    assert own.plan(NORM, signature, x, mode_bits()).kernel == "usual.rms_norm"
    before = own.snapshot.tables
    own.set_costs(costs(row("fast.rms_norm", 5.0), row("slow.rms_norm", 9.0), row("usual.rms_norm", 8.0)))
    assert own.plan(NORM, signature, x, mode_bits()).kernel == "fast.rms_norm"
    assert own.snapshot.tables is not before
    own.set_costs(costs(row("fast.rms_norm", 7.8), row("slow.rms_norm", 9.0), row("usual.rms_norm", 8.0)))
    assert own.plan(NORM, signature, x, mode_bits()).kernel == "usual.rms_norm"


@pytest.mark.parametrize(
    "us, timed, inferred",
    [(96.4, "fast.rms_norm", "usual.rms_norm"), (98.0, "usual.rms_norm", "usual.rms_norm")],
)
def test_the_default_is_guarded_less_where_both_were_timed(us: float, timed: str, inferred: str) -> None:
    """A gain of 3.7 % replaces the default at a timed size, not at one between; one of 2 % nowhere."""
    rows = [
        row(name, cost * n, case=site(N=n, C=512))
        for n in (16, 64)
        for name, cost in (("fast.rms_norm", us), ("usual.rms_norm", 100.0))
    ]
    kernels = [FAST, DEFAULT]
    model = MeasuredCosts([SourcedMeasurement(r, MEASURED) for r in rows], KERNELS, CPU)

    def chosen(n: int) -> str:
        asked = request(N=n, C=512)
        return decide(NORM, asked, SelectionContext(tuple(kernels), CPU), cost=model).kernel

    assert (chosen(64), chosen(32)) == (timed, inferred)


def test_tables_of_other_ops_are_kept() -> None:
    """New measurements of one op leave what was decided for others."""
    attention = kernel("some.attention")
    own = device([*KERNELS.values(), attention])
    q = torch.zeros(1, 1, 4, 8)
    _, full = ATTENTION.build(q, q, q)
    own.plan(ATTENTION, signature_of(ATTENTION, full), full, mode_bits())
    kept = own.snapshot.tables["attention"]
    own.set_costs(costs(row("fast.rms_norm", 5.0)))
    assert own.snapshot.tables["attention"] is kept


@st.composite
def measurements(draw: st.DrawFn, kernels: list[Kernel]) -> list[SourcedMeasurement]:
    rows = []
    for _ in range(draw(st.integers(0, 25))):
        made = draw(st.sampled_from(kernels))
        full = draw(calls())
        asked = ATTENTION.check(full)
        us = draw(st.floats(0.5, 500.0))
        rows.append(
            SourcedMeasurement(
                row(made.id, us, case=BenchmarkCase.of_request(asked)),
                draw(st.sampled_from([MEASURED, SHIPPED])),
            )
        )
    return rows


@given(st.data(), registries(), st.lists(calls(), min_size=1, max_size=6), POLICIES)
def test_cached_equals_uncached_under_measurements(
    data: st.DataObject, kernels: list[Kernel], asked: list[Any], policy: Any
) -> None:
    """Whatever was measured and asked before, the table answers what a fresh decision answers."""
    rows = data.draw(measurements(kernels))
    model = MeasuredCosts(rows, {k.id: k for k in kernels}, CPU)
    own = device(kernels, Settings(), policy=policy, cost=model)
    table = own.table(ATTENTION)
    for full in [*asked, *asked]:
        signature, bits = signature_of(ATTENTION, full), mode_bits()
        try:
            fresh = outcome(table.recompute(table.describe(full, bits)))
        except NoKernelFoundError:
            fresh = None
        try:
            cached = outcome(own.plan(ATTENTION, signature, full, bits).selection_for_request())
        except NoKernelFoundError:
            cached = None
        assert cached == fresh


@given(st.integers(1, 500), st.integers(1, 500), st.floats(1.0, 100.0), st.floats(1.0, 100.0))
def test_the_measured_order_holds_in_its_bucket(rows: int, width: int, first: float, second: float) -> None:
    """Wherever in a bucket kernels were measured, they stand in that order for the whole bucket."""
    place = site(N=rows, C=width)
    model = costs(row("fast.rms_norm", first, case=place), row("slow.rms_norm", second, case=place))
    if model.distrusted:
        return
    own = device([FAST, SLOW], cost=model)
    table = own.table(NORM)
    grid = table._key_maker.bucket(request(N=rows, C=width))
    work = NORM.work(grid)
    ratio = model(FAST, work, grid, CPU)[0] / model(SLOW, work, grid, CPU)[0]
    assert ratio == pytest.approx(first / second)


def test_of_two_tunes_the_mean_counts() -> None:
    """Neither of two tunes is the odd one out: the geometric mean counts, the steadier a little more."""
    first, second = row("fast.rms_norm", 50.0, timestamp=1), row("fast.rms_norm", 200.0, timestamp=2)
    even = [msgspec.structs.replace(each, variance=0.0) for each in (first, second)]
    assert priced(costs(*even), FAST)[0] == pytest.approx(100.0)
    wild = msgspec.structs.replace(second, variance=(0.1 * 200.0) ** 2)
    assert 50.0 < priced(costs(even[0], wild), FAST)[0] < 100.0


def test_an_unsteady_row_counts_less() -> None:
    """Of three tunes, two that spread widely do not outvote the steady one; steady ones have a median."""
    steady = row("fast.rms_norm", 10.0, variance=0.01, timestamp=3)
    wild = [row("fast.rms_norm", us, variance=(0.7 * us) ** 2, timestamp=2) for us in (40.0, 44.0)]
    assert priced(costs(steady, *wild), FAST)[0] == pytest.approx(10.0)
    calm = [msgspec.structs.replace(each, variance=0.01) for each in wild]
    assert priced(costs(steady, *calm), FAST)[0] == pytest.approx(40.0)


@pytest.mark.parametrize(("age_days", "counts"), [(1.0, True), (6.9, True), (7.1, False), (400.0, False)])
def test_measurements_grow_old(age_days: float, counts: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Beyond `perfdb_days` a row no longer counts, and that is logged; without a limit it counts for ever."""
    now = 1_800_000_000.0
    old = row("fast.rms_norm", 12.5, timestamp=int(now - age_days * 86_400))
    kernels = {k.id: k for k in (FAST, SLOW)}
    settings = Settings(perfdb=None, shipped_tables=False, perfdb_days=7)
    model = load_costs(settings, kernels, CPU, (old,), wall=lambda: now)
    assert isinstance(model, MeasuredCosts) is counts
    assert any("older than 7 days" in r.getMessage() for r in caplog.records) is not counts
    for_ever = settings.replace(perfdb_days=None)
    assert isinstance(load_costs(for_ever, kernels, CPU, (old,), wall=lambda: now), MeasuredCosts)


def test_a_shipped_table_is_made_a_model_once() -> None:
    """Who opens a device again gets the model of before; fewer rows, kernels or faster roofs get another."""
    kernels = {k.id: k for k in load_builtin()}
    settings = Settings(perfdb=None)
    first = load_costs(settings, kernels, CPU)
    if not isinstance(first, MeasuredCosts):
        pytest.skip("no shipped table is of this machine's class")
    assert load_costs(settings, dict(kernels), CPU) is first
    fewer = dict(list(kernels.items())[1:])
    faster = msgspec.structs.replace(CPU, bandwidth=CPU.bandwidth * 2)
    others = (
        load_costs(settings, kernels, CPU, excluded={"a spot"}),
        load_costs(settings, fewer, CPU),
        load_costs(settings, fewer, faster),
        load_costs(settings.replace(shipped_tables=False), kernels, CPU),
    )
    assert len({id(model) for model in (first, *others)}) == 5


def test_a_forgotten_spot_is_estimated() -> None:
    """What drift took out counts no longer, for that kernel and bucket alone."""
    rows = [row("fast.rms_norm", 12.5), row("slow.rms_norm", 9.0)]
    whole = costs(*rows)
    spot = whole.key_of("fast.rms_norm", request())
    assert spot == measurement_key(rows[0]) and whole.key_of("fast.rms_norm", request(N=9000, C=8)) is None
    less = MeasuredCosts([SourcedMeasurement(r, MEASURED) for r in rows], KERNELS, CPU, {spot})
    assert priced(less, FAST)[1] == ROOFLINE and priced(less, SLOW) == (pytest.approx(9.0), MEASURED)

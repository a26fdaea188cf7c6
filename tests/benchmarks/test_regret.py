"""The regret benchmark runs, resumes where it ended, and counts what it says it counts."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import pytest

import layerzero as lz
from benchmarks.regret import measure_shapes, opened, summarise
from benchmarks.regret_blind import RANGES, blind, seen
from benchmarks.regret_build import in_order, jobs
from benchmarks.regret_shapes import PARTS, asked, shapes
from benchmarks.regret_tune import to_keep, to_tune
from layerzero.measure.calls import Call
from layerzero.measure.shapes import standard_calls
from layerzero.ops import table as ops_table
from layerzero.perfdb.record import Environment, Measurement
from layerzero.perfdb.shipped import Provenance, ShippedTable
from layerzero.spec.hardware import hypothetical_gpu


def options(out: Path) -> argparse.Namespace:
    return argparse.Namespace(out=out, quick=True, group=["norms float32"], parts=None)


def test_it_goes_on_where_it_ended(tmp_path: Path) -> None:
    """A run that has no time measures nothing; the next one finishes, and another keeps its rows."""
    out = tmp_path / "regret.json"
    settings = lz.Settings(device="cpu", warm="off", perfdb=None, shipped_tables=False)
    with lz.start(settings, scoped=True) as runtime:
        device = runtime.device()
        record = opened(out, device)
        measure_shapes(record, device, options(out), deadline=0.0)
        assert record["unfinished"] is True and record["shapes"] == {}
        measure_shapes(record, device, options(out), deadline=math.inf)
        again = opened(out, device)
        assert len(again["shapes"]) == 2 and again["shapes"] == record["shapes"]
        measure_shapes(again, device, options(out), deadline=math.inf)
    assert again["unfinished"] is False and again["shapes"] == record["shapes"]
    for row in again["shapes"].values():
        assert row["choice"] >= 1.0 and row["chosen"] in row["kernels_us"] and row["lz_us"] > 0
        assert row["kernels_us"][row["best"]] == min(row["kernels_us"].values())


def test_what_would_have_to_compile_is_measured_last() -> None:
    """A call whose kernels' units were all built goes before one that would wait for a compiler."""
    settings = lz.Settings(device="cpu", warm="eager", perfdb=None, shipped_tables=False)
    with lz.start(settings, scoped=True) as runtime:
        device = runtime.device()
        calls = [shape.call for shape in shapes("cpu") if shape.call.op in ("attention", "rope")]
        units = jobs(device, calls)
        assert units, "torch's flex attention compiles by shape"
        waiting = {str(call) for work in units.values() for _, call in work}
        ordered = [str(call) for call in in_order(device, calls, ())]
        everything = [str(call) for call in in_order(device, calls, {" ".join(unit) for unit in units})]
    first = min(ordered.index(name) for name in waiting)
    assert sorted(ordered) == sorted(map(str, calls)) and set(ordered[first:]) == waiting
    assert everything == [str(call) for call in calls]


def test_what_the_shipped_table_lacks_is_tuned_first_and_the_rest_is_kept() -> None:
    """Calls without a measurement go before those with one; a table keeps what time left out."""
    settings = lz.Settings(device="cpu", warm="off", perfdb=None, shipped_tables=False)
    with lz.start(settings, scoped=True) as runtime:
        device = runtime.device()
        plain = to_tune(device, set(), [], quick=True)
        here = Environment.of_hardware(device.hardware)
        sites = [call.benchmark_case(device.hardware) for call in plain]
        own = [
            Measurement(case=site, kernel=kernel.id, median_us=9.0, p95_us=9.0, variance=0.0, samples=9)
            for site in sites
            for kernel in device.registry.for_op(site.op)
        ]
        five = [row for row in own if row.case in sites[:5]]
        provenance = Provenance(command="c", date="d", version="v", environment=here)
        table = ShippedTable(provenance=provenance, content="", rows=tuple(five))
        ordered = to_tune(device, set(sites[5:6]), [table], quick=True)
        only = to_tune(device, set(sites[5:6]), [table], quick=True, only_missing=True)
        late = plain[4]
        named = to_tune(device, set(), [table], quick=True, first=[late.op])
    assert ordered == [*plain[6:], *plain[:5]] and only == [*plain[6:]]
    known = [call for call in named if call in plain[:5]]
    assert known[0] == late and named[-5:] == known and named[0] not in plain[:5]
    assert to_keep(own[:1], [table], here) == [row for row in five if row != own[0]], "its other kernels stay"
    assert to_keep(own[:2], [table], msgspec.structs.replace(here, driver="another")) == []


def test_figures_are_geometric_means_and_worst_cases() -> None:
    """Held-out, blind and tuned rows, launches and groups are never mixed."""

    def row(choice: float, **more: Any) -> dict[str, Any]:
        return {"group": "norms x", "part": "held out", "launch": "eager", "choice": choice} | more

    record: dict[str, Any] = {
        "shapes": {
            "a": row(1.0, end_to_end=1.1), "b": row(4.0, end_to_end=1.1), "c": row(9.0, part="tuned"),
            "d": row(7.0, launch="graph"), "f": row(2.5, part="blind"),
            "e": {**row(1.0), "error": "no"} | {"choice": 1.0},
        }
    }  # fmt: skip
    del record["shapes"]["e"]["choice"]
    summarise(record)
    held = record["summary"]["eager, held out, all"]
    assert (held["shapes"], held["choice_geomean"], held["choice_worst"]) == (2, 2.0, 4.0)
    assert held["end_to_end_geomean"] == pytest.approx(1.1)
    assert record["summary"]["eager, tuned, norms"]["choice_worst"] == 9.0
    assert record["summary"]["eager, blind, all"]["choice_worst"] == 2.5
    assert record["summary"]["graph, held out, all"]["shapes"] == 1
    assert list(record["errors"]) == ["e"]


def test_products_are_told_in_flops_and_overheads_by_launch() -> None:
    """A linear of 2e12 operations in 4 ms is 500 TFLOP/s; eager and replayed overheads stand apart."""

    def row(launch: str, over: float, **more: Any) -> dict[str, Any]:
        return {
            "group": "linear", "part": "held out", "launch": launch, "choice": 1.0, "lz_us": 100.0,
            "overhead_us": over, "end_to_end": 1.25, **more,
        }  # fmt: skip

    prefill = "attention q=1x32x8192x128:bfloat16 k=1x8x8192x128:bfloat16"
    record: dict[str, Any] = {
        "shapes": {
            "a": row("eager", 5.0, lz_us=4000.0, flops=2e12), "b": row("eager", 7.0, flops=1e6),
            "c": row("graph", 0.5), prefill: row("graph", 0.5, group="attention prefill"),
        }
    }  # fmt: skip
    summarise(record)
    assert record["products"] == [{"shape": "a", "tflops": 500.0}]
    assert record["overhead_us"]["median"] == 7.0, "of calls below 200 us"
    assert record["overhead_graph_us"] == {**record["overhead_graph_us"], "median": 0.5, "n": 2}
    assert record["prefill_8k"]["graph"] == {"lz_us": 100.0, "best_us": 80.0, "of_best": 0.8}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_enough_attention_shapes_most_of_them_held_out(platform: str) -> None:
    """At least 60 listed attention shapes, more held out than tuned; every kind in the first rounds."""
    found = shapes(platform)
    attention = {str(call) for _, call, part in found if "attention" in call.op and part != "blind"}
    assert len(attention) >= 60
    count = Counter(part for *_, part in found)
    assert count["held out"] > count["tuned"] > 10 and count["blind"] == 48
    held = [group for group, _, part in found if part == "held out"]
    groups = list(dict.fromkeys(held))
    assert held[: len(groups)] == groups


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_held_out_shapes_come_first_then_the_blind_ones(platform: str) -> None:
    """A run that ends early leaves out tuned shapes before those that nobody tuned."""
    parts = [part for *_, part in shapes(platform)]
    assert list(dict.fromkeys(parts)) == list(PARTS) and parts == sorted(parts, key=PARTS.index)


def digest(found: list[tuple[str, Call]]) -> str:
    return blake2b(repr([(g, str(c)) for g, c in found]).encode(), digest_size=8).hexdigest()


@pytest.mark.parametrize(("platform", "drawn", "before"), [
    ("cuda", "84bcf943f1e45df3", "d0fe2f496e5664df"), ("cpu", "ae13b12c26424f8e", "919089e51a8b47c0"),
])  # fmt: skip
def test_blind_shapes_stay_as_they_were_drawn(platform: str, drawn: str, before: str) -> None:
    """Who changes seed or ranges has to change this digest: after a run they would be blind no longer."""
    found = blind(platform)
    assert (digest(found), digest(seen(platform))) == (drawn, before)
    known = {str(call) for call in standard_calls(None, platform)} | {str(call) for _, call in seen(platform)}
    assert not known & {str(call) for _, call in found}, "none is tuned, none was seen"
    for _, call in found:
        request = call.request(hypothetical_gpu(90))
        assert call.operand_bytes() <= 2 * RANGES[platform].max_bytes
        assert ops_table.get(call.op).work(request).flops <= 1.1 * RANGES[platform].max_flops


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_set_that_was_seen_is_held_out(platform: str) -> None:
    """The calls of an earlier blind set stand among those that are held out, under their own groups."""
    held = {str(call): group for group, call, part in shapes(platform) if part == "held out"}
    assert all(held.get(str(call), group) == group for group, call in seen(platform))
    assert sum(str(call) in held for _, call in seen(platform)) >= 39


def test_parts_are_asked_for_by_name_and_group() -> None:
    """A part gives its shapes, a part and a group those of the group; a name that nothing has is refused."""
    found = asked(shapes("cuda"), ["blind", "held out, sampling"])
    assert Counter((s.part, s.part == "blind" or s.group) for s in found) == {
        ("blind", True): 48, ("held out", "sampling"): 6,
    }  # fmt: skip
    assert asked(shapes("cuda"), None) == shapes("cuda")
    with pytest.raises(ValueError, match="got 'blinds', which no shape has"):
        asked(shapes("cuda"), ["blinds"])


@pytest.mark.parametrize(("platform", "tuned"), [("cuda", 30), ("cpu", 37)])
def test_what_is_held_out_stays_held_out(platform: str, tuned: int) -> None:
    """A standard shape that is added to tuning covers none of the shapes that choices are judged by."""
    assert sum(part == "tuned" for *_, part in shapes(platform)) == tuned

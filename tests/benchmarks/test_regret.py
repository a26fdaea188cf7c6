"""The regret benchmark runs, resumes where it ended, and counts what it says it counts."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

import layerzero as lz
from benchmarks.regret import measure_shapes, opened, summarise
from benchmarks.regret_build import in_order, jobs
from benchmarks.regret_shapes import shapes


def options(out: Path) -> argparse.Namespace:
    return argparse.Namespace(out=out, quick=True, group=["norms float32"])


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
        calls = [call for _, call, _ in shapes("cpu") if call.op in ("attention", "rope")]
        todo = jobs(device, calls)
        assert todo, "torch's flex attention compiles by shape"
        waiting = {str(call) for work in todo.values() for _, call in work}
        ordered = [str(call) for call in in_order(device, calls, ())]
        everything = [str(call) for call in in_order(device, calls, {" ".join(unit) for unit in todo})]
    first = min(ordered.index(name) for name in waiting)
    assert sorted(ordered) == sorted(map(str, calls)) and set(ordered[first:]) == waiting
    assert everything == [str(call) for call in calls]


def test_figures_are_geometric_means_and_worst_cases() -> None:
    """Held-out and tuned rows, launches and groups are never mixed."""

    def row(choice: float, **more: Any) -> dict[str, Any]:
        return {"group": "norms x", "tuned": False, "launch": "eager", "choice": choice} | more

    record: dict[str, Any] = {
        "shapes": {
            "a": row(1.0, end_to_end=1.1), "b": row(4.0, end_to_end=1.1), "c": row(9.0, tuned=True),
            "d": row(7.0, launch="graph"), "e": {**row(1.0), "error": "no"} | {"choice": 1.0},
        }
    }  # fmt: skip
    del record["shapes"]["e"]["choice"]
    summarise(record)
    held = record["summary"]["eager, held out, all"]
    assert (held["shapes"], held["choice_geomean"], held["choice_worst"]) == (2, 2.0, 4.0)
    assert held["end_to_end_geomean"] == pytest.approx(1.1)
    assert record["summary"]["eager, tuned, norms"]["choice_worst"] == 9.0
    assert record["summary"]["graph, held out, all"]["shapes"] == 1
    assert list(record["errors"]) == ["e"]


def test_products_are_told_in_flops_and_overheads_by_launch() -> None:
    """A linear of 2e12 operations in 4 ms is 500 TFLOP/s; eager and replayed overheads stand apart."""

    def row(launch: str, over: float, **more: Any) -> dict[str, Any]:
        return {
            "group": "linear", "tuned": False, "launch": launch, "choice": 1.0, "lz_us": 100.0,
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
    """At least 60 attention shapes; more held out than tuned; every kind stands in the first rounds."""
    found = shapes(platform)
    attention = [call for _, call, _ in found if "attention" in call.op]
    assert len({str(call) for call in attention}) >= 60
    assert sum(not tuned for *_, tuned in found) > sum(tuned for *_, tuned in found) > 10
    groups = list(dict.fromkeys(group for group, *_ in found))
    assert [group for group, *_ in found[: len(groups)]] == groups


@pytest.mark.parametrize(("platform", "tuned"), [("cuda", 30), ("cpu", 37)])
def test_what_is_held_out_stays_held_out(platform: str, tuned: int) -> None:
    """A standard shape that is added to tuning covers none of the shapes that choices are judged by."""
    assert sum(is_tuned for *_, is_tuned in shapes(platform)) == tuned

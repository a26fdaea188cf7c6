"""What the ledger says was measured stands in the committed record, for every row that is done."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import ledger

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ROWS = {row.name: row for row in ledger.rows(ROOT / "REQUIREMENTS.md")}


def record(name: str) -> Any:
    """A committed record."""
    return json.loads((RESULTS / name).read_text())


def floors_are_met() -> bool:
    """Every floor of the hot path that was given is met by the microseconds beside it."""
    bounded = [v for v in record("hot_path.json")["verdicts"].values() if v["floor"] is not None]
    return len(bounded) >= 8 and all(v["us"] <= v["floor"] for v in bounded)


def threads_keep_most_of_one() -> bool:
    """64 threads make more than 0.8 of one thread's hits in a second, and more than behind a lock."""
    hits = record("hot_path.json")["rows"]["a"]["hits_per_s"]
    ours, locked = hits["snapshot"], hits["behind a lock"]
    return bool(ours["64"] > 0.8 * ours["1"] and ours["64"] > locked["64"])


def a_million_hits_a_second() -> bool:
    """One thread."""
    return bool(record("hot_path.json")["rows"]["a"]["hits_per_s"]["snapshot"]["1"] > 1e6)


def of_copy(page: int) -> float:
    """The best share of the copy bandwidth for 64 sequences in pages of so many tokens."""
    rows, pool = record("regret_h200.json")["decode"], f"x{page}x8x128:"
    return max(float(r["of_copy"]) for r in rows if " q=64x" in r["shape"] and pool in r["shape"])


def decode_fills_memory() -> bool:
    """0.97 and 0.95 of the copy bandwidth from pages of 16 and 1."""
    return round(of_copy(16), 2) >= 0.97 and round(of_copy(1), 2) >= 0.95


def products_fill_the_card() -> bool:
    """800 TFLOP/s to the nearest ten, replayed."""
    products = record("regret_h200.json")["products"]
    return round(max(float(p["tflops"]) for p in products if p["shape"].startswith("graph ")), -1) >= 800


def the_soak_ran_as_long_as_is_said() -> bool:
    """Ten minutes, and no document speaks of more."""
    longer = (
        "A soak of 24 to 72 hours was not run." in (ROOT / "docs" / "reference" / "limits.md").read_text()
    )
    return record("soak.json")["soak"]["seconds"] >= 600 and "ten minutes" in ROWS["PS-029"].state and longer


CLAIMS: dict[str, Callable[[], bool]] = {
    "PS-001 to PS-003": floors_are_met,
    "K2": floors_are_met,
    "PS-007, PS-028": threads_keep_most_of_one,
    "PS-027": a_million_hits_a_second,
    "PS-020": decode_fills_memory,
    "PS-021": products_fill_the_card,
    "K23": lambda: decode_fills_memory() and products_fill_the_card(),
    "K38": the_soak_ran_as_long_as_is_said,
}


@pytest.mark.parametrize("row", CLAIMS)
def test_a_row_that_is_done_stands_in_its_record(row: str) -> None:
    """The numbers in its state are those of the record; a row whose record misses them is not done."""
    assert row in ROWS
    assert CLAIMS[row]() or not ROWS[row].done

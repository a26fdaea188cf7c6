"""The GPU's generation benchmark runs whole on the CPU; what fails or has no time left is in its record."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from layerzero.kvcache import KVCacheSpec, PagedCache
from layerzero.kvcache.static_metadata import StaticMetadata
from tests import popen
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "lane_cuda.py"
for folder in ("benchmarks", "examples"):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))

pytest.importorskip("safetensors", reason="the model of the examples needs safetensors")


def rehearsed(out: Path, *more: str) -> dict[str, Any]:
    """The record of a rehearsal."""
    command = [sys.executable, str(SCRIPT), "--rehearse", "--out", str(out), *more]
    done = popen.run(command, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    read: dict[str, Any] = json.loads((out / "lane_h200.json").read_text())
    return read


@pytest.mark.long
@pytest.mark.slow
def test_every_side_is_measured(tmp_path: Path) -> None:
    """Speeds, one request alone and where the time goes, for each way of awaiting, and no error."""
    record = rehearsed(tmp_path)
    here = record["rows"]["2"]["16"]
    graphs = {"per step, captured", "per layer, captured"}
    sides = {"by hand", "per step", "per layer", "per op", *graphs}
    assert not record["errors"] and not record["left_out"]
    assert set(here["sides"]) == set(here["where"]) == sides
    assert all(row["tokens_per_s"] > 0 and row["mean_batch"] > 3 for row in here["sides"].values())
    assert all(row["over_one_by_one"] > 0 for row in here["sides"].values())
    assert all(row["host_us"] > 0 for row in here["where"].values())
    assert here["kernels"]["paged_attention"]
    assert {side: found["same"] for side, found in here["agreement"].items()} == dict.fromkeys(graphs, 4)
    assert record["awaited_path"]
    assert record["linear"]["2"]["awaited_us"] > 0


def test_what_the_budget_leaves_out_is_named(tmp_path: Path) -> None:
    """Without time no item begins, and the record says which."""
    record = rehearsed(tmp_path, "--budget-s", "0")
    assert record["left_out"] == ["2 layers, model", "2 layers, context 16", "2 layers, linear"]


def test_an_item_that_fails_is_an_error_of_the_record(tmp_path: Path) -> None:
    """The others go on, and the failed one is not tried again."""
    lane_cuda = importlib.import_module("lane_cuda")
    out = tmp_path / "record.json"
    record = lane_cuda.Record(out, 1, 60.0)

    def fail() -> None:
        raise RuntimeError("no such kernel")

    assert record.item("one", fail) is None
    assert record.item("one", lambda: 1) is None
    assert record.item("two", lambda: 2) == 2
    assert json.loads(out.read_text())["errors"] == {"one": "RuntimeError: no such kernel"}


def test_padding_keeps_places_of_its_own() -> None:
    """Rows that no sequence has stand where nobody writes, also after a larger crowd stood there."""
    cache = PagedCache(KVCacheSpec(num_kv_heads=1, head_dim=8), pages=12, page_size=4)
    static = StaticMetadata(cache, 8, 4)
    spare = static.metadata(4).slot_mapping.tolist()
    sequences = [cache.sequence(8) for _ in range(4)]
    for count in (4, 1, 3):
        static.load([sequence.extend(1) for sequence in sequences[:count]])
        at = static.metadata(4)
        slots = at.slot_mapping.tolist()
        own = [s.pages[(s.length - 1) // 4] * 4 + (s.length - 1) % 4 for s in sequences[:count]]
        assert slots == [*own, *spare[count:]]
        assert at.seq_lens.tolist() == [*(s.length for s in sequences[:count]), *[1] * (4 - count)]
        assert at.block_tables[:count].tolist() == [s.pages[:2] for s in sequences[:count]]

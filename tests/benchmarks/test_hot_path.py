"""The hot-path benchmark runs whole and its record is complete; how fast anything is, is not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from layerzero.ops import table as ops_table
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.long, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
PEERS = {"transformers", "kernels", "diffusers", "flashinfer-bench", "kernel-set"}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one quick run wrote."""
    out = tmp_path_factory.mktemp("hot_path") / "hot_path.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "hot_path.py"), "--quick", "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read: dict[str, Any] = json.loads(out.read_text())
    return read


def test_the_environment_is_recorded(record: dict[str, Any]) -> None:
    """A reader finds the machine, the versions, the commit and the load."""
    environment = record["environment"]
    assert record["quick"] is True
    for name in ("date", "cpu", "cores", "python", "torch", "commit", "load_average", "versions"):
        assert environment[name], name


def test_every_row_is_there(record: dict[str, Any]) -> None:
    """Rows a to f, allocation, swaps and peers each have their numbers, row b for every op."""
    rows = record["rows"]
    assert set(rows) == {"a", "b", "c", "d", "e", "allocation", "swaps", "peers"}
    for side in ("snapshot", "behind a lock"):
        assert set(rows["a"]["relative_to_one"][side]) == {"1", "4", "16", "64"}
    assert set(rows["b"]) == set(ops_table.names())
    for op in rows["b"].values():
        assert {"over", "bound_guarded", "bound_unguarded", "single_calls"} <= set(op["real"])
        assert not op["real"]["kernel"].startswith("bench.")
    for op in ("attention", "linear", "rms_norm"):
        assert rows["b"][op]["null"]["kernel"].startswith("bench.")
    assert {"100 kernels", "1000 kernels", "100 kernels, 100 rules"} <= set(rows["c"])
    assert {"import_us", "first_call_us", "warm_torch_first_call_us"} <= set(rows["d"])


def test_the_crowd_really_batched(record: dict[str, Any]) -> None:
    """The 64 callers met in batches; otherwise their number would say nothing."""
    rows = record["rows"]["e"]["one_of_64"]
    crowds = {**rows["real"], **{name: rows[name] for name in ("real_with_collector", "real_spawn", "null")}}
    for name, crowd in crowds.items():
        assert crowd["mean_batch"] > 32, name
        assert crowd["kernel"].startswith("bench.") == (name == "null"), name


def test_what_is_published_is_wall_time_over_the_real_kernel(record: dict[str, Any]) -> None:
    """The verdicts are the rows' wall medians; a null kernel has rows of its own, without a bound."""
    rows, verdicts = record["rows"], record["verdicts"]
    for op in ("attention", "linear", "rms_norm"):
        assert verdicts[f"b_{op}"]["us"] == rows["b"][op]["real"]["over"]["wall_us"]["median"]
    worst = max(row["real"]["over"]["wall_us"]["median"] for row in rows["b"].values())
    assert verdicts["b_worst"]["us"] == worst
    real = rows["e"]["one_of_64"]["real"].values()
    assert verdicts["e_one_of_64"]["us"] == max(row["beyond_kernel"]["wall_us"]["median"] for row in real)
    for name in ("b_null", "e_one_of_64_null"):
        assert verdicts[name]["floor"] is None and verdicts[name]["aim"] is None


def test_hits_leave_nothing_behind(record: dict[str, Any]) -> None:
    """A lookup keeps no block: what remains does not grow with the number of hits."""
    allocation = record["rows"]["allocation"]
    assert allocation["lookup"] < allocation["calls"] / 10


def test_policies_were_swapped_while_threads_selected(record: dict[str, Any]) -> None:
    """Both kinds of swap happened, and the readers went on."""
    swaps = record["rows"]["swaps"]
    assert swaps["keys"] == 1000 and swaps["readers"] == 8
    for readers in ("spinning", "paced", "frozen"):
        assert swaps[readers]["quiet"]["swaps"] == 0
        for kind in ("other op", "same op"):
            assert swaps[readers][kind]["swaps"] > 0
            assert swaps[readers][kind]["selections"] > 0


def test_every_peer_has_a_number_or_a_reason(record: dict[str, Any]) -> None:
    """A peer that is missing or cannot run here says so; none is left out."""
    peers = record["rows"]["peers"]
    assert set(peers) >= PEERS | {"torch", "layerzero_sync", "layerzero_bound"}
    for name, peer in peers.items():
        assert (peer["total"] is None) == bool(peer["refused"]), name


def test_every_bounded_number_has_a_verdict(record: dict[str, Any]) -> None:
    """Each floor that was given and each aim is either compared or marked as not measured."""
    for name, verdict in record["verdicts"].items():
        measured = verdict["us"] is not None
        assert (verdict["meets_floor"] is not None) == (measured and verdict["floor"] is not None), name
        assert (verdict["meets_aim"] is not None) == (measured and verdict["aim"] is not None), name

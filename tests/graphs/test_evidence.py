"""What kernels declare about capture is what the committed record of a GPU found."""

from __future__ import annotations

import json
from pathlib import Path

from layerzero.backends import load_builtin

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "graphs_h200.json"


def found() -> dict[str, list[str]]:
    """Every kernel that was tried, with all problems of all its cases."""
    problems: dict[str, list[str]] = {}
    for row in json.loads(RECORD.read_text())["kernels"]:
        for kernel, seen in row["kernels"].items():
            problems.setdefault(kernel, []).extend(seen["found"])
    return problems


def test_no_kernel_declares_what_the_record_does_not_show() -> None:
    """A kernel that was tried and showed a problem, or was not shown to see its inputs, declares nothing."""
    tried = found()
    declared = {k.id for k in load_builtin() if k.capability.graph_safe}
    assert {k: tried[k] for k in declared & tried.keys() if tried[k]} == {}
    assert len(declared & tried.keys()) >= 20


def test_the_record_holds_refusals_too() -> None:
    """What reads lengths or losses on the host was caught: the check can say no."""
    caught = {k for k, problems in found().items() if any("synchronised" in p for p in problems)}
    assert caught == {
        "reference.paged_attention", "reference.ragged_attention", "liger.cross_entropy.triton",
        *(f"flashinfer.{op}_attention.{way}" for op in ("paged", "ragged") for way in ("fa2", "fa3")),
    }  # fmt: skip


def test_replaying_a_step_was_measured_beside_running_it() -> None:
    """Four numbers of rows, both ways in the same run."""
    steps = json.loads(RECORD.read_text())["step"]
    assert [s["rows"] for s in steps] == [1, 3, 16, 64]
    assert all(s["median_us"].keys() == {"eager", "replay"} for s in steps)

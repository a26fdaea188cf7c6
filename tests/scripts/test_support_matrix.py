"""The support matrix says what records say, and records come from any machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layerzero.backends import load_builtin
from scripts.support_matrix import DESCRIBED, MATRIX, MEASURED, OWNED, matrix, recorded

ENVIRONMENT = {"date": "2026-11-21T05:00:00+00:00", "device": "a card", "versions": {"torch": "2.11.0"}}


def ran(platform: str, **kernels: str) -> dict[str, Any]:
    """A record in this script's own shape; `__` in a name stands for a dot."""
    named = {name.replace("__", "."): outcome for name, outcome in kernels.items()}
    return {"platform": platform, "proof": "a test", "environment": ENVIRONMENT, "kernels": named}


def values(records: list[dict[str, Any]], kernel: str) -> list[str]:
    """A kernel's cells: cpu, cuda, rocm."""
    rows = matrix(records)["support"]["rows"]
    (row,) = [r for r in rows if r[1] == f"`{kernel}`"]
    return [str(cell) for cell in row[2:]]


def test_a_kernel_is_supported_where_a_record_says_that_it_passed() -> None:
    """Measured, owned by another suite, described alone, not for the platform."""
    flash = "torch.attention.sdpa_flash"
    assert values([], flash)[:2] == ["-", OWNED]
    assert values([ran("cuda", torch__attention__sdpa_flash="passed")], flash)[:2] == ["-", MEASURED]
    assert values([ran("cuda", torch__attention__sdpa_flash="skipped")], flash)[1] == OWNED
    assert values([], "reference.rope") == [DESCRIBED, DESCRIBED, DESCRIBED]


def test_a_failure_on_one_machine_is_not_hidden_by_another() -> None:
    """Whichever record comes first."""
    good, bad = ran("cuda", reference__rope="passed"), ran("cuda", reference__rope="failed")
    for records in ([good, bad], [bad, good]):
        assert values(records, "reference.rope")[1] == "fails here"


def test_an_accuracy_table_from_a_gpu_is_a_record(tmp_path: Path) -> None:
    """Called and never wrong is a pass; one disagreement in any dtype is not; uncalled is nothing."""
    environment = {
        "date": "2026-11-21", "cpu": "x", "gpu": "NVIDIA H200", "torch": "2.11.0+cu130",
        "versions": {"triton": "3.6", "xformers": None},
    }  # fmt: skip
    rows = [
        {"kernel": "a.rope", "calls": 3, "disagreements": []},
        {"kernel": "b.rope", "calls": 3, "disagreements": []},
        {"kernel": "b.rope", "calls": 3, "disagreements": ["too far"]},
        {"kernel": "c.rope", "calls": 0},
        {"kernel": "d.rope", "failed": "RuntimeError: no"},
    ]
    (tmp_path / "accuracy_h200.json").write_text(json.dumps({"environment": environment, "kernels": rows}))
    (tmp_path / "ran_cpu.json").write_text(json.dumps(ran("cpu", a__rope="passed")))
    accuracy, own = recorded(tmp_path)
    assert accuracy["platform"] == "cuda" and own["platform"] == "cpu"
    assert accuracy["kernels"] == {"a.rope": "passed", "b.rope": "failed", "d.rope": "failed"}
    assert accuracy["environment"]["versions"] == {"torch": "2.11.0+cu130", "triton": "3.6"}
    machine = matrix([accuracy])["machines"]["rows"][0]
    assert machine[:2] == ["cuda", "NVIDIA H200"] and machine[4] == 1


@pytest.mark.parametrize("text", ["{", '{"kernels": {}}', '{"platform": "tpu", "kernels": {}}', "[]"])
def test_a_file_that_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    """Nothing is left out silently."""
    (tmp_path / "ran_odd.json").write_text(text)
    with pytest.raises(ValueError, match=r"ran_odd\.json is no record"):
        recorded(tmp_path)


def test_the_committed_matrix_is_what_the_records_give() -> None:
    """Cells that say "measured here" have a record."""
    root = Path(__file__).parents[2] / "benchmarks" / "results"
    passed = {(k, r["platform"]) for r in recorded(root) for k, o in r["kernels"].items() if o == "passed"}
    table = json.loads((root / "support.json").read_text())["tables"]["support"]
    claimed = {
        (row[1].strip("`"), platform)
        for row in table["rows"]
        for platform, cell in zip(table["columns"][2:], row[2:], strict=True)
        if cell == MEASURED
    }
    assert claimed and claimed <= passed


def test_the_committed_matrix_has_every_kernel() -> None:
    """A kernel that is added has its row, whatever stands there."""
    table = json.loads(MATRIX.read_text())["tables"]["support"]
    assert {row[1].strip("`") for row in table["rows"]} == {kernel.id for kernel in load_builtin()}

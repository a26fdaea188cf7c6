"""The tests of a card: every kernel is in a group, and what dies or hangs is named and counts as failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import environment
from layerzero.backends import load_builtin
from scripts import card_tests
from scripts.card_tests import Group, groups, outcomes
from scripts.support_matrix import PROOFS
from tests import popen

ROOT = Path(__file__).resolve().parents[2]
OTHER = {"commit": "0123", "clean": True, "machine": "another"}


def selects(group: Group, kernel: str) -> bool:
    """Whether a group's words choose a kernel's test, as pytest's -k reads them."""
    words = [
        repr(part in kernel) if part not in ("and", "or", "not") else part for part in group.select.split()
    ]
    return bool(eval(" ".join(words))) if words else False


@pytest.mark.parametrize("kernel", [k.id for k in load_builtin() if "cuda" in k.capability.platforms])
def test_every_kernel_of_a_card_is_proved_in_every_dtype(kernel: str) -> None:
    """By one group, or by one a dtype."""
    of = [g for g in groups() if card_tests.OF_A_KERNEL[0] in g.paths and selects(g, kernel)]
    assert sorted(g.dtype for g in of) in ([""], ["bfloat16", "float16"])


def test_no_group_writes_over_anothers_results() -> None:
    """A group's file has its name; those of tests/cuda are known by how theirs begin."""
    names = [group.name for group in groups()]
    assert len(names) == len(set(names))
    apart = [g for g in groups() if g.name.startswith(card_tests.CUDA)]
    assert {path for g in apart for path in g.paths if not path.startswith("tests/cuda")} == set()


def test_every_file_of_a_card_is_in_a_group() -> None:
    """Those that are left out of the large group have their own."""
    (rest,) = [g for g in groups() if g.paths == ("tests/cuda",)]
    own = {path for g in groups() for path in g.paths}
    left_out = {word for word in rest.select.split() if word.startswith("test_")}
    assert {f"tests/cuda/{name}.py" for name in left_out} <= own


def test_xformers_runs_without_the_library_that_keeps_it_from_importing() -> None:
    """FlashAttention-4 is installed beside it, and its own process must not find it."""
    assert {g.name: g.without for g in groups() if g.without} == {"xformers": "flash_attn"}


def test_the_worst_of_a_kernels_dtypes_counts() -> None:
    """A failure before a pass before a skip; what its process died of has failed; other tests are no proof.

    What was under way when the time was up says nothing of its kernel.
    """

    def entry(kernel: str, outcome: str, proof: str = PROOFS["cuda"]) -> dict[str, str]:
        return {"test": f"{proof}[{kernel}]", "outcome": outcome}

    good = {"tests": [entry("a.rope", "passed"), entry("b.rope", "passed"), entry("c.rope", "skipped")]}
    bad = {
        "tests": [entry("b.rope", "failed"), entry("a.rope", "failed", "tests/other.py::test_x")],
        "running": f"{PROOFS['cuda']}[d.rope]",
        "exit": -11,
    }
    late = {"tests": [], "running": f"{PROOFS['cuda']}[e.rope]", "exit": card_tests.CUT_OFF}
    found = {"a.rope": "passed", "b.rope": "failed", "c.rope": "skipped", "d.rope": "failed"}
    assert outcomes([good, bad]) == outcomes([bad, late, good]) == found


def test_a_process_that_dies_says_where(tmp_path: Path) -> None:
    """What ran before is kept, and the test that took the process down is named."""
    (tmp_path / "test_it.py").write_text(
        "import os\ndef test_good():\n    assert True\ndef test_worse():\n    assert 1 == 2\n"
        "def test_dies():\n    os._exit(7)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    target = tmp_path / "record.json"
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", f"--rootdir={tmp_path}"]
    options += ["-c", str(tmp_path / "pytest.ini"), str(tmp_path / "test_it.py")]
    command = [sys.executable, "-m", "scripts.record_tests", str(target), *options]
    done = popen.run(command, cwd=ROOT)
    record = json.loads(target.read_text())
    assert done.returncode == 7
    assert record["running"] == "test_it.py::test_dies"
    assert record["counts"] == {"passed": 1, "failed": 1}
    assert "assert 1 == 2" in record["tests"][1]["why"]


def test_errors_are_measured_where_the_contract_ran(tmp_path: Path) -> None:
    """One process runs a kernel's tests and writes its errors; other kernels are not measured."""
    target, accuracy = tmp_path / "tests.json", tmp_path / "accuracy.json"
    chosen = "reference.rope and not append"
    options = ["-q", "-p", "no:cacheprovider", "-k", chosen, card_tests.OF_A_KERNEL[0]]
    command = [sys.executable, "-m", "scripts.card_group", str(target), str(accuracy), *options]
    own = {**os.environ, "LAYERZERO_TEST_DEVICE": "cpu", "LAYERZERO_TEST_DTYPES": "bfloat16,float32"}
    done = popen.run(command, cwd=ROOT, env=own)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "failed" not in json.loads(target.read_text())["counts"]
    rows = json.loads(accuracy.read_text())["kernels"]
    assert [(row["kernel"], row["dtype"]) for row in rows] == [
        ("reference.rope", "bfloat16"),
        ("reference.rope", "float32"),
    ]
    assert all(row["calls"] > 2 and not row["disagreements"] for row in rows)


def test_a_second_run_adds_to_the_first_of_the_same_commit(tmp_path: Path) -> None:
    """Groups that do not run again stay; those of another commit are refused by name."""
    own = {"environment": environment(), "counts": {"passed": 1}, "tests": []}
    rows = {"environment": {}, "kernels": [{"op": "rope", "kernel": "a.rope"}]}
    (tmp_path / "accuracy.json").write_text(json.dumps(rows))
    (tmp_path / "groups.json").write_text(json.dumps({"first": own, "killed": {"tests": []}}))
    card_tests.save(tmp_path, [], card_tests.Earlier.read(tmp_path))
    assert set(json.loads((tmp_path / "groups.json").read_text())) == {"first", "killed"}
    assert json.loads((tmp_path / "accuracy.json").read_text()) == rows
    (tmp_path / "groups.json").write_text(json.dumps({"first": own | {"environment": OTHER}}))
    with pytest.raises(ValueError, match="first is of 0123 on another"):
        card_tests.Earlier.read(tmp_path)


def test_a_library_can_be_kept_out_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its package nor what says that it is installed; what stands beside it stays."""
    site = tmp_path / "site"
    for name in ("kernels_x", "kernels_x-1.0.dist-info", "beside"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{site}")
    path = card_tests.path_without("kernels_x", tmp_path)
    assert path.split(":")[0] == str(ROOT)
    code = "from importlib.util import find_spec as f; print(f('kernels_x') is None, f('beside') is None)"
    for entry, said in ((path, "True False"), (str(site), "False False")):
        own = {"PYTHONPATH": entry}
        done = subprocess.run(
            [sys.executable, "-c", code], env=own, check=True, capture_output=True, text=True
        )
        assert done.stdout.strip() == said

"""`lz gate`: status, report and artifacts, and a baseline written and used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerzero.gates import baseline, run
from layerzero.report.document import OPENING
from tests.cli.command import Lz
from tests.gates.test_model_parity import LLAMA

RELEASE = """
version: 1
suites: {quick: [contract, security]}
stages:
  contract: {ops: [rope]}
  security: {command: ["{python}", "-c", "import sys; sys.exit(%d)"]}
waivers: [%s]
"""
WAIVER = '{finding: "security/*", owner: ann, reason: known, expires: 2999-01-01}'
ARTIFACTS = {
    "capabilities.json", "environment.json", "selections.jsonl", "trace.json", run.JSON_NAME, run.PAGE_NAME,
}  # fmt: skip


def release(folder: Path, status: int = 0, waiver: str = "") -> str:
    """A release file whose command ends with this status."""
    path = folder / "RELEASE.yaml"
    path.write_text(RELEASE % (status, waiver))
    return str(path)


def test_the_status_is_the_verdict(lz: Lz, tmp_path: Path) -> None:
    """0 where all stages hold, 1 where one does not, 0 again by a waiver, 2 for a wrong file."""
    assert lz("gate", release(tmp_path), "--quick").exit_code == 0
    failed = lz("gate", release(tmp_path, 4), "--quick")
    assert failed.exit_code == 1 and "security/command" in failed.output and "FAILED" in failed.output
    waived = lz("gate", release(tmp_path, 4, WAIVER), "--quick")
    assert waived.exit_code == 0 and "waived: security/command" in waived.output
    late = lz("gate", release(tmp_path, 4, WAIVER.replace("2999", "2020")), "--quick", "--json")
    report = json.loads(late.stdout)
    assert late.exit_code == 1 and report["stages"][-1]["findings"][0]["code"] == "WAIVER_EXPIRED"
    assert lz("gate", release(tmp_path), "--suite", "nightly").exit_code == 2
    (tmp_path / "RELEASE.yaml").write_text("version: 9\n")
    wrong = lz("gate", str(tmp_path / "RELEASE.yaml"))
    assert wrong.exit_code == 2 and "version needs 1" in wrong.output


def test_what_a_release_keeps_is_in_one_folder(lz: Lz, tmp_path: Path) -> None:
    """Report as JSON and page, capabilities, selections, a trace, the environment; each with its hash."""
    folder = tmp_path / "artifacts"
    assert lz("gate", release(tmp_path), "--quick", "--artifacts", str(folder)).exit_code == 0
    assert {path.name for path in folder.iterdir()} >= ARTIFACTS
    report = json.loads((folder / run.JSON_NAME).read_text())
    assert report["passed"] is True and {name for name, _ in report["artifacts"]} >= ARTIFACTS - {
        run.JSON_NAME, run.PAGE_NAME,
    }  # fmt: skip
    contract = json.loads((folder / "contract_report_latest.json").read_text())
    assert contract["checks"] > 0 and contract["findings"] == []
    assert OPENING in (folder / run.PAGE_NAME).read_text()
    selections = [json.loads(line) for line in (folder / "selections.jsonl").read_text().splitlines()]
    assert any(each["kernel"] and each["candidates"] for each in selections)
    batches = [
        e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e.get("cat") == "batches"
    ]
    assert batches
    assert any("nothing was measured" in note or "tune first" in note for note in report["notes"])


def test_a_baseline_is_written_and_named(lz: Lz, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed names it in a release, and it is judged there; none is written on a busy machine."""
    times = [(2.0, 1.0 + number % 2 / 100, 2.0) for number in range(60)]
    monkeypatch.setattr(baseline, "measure_beside_torch", lambda *_, **__: times)
    path = tmp_path / "RELEASE.yaml"
    stage = (
        'stages:\n  performance:\n    calls: ["rms_norm x=4x64:float32"]\n    slower: 0.5\n    rounds: 60\n'
    )
    path.write_text(f"version: 1\n{stage}    baseline: base.json\n")
    written = lz("gate", str(path), "--write-baseline", str(tmp_path / "base.json"))
    assert written.exit_code == 0 and "sha256: " in written.output
    digest = written.output.partition("sha256: ")[2].strip()
    path.write_text(f"version: 1\n{stage}    baseline: base.json\n    sha256: {digest}\n")
    done = lz("gate", str(path), "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and "as fast" in report["stages"][0]["lines"][0]
    times[:] = [(2.0, 1.0 + number / 10, 2.0) for number in range(60)]
    unsure = lz("gate", str(path))
    assert unsure.exit_code == 3 and "UNDECIDED" in unsure.output and "PACE_UNDECIDED" in unsure.output
    refused = lz("gate", str(path), "--write-baseline", str(tmp_path / "busy.json"))
    assert refused.exit_code == 2 and "BASELINE_UNSTEADY" in refused.output
    assert not (tmp_path / "busy.json").exists()


def test_the_status_of_a_model_is_its_checklist_s(lz: Lz, tmp_path: Path) -> None:
    """0 where it holds, 2 for a folder that is none; a configuration alone gets random weights."""
    pytest.importorskip("transformers", reason="models are those of transformers")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    done = lz("parity", str(tmp_path), "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and report["passed"] and report["flags"] == []
    assert "random weights" in report["checklist"][0]["evidence"]
    (tmp_path / "config.json").write_text("{}")
    assert lz("parity", str(tmp_path)).exit_code == 2

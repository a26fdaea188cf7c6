"""Stages against planted faults: wrong numbers, wrong shapes, files that do not hold, commands that fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import layerzero as lz
from layerzero.gates import numerics, stages
from layerzero.gates.numerics import KernelRun
from layerzero.gates.paired_rounds import PacedCall, PairedResult
from layerzero.gates.release_file import (
    CommandStage,
    ContractStage,
    MatrixStage,
    NumericsStage,
    PerformanceStage,
    SchemaStage,
)
from layerzero.gates.stages import StageRunner
from layerzero.ops.norm.rms_norm import rms_norm_reference
from layerzero.perfdb.record import Environment
from layerzero.perfdb.table_file import content_hash
from layerzero.runtime import Runtime
from tests.gates.test_baseline import stored as stored_baseline
from tests.kernels import kernel
from tests.perfdb.rows import HERE

NORMS = ("rms_norm",)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A runtime of the test's own."""
    with lz.start(lz.Settings(device="cpu", warm="off"), scoped=True) as opened:
        yield opened


def test_kernels_that_are_right_pass_contract_and_numerics(runtime: Runtime, tmp_path: Path) -> None:
    """Every kernel of an op that is ready here is run in two dtypes, and nothing is found."""
    runner = StageRunner(runtime, tmp_path)
    contract, numerics = (
        runner.run("contract", ContractStage(ops=NORMS)), runner.run("numerics", NumericsStage(ops=NORMS))
    )  # fmt: skip
    assert contract.findings == numerics.findings == () and contract.state == numerics.state == "passed"
    assert contract.checks >= 4 and {line.split(":")[0] for line in numerics.lines} == {
        "rms_norm bfloat16", "rms_norm float32",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "stage", "said"),
    [
        (lambda x, w, eps: rms_norm_reference(x, w, eps) * 1.01, "numerics", "relative L2 error 0.01"),
        (lambda x, w, eps: rms_norm_reference(x, w, eps).double(), "contract", "torch.float64, not"),
        (lambda x, w, eps: rms_norm_reference(x, w, eps)[:1], "contract", "output 0 is"),
        (lambda x, w, eps: (x, x), "contract", "2 outputs, not 1"),
        (lambda x, w, eps: torch.full_like(x, torch.nan), "contract", "memory that is not written"),
        (
            lambda x, w, eps: x.mul_(0).add_(rms_norm_reference(x + 1, w, eps)),
            "contract",
            "operand 0 was written to",
        ),
        (lambda x, w, eps: 1 / 0, "contract", "ZeroDivisionError"),
    ],
)
def test_a_planted_fault_is_found_by_its_stage(
    runtime: Runtime, tmp_path: Path, fault: Any, stage: str, said: str
) -> None:
    """Scaled numbers, another dtype, shape or count of outputs, NaN, a written operand, an error."""
    runtime.add_kernel(kernel("planted.rms_norm", fault))
    runner = StageRunner(runtime, tmp_path)
    outcomes = {
        "contract": runner.run("contract", ContractStage(ops=NORMS)),
        "numerics": runner.run("numerics", NumericsStage(ops=NORMS)),
    }
    names = {finding.name for finding in outcomes[stage].findings}
    assert names >= {f"{stage}/rms_norm/float32/planted.rms_norm"}
    assert all("planted" in name for name in names)
    assert any(said in finding.text for finding in outcomes[stage].findings)
    assert outcomes[{"contract": "numerics", "numerics": "contract"}[stage]].findings == ()


def test_the_files_limits_hold(runtime: Runtime, tmp_path: Path) -> None:
    """A limit of an op goes before one of all ops, which goes before what rounding explains."""
    runner = StageRunner(runtime, tmp_path)
    strict = runner.run("numerics", NumericsStage(ops=NORMS, limits={"*": {"float32": 1e-12}}))
    assert strict.state == "failed" and all("/float32/" in finding.name for finding in strict.findings)
    both = NumericsStage(ops=NORMS, limits={"*": {"float32": 1e-12}, "rms_norm": {"float32": 1e-3}})
    assert runner.run("numerics", both).state == "passed"


def test_files_are_checked_by_their_kind(runtime: Runtime, tmp_path: Path) -> None:
    """A whole baseline and a policy pass; a cut one, one of no kind, and a pattern without files do not."""
    stored_baseline(tmp_path / "base.json")
    (tmp_path / "policy.yaml").write_text("version: 1\nrules: []\n")
    runner = StageRunner(runtime, tmp_path)
    passed = runner.run("schemas", SchemaStage(files=("base.json", "*.yaml")))
    assert passed.state == "passed" and passed.lines == ("base.json: baseline", "policy.yaml: policy")
    assert passed.checks > 100  # every kernel's capability
    (tmp_path / "cut.json").write_bytes((tmp_path / "base.json").read_bytes()[:-9])
    (tmp_path / "odd.json").write_text('{"a": 1}')
    (tmp_path / "bad.yaml").write_text("version: 1\nruls: []\n")
    failed = runner.run("schemas", SchemaStage(files=("*.json", "bad.yaml", "none*")))
    assert {finding.name for finding in failed.findings} == {
        "schemas/cut.json", "schemas/odd.json", "schemas/bad.yaml", "schemas/none*",
    }  # fmt: skip


def test_a_commands_status_decides(runtime: Runtime, tmp_path: Path) -> None:
    """Status 0 passes; another one, one that takes too long or is not there fails, with its last words."""
    runner = StageRunner(runtime, tmp_path)

    def outcome(code: str, **more: float) -> Any:
        return runner.run("soak", CommandStage(command=("{python}", "-c", code), **more))

    assert outcome("print('fine')").state == "passed"
    failed = outcome("import sys; print('1 leak'); sys.exit(3)")
    assert failed.state == "failed" and "status 3: 1 leak" in failed.findings[0].text
    late = outcome("import time; time.sleep(60)", limit_s=0.2)
    assert "took more than 0.2 s" in late.findings[0].text
    missing = runner.run("soak", CommandStage(command=("no-such-program",)))
    assert missing.state == "failed" and "no-such-program" in missing.findings[0].text


def test_the_environment_is_compared_with_what_is_promised(runtime: Runtime, tmp_path: Path) -> None:
    """A platform, a library's version, an op without a ready kernel: each is a finding of its own."""
    runner = StageRunner(runtime, tmp_path)
    fine = MatrixStage(platforms=("cpu",), libraries={"torch": ">=2"}, ready_ops=("rms_norm",))
    assert runner.run("matrix", fine).state == "passed"
    amiss = MatrixStage(
        platforms=("npu",), libraries={"torch": ">=99", "acme": ">=1"}, ready_ops=("frobnicate",)
    )
    names = [finding.name for finding in runner.run("matrix", amiss).findings]
    assert names == [
        "matrix/platform/npu",
        "matrix/library/torch",
        "matrix/library/acme",
        "matrix/op/frobnicate",
    ]
    wrong = runner.run("matrix", MatrixStage(libraries={"torch": "newest"}))
    assert "needs specifiers" in wrong.findings[0].text


def test_a_baseline_that_does_not_hold_fails_the_stage_with_its_code(
    runtime: Runtime, tmp_path: Path
) -> None:
    """Nothing is measured against it; the code is in the finding."""
    stored_baseline(tmp_path / "base.json")
    stage = PerformanceStage(baseline="base.json")
    (finding,) = StageRunner(runtime, tmp_path).run("performance", stage).findings
    assert (finding.name, finding.code) == ("performance/baseline", "BASELINE_UNTRUSTED")


def test_a_call_that_the_baseline_has_not_is_named(runtime: Runtime, tmp_path: Path) -> None:
    """A call that nothing was stored of cannot be judged: it does not pass by being left out."""
    digest = stored_baseline(
        tmp_path / "base.json", environment=Environment.of_hardware(runtime.device().hardware)
    )
    stage = PerformanceStage(
        baseline="base.json", sha256=digest, max_age_days=1e6, calls=("rope x=1x8:float32",)
    )
    outcome = StageRunner(runtime, tmp_path).run("performance", stage)
    assert outcome.state == "failed" and "got rope x=1x8:float32" in outcome.findings[0].text


def test_a_tree_that_is_none_is_named(runtime: Runtime, tmp_path: Path) -> None:
    """A path without a tree is a finding, not a traceback."""
    stage = PerformanceStage(against="nowhere", calls=("rms_norm x=1x8:float32",))
    (finding,) = StageRunner(runtime, tmp_path).run("performance", stage).findings
    assert finding.code == "GATE_TREE" and "against needs a tree with layerzero/" in finding.text


@pytest.mark.parametrize(
    ("stored", "code"),
    [
        ({"environment": msgspec.structs.replace(HERE, device="another CPU")}, ""),
        ({"format": 1}, ""),
        ({"date": "2020-01-01"}, ""),
        ({"content": "0"}, "BASELINE_DAMAGED"),
        ({"date": "2999-01-01"}, "BASELINE_DAMAGED"),
    ],
)
def test_a_machine_that_a_baseline_is_not_of_compares_with_the_tree(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: dict[str, Any], code: str
) -> None:
    """And says with what and why; a baseline that was altered is refused although there is a tree."""
    here = {"environment": Environment.of_hardware(runtime.device().hardware)}
    digest = stored_baseline(tmp_path / "base.json", **here | stored)
    (tmp_path / "last" / "layerzero").mkdir(parents=True)
    (tmp_path / "last" / "layerzero" / "__init__.py").touch()
    trees: list[Path] = []

    def compare(call: PacedCall, first: Path, second: Path, **_: Any) -> PairedResult:
        trees.append(first)
        return PairedResult(str(call), "as fast", 100, 1.0, "as planted")

    monkeypatch.setattr(stages, "compare_paces", compare)
    stage = PerformanceStage(
        baseline="base.json", sha256=digest, against="last", calls=("rms_norm x=1x8:float32",)
    )
    outcome = StageRunner(runtime, tmp_path).run("performance", stage)
    if code:
        (finding,) = outcome.findings
        assert (finding.name, finding.code, trees) == ("performance/baseline", code, [])
        return
    assert outcome.state == "passed" and trees == [(tmp_path / "last").resolve()]
    assert (
        str(trees[0]) in outcome.beside and "base.json is not for this machine: BASELINE_" in outcome.beside
    )


def test_a_stage_that_checks_nothing_does_not_pass(runtime: Runtime, tmp_path: Path) -> None:
    """No call was made in it: a baseline without calls, and kernels that all raise, are told from a pass."""

    here = Environment.of_hardware(runtime.device().hardware)
    digest = stored_baseline(tmp_path / "base.json", environment=here, paced=(), content=content_hash(()))
    runner = StageRunner(runtime, tmp_path)
    stage = PerformanceStage(baseline="base.json", sha256=digest, max_age_days=1e6)
    (finding,) = runner.run("performance", stage).findings
    assert finding.code == "GATE_CHECKS_NOTHING" and finding.name == "performance/nothing"
    runner._runs[NORMS] = [KernelRun("rms_norm", "float32", "acme", "call", raised="no luck")]
    outcome = runner.run("numerics", NumericsStage(ops=NORMS))
    assert outcome.state == "failed" and outcome.findings[0].code == "GATE_CHECKS_NOTHING"


def test_errors_of_large_outputs_are_those_of_their_parts_together() -> None:
    """Over several parts: the relative L2 error of the whole; infinite where other places are finite."""
    exact = torch.randn(5, numerics._PART // 2 + 3, dtype=torch.float64).t()
    ours = (exact + 1e-3 * (torch.arange(exact.numel()).view_as(exact) < 99)).float()
    exact[7, 0] = ours[7, 0] = torch.inf
    finite = exact.isfinite()
    whole = float((ours.double() - exact)[finite].norm() / exact[finite].norm())
    assert numerics._error((ours,), (exact,)) == pytest.approx(whole, rel=1e-9) and whole > 0
    ours[-1, -1] = torch.inf
    assert numerics._error((ours,), (exact,)) == float("inf")
    assert numerics._error((torch.ones(4),), (torch.zeros(4),)) == 2.0

"""The stages of a gate, each a function from its thresholds to findings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from layerzero.actors.device.local_device import LocalDevice
from layerzero.api.doctor import doctor
from layerzero.backends import load_builtin
from layerzero.gates.baseline import (
    BaselineCall,
    BaselineRefusedError,
    judge_call,
    measure_call,
    read_baseline,
)
from layerzero.gates.model_parity import compare_model
from layerzero.gates.numerics import KernelRun, default_limit, run_kernels
from layerzero.gates.outcome import Finding, StageOutcome
from layerzero.gates.paired_rounds import PairedResult, compare_paces, tree_of
from layerzero.gates.release_file import (
    CommandStage,
    ContractStage,
    MatrixStage,
    ModelsStage,
    NumericsStage,
    PerformanceStage,
    SchemaStage,
    Stage,
)
from layerzero.gates.stored_files import check_file
from layerzero.perfdb.record import Environment
from layerzero.runtime import Runtime
from layerzero.spec.capability_overlays import problems
from layerzero.spec.errors import ConfigurationError, FileRefusedError, LayerZeroError
from layerzero.spec.reasons import Reason

OWN_TREE = Path(__file__).resolve().parents[2]  # that this process runs
_TAIL = 15
# A baseline may be of another class of machines, of a format before, or too old where there is a tree; one
# that is damaged or has another digest is refused in any case.
_OF_ELSEWHERE = {Reason.BASELINE_ENVIRONMENT_DIFFERS, Reason.BASELINE_FORMAT, Reason.BASELINE_STALE}
# How often a call is measured anew for an answer that counts.
MOST_TRIES = 3


class StageRunner:
    """Runs stages on a runtime's default device; kernels are run once for all stages that look at them."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self._runtime = runtime
        self._folder = folder
        self._runs: dict[tuple[str, ...], list[KernelRun]] = {}

    @property
    def device(self) -> LocalDevice:
        """The device that is judged."""
        return self._runtime.device()

    def run(self, name: str, stage: Stage) -> StageOutcome:
        """The outcome of a stage; an error of the library in it is a finding, too."""
        begin_s = time.monotonic()
        act: Callable[[Any], StageOutcome] = _RUNS[type(stage)].__get__(self)
        try:
            outcome = act(stage)
        except FileRefusedError as error:
            field = "baseline" if isinstance(error, BaselineRefusedError) else ""
            refused = (Finding(field or p.field, str(p), p.reason.value) for p in error.problems)
            outcome = StageOutcome(name, 1, 0.0, tuple(refused))
        except (LayerZeroError, OSError) as error:
            finding = Finding("error", f"{type(error).__name__}: {error}"[:1000])
            outcome = StageOutcome(name, 1, 0.0, (finding,))
        if not outcome.checks:
            code = Reason.GATE_CHECKS_NOTHING
            nothing = Finding("nothing", f"{code.value}: {code.summary}", code.value)
            outcome = msgspec.structs.replace(outcome, findings=(*outcome.findings, nothing))
        findings = tuple(
            msgspec.structs.replace(each, name=f"{name}/{each.name}") for each in outcome.findings
        )
        seconds = round(time.monotonic() - begin_s, 2)
        return msgspec.structs.replace(outcome, stage=name, seconds=seconds, findings=findings)

    def schemas(self, stage: SchemaStage) -> StageOutcome:
        """Every named file holds, and every capability means something."""
        findings, lines, checks = [], [], 0
        for pattern in stage.files:
            paths = sorted(self._folder.glob(pattern))
            if not paths:
                findings.append(Finding(pattern, f"no file matches {pattern!r} in {self._folder}"))
            for path in paths:
                kind, problem = check_file(path)
                checks += 1
                lines.append(f"{path.name}: {kind}")
                if problem:
                    findings.append(Finding(str(path.relative_to(self._folder)), problem))
        for kernel in load_builtin():
            checks += 1
            findings += [Finding(kernel.id, problem) for problem in problems(kernel.capability)]
        return StageOutcome("", checks, 0.0, tuple(findings), tuple(lines))

    def contract(self, stage: ContractStage) -> StageOutcome:
        """Every kernel's outputs are of the schema's number, shape and dtype; no operand is written to."""
        runs = self._kernel_runs(stage.ops)
        findings = [
            Finding(f"{run.op}/{run.dtype}/{run.kernel}", f"{run.call}: {run.raised or run.contract}")
            for run in runs
            if run.raised or run.contract
        ]
        return StageOutcome("", len(runs), 0.0, tuple(findings))

    def numerics(self, stage: NumericsStage) -> StageOutcome:
        """No kernel errs by more than the limit of its op and dtype."""
        findings: list[Finding] = []
        worst: dict[str, float] = {}
        runs = [run for run in self._kernel_runs(stage.ops) if not run.raised and not run.contract]
        for run in runs:
            limit = _limit_of(stage.limits, run)
            key = f"{run.op} {run.dtype}"
            worst[key] = max(worst.get(key, 0.0), run.error / limit if limit else 0.0)
            if not run.error <= limit:
                text = f"{run.call}: relative L2 error {run.error:.3g}, allowed {limit:.3g}"
                findings.append(Finding(f"{run.op}/{run.dtype}/{run.kernel}", text))
        lines = tuple(f"{key}: {share:.0%} of its limit at worst" for key, share in sorted(worst.items()))
        return StageOutcome("", len(runs), 0.0, tuple(findings), lines)

    def performance(self, stage: PerformanceStage) -> StageOutcome:
        """No call is slower than the baseline's or the other tree's, by paired rounds."""
        if stage.baseline:
            try:
                return self._beside_baseline(stage)
            except BaselineRefusedError as error:
                (problem,) = error.problems
                if not stage.against or problem.reason not in _OF_ELSEWHERE:
                    raise
                return self._beside_tree(stage, f" ({stage.baseline} is not for this machine: {problem})")
        return self._beside_tree(stage)

    def _beside_tree(self, stage: PerformanceStage, why: str = "") -> StageOutcome:
        judged, device = OWN_TREE, str(self.device.device)
        with tree_of(stage.against, self._folder, judged) as (tree, description):
            compare = partial(
                compare_paces,
                first=tree,
                second=judged,
                slower=stage.slower,
                rounds=stage.rounds,
                device=device,
            )
            results = [confirm(partial(compare, call)) for call in stage.paced_calls]
        return _paced(stage, results, description + why)

    def _beside_baseline(self, stage: PerformanceStage) -> StageOutcome:
        """Raises: BaselineRefusedError: it may not be compared with here and today."""
        environment, device = Environment.of_hardware(self.device.hardware), str(self.device.device)
        stored = read_baseline(
            self._folder / stage.baseline,
            environment,
            sha256=stage.sha256,
            max_age_days=stage.max_age_days,
            today=datetime.now(UTC).date(),
        )
        only = set(stage.paced_calls)
        if missing := only - {each.call for each in stored.paced}:
            names = ", ".join(sorted(map(str, missing)))
            raise ConfigurationError(f"calls needs calls that {stage.baseline} has, got {names}")
        results = [
            confirm(partial(_against_stored, each, stage, device))
            for each in stored.paced
            if not only or each.call in only
        ]
        return _paced(stage, results, f"the baseline {stage.baseline} of {stored.date}")

    def matrix(self, stage: MatrixStage) -> StageOutcome:
        """The environment has what the release promises."""
        examined = doctor(imports=False)
        platforms = {"cpu", *(device.platform for device in examined.torch.devices)}
        findings = [
            Finding(f"platform/{name}", f"needs a device of {name}, got {', '.join(sorted(platforms))}")
            for name in stage.platforms
            if name not in platforms
        ]
        versions = {
            "torch": examined.torch.version,
            **{each.backend: each.version for each in examined.libraries},
        }
        findings += [
            Finding(f"library/{name}", f"needs {needs}, got {versions.get(name) or 'none'}")
            for name, needs in stage.libraries.items()
            if not _meets(versions.get(name), needs)
        ]
        ready = {each.op for each in examined.kernels if each.ready}
        findings += [
            Finding(f"op/{op}", "needs a kernel that is ready, got none")
            for op in stage.ready_ops
            if op not in ready
        ]
        findings += [Finding("problem", problem) for problem in examined.problems]
        checks = len(stage.platforms) + len(stage.libraries) + len(stage.ready_ops) + 1
        lines = tuple(f"{name} {version or 'missing'}" for name, version in versions.items())
        return StageOutcome("", checks, 0.0, tuple(findings), lines)

    def models(self, stage: ModelsStage) -> StageOutcome:
        """Every line of each model's checklist holds."""
        findings: list[Finding] = []
        lines, checks = [], 0
        for source in stage.models:
            if isinstance(source, str) and (self._folder / source).is_dir():
                source = str(self._folder / source)
            compared = compare_model(source, self.device.device)
            items = [item for item in compared.checklist if item.holds is not None]
            checks += len(items)
            name = Path(compared.model).name
            lines.append(f"{name}: {len(compared.rows)} comparisons")
            findings += [
                Finding(f"{name}/{item.what}", item.evidence[:1000]) for item in items if not item.holds
            ]
        return StageOutcome("", checks, 0.0, tuple(findings), tuple(lines))

    def command(self, stage: CommandStage) -> StageOutcome:
        """The command ends with status 0 within its limit."""
        words = [sys.executable if word == "{python}" else word for word in stage.command]
        try:
            child = subprocess.Popen(
                words,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return StageOutcome("", 1, 0.0, (Finding("command", f"{words[0]}: {error.strerror}"),))
        try:
            text, _ = child.communicate(timeout=stage.limit_s)
        except subprocess.TimeoutExpired:
            _end(child)
            return StageOutcome("", 1, 0.0, (Finding("command", f"took more than {stage.limit_s:g} s"),))
        tail = tuple(text.strip().splitlines()[-_TAIL:])
        if child.returncode == 0:
            return StageOutcome("", 1, 0.0, (), tail)
        ending = tail[-1] if tail else "it printed nothing"
        finding = Finding("command", f"{' '.join(words[:6])} ended with status {child.returncode}: {ending}")
        return StageOutcome("", 1, 0.0, (finding,), tail)

    def _kernel_runs(self, ops: tuple[str, ...]) -> list[KernelRun]:
        if ops not in self._runs:
            self._runs[ops] = list(run_kernels(self.device, ops))
        return self._runs[ops]


_RUNS: Mapping[type[Any], Any] = {
    SchemaStage: StageRunner.schemas,
    ContractStage: StageRunner.contract,
    NumericsStage: StageRunner.numerics,
    PerformanceStage: StageRunner.performance,
    MatrixStage: StageRunner.matrix,
    ModelsStage: StageRunner.models,
    CommandStage: StageRunner.command,
}


def confirm(measure: Callable[[], PairedResult]) -> PairedResult:
    """The first of at most three answers of fresh processes that counts; else the last, as undecided.

    "slower" counts where it comes twice, "as fast" where nothing said "slower" before it or where it comes
    twice. "undecided" counts for neither side, and ends the search where it comes twice.
    """
    answers: list[str] = []
    while True:
        result = measure()
        is_repeated, is_first_side = result.answer in answers, set(answers) <= {"undecided"}
        answers.append(result.answer)
        if is_repeated or (result.answer == "as fast" and is_first_side):
            return result
        if len(answers) == MOST_TRIES:
            why = f"{result.why}; measured {MOST_TRIES} times: {', '.join(answers)}"
            return msgspec.structs.replace(result, answer="undecided", why=why)


def _against_stored(stored: BaselineCall, stage: PerformanceStage, device: str) -> PairedResult:
    measured = measure_call(stored.call, rounds=stage.rounds, device=device)
    return judge_call(stored, measured, slower=stage.slower, rounds=stage.rounds)


def _paced(stage: PerformanceStage, results: list[PairedResult], beside: str) -> StageOutcome:
    lines = tuple(f"{r.call}: {r.answer}, {r.ratio:.3f} times, {r.why}" for r in results)
    findings = tuple(_slow(stage, each) for each in results if each.answer != "as fast")
    return StageOutcome("", len(results), 0.0, findings, lines, beside)


def _slow(stage: PerformanceStage, result: PairedResult) -> Finding:
    code = Reason.PACE_SLOWER if result.answer == "slower" else Reason.PACE_UNDECIDED
    times = f"{result.ratio:.3f} times as long, allowed {1 + stage.slower:.3f}"
    return Finding(result.call, f"{code.value}: {times}; {result.why}", code.value)


def _limit_of(limits: Mapping[str, Mapping[str, float]], run: KernelRun) -> float:
    """The limit of an op and dtype: the file's own, its limit for all ops, or what rounding explains."""
    for op in (run.op, "*"):
        if run.dtype in limits.get(op, {}):
            return limits[op][run.dtype]
    return default_limit(run.dtype)


def _meets(version: str | None, needs: str) -> bool:
    """Whether a version meets a specifier.

    Raises: ConfigurationError: the specifier is none.
    """
    try:
        return version is not None and SpecifierSet(needs).contains(version, prereleases=True)
    except InvalidSpecifier as error:
        raise ConfigurationError(f"libraries needs specifiers such as '>=2.11', got {needs!r}") from error


def _end(child: subprocess.Popen[str]) -> None:
    """End a command and what it started."""
    if hasattr(os, "killpg"):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.communicate()

"""RELEASE.yaml: what it holds, and what is refused with its line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from layerzero.gates.paired_rounds import PacedCall
from layerzero.gates.release_file import (
    SUITES,
    CommandStage,
    NumericsStage,
    PerformanceStage,
    Release,
    ReleaseFileError,
    read_release,
)
from layerzero.spec.reasons import Reason

ROOT = Path(__file__).resolve().parents[2]
WHOLE = """
version: 1
suites:
  quick: [numerics]
stages:
  numerics:
    limits: {rms_norm: {float32: 0.001}}
  parity:
    command: ["{python}", "-c", "0"]
    limit_s: 60
  performance:
    calls: ["rms_norm x=1x8:float32", {call: "linear x=1x8:float32 weight=8x8:float32", callers: 4}]
    against: ../last
waivers:
  - {finding: "numerics/*", owner: ann, reason: a known one, expires: 2026-12-31}
"""


def written(folder: Path, text: str) -> Release:
    """The release of a file with this text."""
    path = folder / "RELEASE.yaml"
    path.write_text(text)
    return read_release(path)


def test_stages_suites_and_waivers_are_read(tmp_path: Path) -> None:
    """Each stage by its kind; a suite that the file does not name has all stages."""
    release = written(tmp_path, WHOLE)
    assert list(release.stages_of("quick")) == ["numerics"]
    assert list(release.stages_of("full")) == list(release.stages_of("stress")) == list(release.stages)
    numerics, parity, performance = release.stages.values()
    assert isinstance(numerics, NumericsStage) and numerics.limits == {"rms_norm": {"float32": 0.001}}
    assert isinstance(parity, CommandStage) and parity.limit_s == 60
    assert isinstance(performance, PerformanceStage)
    assert performance.paced_calls[1] == PacedCall("linear x=1x8:float32 weight=8x8:float32", 4)
    (waiver,) = release.waivers
    assert (waiver.owner, waiver.last_day.isoformat()) == ("ann", "2026-12-31")
    assert release.folder == tmp_path.resolve()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("version: 1", "version: 2"), r":2: version needs 1, got 2"),
        (("suites:", "suits:"), r"unknown part 'suits'.*suites"),
        (("quick: [numerics]", "quick: [numeric]"), r"unknown stage 'numeric'.*numerics"),
        (("quick: [numerics]", "quick: numerics"), "suite quick needs a list"),
        (("limits:", "limit:"), r":6: stage numerics: .*limit"),
        (("limit_s: 60", "limit_s: soon"), r":8: stage parity: .*limit_s"),
        (("limit_s: 60", "limit_s: -1"), r":8: stage parity: .*limit_s"),
        (("limit_s: 60", "limit_s: .nan"), r"limit_s|nan"),
        (('["{python}", "-c", "0"]', "[]"), r":8: stage parity: .*command"),
        (("callers: 4", "callers: -4"), r"stage performance: .*callers"),
        (("against: ../last", "against: x\n    max_age_days: -1"), r"stage performance: .*max_age_days"),
        (("  numerics:\n", "  schemas: {files: [/etc/*.json]}\n  numerics:\n"), "needs files relative to"),
        (("  numerics:\n", '  schemas: {files: [""]}\n  numerics:\n'), "needs files relative to"),
        (("  parity:\n    command:", "  parity:\n    commands:"), "stage parity needs a command"),
        (("against: ../last", "rounds: 100"), "needs against"),
        (("limit_s: 60", "limit_s: 1.0e+300"), r":8: stage parity: .*limit_s"),
        (("quick: [numerics]", "quick: []"), r":4: suite quick needs at least one stage"),
        (("{rms_norm: {float32", "{rms_nrom: {float32"), r":7: unknown op 'rms_nrom'.*rms_norm"),
        (("{float32: 0.001}", "{float23: 0.001}"), r":7: unknown dtype 'float23'.*float32"),
        (('"numerics/*"', '"*"'), r":15: unknown stage of a waiver '\*'"),
        (('"numerics/*"', '"numeric/*"'), r":15: unknown stage of a waiver 'numeric'.*numerics"),
        (("quick: [numerics]", "quick: [numerics]\n  quick: [parity]"), "quick"),
        (("against: ../last", "against: x\n    slower: 0"), "needs slower between"),
        (("owner: ann, ", ""), "waiver 1 needs finding, owner, reason and expires"),
        (("owner: ann", 'owner: " "'), "waiver 1 needs owner, got an empty text"),
        (("2026-12-31", "someday"), r":15: waiver 1 needs .*expires"),
        (("stages:", "stages: []\nwaiver:"), "stages|waiver"),
        (("  parity:", "  ../parity:"), r":8: stage '\.\./parity' needs a name of letters"),
        (("  parity:", "  a/b:"), r":8: stage 'a/b' needs a name of letters"),
        (("  parity:", "  numerics*:"), r":8: stage 'numerics\*' needs a name of letters"),
        (("  parity:", "  waivers:"), r":8: stage 'waivers' needs a name .* other than waivers"),
        (("waivers:", "waivers: 0\nx:"), "unknown part 'x'"),
        (("waivers:\n", "waivers: 0\n#"), r":14: waivers needs a list, got int"),
        (("version: 1", "version: true"), r":2: version needs 1, got True"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    """Another version, misspelt parts, missing fields, waivers without an owner or an end."""
    assert change[0] in WHOLE
    with pytest.raises(ReleaseFileError, match=f"^RELEASE_INVALID: .*(?:{said})") as caught:
        written(tmp_path, WHOLE.replace(*change))
    assert caught.value.context["reason"] is Reason.RELEASE_INVALID


def test_a_file_without_stages_or_suite_is_refused(tmp_path: Path) -> None:
    """Nothing to run, a suite that is not there, a cut file, no file."""
    with pytest.raises(ReleaseFileError, match="stages needs at least one"):
        written(tmp_path, "version: 1\n")
    with pytest.raises(ReleaseFileError, match="suite needs one of quick, full, stress"):
        written(tmp_path, WHOLE).stages_of("nightly")
    with pytest.raises(ReleaseFileError):
        written(tmp_path, WHOLE[: WHOLE.index("waivers") + 30])
    with pytest.raises(ReleaseFileError, match="cannot be read"):
        read_release(tmp_path / "missing.yaml")


def test_the_stress_suite_holds_a_bound_on_coverage() -> None:
    """K11: our own file runs a target that fails below nine lines in ten, and fuzzes every parser."""
    root = Path(__file__).resolve().parents[2]
    stages = read_release(root / "RELEASE.yaml").stages_of("stress")
    commands = {name: stage.command for name, stage in stages.items() if isinstance(stage, CommandStage)}
    assert list(commands["coverage"][:2]) == ["make", "coverage"] and "1000000" in commands["fuzz"]
    project = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["coverage"]
    assert project["report"]["fail_under"] >= 90
    assert "-m scripts.coverage_pieces" in (root / "Makefile").read_text()
    # By folder, since no walk follows the links below layerzero: a module that nothing imports counts.
    assert project["run"]["source_dirs"] == ["layerzero", "actors", "scheduler"]
    assert {"_exit", "fork", "subprocess"} <= set(project["run"]["patch"])


def test_the_release_of_this_project_names_what_is_there() -> None:
    """What it compares with is one commit for ever, its scripts exist, and every suite has stages."""
    release = read_release(ROOT / "RELEASE.yaml")
    stages = release.stages
    performance = stages["performance"]
    assert isinstance(performance, PerformanceStage)
    assert re.fullmatch("git:[0-9a-f]{40}", performance.against) and not performance.baseline
    assert all(release.stages_of(suite) for suite in (*SUITES, "contract", "matrix", "performance"))
    words = [word for stage in stages.values() if isinstance(stage, CommandStage) for word in stage.command]
    paths = [word for word in words if "/" in word and not word.startswith(("-", "build/"))]
    assert paths and all((ROOT / path).exists() for path in paths)

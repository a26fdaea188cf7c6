"""RELEASE.yaml: which stages a suite runs, their thresholds, and waivers that name an owner and an end."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import torch
from msgspec import Meta

from layerzero._util.strict_yaml import quote
from layerzero.gates.paired_rounds import ROUNDS, PacedCall
from layerzero.ops import table as ops_table
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.reasons import Reason
from layerzero.spec.user_file import UserFile

FORMAT: Final = 1
SUITES: Final = ("quick", "full", "stress")
_DTYPES: Final = tuple(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))
_TOP: Final = ("version", "suites", "stages", "waivers")
# Of a stage: files of a release and patterns of waivers have it in them.
_NAME: Final = re.compile(r"(?!waivers$)\w[\w.-]*", re.ASCII)


class ReleaseFileError(ConfigurationError):
    """A release file cannot be read, or a part of it is unknown, missing or wrong (RELEASE_INVALID)."""

    def __init__(self, message: str, **context: Any) -> None:
        reason = Reason.RELEASE_INVALID
        super().__init__(f"{reason.value}: {message}", reason=reason, **context)


class SchemaStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every file that matches `files` (patterns from the release file) holds, and every capability."""

    files: tuple[str, ...] = ()


class ContractStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every kernel that takes a call gives what the schema says, for `ops` or all with standard shapes."""

    ops: tuple[str, ...] = ()


class NumericsStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Largest relative L2 error against float64 by op and dtype; `limits` of "*" hold for all ops."""

    ops: tuple[str, ...] = ()
    limits: dict[str, dict[str, float]] = {}


class PerformanceStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """No call is slower by more than the share `slower` than a `baseline`, or than the tree `against`.

    A baseline needs its `sha256`, and at most `max_age_days` of age. A tree is a folder or `git:REVISION`;
    with both, it is for machines that the baseline is not of. `rounds` bounds the paired rounds of a call.
    """

    calls: tuple[str | PacedCall, ...] = ()
    against: str = ""
    baseline: str = ""
    sha256: str = ""
    max_age_days: Annotated[float, Meta(ge=0)] = 180.0
    slower: float = 0.05
    rounds: int = ROUNDS

    @property
    def paced_calls(self) -> tuple[PacedCall, ...]:
        """The calls; a plain string is one without callers."""
        return tuple(PacedCall(call) if isinstance(call, str) else call for call in self.calls)


class MatrixStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the environment needs: `platforms` of devices, `libraries` by version, ops with a ready kernel."""

    platforms: tuple[str, ...] = ()
    libraries: dict[str, str] = {}
    ready_ops: tuple[str, ...] = ()


class ModelsStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whole models hold beside themselves in float64, as `lz parity` compares them.

    A model is a folder (from the release file), a name of the hub, or the fields of a configuration with its
    `model_type`, which gets random weights.
    """

    models: Annotated[tuple[str | dict[str, Any], ...], Meta(min_length=1)]


class CommandStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A command whose exit status decides; the word `{python}` is this interpreter."""

    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    limit_s: Annotated[float, Meta(gt=0, le=1e7)] = 3600.0


Stage = (
    SchemaStage | ContractStage | NumericsStage | PerformanceStage | MatrixStage | ModelsStage | CommandStage
)
BUILT_IN: Final[Mapping[str, type[Any]]] = {
    "schemas": SchemaStage, "contract": ContractStage, "numerics": NumericsStage,
    "performance": PerformanceStage, "matrix": MatrixStage, "models": ModelsStage,
}  # fmt: skip


class Waiver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finding that does not fail the gate up to the day `expires`; `finding` may have wildcards."""

    finding: str
    owner: str
    reason: str
    expires: str

    @property
    def last_day(self) -> date:
        """The last day on which it holds.

        Raises: ValueError: it is no date.
        """
        return date.fromisoformat(self.expires)

    def covers(self, finding: str) -> bool:
        """Whether it speaks of that finding."""
        return finding == self.finding or fnmatchcase(finding, self.finding)


class Release(msgspec.Struct, frozen=True):
    """A release file, checked: stages by name in their order, suites, waivers, and the folder it is in."""

    path: str
    stages: dict[str, Stage]
    suites: dict[str, tuple[str, ...]]
    waivers: tuple[Waiver, ...]

    @property
    def folder(self) -> Path:
        """What its paths are relative to."""
        return Path(self.path).resolve().parent

    def stages_of(self, suite: str) -> dict[str, Stage]:
        """The stages of a suite, in the order that the suite has.

        Raises: ReleaseFileError: the file has no such suite.
        """
        if suite not in self.suites:
            names = ", ".join(self.suites)
            raise ReleaseFileError(f"suite needs one of {names} in {self.path}, got {suite!r}")
        return {name: self.stages[name] for name in self.suites[suite]}


def read_release(path: str | os.PathLike[str]) -> Release:
    """Read and check a release file.

    Raises: ReleaseFileError: it cannot be read, or a part of it is unknown, missing or wrong, with its line.
    """
    file = UserFile(path, kind=ReleaseFileError)
    file.refuse_unknown(file.value, _TOP, "part")
    version = file.value.get("version")
    if version is True or version != FORMAT:
        raise file.error(("version",), f"version needs {FORMAT}, got {version!r}")
    stages = {name: _stage(file, name, entry) for name, entry in _mapping(file, "stages").items()}
    if not stages:
        raise file.error((), f"stages needs at least one of {', '.join(BUILT_IN)}, or one with a command")
    suites = {name: _suite(file, name, entry, stages) for name, entry in _mapping(file, "suites").items()}
    for name in SUITES:
        suites.setdefault(name, tuple(stages))
    entries = file.value.get("waivers")
    if entries is None:
        entries = []
    if not isinstance(entries, list):
        raise file.error(("waivers",), f"waivers needs a list, got {type(entries).__name__}")
    waivers = tuple(_waiver(file, place, entry, stages) for place, entry in enumerate(entries))
    return Release(os.fspath(path), stages, suites, waivers)


def _mapping(file: UserFile, name: str) -> dict[str, Any]:
    value = file.value.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise file.error((name,), f"{name} needs a mapping by name, got {type(value).__name__}")
    return value


def _stage(file: UserFile, name: str, entry: Any) -> Stage:
    place = ("stages", name)
    if not _NAME.fullmatch(name):
        needs = "a name of letters, digits, '_', '.' and '-' other than waivers, the gate's own"
        raise file.error(place, f"stage {quote(name)} needs {needs}")
    if not isinstance(entry, dict):
        raise file.error(place, f"stage {name} needs a mapping, got {type(entry).__name__}")
    kind = CommandStage if "command" in entry else BUILT_IN.get(name)
    if kind is None:
        raise file.error(place, f"stage {name} needs a command, or one of the names {', '.join(BUILT_IN)}")
    try:
        stage: Stage = msgspec.convert(entry, kind)
    except msgspec.ValidationError as error:
        raise file.error(place, f"stage {name}: {error}") from error
    if isinstance(stage, SchemaStage):
        absolute = [pattern for pattern in stage.files if not pattern or Path(pattern).is_absolute()]
        if absolute:
            raise file.error(place, f"stage {name} needs files relative to its own, got {absolute[0]!r}")
    if isinstance(stage, NumericsStage):
        file.refuse_unknown(stage.limits, ("*", *ops_table.names()), "op", (*place, "limits"))
        for op, limits in stage.limits.items():
            file.refuse_unknown(limits, _DTYPES, "dtype", (*place, "limits", op))
    if isinstance(stage, PerformanceStage):
        _check_performance(file, stage)
    return stage


def _check_performance(file: UserFile, stage: PerformanceStage) -> None:
    place = ("stages", "performance")
    if not stage.against and not stage.baseline:
        raise file.error(place, "stage performance needs against (a tree), baseline (a file) or both")
    if stage.against and not stage.calls:
        raise file.error(place, "stage performance needs calls to measure against another tree")
    if not 0 < stage.slower < 10 or stage.rounds < 20:
        message = "stage performance needs slower between 0 and 10 and at least 20 rounds"
        raise file.error(place, f"{message}, got {stage.slower:g} and {stage.rounds}")


def _suite(file: UserFile, name: str, entry: Any, stages: Mapping[str, Stage]) -> tuple[str, ...]:
    place = ("suites", name)
    if not isinstance(entry, list) or not all(isinstance(each, str) for each in entry):
        raise file.error(place, f"suite {name} needs a list of names of stages")
    if not entry:
        raise file.error(place, f"suite {name} needs at least one stage: it would pass whatever is wrong")
    file.refuse_unknown(entry, stages, "stage", place)
    return tuple(dict.fromkeys(entry))


def _waiver(file: UserFile, number: int, entry: Any, stages: Iterable[str]) -> Waiver:
    place = ("waivers", number)
    try:
        waiver = msgspec.convert(entry, Waiver)
        waiver.last_day  # noqa: B018
    except (msgspec.ValidationError, ValueError) as error:
        needs = "finding, owner, reason and expires (YYYY-MM-DD)"
        raise file.error(place, f"waiver {number + 1} needs {needs}: {error}") from error
    empty = [name for name in ("finding", "owner", "reason") if not getattr(waiver, name).strip()]
    if empty:
        raise file.error(place, f"waiver {number + 1} needs {' and '.join(empty)}, got an empty text")
    file.refuse_unknown([waiver.finding.partition("/")[0]], stages, "stage of a waiver", place)
    return waiver

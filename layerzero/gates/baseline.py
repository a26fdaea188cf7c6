"""A stored baseline: each call's time over plain torch's on one class of machine, with a hash of itself.

No time is compared with one of another moment. Each round times the call, a yardstick (plain torch, awaited
where the call is) and a reference (a fixed product) beside each other. Stored are the call over the yardstick
and, as a control, the yardstick over the reference. No code of ours runs in the control: by as much as it has
moved since, the machine may have moved the call, too. A difference within that, or within what groups of
rounds differ by, is undecided; so is all that a busy machine measures: where threads wait for a core, a part
of the time that is not the call's hides what the call has become.
"""

from __future__ import annotations

import hashlib
import os
import statistics
from collections.abc import Sequence
from datetime import UTC, date, datetime
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Final

import msgspec

from layerzero._util.files import decode_json, read_given
from layerzero._util.version import VERSION
from layerzero.gates.paired_rounds import PacedCall, PairedResult, measure_beside_torch
from layerzero.perfdb.record import Environment
from layerzero.perfdb.table_file import content_hash, write_table_file
from layerzero.spec.errors import FileRefusedError
from layerzero.spec.reasons import Reason

FORMAT: Final = 2
# All groups of a call that is as long as the limit lie on one side of it once in 256 times by chance.
GROUPS: Final = 8
# What groups and what the middle half of the rounds may differ by where nothing else runs; tries to write.
MOST_SPREAD: Final = 1.1
MOST_SCATTER: Final = 1.25
TRIES: Final = 3
# What has to be equal for a stored ratio to mean the same: the machine's class, and torch, which it is over.
_CLASS: Final = ("platform", "device", "vendor", "sm", "isa", "torch", "cuda")


_Ratio = Annotated[float, msgspec.Meta(gt=0)]


class RatioStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The median of a ratio over all rounds, the least and the largest median of a group of rounds.

    `scatter` is how many times the lower quartile of all rounds the upper one is.
    """

    median: _Ratio
    lowest: _Ratio
    highest: _Ratio
    scatter: _Ratio

    @classmethod
    def of_rounds(cls, ratios: Sequence[float]) -> RatioStats:
        """Of at least `GROUPS` rounds in their order; a group is rounds that follow each other."""
        bounds = [len(ratios) * group // GROUPS for group in range(GROUPS + 1)]
        groups = [statistics.median(ratios[a:b]) for a, b in pairwise(bounds)]
        lower, middle, upper = statistics.quantiles(ratios, n=4)
        return cls(*(round(each, 5) for each in (middle, min(groups), max(groups), upper / lower)))


class BaselineCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call over its yardstick, the yardstick over the reference, and the load average beside them."""

    call: PacedCall
    ratio: RatioStats
    control: RatioStats
    load: float

    @property
    def unrest(self) -> str:
        """How the rounds disagree with each other more than on a quiet machine; empty where they do not."""
        ratios = (self.ratio, self.control)
        spread = max(each.highest / each.lowest for each in ratios)
        scatter = max(each.scatter for each in ratios)
        if spread <= MOST_SPREAD and scatter <= MOST_SCATTER:
            return ""
        return (
            f"groups of rounds {spread:.2f} times each other (at most {MOST_SPREAD:g}), quartiles "
            f"{scatter:.2f} times (at most {MOST_SCATTER:g}), at a load of {self.load:g}"
        )


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Calls measured on one machine; `content` is the hash of `paced`."""

    format: int = FORMAT
    date: str
    version: str
    environment: Environment
    content: str
    paced: tuple[BaselineCall, ...]


class BaselineRefusedError(FileRefusedError):
    """A baseline is old, cut, of another machine, or not known to be the wanted one."""


def measure_baseline(
    calls: Sequence[PacedCall], environment: Environment, *, rounds: int, device: str
) -> Baseline:
    """Measure every call beside plain torch.

    Raises: BaselineRefusedError: the rounds of a call disagree with each other in every try
        (BASELINE_UNSTEADY).
    """
    paced = tuple(_measure_steady(call, rounds, device) for call in calls)
    today = datetime.now(UTC).date().isoformat()
    return Baseline(
        date=today, version=VERSION, environment=environment, content=content_hash(paced), paced=paced
    )


def measure_call(call: PacedCall, *, rounds: int, device: str) -> BaselineCall:
    """A call, its yardstick and the reference, in rounds.

    Raises: ConfigurationError: the call does not run.
    """
    times = measure_beside_torch(call, rounds=rounds, device=device)
    return BaselineCall(
        call,
        RatioStats.of_rounds([ours / yardstick for _, yardstick, ours in times]),
        RatioStats.of_rounds([yardstick / reference for reference, yardstick, _ in times]),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
    )


def _measure_steady(call: PacedCall, rounds: int, device: str) -> BaselineCall:
    unrest = ""
    for _ in range(TRIES):
        measured = measure_call(call, rounds=rounds, device=device)
        if not (unrest := measured.unrest):
            return measured
    needs, cure = "rounds that agree with each other", "measure while the machine does nothing else"
    raise BaselineRefusedError.because("baseline", Reason.BASELINE_UNSTEADY, str(call), needs, unrest, cure)


def judge_call(stored: BaselineCall, later: BaselineCall, *, slower: float, rounds: int) -> PairedResult:
    """Whether a call is slower than it was by more than the share `slower`, as far as noise lets one say."""
    name, ratio = str(stored.call), later.ratio.median / stored.ratio.median
    for when, measured in (("stored", stored), ("now", later)):
        if unrest := measured.unrest:
            return PairedResult(name, "undecided", rounds, ratio, f"{when} {unrest}")
    moved = later.control.median / stored.control.median
    unsure = max(moved, 1 / moved)
    lowest = later.ratio.lowest / stored.ratio.highest / unsure
    highest = later.ratio.highest / stored.ratio.lowest * unsure
    why = (
        f"between {lowest:.3f} and {highest:.3f} times with the noise; torch over a fixed product is "
        f"{moved:.3f} times what it was (load {stored.load:g} then, {later.load:g} now)"
    )
    if highest <= 1 + slower:
        return PairedResult(name, "as fast", rounds, ratio, why)
    return PairedResult(name, "slower" if lowest > 1 + slower else "undecided", rounds, ratio, why)


def write_baseline(path: str | os.PathLike[str], baseline: Baseline) -> str:
    """Write it, whole or not at all; the SHA-256 that a release file names it by.

    Raises: FileExistsError: `path` is another kind of file.
    """
    write_table_file(path, baseline, "paced")
    return hashlib.sha256(read_given(path)).hexdigest()


def read_baseline(
    path: str | os.PathLike[str], environment: Environment, *, sha256: str, max_age_days: float, today: date
) -> Baseline:
    """The baseline of a file, if it may be compared with on this machine today.

    Raises: BaselineRefusedError: it is not the one that `sha256` names, or none is named
        (BASELINE_UNTRUSTED), is cut or altered (BASELINE_DAMAGED), of another format (BASELINE_FORMAT), of
        another machine or torch (BASELINE_ENVIRONMENT_DIFFERS), or too old (BASELINE_STALE).
    """
    refuse = partial(BaselineRefusedError.because, path)
    try:
        data = read_given(path)
        stated = decode_json(data, dict[str, Any]).get("format")
        if stated != FORMAT:
            cure = "write it again: an older one has no yardstick, and what it lacks cannot be made up"
            raise refuse(Reason.BASELINE_FORMAT, "format", f"{FORMAT}", f"{stated}", cure)
        baseline = decode_json(data, Baseline)
        measured = date.fromisoformat(baseline.date)
    except FileNotFoundError as error:
        raise refuse(Reason.BASELINE_DAMAGED, "file", "a baseline", "no file") from error
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise refuse(Reason.BASELINE_DAMAGED, "file", "a whole baseline", str(error)) from error
    if baseline.content != content_hash(baseline.paced):
        raise refuse(Reason.BASELINE_DAMAGED, "content", "the hash of its calls", "another")
    digest = hashlib.sha256(data).hexdigest()
    if sha256 != digest:
        needs = f"the file of SHA-256 {sha256[:16]}" if sha256 else "sha256 in the release file"
        raise refuse(Reason.BASELINE_UNTRUSTED, "sha256", needs, digest[:16], f"sha256: {digest}")
    differing = [
        f"{name} {getattr(baseline.environment, name)}"
        for name in _CLASS
        if getattr(baseline.environment, name) != getattr(environment, name)
    ]
    if differing:
        needed = "; ".join(
            f"{each.partition(' ')[0]} {getattr(environment, each.partition(' ')[0])}" for each in differing
        )
        raise refuse(Reason.BASELINE_ENVIRONMENT_DIFFERS, "environment", needed, "; ".join(differing))
    age_days = (today - measured).days
    if age_days < -1:  # by a day clocks may differ
        raise refuse(Reason.BASELINE_DAMAGED, "date", f"a day up to {today}", baseline.date)
    if age_days > max_age_days:
        raise refuse(Reason.BASELINE_STALE, "date", f"at most {max_age_days:g} days", f"{age_days} days")
    return baseline

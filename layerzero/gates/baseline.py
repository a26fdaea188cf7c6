"""A stored baseline: each call's time over plain torch's on one class of machine, with a hash of itself."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from datetime import UTC, date, datetime
from typing import Final

import msgspec

from layerzero._util.files import decode_json, read_given
from layerzero._util.version import VERSION
from layerzero.gates.paired_rounds import PacedCall, PairedResult, measure_ratio
from layerzero.perfdb.record import Environment
from layerzero.perfdb.table_file import content_hash, write_table_file
from layerzero.spec.errors import FileRefusedError
from layerzero.spec.reasons import Reason, Rejected

FORMAT: Final = 1
# What has to be equal for a stored ratio to mean the same: the machine's class, and torch, which it is over.
_CLASS: Final = ("platform", "device", "vendor", "sm", "isa", "torch", "cuda")


class BaselineCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call: its time over plain torch's, and both in microseconds."""

    call: PacedCall
    ratio: float
    us: float
    anchor_us: float


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
    """Measure every call beside plain torch."""
    results = [(call, measure_ratio(call, rounds=rounds, device=device)) for call in calls]
    paced = tuple(_stored(call, result) for call, result in results)
    today = datetime.now(UTC).date().isoformat()
    return Baseline(
        date=today, version=VERSION, environment=environment, content=content_hash(paced), paced=paced
    )


def _stored(call: PacedCall, result: PairedResult) -> BaselineCall:
    return BaselineCall(
        call, round(result.ratio, 4), us=round(result.second_us, 3), anchor_us=round(result.first_us, 3)
    )


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

    def refuse(
        reason: Reason, field: str, needs: str, got: str, cure: str | None = None
    ) -> BaselineRefusedError:
        return BaselineRefusedError.of(path, Rejected(reason, field, needs, got[:200], cure))

    try:
        data = read_given(path)
        baseline = decode_json(data, Baseline)
        measured = date.fromisoformat(baseline.date)
    except FileNotFoundError as error:
        raise refuse(Reason.BASELINE_DAMAGED, "file", "a baseline", "no file") from error
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise refuse(Reason.BASELINE_DAMAGED, "file", "a whole baseline", str(error)) from error
    if baseline.format != FORMAT:
        raise refuse(Reason.BASELINE_FORMAT, "format", f"{FORMAT}", f"{baseline.format}")
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
    if age_days > max_age_days:
        raise refuse(Reason.BASELINE_STALE, "date", f"at most {max_age_days:g} days", f"{age_days} days")
    return baseline

"""Tables of measurements that come with the package: one JSON file for a class of hardware.

A table is written by `lz tune --table`, holds its own content hash, and is used where the hardware is of the
same class; software versions may differ, which the table's provenance says.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import statistics
from collections.abc import Iterable
from pathlib import Path

import msgspec

from layerzero._util import log
from layerzero._util.files import decoded, read_given, replace_own
from layerzero.perfdb.record import Environment, Measurement, Site
from layerzero.spec.errors import CacheCorruptionError
from layerzero.spec.hardware import Hardware

FORMAT = 1
TABLE_REFUSED = "shipped_table.refused"


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who made a table, when and with what; `command` makes it again."""

    command: str
    date: str
    version: str
    environment: Environment
    libraries: tuple[str, ...] = ()
    note: str = ""


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements for one class of hardware; `content` is the hash of `rows`."""

    format: int = FORMAT
    provenance: Provenance
    content: str
    rows: tuple[Measurement, ...]

    def fits(self, hardware: Hardware) -> bool:
        """Whether the table's class of hardware is `hardware`'s: the same GPU, or the same kind of CPU."""
        own, theirs = self.provenance.environment, Environment.of(hardware)
        if own.platform != theirs.platform:
            return False
        if own.platform == "cpu":
            ratio = own.threads / max(1, theirs.threads)
            return own.vendor == theirs.vendor and own.isa == theirs.isa and 0.4 < ratio < 2.5
        return own.device == theirs.device and own.sm == theirs.sm


def content_hash(rows: tuple[Measurement, ...]) -> str:
    """The hash that a table states of its rows."""
    return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()


def condensed(rows: Iterable[Measurement]) -> list[Measurement]:
    """One row for each kernel on each call: of several tunes the median, of two their geometric mean.

    Its variance holds what the tunes differ by, too; its date is the newest.
    """
    tunes: dict[tuple[Site, str, str, str], list[Measurement]] = {}
    for row in rows:
        tunes.setdefault((row.site, row.kernel, row.launch, row.cache), []).append(row)
    return [own[0] if len(own) == 1 else _together(own) for own in tunes.values()]


def _together(tunes: list[Measurement]) -> Measurement:
    medians = [row.median_us for row in tunes]
    return msgspec.structs.replace(
        max(tunes, key=lambda row: row.at),
        median_us=round(math.exp(statistics.median(map(math.log, medians))), 4),
        p95_us=round(statistics.median(row.p95_us for row in tunes), 4),
        variance=round(statistics.mean(row.variance for row in tunes) + statistics.pvariance(medians), 6),
        samples=sum(row.samples for row in tunes),
    )


def write_table(path: str | os.PathLike[str], provenance: Provenance, rows: list[Measurement]) -> Table:
    """Write rows as a table, whole or not at all; the rows are sorted so that a diff reads well.

    Raises: FileExistsError: `path` is another kind of file.
    """
    ordered = tuple(sorted(rows, key=lambda r: (r.site.op, r.site.dims, r.site.features, r.kernel, r.launch)))
    table = Table(provenance=provenance, content=content_hash(ordered), rows=ordered)
    head = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(table, rows=())), indent=1)
    lines = b",\n".join(b"  " + msgspec.json.encode(row) for row in ordered)
    data = head.replace(b'"rows": []', b'"rows": [\n' + lines + b"\n ]") + b"\n"
    replace_own(Path(path), data, "rows")
    return table


def read_table(path: str | os.PathLike[str]) -> Table:
    """A table out of its file.

    Raises: CacheCorruptionError: it does not decode, is of another format, or its rows do not match its hash.
    """
    try:
        table = decoded(read_given(path), Table)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise CacheCorruptionError(f"{path}: {error}", path=str(path)) from error
    if table.format != FORMAT:
        raise CacheCorruptionError(f"{path}: format needs {FORMAT}, got {table.format}", path=str(path))
    if content_hash(table.rows) != table.content:
        raise CacheCorruptionError(f"{path}: its rows do not match its content hash", path=str(path))
    return table


def fitting_tables(hardware: Hardware, folder: Path) -> list[Table]:
    """The tables of `folder` for a device's class of hardware, nearest in threads first; bad ones left out.

    A table's file is named `<platform>_<what>.json`, so that those of other platforms are not even read.
    """
    found = [table for table in _all(folder, hardware.platform) if table.fits(hardware)]
    return sorted(found, key=lambda t: abs(t.provenance.environment.threads - hardware.threads))


@functools.cache
def _all(folder: Path, platform: str) -> tuple[Table, ...]:
    tables: list[Table] = []
    for path in sorted(folder.glob(f"{platform}_*.json")):
        try:
            tables.append(read_table(path))
        except CacheCorruptionError as error:
            log.error(TABLE_REFUSED, path=str(path), error=str(error))
    return tuple(tables)

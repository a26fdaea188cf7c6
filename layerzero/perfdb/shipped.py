"""Tables of measurements that come with the package: one JSON file for a class of hardware.

A table is written by `lz tune --table`, holds its own content hash, and is used where the hardware is of the
same class; software versions may differ, which the table's provenance says.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
from collections.abc import Iterable
from pathlib import Path

import msgspec

from layerzero._util import log
from layerzero.perfdb.record import BenchmarkCase, Environment, Measurement
from layerzero.perfdb.table_file import Plain, content_hash, read_table_file, write_table_file
from layerzero.spec.errors import CacheCorruptionError
from layerzero.spec.hardware import Hardware

FORMAT = 2
TABLE_REFUSED = "shipped_table.refused"


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who made a table, when and with what; `command` makes it again."""

    command: str
    date: str
    version: str
    environment: Environment
    libraries: tuple[str, ...] = ()
    note: str = ""


class ShippedTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements for one class of hardware; `content` is the hash of `rows`."""

    format: int = FORMAT
    provenance: Provenance
    content: str
    rows: tuple[Measurement, ...]

    def fits(self, hardware: Hardware) -> bool:
        """Whether the table's class of hardware is `hardware`'s: the same GPU, or the same kind of CPU."""
        measured_on, this_machine = self.provenance.environment, Environment.of_hardware(hardware)
        if measured_on.platform != this_machine.platform:
            return False
        if measured_on.platform == "cpu":
            ratio = measured_on.threads / max(1, this_machine.threads)
            return (
                measured_on.vendor == this_machine.vendor
                and measured_on.isa == this_machine.isa
                and 0.4 < ratio < 2.5
            )
        return measured_on.device == this_machine.device and measured_on.sm == this_machine.sm


def condense(rows: Iterable[Measurement]) -> list[Measurement]:
    """One row for each kernel on each call: of several tunes the median, of two their geometric mean.

    Its variance holds what the tunes differ by, too; its date is the newest.
    """
    tunes: dict[tuple[BenchmarkCase, str, str, str], list[Measurement]] = {}
    for row in rows:
        tunes.setdefault((row.case, row.kernel, row.launch, row.cache), []).append(row)
    return [group[0] if len(group) == 1 else _combine(group) for group in tunes.values()]


def _combine(tunes: list[Measurement]) -> Measurement:
    medians = [row.median_us for row in tunes]
    return msgspec.structs.replace(
        max(tunes, key=lambda row: row.timestamp),
        median_us=round(math.exp(statistics.median(map(math.log, medians))), 4),
        p95_us=round(statistics.median(row.p95_us for row in tunes), 4),
        variance=round(statistics.mean(row.variance for row in tunes) + statistics.pvariance(medians), 6),
        samples=sum(row.samples for row in tunes),
    )


def write_table(
    path: str | os.PathLike[str], provenance: Provenance, rows: list[Measurement]
) -> ShippedTable:
    """Write rows as a table, whole or not at all; the rows are sorted so that a diff reads well.

    Raises: FileExistsError: `path` is another kind of file.
    """
    ordered = tuple(sorted(rows, key=lambda r: (r.case.op, r.case.dims, r.case.features, r.kernel, r.launch)))
    table = ShippedTable(provenance=provenance, content=content_hash(ordered), rows=ordered)
    write_table_file(path, table, "rows")
    return table


def read_table(path: str | os.PathLike[str]) -> ShippedTable:
    """A table out of its file.

    Raises: CacheCorruptionError: it does not decode, is of another format, or its rows do not match its hash.
    """
    return read_table_file(path, ShippedTable, "rows", MIGRATIONS, format=FORMAT)


def _renamed(table: Plain) -> Plain:
    """Format 1 said `site` for the call and `at` for the time."""
    for row in table["rows"]:
        row["case"] = row.pop("site")
        if "at" in row:
            row["timestamp"] = row.pop("at")
    return table


MIGRATIONS = {1: _renamed}


def fitting_tables(hardware: Hardware, folder: Path) -> list[ShippedTable]:
    """The tables of `folder` for a device's class of hardware, nearest in threads first; bad ones left out.

    A table's file is named `<platform>_<what>.json`, so that those of other platforms are not even read.
    """
    fitting = [table for table in _tables_of(folder, hardware.platform) if table.fits(hardware)]
    return sorted(fitting, key=lambda t: abs(t.provenance.environment.threads - hardware.threads))


@functools.cache
def _tables_of(folder: Path, platform: str) -> tuple[ShippedTable, ...]:
    tables: list[ShippedTable] = []
    for path in sorted(folder.glob(f"{platform}_*.json")):
        try:
            tables.append(read_table(path))
        except CacheCorruptionError as error:
            log.error(TABLE_REFUSED, path=str(path), error=str(error))
    return tuple(tables)

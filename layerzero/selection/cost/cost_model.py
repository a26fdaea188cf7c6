"""What a device expects kernels to cost: its own measurements, then shipped tables, then estimates."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from layerzero._util import files, log
from layerzero.selection.context import CostModel
from layerzero.selection.cost.roofline import MEASURED, SHIPPED
from layerzero.selection.decide import roofline_cost
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings

if TYPE_CHECKING:
    from layerzero.perfdb import Measurement
    from layerzero.perfdb.shipped import ShippedTable

FILE = "perfdb.sqlite"
TABLES = Path(__file__).resolve().parents[2] / "tables"
ROWS_STALE = "perfdb.rows_stale"
# The model of a shipped table alone, by kind of device: a runtime that is opened again reuses it.
_SHIPPED_ONLY: dict[str, tuple[ShippedTable, Mapping[str, Kernel], Hardware, CostModel]] = {}


def perfdb_path(settings: Settings) -> Path | None:
    """The file of this machine's measurements; None where none are kept.

    Raises: ConfigurationError: what the settings name is a folder.
    """
    if settings.perfdb is None:
        return None
    if settings.perfdb != "auto":
        if (path := Path(settings.perfdb)).is_dir():
            raise ConfigurationError(
                f'perfdb (LAYERZERO_PERFDB) needs a file, "auto" or None, got the folder {path}',
                field="perfdb",
            )
        return path
    if settings.state_dir is not None:
        return Path(settings.state_dir) / FILE
    return files.user_folder(FILE)


def has_measurements(settings: Settings, hardware: Hardware) -> bool:
    """Whether there is anything to read for a device; nothing is read for the answer."""
    path = perfdb_path(settings)
    shipped = settings.shipped_tables and any(TABLES.glob(f"{hardware.platform}_*.json"))
    return shipped or (path is not None and path.is_file())


def load_costs(
    settings: Settings,
    kernels: Mapping[str, Kernel],
    hardware: Hardware,
    unsaved: tuple[Measurement, ...] = (),
    *,
    excluded: Collection[Hashable] = (),
    wall: Callable[[], float] = time.time,
) -> CostModel:
    """The cost model that the settings give a device; `unsaved` are measurements that no file holds (yet).

    Rows of other versions of a kernel's libraries, and rows older than `Settings.perfdb_days` by the clock
    `wall` (seconds since 1970), are left out, and said so. `excluded` holds measurement keys that no longer
    count.
    """
    # Imported where it is used: a process's first call does not wait for measurements.
    from layerzero.perfdb import Environment, versions_of
    from layerzero.selection.cost.measured import MeasuredCosts, SourcedMeasurement

    rows = [SourcedMeasurement(measurement, MEASURED) for measurement in unsaved]
    path = perfdb_path(settings)
    if path is not None and path.is_file():
        from layerzero.perfdb.store import read_rows

        rows += [
            SourcedMeasurement(stored, MEASURED)
            for stored in read_rows(path, Environment.of_hardware(hardware))
        ]
    oldest = wall() - settings.perfdb_days * 86_400 if settings.perfdb_days is not None else -1.0
    current: list[SourcedMeasurement] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        kernel = kernels.get(row.measurement.kernel)
        if kernel is None or versions_of(kernel) != row.measurement.version:
            left_out["another version of the kernel's library"] += 1
        elif row.measurement.timestamp < oldest:
            left_out[f"older than {settings.perfdb_days:g} days"] += 1
        else:
            current.append(row)
    for why, count in left_out.items():
        log.warning(ROWS_STALE, rows=count, used=len(current), why=why)
    table = None
    if settings.shipped_tables:
        from layerzero.perfdb.shipped import fitting_tables

        table = next(iter(fitting_tables(hardware, TABLES)), None)
    if table is None:
        return MeasuredCosts(current, kernels, hardware, excluded) if current else roofline_cost
    shipped_only = not current and not excluded
    if shipped_only:
        cached = _SHIPPED_ONLY.get(hardware.device)
        # Kernels are compared as objects; equal hardware has equal roofs.
        if cached is not None and cached[0] is table and cached[1] == kernels and cached[2] == hardware:
            return cached[3]
    apart = {name for name, kernel in kernels.items() if kernel.isolated}  # no table was measured so
    current += [SourcedMeasurement(found, SHIPPED) for found in table.rows if found.kernel not in apart]
    model = MeasuredCosts(current, kernels, hardware, excluded)
    if shipped_only:
        _SHIPPED_ONLY[hardware.device] = (table, dict(kernels), hardware, model)
    return model

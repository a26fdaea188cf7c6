"""What a runtime puts into a warm-up bundle, and what it takes over from one."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import msgspec

from layerzero.actors.device.local_device import LocalDevice
from layerzero.graphs.proof import CaptureProof
from layerzero.graphs.proof import environment_of as proved_in
from layerzero.measure.tuning import publish, stored_rows
from layerzero.perfdb import Environment
from layerzero.selection.active_table import kernels_differ
from layerzero.spec.errors import BundleRefusedError
from layerzero.spec.reasons import Reason
from layerzero.warmup import Manifest
from layerzero.warmup.bundle import Bundle, InstalledFiles, Measurements, Records, read_bundle, write_bundle

if TYPE_CHECKING:
    from layerzero.runtime.runtime import Runtime


class BundleReport(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle and what of it this machine has now.

    `written`, `same`, `unchanged` and `replaced` are files: new here, here before, here with other bytes and
    left so, and overwritten. `proofs` and `measurements` are how many came that were not known;
    `dispatch_table` is the file of its decisions, for `Settings.dispatch_table`. `notes` say what ends with
    the process.
    """

    path: str
    sha256: str
    device: str
    members: int
    written: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    proofs: int = 0
    measurements: int = 0
    dispatch_table: str = ""
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = {name: len(getattr(self, name)) for name in InstalledFiles.__struct_fields__}
        counts |= {"proofs": self.proofs, "measurements": self.measurements}
        text = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        return f"{self.path} ({self.sha256[:16]}): {text or 'nothing new'}"


def save(
    runtime: Runtime, path: str | os.PathLike[str], manifest: Manifest | None, device: str | None
) -> BundleReport:
    """Write what a runtime's machine has for a device; what `layerzero.save_bundle` says."""
    local_device = runtime.device(device)
    records = _records(local_device, manifest)
    digest, names = write_bundle(path, local_device.hardware, records)
    return BundleReport(
        path=os.fspath(path), sha256=digest, device=str(local_device.device), members=len(names),
        proofs=len(records.proofs), manifest=records.manifest,
        measurements=len(records.measurements.rows) if records.measurements is not None else 0,
    )  # fmt: skip


def load(
    runtime: Runtime,
    path: str | os.PathLike[str],
    *,
    sha256: str | None,
    device: str | None,
    replace: bool,
) -> BundleReport:
    """Take a bundle over; what `layerzero.load_bundle` says."""
    local_device = runtime.device(device)
    bundle = read_bundle(path, local_device.hardware, sha256=sha256)
    _need_kernels(local_device, bundle)
    installed = bundle.install(replace=replace)
    notes: list[str] = []
    records: dict[str, Any] = {
        "proofs": _take_proofs(local_device, bundle, notes),
        "measurements": _take_measurements(local_device, bundle, notes),
        "dispatch_table": _take_decisions(runtime, bundle, notes),
    }
    bundle.confirm(installed, records)
    runtime.bundles.append(bundle.sha256)
    return BundleReport(
        path=os.fspath(path), sha256=bundle.sha256, device=str(local_device.device),
        members=bundle.members, manifest=bundle.records.manifest, notes=tuple(notes),
        **msgspec.structs.asdict(installed), **records,
    )  # fmt: skip


def _records(device: LocalDevice, manifest: Manifest | None) -> Records:
    rows = stored_rows(device)
    table = device.dispatch_table
    return Records(
        proofs=tuple(proof for proof in device.proofs.all() if _is_of_here(device, proof)),
        measurements=Measurements(Environment.of_hardware(device.hardware), rows) if rows else None,
        dispatch_table=table.original.table if table is not None else None,
        manifest=manifest,
    )


def _is_of_here(device: LocalDevice, proof: CaptureProof) -> bool:
    """Whether a proof holds for a kernel as it is installed on this machine."""
    kernel = device.registry.get(proof.kernel)
    return kernel is not None and proof.environment == proved_in(kernel, device.hardware)


def _need_kernels(device: LocalDevice, bundle: Bundle) -> None:
    """Raises: BundleRefusedError: it decides for other kernels than there are."""
    table = bundle.records.dispatch_table
    if table is None:
        return
    differs = kernels_differ(table, str(bundle.path), device.hardware.platform, device.registry.of)
    if any(differs(bucket.op) for bucket in table.buckets):
        needs, got = "those that its dispatch table was solved for", "others, or of other limits"
        raise BundleRefusedError.because(
            bundle.path, Reason.BUNDLE_ENVIRONMENT_DIFFERS, "kernels", needs, got
        )


def _take_proofs(device: LocalDevice, bundle: Bundle, notes: list[str]) -> int:
    """Know what was proved there; what this machine found itself counts before it."""
    count = 0
    for proof in bundle.records.proofs:
        if _is_of_here(device, proof):
            count += device.proofs.take(proof)
    if count:
        device.refresh()
        if device.settings.state_dir is None:
            notes.append("proofs end with this process: Settings.state_dir is not set")
    return count


def _take_measurements(device: LocalDevice, bundle: Bundle, notes: list[str]) -> int:
    """Price with what was measured there, beside what was measured here."""
    if bundle.records.measurements is None:
        return 0
    stored = set(map(msgspec.json.encode, stored_rows(device)))
    rows = [row for row in bundle.records.measurements.rows if msgspec.json.encode(row) not in stored]
    if not rows:
        return 0
    with ThreadPoolExecutor(1) as thread:  # it has a loop of its own, which the caller may have, too
        path = thread.submit(copy_context().run, publish, device, rows).result()
    if path is None:
        notes.append("measurements end with this process: Settings.perfdb is None")
    return len(rows)


def _take_decisions(runtime: Runtime, bundle: Bundle, notes: list[str]) -> str:
    """Keep its dispatch table, in force where the settings name none; the file that it is in."""
    path = bundle.save_plan()
    if path is None:
        return ""
    if runtime.settings.dispatch_table is None:
        runtime.reconfigure(runtime.settings.replace(dispatch_table=str(path)))
        notes.append(f"later processes decide by its table with Settings.dispatch_table={str(path)!r}")
    else:
        notes.append(f"its table is at {path}; {runtime.settings.dispatch_table} stays in force")
    return str(path)

"""Warm-up bundles: what one machine compiled, proved and measured, in one file for the next machine like it.

A bundle states the environment that it was made in. It is used as a whole or refused as a whole: where any
field differs, or any byte is not what the list says, nothing is written.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from layerzero._util import files, log
from layerzero._util.version import VERSION, installed_version
from layerzero.graphs.proof import CaptureProof
from layerzero.native import building
from layerzero.perfdb import Environment, Measurement
from layerzero.selection.dispatch_table import DispatchTable
from layerzero.spec.errors import BundleRefusedError, CacheCorruptionError, ConfigurationError
from layerzero.spec.hardware import Hardware
from layerzero.spec.reasons import Reason, Rejected
from layerzero.warmup.archive import Archive, read_archive, write_archive
from layerzero.warmup.manifest import Manifest
from layerzero.warmup.places import compiled_here, content_for, is_group, native_names, target_of

FILE_KEPT = "bundle.file_kept"
FILE_REPLACED = "bundle.file_replaced"
INSTALLED = "bundle.installed"
# Whose release decides whether compiled kernels run as they were made to.
LIBRARIES = ("flashinfer-python", "apache-tvm-ffi", "triton")
CPU = "cpu"
_RECEIPT = ".json"


class Measurements(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured times of one environment."""

    environment: Environment
    rows: tuple[Measurement, ...]


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """What a bundle carries beside compiled kernels: proofs, measurements, decisions, the calls to warm."""

    proofs: tuple[CaptureProof, ...] = ()
    measurements: Measurements | None = None
    dispatch_table: DispatchTable | None = None
    manifest: Manifest | None = None

    def members(self) -> dict[str, bytes]:
        """The records as files of a bundle; none for what is not there."""
        return {
            f"{name}.json": msgspec.json.encode(value)
            for name in self.__struct_fields__
            if (value := getattr(self, name))
        }


_RECORD_TYPES: Mapping[str, Any] = {
    "proofs": tuple[CaptureProof, ...],
    "measurements": Measurements,
    "dispatch_table": DispatchTable,
    "manifest": Manifest,
}


class InstallRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What came from a bundle to this machine: `files` are paths with their SHA-256, as they were written."""

    sha256: str
    path: str
    timestamp: float
    files: dict[str, str] = {}
    proofs: int = 0
    measurements: int = 0
    dispatch_table: str = ""

    def altered(self) -> tuple[str, ...]:
        """The files that are gone or hold other bytes by now."""
        return tuple(path for path, digest in self.files.items() if _digest_of(Path(path)) != digest)


class InstalledFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle's files here: `written`, the `same` before, `unchanged` though they differ, `replaced`."""

    written: tuple[str, ...] = ()
    same: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()


def environment_of(hardware: Hardware, *, for_this_cpu: bool) -> dict[str, str]:
    """What kernels, proofs and times hold for, by name; `for_this_cpu` adds its instructions."""
    stated = {
        "layerzero": VERSION,
        "python": building.python_abi(),
        "platform": f"{sys.platform} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "torch": str(hardware.torch),
        "device": hardware.name,
        "sm": str(hardware.sm or hardware.arch or "none"),
        "cuda": str(hardware.cuda),
        "driver": str(hardware.driver),
        "threads": str(hardware.threads),
        **{name: installed_version(name) or "missing" for name in LIBRARIES},
    }
    if for_this_cpu:
        # A digest: the whole list is too long to compare by eye.
        instructions = " ".join(sorted(building.cpu_flags()))
        stated[CPU] = f"{hardware.name} ({hashlib.sha256(instructions.encode()).hexdigest()[:12]})"
    return stated


def write_bundle(path: str | os.PathLike[str], hardware: Hardware, records: Records) -> tuple[str, list[str]]:
    """Write what this machine has compiled, with `records`; the file's SHA-256 and its members' names.

    Raises: FileExistsError: another kind of file is there. OSError: something cannot be read or written.
    """
    on_cpu = hardware.platform == "cpu"
    members = dict(compiled_here(for_cpu=on_cpu))
    members |= records.members()
    digest = write_archive(path, environment_of(hardware, for_this_cpu=on_cpu), members)
    return digest, sorted(members)


class Bundle:
    """A bundle that was checked and fits this machine: its records, and its kernels ready to be written."""

    def __init__(self, archive: Archive, hardware: Hardware) -> None:
        """Raises: BundleRefusedError: it was made in another environment, or a member does not hold."""
        self._archive = archive
        self.path, self.sha256 = archive.path, archive.sha256
        self._need_environment(hardware)
        self.records = self._decoded(Environment.of_hardware(hardware))
        names = frozenset(archive.names)
        self._compiled = [m for m in archive.head.members if "/" in m.name]
        for_cpu = hardware.platform == "cpu"
        problems = [
            Rejected(Reason.BUNDLE_ENVIRONMENT_DIFFERS, name, "sources and a CPU as here", "others")
            for name in archive.names
            if name.startswith("native/") and name.partition("/")[2] not in native_names(for_cpu=for_cpu)
        ]
        if problems:
            raise BundleRefusedError.of(self.path, *problems)
        for member in self._compiled:
            try:
                content_for(member.name, archive.read(member) if is_group(member.name) else b"", names)
            except (ValueError, msgspec.MsgspecError) as error:
                raise self._damaged(member.name, error) from error

    def _need_environment(self, hardware: Hardware) -> None:
        stated = self._archive.head.environment
        local = environment_of(hardware, for_this_cpu=CPU in stated)
        problems = [
            Rejected(
                Reason.BUNDLE_ENVIRONMENT_DIFFERS, name, stated.get(name, "nothing stated"),
                local.get(name, "no such field"),
            )
            for name in sorted(stated.keys() | local.keys())
            if stated.get(name) != local.get(name)
        ]  # fmt: skip
        if problems:
            raise BundleRefusedError.of(self.path, *problems)

    def _decoded(self, environment: Environment) -> Records:
        values: dict[str, Any] = {}
        for name, kind in _RECORD_TYPES.items():
            data = self._archive.find(f"{name}.json")
            if data is None:
                continue
            try:
                if name == "dispatch_table":
                    values[name] = DispatchTable.decode(data, name)
                    continue
                values[name] = files.decode_json(data, kind)
                if name == "manifest":
                    values[name].need_format(name)
            except (msgspec.MsgspecError, CacheCorruptionError, ConfigurationError) as error:
                raise self._damaged(f"{name}.json", error) from error
        records = Records(**values)
        stated = [r.environment for r in (records.measurements,) if r is not None]
        stated += [table.hardware for table in (records.dispatch_table,) if table is not None]
        for each in stated:
            if problems := [
                Rejected(Reason.BUNDLE_ENVIRONMENT_DIFFERS, "measured on", "this machine", difference)
                for difference in each.differences(environment)
            ]:
                raise BundleRefusedError.of(self.path, *problems)
        return records

    def _damaged(self, name: str, error: Exception) -> BundleRefusedError:
        return BundleRefusedError.because(self.path, Reason.BUNDLE_DAMAGED, name, "to be decoded", str(error))

    def install(self, *, replace: bool = False) -> InstalledFiles:
        """Put the compiled kernels into their places, each whole or not at all.

        A file that is there and differs is kept, or replaced where `replace` says so; either way an event
        names it. Raises: OSError: a file cannot be written, or others can write its folder; those before it
        are in place.
        """
        paths: dict[str, list[str]] = {name: [] for name in InstalledFiles.__struct_fields__}
        names = frozenset(self._archive.names)
        # A list comes behind the files that it names: who finds it finds them.
        for member in sorted(self._compiled, key=lambda m: is_group(m.name)):
            target = target_of(member.name)
            data = content_for(member.name, self._archive.read(member), names)
            local_digest = _digest_of(target)
            state = "written"
            if local_digest == hashlib.sha256(data).hexdigest():
                state = "same"
            elif os.path.lexists(target):
                state = "replaced" if replace else "unchanged"
                log.warning(FILE_REPLACED if replace else FILE_KEPT, path=str(target), bundle=self.sha256)
            if state in ("written", "replaced"):
                _put(target, data)
            paths[state].append(str(target))
        return InstalledFiles(**{name: tuple(placed) for name, placed in paths.items()})

    @property
    def members(self) -> int:
        """How many files it carries."""
        return len(self._archive.names)

    def save_plan(self) -> Path | None:
        """Put its dispatch table where `Settings.dispatch_table` can name it; the file, None without one.

        Raises: OSError: it cannot be written.
        """
        table = self.records.dispatch_table
        if table is None:
            return None
        path = files.own_user_folder("plans") / f"{table.content[:32]}.json"
        table.save(path)
        return path

    def confirm(self, installed: InstalledFiles, records: Mapping[str, Any]) -> InstallRecord:
        """Remember on this machine what came from the bundle, for `receipts`.

        Raises: OSError: it cannot be written.
        """
        paths = (*installed.written, *installed.replaced, *installed.same)
        receipt = InstallRecord(
            sha256=self.sha256,
            path=os.path.abspath(self.path),
            timestamp=time.time(),
            files={path: _digest_of(Path(path)) for path in sorted(paths)},
            **records,
        )
        folder = files.own_user_folder("bundles")
        files.write_whole(folder / f"{self.sha256}{_RECEIPT}", msgspec.json.encode(receipt))
        log.info(INSTALLED, bundle=self.sha256, files=len(paths), unchanged=len(installed.unchanged))
        return receipt


def read_bundle(path: str | os.PathLike[str], hardware: Hardware, *, sha256: str | None = None) -> Bundle:
    """A bundle that is whole, and of this environment.

    Raises: BundleRefusedError: it is not, or not the pinned one; its `problems` say by name why. OSError: it
        cannot be read. ValueError: `sha256` is no digest.
    """
    return Bundle(read_archive(path, sha256=sha256), hardware)


def receipts() -> tuple[InstallRecord, ...]:
    """What came from bundles to this machine, the last one first; what does not decode is left out."""
    folder = files.user_folder("bundles")
    decoded = []
    for path in sorted(folder.glob(f"*{_RECEIPT}")) if folder.is_dir() else ():
        try:
            decoded.append(files.decode_json(files.read_bounded(path, 1 << 26), InstallRecord))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("bundle.receipt_unreadable", path=str(path), why=str(error))
    return tuple(sorted(decoded, key=lambda receipt: -receipt.timestamp))


def _put(target: Path, data: bytes) -> None:
    """Write a file into a folder of this user's; those above it are looked at as far as a cache reaches."""
    ours = files.user_folder("")
    files.own_folder(target.parent.parent)
    if target.is_relative_to(ours):
        for folder in reversed(target.relative_to(ours).parents):
            files.own_folder(ours / folder, default=True)
    files.write_whole(target, data)


def _digest_of(path: Path) -> str:
    """The SHA-256 of a file of ours; empty where there is none, or it is no plain file."""
    try:
        return hashlib.sha256(files.read_bounded(path, 1 << 29)).hexdigest()
    except (OSError, ValueError):
        return ""

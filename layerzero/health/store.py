"""Quarantine between processes: one small JSON file for each record, replaced whole or not at all.

A file for each (kernel, device, environment) needs no read-modify-write, so processes cannot lose each
other's records, and damage stays with one kernel. A record that does not decode is set aside under a new name
and its kernel, which the file's name still tells, stays quarantined everywhere: unreadable never means free.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from layerzero._util import files, log

SCHEMA = 1
MAX_BYTES = 65_536

RECORD_SET_ASIDE = "quarantine.set_aside"
RECORD_NEWER = "quarantine.newer_found"

_FILE = re.compile(r"(?P<kernel>[a-z0-9_.]{1,192})@[0-9a-f]{16}\.json")


class QuarantineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that must not run on a device in an environment; "*" stands for all of them.

    `at` is wall-clock time in seconds since 1970.
    """

    kernel: str
    device: str = "*"
    environment: str = "*"
    why: str = ""
    timestamp: float = 0.0


class QuarantineStore(Protocol):
    """Where quarantine is kept between processes."""

    def load(self) -> Sequence[QuarantineRecord]: ...

    def save(self, record: QuarantineRecord) -> None: ...

    def forget(self, record: QuarantineRecord) -> None: ...


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    record: QuarantineRecord
    checksum: str


class _Header(msgspec.Struct, frozen=True):
    schema: int


class JsonQuarantineStore:
    """Records as files in `directory`, which is made for this user alone on the first save."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def load(self) -> Sequence[QuarantineRecord]:
        """Every record; damaged ones are set aside and answered by one that covers every device.

        Raises: OSError: the directory exists and cannot be read. PermissionError: others can write it.
        """
        if not self.directory.is_dir():
            return ()
        files.own_folder(self.directory)
        records = (
            self._read(path) for path in sorted(self.directory.iterdir()) if _FILE.fullmatch(path.name)
        )
        return tuple(record for record in records if record is not None)

    def save(self, record: QuarantineRecord) -> None:
        """Write `record`, replacing an earlier one of the same kernel, device and environment.

        Raises: OSError: the file cannot be written; ValueError: the kernel id is no file name.
        """
        path = self._path(record)
        files.write_whole(path, msgspec.json.encode(_Stored(SCHEMA, record, _checksum(record))))

    def forget(self, record: QuarantineRecord) -> None:
        """Remove the record of the same kernel, device and environment, if there is one."""
        with suppress(FileNotFoundError):
            self._path(record).unlink()

    def _path(self, record: QuarantineRecord) -> Path:
        scope = f"{record.device}\0{record.environment}".encode()
        name = f"{record.kernel}@{hashlib.sha256(scope).hexdigest()[:16]}.json"
        if not _FILE.fullmatch(name):
            raise ValueError(
                f"kernel needs an id of lower case letters, digits, _ and ., got {record.kernel!r}"
            )
        return self.directory / name

    def _read(self, path: Path) -> QuarantineRecord | None:
        try:
            data = files.read_bounded(path, MAX_BYTES)
            schema = files.decode_json(data, _Header).schema
            if schema > SCHEMA:
                log.warning(RECORD_NEWER, path=str(path), schema=schema, needs=SCHEMA)
                return QuarantineRecord(
                    kernel=_kernel(path), why=f"record of a newer format {schema}: {path.name}"
                )
            stored = files.decode_json(data, _Stored)
            if stored.checksum != _checksum(stored.record) or self._path(stored.record) != path:
                raise ValueError("checksum or name does not fit the record")
        except FileNotFoundError:
            return None  # another process lifted it meanwhile
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            return self._set_aside(path, str(error))
        return stored.record

    def _set_aside(self, path: Path, why: str) -> QuarantineRecord:
        aside = files.set_aside(path)
        log.error(RECORD_SET_ASIDE, path=str(path), moved_to=str(aside), why=why)
        record = QuarantineRecord(
            kernel=_kernel(path), why=f"its record was unreadable and is now {aside.name}"
        )
        self.save(record)
        return record


def _kernel(path: Path) -> str:
    return path.name.partition("@")[0]


def _checksum(record: QuarantineRecord) -> str:
    return hashlib.sha256(msgspec.json.encode(record)).hexdigest()[:32]

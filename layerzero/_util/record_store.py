"""Records between processes: one small JSON file for each, replaced whole or not at all.

A file for each (kernel, scope) needs no read-modify-write, so processes cannot lose each other's records, and
damage stays with one kernel. A file that does not decode is set aside under a new name, and its kernel, which
the file's name still tells, gets the record that its store makes for a lost one.
"""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from layerzero._util import files, log

SCHEMA = 2

R = TypeVar("R", bound=msgspec.Struct)

_FILE = re.compile(r"[a-z0-9_.]{1,192}@[0-9a-f]{16}\.json")


class _StoredRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    record: msgspec.Raw
    checksum: str


class _SchemaOnly(msgspec.Struct, frozen=True):
    schema: int


class RecordStore(Generic[R]):
    """Records of one `kind` as files in `directory`, which is made for this user alone on the first save.

    `name` is the `store` of the log events; `max_bytes` bounds one file.
    """

    kind: type[R]
    name: str
    max_bytes = 65_536

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def key(self, record: R) -> tuple[str, str]:
        """The kernel of a record, and what it holds for: another record of both replaces it."""
        raise NotImplementedError

    def lost(self, kernel: str, why: str) -> R:
        """What is believed of a kernel whose record is unreadable."""
        raise NotImplementedError

    def newer(self, kernel: str, why: str) -> R | None:
        """What is believed of a kernel whose record a later release wrote; None for nothing."""
        return None

    def load(self) -> tuple[R, ...]:
        """Every record; damaged ones are set aside, with what `lost` returns stored in their place.

        Where that cannot be written, they stay, and `lost` holds all the same.

        Raises: OSError: the directory exists and cannot be read. PermissionError: others can write it.
        """
        if not self.directory.is_dir():
            return ()
        files.own_folder(self.directory)
        paths = sorted(path for path in self.directory.iterdir() if _FILE.fullmatch(path.name))
        return tuple(record for path in paths if (record := self._read(path)) is not None)

    def save(self, record: R) -> None:
        """Write `record`, replacing an earlier one of the same kernel and scope.

        Raises: OSError: the file cannot be written; ValueError: the kernel id is no file name.
        """
        data = msgspec.json.encode(record)
        stored = _StoredRecord(SCHEMA, msgspec.Raw(data), _checksum(data))
        files.write_whole(self._path(record), msgspec.json.encode(stored))

    def forget(self, record: R) -> None:
        """Remove the record of the same kernel and scope, if there is one."""
        with suppress(FileNotFoundError):
            self._path(record).unlink()

    def _path(self, record: R) -> Path:
        kernel, scope = self.key(record)
        name = f"{kernel}@{hashlib.sha256(scope.encode()).hexdigest()[:16]}.json"
        if not _FILE.fullmatch(name):
            raise ValueError(f"kernel needs an id of lower case letters, digits, _ and ., got {kernel!r}")
        return self.directory / name

    def _read(self, path: Path) -> R | None:
        kernel = path.name.partition("@")[0]
        try:
            data = files.read_bounded(path, self.max_bytes)
            schema = files.decode_json(data, _SchemaOnly).schema
            if schema > SCHEMA:
                log.warning(
                    "record.newer_found", store=self.name, path=str(path), schema=schema, needs=SCHEMA
                )
                return self.newer(kernel, f"record of a newer format {schema}: {path.name}")
            if schema == 1:
                data = _of_schema_2(data)
            stored = files.decode_json(data, _StoredRecord)
            record = files.decode_json(bytes(stored.record), self.kind)
            if stored.checksum != _checksum(bytes(stored.record)) or self._path(record) != path:
                raise ValueError("checksum or name does not fit the record")
        except FileNotFoundError:
            return None  # another process has just removed it
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            record = self.lost(kernel, f"its record was unreadable: {path.name}")
            moved_to, why = "", str(error)
            try:
                moved_to = str(self._replaced_by(record, path))
            except OSError as failure:  # no room, or no right to write: the damage is found again
                why = f"{why}; it stays: {failure}"
            log.error("record.set_aside", store=self.name, path=str(path), moved_to=moved_to, why=why)
        return record

    def _replaced_by(self, record: R, path: Path) -> Path:
        """The new name of a damaged file, in whose place `record` is stored; at no moment is neither there.

        Raises: OSError: `record` cannot be written; the damaged file is where it was.
        """
        aside = files.set_aside(path) if self._path(record) == path else None
        try:
            self.save(record)
        except BaseException:
            if aside is not None:
                os.replace(aside, path)
            raise
        return aside if aside is not None else files.set_aside(path)


def _of_schema_2(data: bytes) -> bytes:
    """A file of schema 1, which named the record by its kind and its time `at`, as one of schema 2.

    Raises: ValueError: its checksum does not fit. msgspec.MsgspecError: it is no such file.
    """
    raw = files.decode_json(data, dict[str, msgspec.Raw])
    stored = next((bytes(raw[name]) for name in ("record", "proof") if name in raw), b"{}")
    if files.decode_json(bytes(raw.get("checksum", b'""')), str) != _checksum(stored):
        raise ValueError("checksum does not fit the record")
    record = files.decode_json(stored, dict)
    if "at" in record:
        record["timestamp"] = record.pop("at")
    encoded = msgspec.json.encode(record)
    return msgspec.json.encode(_StoredRecord(SCHEMA, msgspec.Raw(encoded), _checksum(encoded)))


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]

"""A file of measurements made ready for a writer: made where there is none, rebuilt where it is damaged."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from layerzero._util import files, log
from layerzero._util.files import fcntl
from layerzero.perfdb.record import BenchmarkCase, Environment, Measurement
from layerzero.perfdb.rows import (
    DAMAGE,
    DDL,
    SCHEMA,
    SELECT,
    connect,
    decode_row,
    foreign_writer,
    insertions,
    transaction,
    wal_is_safe,
)

SET_ASIDE = "perfdb.set_aside"
REBUILT = "perfdb.rebuilt"
LOCK_TIMEOUT_S = 30.0
_LOOK_S = 0.01
# Our tables' text is on a file's first page.
_HEAD = 1 << 16
_MARKS = tuple(statement.partition(" (")[0].partition(" ON")[0].encode() for statement in DDL)
_BESIDE = ("-journal", "-wal", "-shm")


def prepare(path: Path) -> None:
    """Make the file, or check it and set a damaged one aside.

    One writer at a time: each would make the file, or take for damage what another is about to make.
    Raises: sqlite3.DatabaseError: a later release or another program wrote it, another process has it locked,
        or it cannot be opened; it is left as it is. PermissionError: others can write its folder, or own it.
    """
    prepare_folder(path)
    with _folder_lock(path.parent):
        if path.exists() and not path.is_dir() and not path.is_file():
            raise sqlite3.OperationalError(f"unable to open {path}: it is no plain file")
        if not path.exists():
            _create(path)
            return
        if path.stat().st_size:
            damaged, writer = _damage(path)
            if damaged and not is_ours(path):
                writer = "another program"
            if writer:
                raise sqlite3.DatabaseError(f"{path} was written by {writer}: use another file")
            if not damaged:
                return
            _set_aside(path, damaged)
        else:
            _create_tables(path)


def prepare_folder(path: Path) -> None:
    """Make the file's folder, and check the default one; refuse another user's file or link.

    Raises: PermissionError: others could have written what is there.
    """
    default = path == files.user_folder(path.name)
    if default or not path.parent.exists():
        files.own_folder(path.parent, default=default)
    if hasattr(os, "geteuid") and os.path.lexists(path):
        owner = os.lstat(path).st_uid
        if owner not in (os.geteuid(), 0):
            why = f"the file needs to belong to this user, got owner {owner}"
            raise PermissionError(errno.EPERM, why, str(path))


@contextlib.contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with its process and leaves no file; not where there are none.

    Raises: sqlite3.OperationalError: another process locks it for longer than a transaction may take.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    message = f"database is locked: another process prepares {folder}"
                    raise sqlite3.OperationalError(message) from None
                time.sleep(_LOOK_S)
            except OSError as error:  # some file systems of networks have no locks
                log.debug("perfdb.no_lock", folder=str(folder), error=str(error))
                break
        yield
    finally:
        os.close(handle)


def is_ours(path: Path) -> bool:
    """Whether a file that makes no sense was one of ours: a table of ours is in it, or nothing at all."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return any(mark in head for mark in _MARKS) or not head.strip(b"\0")


def _damage(path: Path) -> tuple[str, str]:
    """What is wrong with a file, in words, and who else wrote it."""
    try:
        with contextlib.closing(connect(path, "rw")) as connection:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                return str(verdict), ""
            if writer := foreign_writer(connection, path):
                return "", writer
            query = "SELECT sql FROM sqlite_master WHERE sql NOT NULL"
            if {row[0] for row in connection.execute(query)} != set(DDL):
                return "its tables are not ours", ""
            cases: dict[bytes, BenchmarkCase | None] = {}
            bad = sum(decode_row(row, cases) is None for row in connection.execute(SELECT))
            return f"{bad} rows fail their checksum" if bad else "", ""
    except DAMAGE as error:
        if not is_damage(error):
            raise
        return f"{type(error).__name__}: {error}", ""


def is_damage(error: Exception) -> bool:
    """Whether the file is at fault, not who holds it, the disk, or what else is at its path."""
    if not isinstance(error, sqlite3.DatabaseError):
        return not isinstance(error, OSError)
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # without what extends it
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


def _create(path: Path) -> None:
    """Make the file. Raises: FileExistsError: one is there. sqlite3.Error: it cannot be written."""
    os.close(files.create_own(path))
    try:
        _create_tables(path)
    except BaseException:
        _unlink(path)
        raise


def _create_tables(path: Path) -> None:
    with contextlib.closing(connect(path, "rw")) as connection:
        connection.execute(f"PRAGMA journal_mode = {'WAL' if wal_is_safe() else 'DELETE'}")
        with transaction(connection):
            for statement in DDL:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA}")


def _unlink(path: Path) -> None:
    for suffix in ("", *_BESIDE):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")


def _set_aside(path: Path, why: str) -> None:
    """Put the rows that still hold into another file at its place, and give the damaged one a new name.

    Raises: sqlite3.Error, OSError: there is no room for it; the damaged file stays where it is, for later.
    """
    saved = salvage(path)
    rebuilt = path.with_name(f"{path.name}.new-{os.getpid()}")
    _unlink(rebuilt)  # of a process of this number that ended before it was done
    _create(rebuilt)
    try:
        with contextlib.closing(connect(rebuilt, "rw")) as connection:
            for environment, rows in saved.items():
                with transaction(connection):
                    for statement, values in insertions(environment, rows):
                        connection.executemany(statement, values)
        aside = files.damaged_name(path)
        try:
            os.link(path, aside)  # so that there is a file at the path throughout
        except OSError:  # no file has two names here
            os.replace(path, aside)
        for suffix in _BESIDE:
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{aside}{suffix}")
        os.replace(rebuilt, path)
    except BaseException:
        _unlink(rebuilt)
        raise
    log.error(SET_ASIDE, path=str(path), moved_to=str(aside), why=why)
    log.warning(REBUILT, path=str(path), rows=sum(len(rows) for rows in saved.values()))


def salvage(path: Path) -> dict[Environment, list[Measurement]]:
    """The rows that hold, as far as they can be read."""
    saved: dict[Environment, list[Measurement]] = {}
    with contextlib.suppress(*DAMAGE), contextlib.closing(connect(path, "ro")) as connection:
        cases: dict[bytes, BenchmarkCase | None] = {}
        for values in connection.execute(SELECT):
            row = decode_row(values, cases)
            if row is not None:
                environment = msgspec.json.decode(values[2], type=Environment)
                saved.setdefault(environment, []).append(row)
    return saved

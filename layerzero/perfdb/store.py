"""Measurements in SQLite: one writer, a checksum a row, and a damaged file set aside, never overwritten.

SQLite 3.7.0 to 3.51.2 can corrupt a database in WAL mode with several connections (fixed in 3.51.3, and in
3.50.7 and 3.44.6): with such a version the rollback journal is used. Rows carry their own checksum because
SQLite's checks let most single-bit errors in data through.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio
import msgspec

from layerzero import log
from layerzero.perfdb.record import Environment, Measurement, Site

SCHEMA = 1
MAX_ROWS = 1_000_000
SET_ASIDE = "perfdb.set_aside"
REBUILT = "perfdb.rebuilt"
NEWER = "perfdb.newer_found"
FOREIGN = "perfdb.foreign_found"
PRUNED = "perfdb.pruned"

_DDL = (
    "CREATE TABLE environment (id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, body BLOB NOT NULL)",
    "CREATE TABLE site (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, body BLOB NOT NULL)",
    "CREATE TABLE kernel (id INTEGER PRIMARY KEY, name TEXT NOT NULL, version TEXT NOT NULL,"
    " UNIQUE (name, version))",
    "CREATE TABLE measurement (id INTEGER PRIMARY KEY, environment INTEGER NOT NULL, site INTEGER NOT NULL,"
    " kernel INTEGER NOT NULL, policy TEXT NOT NULL, median REAL NOT NULL, p95 REAL NOT NULL,"
    " variance REAL NOT NULL, samples INTEGER NOT NULL, at INTEGER NOT NULL, temperature INTEGER,"
    " power INTEGER, free INTEGER, checksum BLOB NOT NULL)",
    "CREATE INDEX measurement_of ON measurement (environment, site, kernel)",
)
_TABLES = frozenset({"environment", "site", "kernel", "measurement"})
_SELECT = (
    "SELECT m.id, e.digest, e.body, s.digest, s.body, k.name, k.version, m.policy, m.median, m.p95,"
    " m.variance, m.samples, m.at, m.temperature, m.power, m.free, m.checksum"
    " FROM measurement m JOIN environment e ON e.id = m.environment JOIN site s ON s.id = m.site"
    " JOIN kernel k ON k.id = m.kernel"
)
_INSERT = (
    "INSERT INTO measurement (environment, site, kernel, policy, median, p95, variance, samples, at,"
    " temperature, power, free, checksum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def wal_is_safe(version: str = sqlite3.sqlite_version) -> bool:
    """Whether this SQLite is free of the bug that can corrupt a file in WAL mode."""
    numbers = tuple(int(part) for part in version.split(".")[:3])
    return numbers >= (3, 51, 3) or (3, 50, 7) <= numbers < (3, 51, 0) or (3, 44, 6) <= numbers < (3, 45, 0)


class PerfDB:
    """The one writer of a file of measurements; `async with PerfDB(path) as db`."""

    def __init__(self, path: str | os.PathLike[str], *, max_rows: int = MAX_ROWS) -> None:
        self.path = Path(path)
        self._max_rows = max_rows
        self._connection: Any = None
        self._lock: anyio.Lock | None = None

    async def __aenter__(self) -> PerfDB:
        import aiosqlite

        await anyio.to_thread.run_sync(_prepare, self.path)
        self._connection = await aiosqlite.connect(self.path, isolation_level=None)
        self._lock = anyio.Lock()
        for pragma in _PRAGMAS:
            await self._connection.execute(pragma)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with anyio.CancelScope(shield=True):
                await connection.close()

    async def add(self, environment: Environment, rows: Sequence[Measurement]) -> None:
        """Write rows in one transaction; beyond the limit the oldest go.

        Raises: sqlite3.Error: the file cannot be written; nothing of `rows` was.
        """
        assert self._connection is not None and self._lock is not None
        async with self._lock:
            await self._connection.execute("BEGIN IMMEDIATE")
            try:
                for statement, values in _insertions(environment, rows):
                    await self._connection.executemany(statement, values)
                await self._prune()
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._connection.rollback()
                raise
            await self._connection.commit()

    async def _prune(self) -> None:
        async with self._connection.execute("SELECT min(id), max(id) FROM measurement") as cursor:
            low, high = await cursor.fetchone()
        if high is None or high - low < self._max_rows:
            return
        oldest = high - self._max_rows
        await self._connection.execute("DELETE FROM measurement WHERE id <= ?", (oldest,))
        for table in ("site", "environment", "kernel"):
            unused = f"DELETE FROM {table} WHERE id NOT IN (SELECT {table} FROM measurement)"
            await self._connection.execute(unused)
        log.info(PRUNED, kept=self._max_rows)

    async def rows(self, environment: Environment | None = None) -> list[Measurement]:
        """Every row of an environment, or of all; damaged rows are left out."""
        assert self._connection is not None
        query, values = _query(environment)
        async with self._connection.execute(query, values) as cursor:
            found = await cursor.fetchall()
        rows, _ = await anyio.to_thread.run_sync(_decode_all, found)
        return rows

    async def count(self) -> int:
        """How many rows the file holds."""
        assert self._connection is not None
        async with self._connection.execute("SELECT count(*) FROM measurement") as cursor:
            return int((await cursor.fetchone())[0])

    async def forget(self, environment: Environment) -> int:
        """Remove an environment's rows; returns how many there were."""
        assert self._connection is not None and self._lock is not None
        async with self._lock:
            cursor = await self._connection.execute(
                "DELETE FROM measurement WHERE environment IN (SELECT id FROM environment WHERE digest = ?)",
                (environment.digest(),),
            )
            await self._connection.commit()
            return int(cursor.rowcount)

    async def discard(self, environment: Environment, rows: Sequence[Measurement]) -> int:
        """Remove an environment's rows of the kernels and sites of `rows`; returns how many there were."""
        assert self._connection is not None and self._lock is not None
        place, gone = _id(environment.digest().encode()), 0
        async with self._lock:
            for site, kernel in {(row.site.digest(), f"{row.kernel}\0{row.version}") for row in rows}:
                cursor = await self._connection.execute(
                    "DELETE FROM measurement WHERE environment = ? AND site = ? AND kernel = ?",
                    (place, _id(site), _id(kernel.encode())),
                )
                gone += cursor.rowcount
            await self._connection.commit()
        return gone


def read_rows(path: str | os.PathLike[str], environment: Environment | None = None) -> list[Measurement]:
    """The rows of an environment, read at once: what a device publishes when it is opened.

    A file that is missing, of a newer format or another program's gives nothing; a damaged one is set aside
    and rebuilt from the rows that still hold.
    """
    where = Path(path)
    if not where.is_file():
        return []
    try:
        try:
            rows, damaged = _read(where, environment, "ro")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise
            # A writer was killed in its transaction: only a connection that may write takes that back.
            rows, damaged = _read(where, environment, "rw")
    except sqlite3.OperationalError as error:
        if not _tells_damage(error):
            log.warning("perfdb.unreadable", path=str(where), error=str(error))
            return []
        rows, damaged = [], str(error)
    except (sqlite3.DatabaseError, msgspec.MsgspecError, ValueError) as error:
        rows, damaged = [], f"{type(error).__name__}: {error}"
    if damaged:
        _set_aside(where, damaged)
        return read_rows(where, environment)
    return rows


def _read(path: Path, environment: Environment | None, mode: str) -> tuple[list[Measurement], str]:
    """The rows of an environment, and what is wrong with others; nothing where somebody else wrote."""
    with contextlib.closing(_connect(path, mode)) as connection:
        if _elses(connection, path):
            return [], ""
        return _decode_all(connection.execute(*_query(environment)))


_PRAGMAS = (
    "PRAGMA busy_timeout = 10000",
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cell_size_check = ON",
    "PRAGMA mmap_size = 0",
    "PRAGMA synchronous = NORMAL" if wal_is_safe() else "PRAGMA synchronous = FULL",
)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, isolation_level=None)
    try:
        for pragma in _PRAGMAS:
            connection.execute(pragma)
    except BaseException:
        connection.close()
        raise
    return connection


def _elses(connection: sqlite3.Connection, path: Path) -> str:
    """Who else wrote the file, which is then left alone: another program or a later release; else ""."""
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and not tables & _TABLES:
        log.warning(FOREIGN, path=str(path), tables=sorted(tables)[:4])
        return "another program"
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA:
        log.warning(NEWER, path=str(path), schema=version, needs=SCHEMA)
        return "a later release"
    return ""


def _prepare(path: Path) -> None:
    """Make the file, or check it and set a damaged one aside.

    Raises: sqlite3.DatabaseError: a later release or another program wrote it, somebody holds it, or it
        cannot be opened; it is left as it is.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size:
        damaged, writer = _damage(path)
        if writer:
            raise sqlite3.DatabaseError(f"{path} was written by {writer}: use another file")
        if damaged:
            _set_aside(path, damaged)
        return
    _create(path)


def _damage(path: Path) -> tuple[str, str]:
    """What is wrong with a file, in words, and who else wrote it."""
    try:
        with contextlib.closing(_connect(path, "rw")) as connection:
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                return str(found), ""
            if writer := _elses(connection, path):
                return "", writer
            wanted = "SELECT sql FROM sqlite_master WHERE sql NOT NULL"
            named = {row[0] for row in connection.execute(wanted)}
            return ("" if named == set(_DDL) else "its tables are not ours"), ""
    except sqlite3.DatabaseError as error:
        if not _tells_damage(error):
            raise
        return f"{type(error).__name__}: {error}", ""


def _tells_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file is at fault, not who holds it, the disk, or what else stands at its place."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # without what extends it
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


def _create(path: Path) -> None:
    with contextlib.closing(_connect(path, "rwc")) as connection:
        connection.execute(f"PRAGMA journal_mode = {'WAL' if wal_is_safe() else 'DELETE'}")
        with _transaction(connection):
            for statement in _DDL:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
    with contextlib.suppress(OSError):
        os.chmod(path, 0o600)


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Any:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.rollback()
        raise
    connection.commit()


def _insertions(
    environment: Environment, rows: Iterable[Measurement]
) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """The statements that add rows, with their values; ids follow from content, so nothing is looked up."""
    place = environment.digest()
    sites: dict[int, tuple[Any, ...]] = {}
    kernels: dict[int, tuple[Any, ...]] = {}
    added = []
    for row in rows:
        own = row.site.digest()
        site, kernel = _id(own), _id(f"{row.kernel}\0{row.version}".encode())
        sites.setdefault(site, (site, own, msgspec.json.encode(row.site)))
        kernels.setdefault(kernel, (kernel, row.kernel, row.version))
        values = _values(row)
        checksum = _checksum(place, own, row.kernel, row.version, values)
        added.append((_id(place.encode()), site, kernel, *values, checksum))
    body = msgspec.json.encode(environment)
    return [
        ("INSERT OR IGNORE INTO environment VALUES (?, ?, ?)", [(_id(place.encode()), place, body)]),
        ("INSERT OR IGNORE INTO site VALUES (?, ?, ?)", list(sites.values())),
        ("INSERT OR IGNORE INTO kernel VALUES (?, ?, ?)", list(kernels.values())),
        (_INSERT, added),
    ]


def _id(content: bytes) -> int:
    """A key that is equal for equal content, of 48 bits: a few bytes in each row that refers to it."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest())


def _values(row: Measurement) -> tuple[Any, ...]:
    return (
        f"{row.launch}/{row.cache}", row.median_us, row.p95_us, row.variance, row.samples, row.at,
        row.temperature_c, row.power_w, row.free_bytes,
    )  # fmt: skip


def _checksum(environment: str, site: bytes, kernel: str, version: str, values: tuple[Any, ...]) -> bytes:
    body = msgspec.msgpack.encode((environment, site, kernel, version, values))
    return hashlib.blake2b(body, digest_size=8).digest()


def _query(environment: Environment | None) -> tuple[str, tuple[str, ...]]:
    return (
        (_SELECT, ()) if environment is None else (f"{_SELECT} WHERE e.digest = ?", (environment.digest(),))
    )


def _decode_all(found: Iterable[tuple[Any, ...]]) -> tuple[list[Measurement], str]:
    """The rows that hold, and what is wrong with the others."""
    sites: dict[bytes, Site | None] = {}
    decoded = [_decoded(row, sites) for row in found]
    bad = sum(row is None for row in decoded)
    return [row for row in decoded if row is not None], f"{bad} rows fail their checksum" if bad else ""


def _decoded(found: tuple[Any, ...], sites: dict[bytes, Site | None]) -> Measurement | None:
    _, where, place, digest, body, kernel, version, *rest = found
    values, checksum = tuple(rest[:-1]), rest[-1]
    try:
        if digest not in sites:
            site = msgspec.json.decode(body, type=Site)
            sites[digest] = site if site.digest() == digest else None
        own = sites[digest]
        place_holds = hashlib.blake2b(place, digest_size=16).hexdigest() == where
        if own is None or not place_holds or _checksum(where, digest, kernel, version, values) != checksum:
            return None
        launch, cache = values[0].split("/")
        return msgspec.convert(
            {
                "site": own, "kernel": kernel, "version": version, "launch": launch, "cache": cache,
                "median_us": values[1], "p95_us": values[2], "variance": values[3], "samples": values[4],
                "at": values[5], "temperature_c": values[6], "power_w": values[7], "free_bytes": values[8],
            },
            Measurement,
        )  # fmt: skip
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError):
        return None


def _set_aside(path: Path, why: str) -> None:
    """Move a damaged file to a new name, and begin another with the rows that still hold."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.replace(path, aside)
    for suffix in ("-journal", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    log.error(SET_ASIDE, path=str(path), moved_to=str(aside), why=why)
    saved = _salvaged(aside)
    _create(path)
    with contextlib.closing(_connect(path, "rw")) as connection:
        for environment, rows in saved.items():
            with _transaction(connection):
                for statement, values in _insertions(environment, rows):
                    connection.executemany(statement, values)
    log.warning(REBUILT, path=str(path), rows=sum(len(rows) for rows in saved.values()))


def _salvaged(path: Path) -> dict[Environment, list[Measurement]]:
    saved: dict[Environment, list[Measurement]] = {}
    with (
        contextlib.suppress(sqlite3.DatabaseError, msgspec.MsgspecError),
        contextlib.closing(_connect(path, "ro")) as connection,
    ):
        sites: dict[bytes, Site | None] = {}
        for found in connection.execute(_SELECT):
            row = _decoded(found, sites)
            if row is not None:
                place = msgspec.json.decode(found[2], type=Environment)
                saved.setdefault(place, []).append(row)
    return saved

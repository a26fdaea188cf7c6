"""How measurements are stored in SQLite: the tables, a connection, and rows with a checksum each.

SQLite 3.7.0 to 3.51.2 can corrupt a database in WAL mode with several connections (fixed in 3.51.3, and in
3.50.7 and 3.44.6): with such a version the rollback journal is used. Rows carry their own checksum because
SQLite's checks let most single-bit errors in data through.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from layerzero._util import log
from layerzero.perfdb.record import BenchmarkCase, Environment, Measurement

SCHEMA = 1
NEWER = "perfdb.newer_found"
FOREIGN = "perfdb.foreign_found"
# SQLite's own words, and what Python makes of those that are no text.
DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError, msgspec.MsgspecError, ValueError, RecursionError)
DDL = (
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
# The fields of a measurement that have a column each, in their order.
_FIELDS = (
    "median_us", "p95_us", "variance", "samples", "timestamp", "temperature_c", "power_w", "free_bytes",
)  # fmt: skip
_TABLES = frozenset({"environment", "site", "kernel", "measurement"})
SELECT = (
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
    """Whether this SQLite is free of the bug that can corrupt a WAL file that two connections reset.

    3.7.0 up to 3.51.2 have it; 3.44.6, 3.50.7 and what follows them in their series carry the repair.
    Source: sqlite.org/wal.html.
    """
    numbers = tuple(int(part) for part in version.split(".")[:3])
    return (
        numbers < (3, 7, 0)
        or numbers >= (3, 51, 3)
        or (3, 50, 7) <= numbers < (3, 51, 0)
        or (3, 44, 6) <= numbers < (3, 45, 0)
    )


PRAGMAS = (
    "PRAGMA busy_timeout = 10000",
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cell_size_check = ON",
    "PRAGMA mmap_size = 0",
    "PRAGMA synchronous = NORMAL" if wal_is_safe() else "PRAGMA synchronous = FULL",
)


def uri_of(path: Path, mode: str) -> str:
    """The SQLite URI of a file; `mode` is ro, rw or rwc."""
    return f"{path.resolve().as_uri()}?mode={mode}"


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """A connection with the pragmas above, in autocommit mode.

    Raises: sqlite3.Error: the file cannot be opened, or is no database.
    """
    connection = sqlite3.connect(uri_of(path, mode), uri=True, isolation_level=None)
    try:
        for pragma in PRAGMAS:
            connection.execute(pragma)
    except BaseException:
        connection.close()
        raise
    return connection


def foreign_writer(connection: sqlite3.Connection, path: Path) -> str:
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


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Any:
    """A block whose writes are committed together, or rolled back when it raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.rollback()
        raise
    connection.commit()


def insertions(
    environment: Environment, rows: Iterable[Measurement]
) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """The statements that add rows, with their values; ids follow from content, so nothing is looked up."""
    environment_digest = environment.digest()
    environment_id = id_of(environment_digest.encode())
    cases: dict[int, tuple[Any, ...]] = {}
    kernels: dict[int, tuple[Any, ...]] = {}
    added = []
    for row in rows:
        case_digest = row.case.digest()
        case_id, kernel_id = id_of(case_digest), id_of(f"{row.kernel}\0{row.version}".encode())
        cases.setdefault(case_id, (case_id, case_digest, msgspec.json.encode(row.case)))
        kernels.setdefault(kernel_id, (kernel_id, row.kernel, row.version))
        values = (f"{row.launch}/{row.cache}", *(getattr(row, name) for name in _FIELDS))
        checksum = _checksum(environment_digest, case_digest, row.kernel, row.version, values)
        added.append((environment_id, case_id, kernel_id, *values, checksum))
    environment_row = environment_id, environment_digest, msgspec.json.encode(environment)
    return [
        ("INSERT OR IGNORE INTO environment VALUES (?, ?, ?)", [environment_row]),
        ("INSERT OR IGNORE INTO site VALUES (?, ?, ?)", list(cases.values())),
        ("INSERT OR IGNORE INTO kernel VALUES (?, ?, ?)", list(kernels.values())),
        (_INSERT, added),
    ]


def id_of(content: bytes) -> int:
    """A key that is equal for equal content, of 48 bits: a few bytes in each row that refers to it."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest())


def _checksum(environment: str, site: bytes, kernel: str, version: str, values: tuple[Any, ...]) -> bytes:
    body = msgspec.msgpack.encode((environment, site, kernel, version, values))
    return hashlib.blake2b(body, digest_size=8).digest()


def query_of(environment: Environment | None) -> tuple[str, tuple[str, ...]]:
    """The statement that reads the rows of an environment, all rows for None; and its values."""
    return (SELECT, ()) if environment is None else (f"{SELECT} WHERE e.digest = ?", (environment.digest(),))


def decode_all(records: Iterable[tuple[Any, ...]]) -> tuple[list[Measurement], str]:
    """The rows that hold, and what is wrong with the others."""
    cases: dict[bytes, BenchmarkCase | None] = {}
    decoded = [decode_row(row, cases) for row in records]
    bad = sum(row is None for row in decoded)
    return [row for row in decoded if row is not None], f"{bad} rows fail their checksum" if bad else ""


def decode_row(record: tuple[Any, ...], cases: dict[bytes, BenchmarkCase | None]) -> Measurement | None:
    """The measurement of one record, None where a digest or checksum differs; `cases` caches by digest."""
    _, environment_digest, environment_body, digest, body, kernel, version, *rest = record
    values, checksum = tuple(rest[:-1]), rest[-1]
    try:
        if digest not in cases:
            decoded = msgspec.json.decode(body, type=BenchmarkCase)
            cases[digest] = decoded if decoded.digest() == digest else None
        case, measured_in = cases[digest], hashlib.blake2b(environment_body, digest_size=16).hexdigest()
        if case is None or measured_in != environment_digest:
            return None
        if _checksum(environment_digest, digest, kernel, version, values) != checksum:
            return None
        launch, cache = values[0].split("/")
        stored = {"case": case, "kernel": kernel, "version": version, "launch": launch, "cache": cache}
        return msgspec.convert(stored | dict(zip(_FIELDS, values[1:], strict=True)), Measurement)
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError):
        return None

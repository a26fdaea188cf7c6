"""Measurements in SQLite: one writer, a checksum a row, and a damaged file set aside, never overwritten."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from layerzero._util import log
from layerzero.perfdb import rows as sql
from layerzero.perfdb.record import Environment, Measurement
from layerzero.perfdb.repair import is_damage, is_ours, prepare, prepare_folder, salvage
from layerzero.perfdb.rows import (
    DAMAGE,
    FOREIGN,
    connect,
    decode_all,
    foreign_writer,
    id_of,
    insertions,
    query_of,
    uri_of,
)

MAX_ROWS = 1_000_000
PRUNED = "perfdb.pruned"
DAMAGED = "perfdb.damaged"


class PerfDB:
    """The one writer of a file of measurements; `async with PerfDB(path) as db`."""

    def __init__(self, path: str | os.PathLike[str], *, max_rows: int = MAX_ROWS) -> None:
        self.path = Path(path)
        self._max_rows = max_rows
        self._connection: Any = None
        self._lock: anyio.Lock | None = None

    async def __aenter__(self) -> PerfDB:
        import aiosqlite

        await anyio.to_thread.run_sync(prepare, self.path)
        self._connection = await aiosqlite.connect(uri_of(self.path, "rw"), uri=True, isolation_level=None)
        self._lock = anyio.Lock()
        for pragma in sql.PRAGMAS:
            await self._connection.execute(pragma)
        return self

    async def __aexit__(self, *raised: object) -> None:
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
                for statement, values in insertions(environment, rows):
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
        query, values = query_of(environment)
        async with self._connection.execute(query, values) as cursor:
            records = await cursor.fetchall()
        rows, _ = await anyio.to_thread.run_sync(decode_all, records)
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
        """Remove an environment's rows of the kernels and cases of `rows`; returns how many there were."""
        assert self._connection is not None and self._lock is not None
        environment_id, removed = id_of(environment.digest().encode()), 0
        async with self._lock:
            for case_digest, kernel in {(row.case.digest(), f"{row.kernel}\0{row.version}") for row in rows}:
                cursor = await self._connection.execute(
                    "DELETE FROM measurement WHERE environment = ? AND site = ? AND kernel = ?",
                    (environment_id, id_of(case_digest), id_of(kernel.encode())),
                )
                removed += cursor.rowcount
            await self._connection.commit()
        return removed


def read_rows(path: str | os.PathLike[str], environment: Environment | None = None) -> list[Measurement]:
    """The rows of an environment, read at once: what a device publishes when it is opened.

    A file that is missing, of a newer format or another program's gives nothing, a damaged one the rows that
    still hold. Who only reads moves nothing: the next writer sets a damaged file aside.
    """
    where = Path(path)
    if not where.is_file():
        return []
    try:
        prepare_folder(where)
        try:
            rows, damaged = _read(where, environment, "ro")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise
            # A writer was killed in its transaction: only a connection that may write takes that back.
            rows, damaged = _read(where, environment, "rw")
    except (*DAMAGE, OSError) as error:
        if not is_damage(error):
            log.warning("perfdb.unreadable", path=str(where), error=str(error))
            return []
        if not is_ours(where):
            log.warning(FOREIGN, path=str(where))
            return []
        recovered = salvage(where).items()
        rows = [row for place, of_it in recovered if environment in (None, place) for row in of_it]
        damaged = f"{type(error).__name__}: {error}"
    if damaged:
        log.warning(DAMAGED, path=str(where), rows=len(rows), why=damaged)
    return rows


def _read(path: Path, environment: Environment | None, mode: str) -> tuple[list[Measurement], str]:
    """The rows of an environment, and what is wrong with others; nothing of another program's file."""
    with contextlib.closing(connect(path, mode)) as connection:
        if foreign_writer(connection, path):
            return [], ""
        return decode_all(connection.execute(*query_of(environment)))

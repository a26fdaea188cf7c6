"""The file of measurements: what is written is read, and damage is set aside, told and survived."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from layerzero._util import files
from layerzero.perfdb import Environment, Measurement, rows
from layerzero.perfdb.rows import wal_is_safe
from layerzero.perfdb.store import PerfDB, read_rows
from layerzero.spec.hardware import hypothetical_gpu
from tests import children
from tests.perfdb.rows import HERE, row, site
from tests.users import NOBODY, needs_root, planted, shared

__all__ = ["shared"]


async def write(path: Path, rows: list[Measurement], environment: Environment = HERE, **more: int) -> None:
    async with PerfDB(path, **more) as db:
        await db.add(environment, rows)


def asides(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.damaged-*"))


@pytest.mark.asyncio
async def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    """Every field survives, through the async reader and the one that a device opens with."""
    path = tmp_path / "perf.sqlite"
    rows = [
        row("a.rms_norm", 3.25, version="a 1.0", launch="graph", cache="cold", temperature_c=55, power_w=300),
        row("b.rms_norm", 7.5, case=site(N=1, C=384), free_bytes=1 << 34),
    ]
    async with PerfDB(path) as db:
        await db.add(HERE, rows)
        assert await db.count() == 2
        assert sorted(await db.rows(HERE), key=lambda r: r.kernel) == rows
    assert sorted(read_rows(path, HERE), key=lambda r: r.kernel) == rows


@pytest.mark.asyncio
@pytest.mark.parametrize("field", ["torch", "driver", "cuda", "device", "isa", "threads"])
async def test_another_environment_reads_none_of_them(tmp_path: Path, field: str) -> None:
    """A change of any version or of the machine starts anew; the rows stay for the old one."""
    other = msgspec.structs.replace(HERE, **{field: {"threads": 96, "isa": ("sve",)}.get(field, "another")})
    path = tmp_path / "perf.sqlite"
    await write(path, [row()])
    assert read_rows(path, other) == []
    await write(path, [row(us=2.0)], other)
    assert [r.median_us for r in read_rows(path, HERE)] == [10.0]
    assert [r.median_us for r in read_rows(path, other)] == [2.0]
    assert other.differences(HERE)


@pytest.mark.parametrize(
    "changed",
    [
        {"platform": "rocm"}, {"name": "another"}, {"vendor": "another"}, {"sm": 91},
        {"isa": frozenset({"sve"})}, {"threads": 96}, {"torch": "9.0"}, {"cuda": "99.0"}, {"driver": "999.0"},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_every_fact_of_a_device_is_in_its_environment(changed: dict[str, Any]) -> None:
    """A device that differs in one of them has another digest, and says in what it differs."""
    card = hypothetical_gpu(90)
    here, other = (
        Environment.of_hardware(card),
        Environment.of_hardware(msgspec.structs.replace(card, **changed)),
    )
    assert here.digest() != other.digest() and len(here.differences(other)) == 1


@pytest.mark.asyncio
async def test_discarding_takes_one_kernel_of_one_site(tmp_path: Path) -> None:
    """Rows of that kernel and site in that environment go; every other row stays."""
    path = tmp_path / "perf.sqlite"
    other = msgspec.structs.replace(HERE, driver="another")
    rows = [row(), row(us=11.0), row("b.rms_norm"), row(case=site(N=1, C=384)), row(version="a 2.0")]
    await write(path, rows)
    await write(path, [row()], other)
    async with PerfDB(path) as db:
        assert await db.discard(HERE, [row(us=99.0)]) == 2
    kept = read_rows(path, HERE)
    assert len(kept) == 3 and all(each in kept for each in rows[2:]) and len(read_rows(path, other)) == 1


@pytest.mark.asyncio
async def test_a_failed_write_writes_nothing(tmp_path: Path) -> None:
    """Rows of one call are one transaction."""
    path = tmp_path / "perf.sqlite"
    bad = row(us=float("nan"))  # SQLite stores NaN as NULL, which the column refuses
    with pytest.raises(sqlite3.IntegrityError):
        await write(path, [row(), bad])
    assert read_rows(path, HERE) == []


@pytest.mark.asyncio
async def test_the_oldest_rows_go_at_the_limit(tmp_path: Path) -> None:
    """The file holds the newest rows, and nothing that only the old ones spoke of."""
    path = tmp_path / "perf.sqlite"
    for n in range(1, 6):
        await write(path, [row(f"k{n}.rms_norm", float(n), case=site(N=n, C=8))] * 4, max_rows=10)
    kept = read_rows(path, HERE)
    assert len(kept) == 10 and {r.kernel for r in kept} == {"k3.rms_norm", "k4.rms_norm", "k5.rms_norm"}
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM kernel").fetchone() == (3,)
    connection.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["truncated", "zeros", "other tables", "header", "no text"])
async def test_a_damaged_file_is_set_aside_and_another_begun(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever stands there is kept under another name, said at error level, and measuring goes on."""
    path = tmp_path / "perf.sqlite"
    await write(path, [row()])
    before = path.read_bytes()
    if what == "truncated":
        path.write_bytes(before[: len(before) // 2])
    elif what == "zeros":
        path.write_bytes(b"\0" * len(before))
    elif what == "no text":
        path.write_bytes(before.replace(b"TABLE measurement (id", b"TABLE \xff\xfesurement (id"))
    elif what == "header":
        path.write_bytes(b"\0" * 64 + before[64:])
    else:
        path.unlink()
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE measurement (poison TEXT)")
        connection.close()
    damaged = path.read_bytes()
    await write(path, [row(us=4.0)])
    assert [r.median_us for r in read_rows(path, HERE)][-1] == 4.0
    assert [aside.read_bytes() for aside in asides(path)] == [damaged]
    assert any("perfdb.set_aside" in record.getMessage() for record in caplog.records)


@pytest.mark.asyncio
async def test_another_programs_database_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sound file without a table of ours was named by mistake: nothing is read, moved or written."""
    path = tmp_path / "app.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
    connection.close()
    before = path.read_bytes()
    assert read_rows(path, HERE) == []
    assert any("perfdb.foreign_found" in record.getMessage() for record in caplog.records)
    with pytest.raises(sqlite3.DatabaseError, match="another program: use another file"):
        await write(path, [row()])
    assert path.read_bytes() == before and asides(path) == []


def test_a_changed_number_is_never_believed(tmp_path: Path) -> None:
    """A row whose time was edited fails its checksum; the next writer saves the others in another file."""
    import anyio

    path = tmp_path / "perf.sqlite"
    anyio.run(write, path, [row("a.rms_norm", 10.0), row("b.rms_norm", 20.0)])
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE measurement SET median = 0.001 WHERE median = 20")
    connection.close()
    assert [r.kernel for r in read_rows(path, HERE)] == ["a.rms_norm"] and asides(path) == []
    anyio.run(write, path, [row("c.rms_norm", 30.0)])
    assert {r.kernel for r in read_rows(path, HERE)} == {"a.rms_norm", "c.rms_norm"}
    assert len(asides(path)) == 1


def test_flipped_bits_are_found_or_harmless(tmp_path: Path) -> None:
    """After any single flipped bit, every row that is read is one that was written; nothing raises."""
    import anyio

    path = tmp_path / "perf.sqlite"
    rows = [row(f"k{n}.rms_norm", float(n + 1), case=site(N=n + 1, C=64)) for n in range(12)]
    anyio.run(write, path, rows)
    good, known = path.read_bytes(), {r.kernel: r for r in rows}
    draw = random.Random(7)
    for turn in range(150):
        spoiled = bytearray(good)
        place = draw.randrange(len(spoiled))
        spoiled[place] ^= 1 << draw.randrange(8)
        own = tmp_path / f"turn{turn}.sqlite"
        own.write_bytes(spoiled)
        for found in read_rows(own, HERE):
            assert found == known[found.kernel], f"bit of byte {place}"
        assert own.read_bytes() == spoiled or wal_is_safe(), "who only reads writes nothing"


@pytest.mark.asyncio
async def test_a_later_format_is_left_alone(tmp_path: Path) -> None:
    """A file of a later release gives nothing, refuses writes and keeps every byte."""
    path = tmp_path / "perf.sqlite"
    await write(path, [row()])
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()
    assert read_rows(path, HERE) == []
    with pytest.raises(sqlite3.DatabaseError, match="later release"):
        await write(path, [row()])
    assert path.read_bytes() == before and not asides(path)


@pytest.mark.parametrize(
    ("version", "safe"),
    [("3.40.1", False), ("3.51.2", False), ("3.51.3", True), ("3.50.7", True), ("3.50.6", False),
     ("3.44.6", True), ("3.45.0", False), ("3.52.0", True)],
)  # fmt: skip
def test_wal_only_where_it_is_sound(version: str, safe: bool) -> None:
    """The bug's range and its backports, exactly."""
    assert wal_is_safe(version) is safe


@pytest.mark.asyncio
async def test_the_journal_follows_the_linked_sqlite(tmp_path: Path) -> None:
    """The file is in WAL mode if, and only if, this SQLite may be trusted with it."""
    path = tmp_path / "perf.sqlite"
    await write(path, [row()])
    with sqlite3.connect(path) as connection:
        mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    connection.close()
    assert mode == ("wal" if wal_is_safe() else "delete")


@pytest.mark.asyncio
async def test_a_million_rows_stay_below_500_mb(tmp_path: Path) -> None:
    """By what 20,000 rows take, each kernel of five on sites of its own: the worst case is below it, too."""
    path = tmp_path / "perf.sqlite"
    dims = {"B": 1, "D": 128, "Dv": 128, "G": 4, "Hk": 8, "Hq": 32, "Sk": 1}
    rows = [
        row(f"vendor.attention.variant{n % 5}", 10.5 + n, version="vendor-library 10.20.30.post1",
            case=site("attention", **{**dims, "Sk": n // 5, "Sq": n // 5}))
        for n in range(20_000)
    ]  # fmt: skip
    await write(path, rows)
    assert path.stat().st_size * 50 < 500e6


_KILLED = """
import anyio, sys
from layerzero.perfdb.store import PerfDB
from tests.perfdb.rows import HERE, row, site
async def main():
    async with PerfDB(sys.argv[1]) as db:
        for n in range(100000):
            await db.add(HERE, [row(f"k{n}.rms_norm", n + 1.0, case=site(N=n + 1, C=8))])
            print(n, flush=True)
anyio.run(main)
"""


def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    """After SIGKILL in the middle of writing, the file is sound and every acknowledged row is there."""
    path = tmp_path / "perf.sqlite"
    for _ in range(2):
        child = children.Child(_KILLED, str(path), folder=tmp_path)
        while child.out.read_text().count("\n") <= 20:
            assert child.is_alive(), child.err.read_text()
            time.sleep(0.005)
        child.process.kill()
        acknowledged = child.ended().stdout.count("\n") - 1
        kept = {r.kernel for r in read_rows(path, HERE)}
        assert {f"k{n}.rms_norm" for n in range(acknowledged + 1)} <= kept
        assert not asides(path)


_HALF_WAY = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")  # pages go to the file before the transaction ends
connection.execute("BEGIN IMMEDIATE")
connection.execute("DELETE FROM measurement WHERE id % 2 = 0")
connection.execute("CREATE TABLE filler (x)")
connection.executemany("INSERT INTO filler VALUES (?)", [("x" * 2000,) for _ in range(200)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_killed_half_way_through_a_transaction_costs_no_row(tmp_path: Path) -> None:
    """Its journal is played back by the next reader: no row is gone and the file is not taken for damaged."""
    path = tmp_path / "perf.sqlite"
    anyio.run(write, path, [row(f"k{n}.rms_norm", n + 1.0) for n in range(20)])
    done = children.run(_HALF_WAY, str(path), folder=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert wal_is_safe() or path.with_name("perf.sqlite-journal").exists()
    assert {r.kernel for r in read_rows(path, HERE)} == {f"k{n}.rms_norm" for n in range(20)}
    assert not asides(path)


_FEW_FILES = """
import random, resource, sys, threading, time
from layerzero.perfdb.store import read_rows
from tests.perfdb.rows import HERE
read_rows(sys.argv[1], HERE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
gate, found = threading.Barrier(200), []
def read():
    gate.wait()
    for _ in range(500):
        rows = len(read_rows(sys.argv[1], HERE))
        found.append(rows)
        if rows:
            return
        time.sleep(random.random() / 50)  # who was refused comes back, and no longer with everybody
threads = [threading.Thread(target=read) for _ in range(200)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(found), found.count(1), len(read_rows(sys.argv[1], HERE)))
"""


def test_few_descriptors_and_many_threads(tmp_path: Path) -> None:
    """FS-025: 200 threads read under a limit of 64 descriptors: nobody fails, and afterwards all can be read.

    Who meets the limit is told that nothing can be read now, and the file is not taken for a damaged one.
    """
    pytest.importorskip("resource", reason="limits of descriptors are Unix's")
    path = tmp_path / "perf.sqlite"
    anyio.run(write, path, [row()])
    done = children.run(_FEW_FILES, str(path), folder=tmp_path)
    asked, answered, after = map(int, done.stdout.split())
    assert asked >= answered == 200 and after == 1, done.stderr[-2000:]
    assert not asides(path) and read_rows(path, HERE)


@pytest.mark.asyncio
async def test_a_reader_sees_whole_transactions_beside_a_writer(tmp_path: Path) -> None:
    """CS-014: each write is 50 rows; a reader finds all or none of them, and a sound file."""
    path = tmp_path / "perf.sqlite"
    stop, seen = threading.Event(), list[int]()

    def read() -> None:
        while not stop.is_set():
            seen.append(len(read_rows(path, HERE)))

    async with PerfDB(path) as db:
        await db.add(HERE, [row(f"k{n}.rms_norm") for n in range(50)])
        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for turn in range(1, 31):
            await db.add(HERE, [row(f"k{turn * 50 + n}.rms_norm") for n in range(50)])
        stop.set()
        for reader in readers:
            reader.join()
    assert len(set(seen)) > 1 and {count % 50 for count in seen} == {0}
    assert len(read_rows(path, HERE)) == 31 * 50 and not asides(path)


def names(folder: Path) -> list[str]:
    return [found.name for found in folder.iterdir()]


@pytest.mark.asyncio
async def test_a_file_that_somebody_holds_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tuning that comes upon a lock says so; the file stays where it is, with its rows."""
    monkeypatch.setattr(rows, "PRAGMAS", ("PRAGMA busy_timeout = 1",))
    path = tmp_path / "p.sqlite"
    async with PerfDB(path) as db:
        await db.add(HERE, [row()])
    holder = sqlite3.connect(path)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        async with PerfDB(path):
            pass
    assert read_rows(path) == []
    holder.rollback()
    holder.close()
    assert names(tmp_path) == ["p.sqlite"]
    assert len(read_rows(path)) == 1


@pytest.mark.asyncio
async def test_a_folder_at_the_place_of_the_file_stays_there(tmp_path: Path) -> None:
    """It was named by mistake: it is told, not renamed."""
    path = tmp_path / "p.sqlite"
    path.mkdir()
    (path / "mine").touch()
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        async with PerfDB(path):
            pass
    assert (path / "mine").exists()
    assert names(tmp_path) == ["p.sqlite"]


@pytest.mark.asyncio
@pytest.mark.parametrize("content", [b"a list of things to buy\n" * 40, b"%PDF-1.7 \xff\x00" * 40, b"x"])
async def test_another_kind_of_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    """It was named by mistake: who reads finds nothing in it, who would write is told; it stays as it was."""
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    assert read_rows(path, HERE) == []
    with pytest.raises(sqlite3.DatabaseError, match="another program: use another file"):
        await write(path, [row()])
    assert path.read_bytes() == content and names(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("what", ["truncated", "no text", "header", "zeros"])
def test_who_only_reads_moves_nothing(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    """A runtime that opens a damaged file says so and uses what holds; the next writer mends it."""
    path = tmp_path / "perf.sqlite"
    anyio.run(write, path, [row(f"k{n}.rms_norm", n + 1.0) for n in range(200)])
    whole = path.read_bytes()
    spoiled = {
        "truncated": whole[: len(whole) - 4096],
        "no text": whole.replace(b"TABLE measurement (id", b"TABLE \xff\xfesurement (id"),
        "header": b"\0" * 64 + whole[64:],
        "zeros": b"\0" * len(whole),
    }[what]
    path.write_bytes(spoiled)
    for _ in range(2):
        assert all(found.kernel.startswith("k") for found in read_rows(path, HERE))
    assert path.read_bytes() == spoiled and names(tmp_path) == ["perf.sqlite"]
    assert "perfdb.damaged" in caplog.text


@pytest.mark.asyncio
async def test_damage_on_a_full_disk_is_mended_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for another file: the damaged one stays, and gives its rows when there is."""
    path = tmp_path / "perf.sqlite"
    await write(path, [row("a.rms_norm", 10.0), row("b.rms_norm", 20.0)])
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE measurement SET median = 0.001 WHERE median = 20")
    connection.close()
    before = path.read_bytes()
    with monkeypatch.context() as full:
        full.setattr(rows, "PRAGMAS", ("PRAGMA max_page_count = 3",))  # SQLite's own limit, and its error
        with pytest.raises(sqlite3.OperationalError, match="full"):
            await write(path, [row()])
    assert path.read_bytes() == before and names(tmp_path) == ["perf.sqlite"]
    await write(path, [row("c.rms_norm", 30.0)])
    assert {r.kernel for r in read_rows(path, HERE)} == {"a.rms_norm", "c.rms_norm"}
    assert [aside.read_bytes() for aside in asides(path)] == [before]


_OPENERS = """
import sys, time
from pathlib import Path
import anyio
from layerzero.perfdb.store import PerfDB
from tests.perfdb.rows import HERE, row
folder, own = Path(sys.argv[1]), sys.argv[2]
async def write(path):
    async with PerfDB(path) as db:
        await db.add(HERE, [row(f"w{own}.rms_norm")])
for turn in range(int(sys.argv[3])):
    (folder / f"here-{turn}-{own}").touch()
    while not (folder / f"go-{turn}").exists():
        time.sleep(0.0005)
    anyio.run(write, folder / f"{turn}.sqlite")
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_writers_that_begin_together_all_write(tmp_path: Path, damaged: bool) -> None:
    """Six processes open a file that is not there yet, or is damaged: each one's row is in it."""
    turns, writers, work = 12, 6, tmp_path / "work"
    work.mkdir()
    if damaged:
        anyio.run(write, tmp_path / "whole.sqlite", [row("old.rms_norm")])
        whole = (tmp_path / "whole.sqlite").read_bytes()
        for turn in range(turns):
            (work / f"{turn}.sqlite").write_bytes(b"\0" * 64 + whole[64:])
    running = [
        children.Child(_OPENERS, str(work), str(own), str(turns), folder=tmp_path) for own in range(writers)
    ]
    try:
        for turn in range(turns):
            while (
                sum(each.exists() for each in (work / f"here-{turn}-{n}" for n in range(writers))) < writers
            ):
                assert all(child.is_alive() for child in running), [c.err.read_text() for c in running]
                time.sleep(0.001)
            (work / f"go-{turn}").touch()
    except BaseException:
        for child in running:
            child.process.kill()
        raise
    ended = [child.ended() for child in running]
    assert [done.returncode for done in ended] == [0] * writers, [done.stderr[-600:] for done in ended]
    for turn in range(turns):
        found = {r.kernel for r in read_rows(work / f"{turn}.sqlite", HERE)}
        assert found == {f"w{own}.rms_norm" for own in range(writers)}
        assert len(asides(work / f"{turn}.sqlite")) == damaged
    assert not list(work.glob("*.new-*"))


@pytest.mark.asyncio
async def test_a_pipe_at_the_place_of_the_file_is_told(tmp_path: Path) -> None:
    """Nobody waits for somebody to write into it."""
    os.mkfifo(tmp_path / "p.sqlite")
    assert read_rows(tmp_path / "p.sqlite") == []
    with pytest.raises(sqlite3.OperationalError, match="no plain file"):
        await write(tmp_path / "p.sqlite", [row()])


@needs_root
@pytest.mark.asyncio
async def test_another_users_file_or_link_is_refused(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not written through, and what it says moves no choice."""
    mine = shared / "mine.sqlite"
    mine.write_bytes(b"")
    whole = shared / "whole.sqlite"
    await write(whole, [row()])
    data = whole.read_bytes()

    def plant() -> None:
        (shared / "link.sqlite").symlink_to(mine)
        (shared / "file.sqlite").write_bytes(data)

    planted(shared, plant)
    for name in ("link", "file"):
        assert read_rows(shared / f"{name}.sqlite", HERE) == []
        with pytest.raises(PermissionError, match=f"got owner {NOBODY}"):
            await write(shared / f"{name}.sqlite", [row()])
    assert mine.read_bytes() == b"" and "perfdb.unreadable" in caplog.text


@pytest.mark.asyncio
async def test_the_default_folder_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that others can write is neither read nor written; one that they can only read is closed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = files.user_folder("perfdb.sqlite")
    await write(path, [row()])
    path.parent.chmod(0o755)
    assert len(read_rows(path, HERE)) == 1 and path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o777)
    assert read_rows(path, HERE) == []
    with pytest.raises(PermissionError, match="writable by no other user"):
        await write(path, [row()])

"""The quarantine store: whole records or none, damage that never reads as freedom, nothing overwritten."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.health import JsonQuarantineStore, QuarantineRecord

RECORD = QuarantineRecord(kernel="a.b", device="cuda:0", environment="e1", why="wrong numbers", timestamp=5.0)


def only_file(directory: Path) -> Path:
    (path,) = (p for p in directory.iterdir() if p.suffix == ".json")
    return path


def test_records_round_trip(tmp_path: Path) -> None:
    """What is saved is loaded, once for each kernel, device and environment; the last word stands."""
    store = JsonQuarantineStore(tmp_path / "q")
    assert store.load() == ()
    other = QuarantineRecord(kernel="a.b", device="cuda:1", environment="e1")
    for record in (RECORD, other, msgspec.structs.replace(RECORD, why="later")):
        store.save(record)
    assert {(r.device, r.why) for r in JsonQuarantineStore(tmp_path / "q").load()} == {
        ("cuda:0", "later"),
        ("cuda:1", ""),
    }
    store.forget(RECORD)
    store.forget(RECORD)
    assert store.load() == (other,)


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_files_belong_to_the_user_alone(tmp_path: Path) -> None:
    """Directory 0700, file 0600, and no temporary file stays."""
    store = JsonQuarantineStore(tmp_path / "q")
    store.save(RECORD)
    assert stat.S_IMODE((tmp_path / "q").stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(tmp_path / "q").stat().st_mode) == 0o600
    assert len(list((tmp_path / "q").iterdir())) == 1


@pytest.mark.parametrize("kernel", ["../x", "A.b", "a/b", "", "a\x00b", "a" * 200])
def test_a_kernel_id_that_is_no_file_name_is_refused(tmp_path: Path, kernel: str) -> None:
    """No id reaches outside the directory."""
    with pytest.raises(ValueError, match="kernel needs an id"):
        JsonQuarantineStore(tmp_path / "q").save(QuarantineRecord(kernel=kernel))
    assert list(tmp_path.iterdir()) == []


def test_damage_is_set_aside_and_keeps_the_kernel_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A record that does not decode moves to a new name; its kernel stays out, everywhere, from then on."""
    store = JsonQuarantineStore(tmp_path)
    store.save(RECORD)
    path = only_file(tmp_path)
    for number, damage in enumerate((b"\x00 not json 1", b"[" * 50_000), 1):
        path.write_bytes(damage)
        with caplog.at_level(logging.ERROR, "layerzero"):
            (record,) = {r.kernel: r for r in store.load()}.values()
        assert (record.kernel, record.device, record.environment) == ("a.b", "*", "*")
        assert "unreadable" in record.why and "record.set_aside" in caplog.text
        aside = tmp_path / f"{path.name}.damaged-{number}"
        assert aside.read_bytes() == damage
        assert [r.kernel for r in JsonQuarantineStore(tmp_path).load()] == ["a.b"]
    assert (tmp_path / f"{path.name}.damaged-1").read_bytes() == b"\x00 not json 1"


def test_a_newer_format_is_left_alone_and_obeyed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A record of a later release is not ours to move; its kernel is out here as well."""
    store = JsonQuarantineStore(tmp_path)
    store.save(RECORD)
    path = only_file(tmp_path)
    path.write_bytes(b'{"schema": 3, "something": "else"}')
    with caplog.at_level(logging.WARNING, "layerzero"):
        (record,) = store.load()
    assert record.kernel == "a.b" and "newer format 3" in record.why and "record.newer_found" in caplog.text
    assert path.read_bytes() == b'{"schema": 3, "something": "else"}'


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="this platform cannot refuse links")
def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    """A link in the directory is damage: set aside, its target untouched."""
    store = JsonQuarantineStore(tmp_path / "q")
    store.save(RECORD)
    path = only_file(tmp_path / "q")
    target = tmp_path / "elsewhere"
    target.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(target)
    (record,) = store.load()
    assert record.device == "*" and target.exists() and path.with_name(path.name + ".damaged-1").is_symlink()


@pytest.mark.parametrize("record", [RECORD, QuarantineRecord(kernel="a.b")], ids=["device", "everywhere"])
@pytest.mark.parametrize("step", ["mkstemp", "replace", "fsync"])
def test_damage_that_cannot_be_replaced_keeps_the_kernel_out_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    record: QuarantineRecord, step: str,
) -> None:  # fmt: skip
    """A full disk, no descriptor, a folder to read alone: now, and when there is room again."""
    store = JsonQuarantineStore(tmp_path)
    store.save(record)
    path = only_file(tmp_path)
    path.write_bytes(b"damaged")

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "layerzero"):
        patch.setattr(tempfile if step == "mkstemp" else os, step, full)
        (found,) = store.load()
    assert (found.kernel, found.device, path.read_bytes()) == ("a.b", "*", b"damaged")
    assert "no space left" in caplog.text
    (found,) = {r.kernel: r for r in JsonQuarantineStore(tmp_path).load()}.values()
    assert (found.kernel, found.device) == ("a.b", "*")
    assert path.with_name(f"{path.name}.damaged-1").read_bytes() == b"damaged"


def test_a_process_that_ends_while_it_replaces_damage_frees_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before what it believes of the kernel is written: the damage is found again."""
    store = JsonQuarantineStore(tmp_path)
    store.save(RECORD)
    only_file(tmp_path).write_bytes(b"damaged")

    def killed(*_: object) -> None:
        assert [path for path in tmp_path.iterdir() if path.suffix == ".json"]
        raise OSError("as if")

    monkeypatch.setattr(JsonQuarantineStore, "save", killed)
    store.load()


def test_strange_files_are_ignored(tmp_path: Path) -> None:
    """Only names of our own form are read."""
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "a.b.json").write_text("x")
    assert JsonQuarantineStore(tmp_path).load() == () and len(list(tmp_path.iterdir())) == 2


def test_concurrent_writers_leave_one_whole_record(tmp_path: Path) -> None:
    """Eight threads saving one record, and a reader meanwhile: every read is some whole record."""
    store = JsonQuarantineStore(tmp_path)
    store.save(RECORD)
    seen: set[str] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.update(record.device for record in JsonQuarantineStore(tmp_path).load())

    def write(number: int) -> None:
        for _ in range(10):
            store.save(msgspec.structs.replace(RECORD, why=f"writer {number}"))

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    stop.set()
    reader.join()
    assert seen == {"cuda:0"} and len(list(tmp_path.iterdir())) == 1


def test_a_failed_save_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the replacement fails, the record before it stands and no temporary file stays."""
    store = JsonQuarantineStore(tmp_path)
    store.save(RECORD)

    def full(source: object, target: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        store.save(msgspec.structs.replace(RECORD, why="new"))
    monkeypatch.undo()
    assert store.load() == (RECORD,) and len(list(tmp_path.iterdir())) == 1


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
def test_no_damage_frees_a_kernel(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int, cut: bool
) -> None:
    """Any flipped bit or truncation still yields the kernel's quarantine (I7)."""
    directory = tmp_path_factory.mktemp("q")
    store = JsonQuarantineStore(directory)
    store.save(RECORD)
    path = only_file(directory)
    data = bytearray(path.read_bytes())
    position %= len(data)
    if cut:
        del data[position:]
    else:
        data[position] ^= 1 << bit
    path.write_bytes(bytes(data))
    records = store.load()
    assert records and all(
        r == RECORD or (r.kernel, r.device, r.environment) == ("a.b", "*", "*") for r in records
    )


def test_a_record_too_large_is_damage(tmp_path: Path) -> None:
    """A file above the size limit is not decoded; its kernel stays out."""
    store = JsonQuarantineStore(tmp_path)
    store.save(RECORD)
    only_file(tmp_path).write_bytes(b" " * 70_000)
    (record,) = store.load()
    assert (record.kernel, record.device) == ("a.b", "*")


def test_records_in_a_folder_that_others_can_write_are_refused(tmp_path: Path) -> None:
    """Anybody could take a kernel out, or free one; nothing is written there either."""
    store = JsonQuarantineStore(tmp_path)
    store.save(QuarantineRecord(kernel="a.x"))
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="writable by no other user"):
        store.load()
    with pytest.raises(PermissionError):
        store.save(QuarantineRecord(kernel="b.x"))

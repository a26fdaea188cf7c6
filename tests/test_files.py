"""Small files of state: whole or not at all, bounded, set aside under a name of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from layerzero import files


def test_what_was_written_is_read_and_nothing_else_is_left(tmp_path: Path) -> None:
    """A file replaces its forerunner, in a folder that only this user can enter."""
    path = tmp_path / "state" / "a.json"
    for data in (b"first", b"second"):
        files.write_whole(path, data)
        assert files.read_bounded(path, 6) == data
    assert os.listdir(path.parent) == ["a.json"]
    assert path.parent.stat().st_mode & 0o077 == 0


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the old file nor the folder shows a trace of it."""
    path = tmp_path / "a.json"
    files.write_whole(path, b"first")

    def full(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        files.write_whole(path, b"second")
    assert files.read_bounded(path, 10) == b"first"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_and_a_large_file_are_not_read(tmp_path: Path) -> None:
    """Somebody else's link does not choose what is read; a bound is a bound."""
    files.write_whole(tmp_path / "a", b"12345")
    with pytest.raises(ValueError, match="more than 4 bytes"):
        files.read_bounded(tmp_path / "a", 4)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(OSError):
        files.read_bounded(tmp_path / "link", 5)


def test_damaged_files_keep_apart(tmp_path: Path) -> None:
    """Each one set aside gets a name of its own, also where another process was quicker."""
    found = []
    for data in (b"x", b"y"):
        files.write_whole(tmp_path / "a", data)
        found.append(files.set_aside(tmp_path / "a"))
    assert [path.name for path in found] == ["a.damaged-1", "a.damaged-2"]
    assert [path.read_bytes() for path in found] == [b"x", b"y"]
    assert not files.set_aside(tmp_path / "a").exists()


@pytest.mark.parametrize("there", [b"root:x:0:0\n", b'{"other": []}', b"[1]"])
def test_another_kind_of_file_is_not_replaced(tmp_path: Path, there: bytes) -> None:
    """What somebody named by mistake stays as it was; nor is a neighbour with a draft's name touched."""
    path = tmp_path / "a.json"
    path.write_bytes(there)
    with pytest.raises(FileExistsError, match="no file with 'rows'"):
        files.replace_own(path, b'{"rows": []}', "rows")
    with pytest.raises(FileExistsError):
        files.replace_own(tmp_path, b'{"rows": []}', "rows")
    assert path.read_bytes() == there
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_file_of_ours_is_replaced(tmp_path: Path) -> None:
    """So is an empty one; a failed write leaves what was there."""
    path, neighbour = tmp_path / "new" / "a.json", tmp_path / "new" / "a.tmp"
    neighbour.parent.mkdir()
    for there in (b"", b'{"rows": [1]}'):
        neighbour.write_bytes(b"mine")
        path.write_bytes(there)
        files.replace_own(path, b'{"rows": [2]}', "rows")
        assert path.read_bytes() == b'{"rows": [2]}'
    with pytest.raises(TypeError):
        files.replace_own(path, "no bytes", "rows")  # type: ignore[arg-type]
    assert path.read_bytes() == b'{"rows": [2]}'
    assert sorted(os.listdir(path.parent)) == ["a.json", "a.tmp"]
    assert neighbour.read_bytes() == b"mine"

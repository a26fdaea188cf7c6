"""Small files of state: written whole or not at all, read within bounds, set aside where they are damaged."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

# What stands before the rows of any file of ours.
_HEAD = 1 << 18


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` in place of `path`; its folder is made for this user alone where it is missing.

    Raises: OSError: it cannot be written; what was there stays.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
    _sync_folder(path.parent)


def replace_own(path: Path, data: bytes, field: str) -> None:
    """Put `data` in place of `path`, for everybody to read; its folder is made where it is missing.

    Raises: FileExistsError: another kind of file stands there. OSError: it cannot be written; what was
        there stays.
    """
    need_own(path, field)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with draft.open("xb") as file:
            file.write(data)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def need_own(path: Path, field: str) -> None:
    """Refuse a `path` where anything else stands than JSON with `field`, which a new one may replace.

    Raises: FileExistsError.
    """
    if not path.exists():
        return
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(_HEAD)
        if not head or (head.lstrip().startswith(b"{") and f'"{field}"'.encode() in head):
            return
    raise FileExistsError(errno.EEXIST, f"not replaced: it is no file with {field!r}", str(path))


def read_bounded(path: Path, limit: int) -> bytes:
    """The file's bytes.

    Raises: FileNotFoundError: it is not there. OSError: it cannot be read, or is a link. ValueError: it has
        more than `limit` bytes.
    """
    # O_NOFOLLOW: a link planted here must not choose what is read.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(handle, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"more than {limit} bytes")
    return data


def set_aside(path: Path) -> Path:
    """Give a damaged file a name beside it that nobody reads; gives that name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    with suppress(FileNotFoundError):  # another process has just done the same
        os.replace(path, aside)
    return aside


def _sync_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return  # only POSIX opens a folder; elsewhere the replace itself is all there is
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

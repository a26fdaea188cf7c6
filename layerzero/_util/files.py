"""Small files of state: written whole or not at all, read within bounds, set aside where they are damaged.

State is in folders that no other user can write: a user that can plant a file there chooses what is read, and
who can plant a link chooses what is overwritten.
"""

from __future__ import annotations

import errno
import importlib
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

fcntl: Any = None  # Windows has none
with suppress(ImportError):
    fcntl = importlib.import_module("fcntl")

_T = TypeVar("_T")
# A reader must not wait for another process to write into a pipe at a file's path.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_MAX_GIVEN = 1 << 28
_POSIX = hasattr(os, "geteuid")

# What precedes the rows of any file of ours.
_HEAD = 1 << 18


class StatedFormat(msgspec.Struct, frozen=True):
    """What any file of ours says, whatever its format: which one it is."""

    format: int


class ExposedError(PermissionError):
    """A file that others than this user and root can write, where that decides what is read or run."""


def user_folder(name: str) -> Path:
    """`layerzero/<name>` in the user's cache folder, which need not be there.

    A relative XDG_CACHE_HOME counts for nothing, as the XDG specification wants: it would be another folder
    in each working directory.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "layerzero" / name


def own_user_folder(name: str) -> Path:
    """`user_folder(name)`, made or checked as `own_folder` does, and the folder around it.

    Raises: OSError: as `own_folder`.
    """
    path = user_folder(name)
    own_folder(path.parent, default=True)
    return own_folder(path, default=True)


def own_folder(path: Path, *, default: bool = False) -> Path:
    """`path`, made for this user alone where it is missing, or checked to be this user's where it is there.

    A `default` place, which no user chose, has mode 0700 afterwards.
    Raises: PermissionError: it, or a link at its place, belongs to another user, or others can write it.
        OSError: it cannot be made, or is no folder.
    """
    if not path.parent.exists():
        own_folder(path.parent)
    if not os.path.lexists(path):
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    if not _POSIX:
        return path
    link = os.lstat(path)
    linked = stat.S_ISLNK(link.st_mode)
    if linked and link.st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, f"a link of user {link.st_uid} leads elsewhere", str(path))
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | (0 if linked else _NO_LINK))
    try:
        status = os.fstat(handle)
        if problem := _exposure(status):
            raise PermissionError(errno.EPERM, f"the folder needs {problem}", str(path))
        if default and status.st_mode & 0o077:
            os.fchmod(handle, 0o700)  # raises where it is another user's
    finally:
        os.close(handle)
    return path


def _exposure(status: os.stat_result) -> str:
    """What a file or folder lacks to be this user's alone to write; empty where it lacks nothing."""
    user = os.geteuid()  # beside whom only root, who needs no plan, may own it
    shared = status.st_mode & stat.S_IWOTH or (
        status.st_mode & stat.S_IWGRP and status.st_gid != os.getegid()
    )
    if status.st_uid in (user, 0) and not shared:
        return ""
    return (
        f"to belong to this user ({user}) and to be writable by no other user, got owner {status.st_uid} and "
        f"mode {stat.S_IMODE(status.st_mode):o}"
    )


def create_own(path: Path) -> int:
    """The descriptor of a new file of this user alone, to read and write.

    Raises: FileExistsError: something is there, a link too.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK | getattr(os, "O_CLOEXEC", 0)
    return os.open(path, flags, 0o600)


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` in place of `path`; its folder is made for this user alone where it is missing.

    Raises: PermissionError: others can write the folder. OSError: it cannot be written; what was there stays.
    """
    own_folder(path.parent)
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

    Raises: FileExistsError: another kind of file is there. OSError: it cannot be written; what was
        there stays.
    """
    need_own(path, field)
    put_whole(path, data)


def put_whole(path: Path, data: bytes) -> None:
    """Put `data` in place of `path`, whole or not at all; its folder is made where it is missing.

    Raises: OSError: it cannot be written; what was there stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with draft.open("xb") as file:
            file.write(data)
        draft.replace(path)
    except BaseException as error:
        with suppress(OSError):  # where it could not be made either
            draft.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def need_own(path: Path, field: str) -> None:
    """Refuse a `path` that is anything else than JSON with `field`, which a new one may replace.

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
    """The bytes of a file of state.

    Raises: FileNotFoundError: it is not there. OSError: it cannot be read, is a link, or no plain file.
        PermissionError: others could have written it. ValueError: it has more than `limit` bytes.
    """
    return _read(path, limit, _READ | _NO_LINK, _need_own)


def pinned_path(path: Path) -> str:
    """A path to the file that is at `path` now, whatever is there later; open until the process ends.

    Never closed: the loader knows libraries by their paths, and a number that is given again would name the
    first one. Where the system has no such paths, `path` itself.
    Raises: OSError: it is a link, or no plain file. PermissionError: others could have written it.
    """
    handle = os.open(path, _READ | _NO_LINK)
    try:
        _need_own(path, os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    path_of_handle = f"/proc/self/fd/{handle}"
    if os.path.exists(path_of_handle):
        return path_of_handle
    os.close(handle)
    return str(path)


def _need_own(path: Path, status: os.stat_result) -> None:
    _need_plain(path, status)
    if _POSIX and (problem := _exposure(status)):
        raise ExposedError(errno.EPERM, f"the file needs {problem}", str(path))


def _need_plain(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no plain file", str(path))


def read_given(path: str | os.PathLike[str], limit: int = _MAX_GIVEN, *, trusted: bool = False) -> bytes:
    """The bytes of a file that a user named: a link may lead to it, and any user may have written it.

    A `trusted` one only this user and root may have written.
    Raises: OSError: it cannot be read, or is no plain file. ExposedError: others could have written a
        `trusted` one. ValueError: it has more than `limit` bytes.
    """
    return _read(Path(path), limit, _READ, _need_own if trusted else _need_plain)


def _read(path: Path, limit: int, flags: int, need: Callable[[Path, os.stat_result], None]) -> bytes:
    handle = os.open(path, flags)
    try:
        need(path, os.fstat(handle))  # before Python's own look at it, whose error names a number
        with open(handle, "rb", closefd=False) as file:
            data = file.read(limit + 1)
    finally:
        os.close(handle)
    if len(data) > limit:
        raise ValueError(f"{path} has more than {limit} bytes")
    return data


def pretty_json(value: object) -> bytes:
    """JSON that a diff reads well."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def decode_json(data: bytes, type: type[_T]) -> _T:
    """The value of a file's JSON.

    Raises: msgspec.MsgspecError: it is none, of another kind, not UTF-8, or nested too deeply.
    """
    return _decoded(msgspec.json.decode, "JSON", data, type)


def decode_packed(data: bytes, type: type[_T]) -> _T:
    """The value of a msgpack message.

    Raises: msgspec.MsgspecError: as `decode_json`.
    """
    return _decoded(msgspec.msgpack.decode, "msgpack", data, type)


def _decoded(decode: Callable[..., Any], name: str, data: bytes, type: type[_T]) -> _T:
    try:
        decoded: _T = decode(data, type=type)
    except RecursionError as error:
        raise msgspec.DecodeError(f"{name} is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"{name} needs UTF-8 in its texts, got another: {error}") from error
    return decoded


def damaged_name(path: Path) -> Path:
    """A free name beside a damaged file, which is never read."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    return aside


def set_aside(path: Path) -> Path:
    """Give a damaged file a name beside it that is never read; returns that name."""
    aside = damaged_name(path)
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

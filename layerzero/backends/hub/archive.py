"""Repositories out of a tar archive, read strictly: plain files under names that were locked, within bounds.

Not by `tarfile`, which takes more than that: chains of headers without end, sizes below zero, lists of holes.
Format: POSIX.1-2017, `pax`, "ustar Interchange Format"; GNU tar's long names (type `L`).
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from layerzero._util.files import read_given
from layerzero.backends.hub.refusal import refusal

# Far above what a kernel's build is, far below what harms a machine.
MAX_BYTES = 2 << 30
MAX_HEADER = 1 << 16  # of what describes a file: its long name, its times
Check = Callable[[str, bytes], None]
_BLOCK = 512
_RECORD = re.compile(rb"(\d{1,6}) ([^=]+)=")


def unpack_files(archive: Path, locate: Callable[[str], tuple[str, Check]]) -> dict[str, dict[str, bytes]]:
    """The repositories of a tar archive, packed by gzip or not: `<owner>/<name>/<path>`, plain files alone.

    `locate(name)` gives a member's repository with its check, or refuses it. Nothing is unpacked to disk.
    Raises: BackendNotAvailableError: a link, a device, holes, a path that leads elsewhere, a file that is not
        locked or is another, more than `MAX_BYTES` in all, or damage.
    """
    repositories: dict[str, dict[str, bytes]] = {}
    try:
        stream = _Stream(read_given(archive, MAX_BYTES))
        for name, size in _members(stream):
            repository, check = locate(name)
            path = name.removeprefix(f"{repository}/")
            files = repositories.setdefault(repository, {})
            if path in files:
                raise ValueError(f"{name!r} is there twice")
            files[path] = stream.padded(size)
            check(path, files[path])
    except (OSError, ValueError, zlib.error) as error:
        raise refusal(str(archive), f"it is no whole archive: {error}") from error
    return repositories


def _members(stream: _Stream) -> Iterator[tuple[str, int]]:
    """The name and the size of each file, whose content is to be taken before the next one is asked for."""
    names: dict[bytes, bytes] = {}  # the next file's name, by the type of the header that says it
    while any(head := stream.take(_BLOCK)):
        if _octal(head[148:156]) != sum(head) - sum(head[148:156]) + 8 * ord(" "):
            raise ValueError("the checksum of a header does not hold")
        kind, size = head[156:157], _octal(head[124:136])
        if kind in (b"x", b"g", b"L"):
            if kind in names or size > MAX_HEADER:
                raise ValueError(f"a file needs one header of each kind of at most {MAX_HEADER} bytes")
            names[kind] = _described_name(kind, stream.padded(size))
            continue
        name = (names.get(b"x") or names.get(b"L") or _name(head)).decode()
        if kind not in (b"0", b"\0"):
            what = "a link" if kind in (b"1", b"2", b"K") else "no plain file"
            raise ValueError(f"{name!r} is {'holes' if kind == b'S' else what}")
        yield name, size
        names = {}


def _name(head: bytes) -> bytes:
    name, begins = (field.split(b"\0")[0] for field in (head[:100], head[345:500]))
    return begins + b"/" + name if head[257:263] == b"ustar\0" and begins else name


def _described_name(kind: bytes, data: bytes) -> bytes:
    """The name in a header that describes the next file, or all of them; empty where it says none."""
    name = data.split(b"\0")[0] if kind == b"L" else _records(data).get(b"path", b"")
    if kind == b"g" and name:
        raise ValueError("a name that holds for all files is none of a file")
    return name


def _records(data: bytes) -> dict[bytes, bytes]:
    """The records of a header: `<length> <key>=<value>` and a line's end each."""
    records, start = {}, 0
    while start < len(data):
        begun = _RECORD.match(data, start)
        end = start + int(begun[1]) if begun else 0
        if begun is None or not begun.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise ValueError("a header holds no records")
        if begun[2] == b"size" or begun[2].startswith(b"GNU.sparse"):
            raise ValueError(f"a file's {begun[2].decode()!r} holds what the archive does not: holes")
        records[begun[2]], start = data[begun.end() : end - 1], end
    return records


def _octal(field: bytes) -> int:
    digits = field.strip(b" \0")
    if not re.fullmatch(rb"[0-7]*", digits):
        raise ValueError(f"a number in a header needs octal digits, got {digits!r}")
    return int(digits or b"0", 8)


class _Stream:
    """What comes out of an archive, up to `MAX_BYTES`."""

    def __init__(self, packed: bytes) -> None:
        self._packed = io.BytesIO(packed)
        # 31: with gzip's header, which is read in C, however long it is.
        self._unpack = zlib.decompressobj(31) if packed.startswith(b"\x1f\x8b") else None
        self._taken = 0

    def take(self, size: int) -> bytes:
        """The next bytes.

        Raises: ValueError: there are not so many, or more than the bound in all.
        """
        self._taken += size
        if self._taken > MAX_BYTES:
            raise ValueError(f"it holds more than {MAX_BYTES} bytes")
        data = self._packed.read(size) if self._unpack is None else self._unpacked(self._unpack, size)
        if len(data) < size:
            raise ValueError("it ends in the middle")
        return data

    def _unpacked(self, unpack: zlib._Decompress, size: int) -> bytes:
        data = bytearray()
        while len(data) < size and not unpack.eof:
            packed = unpack.unconsumed_tail or self._packed.read(1 << 16)
            if not packed:
                break
            data += unpack.decompress(packed, size - len(data))
        return bytes(data)

    def padded(self, size: int) -> bytes:
        """The next bytes, with the rest of their last block behind them left out."""
        return self.take(size + -size % _BLOCK)[:size]

"""Tables as JSON files that people read and diff: one row a line, and a hash of the rows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from layerzero._util.files import decode_json, read_given, replace_own
from layerzero.spec.errors import CacheCorruptionError

T = TypeVar("T", bound=msgspec.Struct)


def content_hash(rows: Sequence[msgspec.Struct]) -> str:
    """The hash that a table states of its rows."""
    return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()


def write_table_file(path: str | os.PathLike[str], table: msgspec.Struct, field: str) -> None:
    """Write `table`, whole or not at all, with the rows of `field` on a line each.

    Raises: FileExistsError: `path` is another kind of file.
    """
    empty = msgspec.structs.replace(table, **{field: ()})
    head = msgspec.json.format(msgspec.json.encode(empty), indent=1)
    lines = b",\n".join(b"  " + msgspec.json.encode(row) for row in getattr(table, field))
    name = f'"{field}": ['.encode()
    replace_own(Path(path), head.replace(name + b"]", name + b"\n" + lines + b"\n ]") + b"\n", field)


def read_table_file(path: str | os.PathLike[str], kind: type[T], field: str, **versions: int) -> T:
    """Read what `write_table_file` wrote.

    Raises: CacheCorruptionError: it does not decode, a field of `versions` has another value, or the rows of
        `field` do not match its `content` hash.
    """
    try:
        table = decode_json(read_given(path), kind)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise CacheCorruptionError(f"{path}: {error}", path=str(path)) from error
    need_table(table, str(path), field, **versions)
    return table


def need_table(table: msgspec.Struct, path: str, field: str, **versions: int) -> None:
    """Refuse a table of another format, or with other rows than it states.

    Raises: CacheCorruptionError: as `read_table_file`; `path` names the table.
    """
    for name, needed in versions.items():
        if (got := getattr(table, name)) != needed:
            raise CacheCorruptionError(f"{path}: {name} needs {needed}, got {got}", path=path)
    if content_hash(getattr(table, field)) != getattr(table, "content", None):
        raise CacheCorruptionError(f"{path}: its {field} do not match its content hash", path=path)

"""Tables as JSON files that people read and diff: one row a line, and a hash of the rows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from layerzero._util import log
from layerzero._util.files import StatedFormat, decode_json, read_given, replace_own
from layerzero.spec.errors import CacheCorruptionError

T = TypeVar("T", bound=msgspec.Struct)
Plain = dict[str, Any]
MIGRATED = "table.migrated"
NO_MIGRATIONS: Mapping[int, Callable[[Plain], Plain]] = MappingProxyType({})


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


def read_table_file(
    path: str | os.PathLike[str],
    kind: type[T],
    field: str,
    migrations: Mapping[int, Callable[[Plain], Plain]] = NO_MIGRATIONS,
    *,
    format: int,
    **versions: int,
) -> T:
    """Read what `write_table_file` wrote; `migrations` make of each older format the one after it.

    Raises: CacheCorruptionError: it does not decode, a field of `versions` has another value, or the rows of
        `field` do not match its `content` hash.
    """
    try:
        data = read_given(path)
    except (OSError, ValueError) as error:
        raise CacheCorruptionError(f"{path}: {error}", path=str(path)) from error
    return decode_table(data, str(path), kind, field, migrations, format=format, **versions)


def decode_table(
    data: bytes,
    path: str,
    kind: type[T],
    field: str,
    migrations: Mapping[int, Callable[[Plain], Plain]] = NO_MIGRATIONS,
    *,
    format: int,
    **versions: int,
) -> T:
    """The table in the bytes of a file, as `read_table_file` reads it; `path` names it in errors.

    Raises: CacheCorruptionError.
    """
    try:
        stated = decode_json(data, StatedFormat).format
        if stated in migrations:
            table = _migrated(data, kind, field, [migrations[v] for v in range(stated, format)])
            log.info(MIGRATED, path=path, format=stated, now=format)
        else:
            table = decode_json(data, kind)
    except (ValueError, KeyError, TypeError, AttributeError, msgspec.MsgspecError) as error:
        raise CacheCorruptionError(f"{path}: {error}", path=path) from error
    need_table(table, path, field, format=format, **versions)
    return table


def _migrated(data: bytes, kind: type[T], field: str, steps: Sequence[Callable[[Plain], Plain]]) -> T:
    """A table of an older format in the newest one. Raises: ValueError, KeyError, TypeError: it is none."""
    plain = decode_json(data, dict)
    if hashlib.sha256(msgspec.json.encode(plain[field])).hexdigest() != plain["content"]:
        raise ValueError(f"its {field} do not match its content hash")
    for step in steps:
        plain = step(plain)
    plain["format"] += len(steps)
    table = msgspec.convert(plain, kind)
    return msgspec.structs.replace(table, content=content_hash(getattr(table, field)))


def need_table(table: msgspec.Struct, path: str, field: str, **versions: int) -> None:
    """Refuse a table of another format, or with other rows than it states.

    Raises: CacheCorruptionError: as `read_table_file`; `path` names the table.
    """
    for name, needed in versions.items():
        if (got := getattr(table, name)) != needed:
            raise CacheCorruptionError(f"{path}: {name} needs {needed}, got {got}", path=path)
    if content_hash(getattr(table, field)) != getattr(table, "content", None):
        raise CacheCorruptionError(f"{path}: its {field} do not match its content hash", path=path)

"""Inputs behind a hash or in a container: the parts are what changes, and hash and container fit them.

A hash that is `?` in an input is computed, so that what is behind it is read; any other is left as it is.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_type_hints

import msgspec

from layerzero.perfdb.table_file import content_hash
from layerzero.spec import capability_overlays
from layerzero.warmup.archive import FORMAT, HEAD

_WRONG = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
    msgspec.MsgspecError,
)


def _plain(data: bytes) -> dict[str, Any] | None:
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return plain if isinstance(plain, dict) else None


def _written(plain: dict[str, Any]) -> bytes:
    return json.dumps(plain).encode("utf-8", "surrogatepass")


def table(data: bytes, kind: type[msgspec.Struct], field: str) -> bytes:
    """A table file whose `content`, where it is `?`, is the hash of its rows."""
    plain = _plain(data)
    if plain is None or plain.get("content") != "?":
        return data
    with suppress(*_WRONG):
        plain["content"] = hashlib.sha256(msgspec.json.encode(plain[field])).hexdigest()
    with suppress(*_WRONG):
        rows = msgspec.convert(plain[field], get_type_hints(kind)[field])
        plain["content"] = content_hash(rows)
    return _written(plain)


def capabilities(data: bytes) -> bytes:
    """A document of capabilities, likewise."""
    plain = _plain(data)
    if plain is None or plain.get("content") != "?":
        return data
    with suppress(*_WRONG):
        plain["content"] = capability_overlays._plain_hash(plain["kernels"])
    with suppress(*_WRONG):
        entries = msgspec.convert(plain["kernels"], dict[str, capability_overlays.CapabilityEntry])
        plain["content"] = capability_overlays.content_hash(entries)
    return _written(plain)


def bundle(data: bytes) -> bytes:
    """A zip as it is, or one of the `members` that a JSON object names, with its `head` changed."""
    plain = _plain(data)
    if plain is None or not isinstance(plain.get("members"), dict):
        return data
    members = {str(name): str(text).encode("utf-8", "replace") for name, text in plain["members"].items()}
    listed = [
        {"name": name, "size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        for name, text in members.items()
    ]
    head: dict[str, Any] = {"format": FORMAT, "environment": {}, "members": listed}
    if isinstance(plain.get("head"), dict):
        head |= plain["head"]
    packed = io.BytesIO()
    try:
        with zipfile.ZipFile(packed, "w") as file:
            for name, text in {HEAD: _written(head), **members}.items():
                file.writestr(name, text)
    except (*_WRONG, IndexError):
        return data
    return packed.getvalue()


def checkpoint(data: bytes, folder: Path) -> Path:
    """A folder of weights: `config`, `index` and the header `tensors` of a JSON object, else a damaged file.

    The bytes behind a header are as many as it asks for, up to 64 KiB.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    plain = _plain(data)
    if plain is None:
        plain, raw = {"config": {"quantization_config": {"quant_method": "awq", "bits": 4}}}, data
    else:
        raw = _safetensors(plain.get("tensors"), plain.get("bytes"))
    for name, part in (
        ("config.json", "config"), ("hf_quant_config.json", "own"), ("model.safetensors.index.json", "index"),
    ):  # fmt: skip
        if part in plain:
            (folder / name).write_bytes(_written(plain[part]))
    (folder / "model.safetensors").write_bytes(raw)
    return folder


def _safetensors(tensors: Any, first: Any) -> bytes:
    header = _written(tensors)
    header += b" " * (-len(header) % 8)
    needed = 0
    for entry in tensors.values() if isinstance(tensors, dict) else ():
        with suppress(*_WRONG, IndexError):
            needed = max(needed, int(entry["data_offsets"][1]))
    start = str(first or "").encode("utf-8", "replace")
    body = start + bytes(range(256)) * (min(needed, 1 << 16) // 256 + 1)
    return struct.pack("<Q", len(header)) + header + body[: min(needed, 1 << 16)]


class _Registry:
    def all(self) -> tuple[Any, ...]:
        """No kernel."""
        return ()


@cache
def _hardware() -> Any:
    from layerzero.spec.hardware import probe

    return probe("cpu")


class _Device(SimpleNamespace):
    @property
    def hardware(self) -> Any:
        """This machine's."""
        return _hardware()


DEVICE = cast(Any, _Device(registry=_Registry()))


def tar(data: bytes) -> bytes:
    """A tar archive whose headers have the checksums that they need, wherever a change put them."""
    blocks = [bytearray(data[start : start + 512]) for start in range(0, len(data), 512)]
    for block in blocks:
        if block[257:262] == b"ustar" and len(block) == 512:
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
    return b"".join(blocks)

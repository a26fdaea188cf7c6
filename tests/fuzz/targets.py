"""Every parser of what comes from outside, as a function of bytes, with the errors that it promises."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import click

from layerzero.actors.isolation.descriptions import rename_kernels
from layerzero.actors.rpc.message_stream import MessageStream
from layerzero.backends import load_builtin
from layerzero.backends.hub.archive import unpack_files
from layerzero.checkpoints import load_quantized
from layerzero.cli.common.call_arguments import build_call
from layerzero.formats.errors import FormatError
from layerzero.gates.baseline import Baseline, BaselineRefusedError, read_baseline
from layerzero.gates.release_file import read_release
from layerzero.health import JsonQuarantineStore
from layerzero.measure.calls import Workload
from layerzero.measure.model_calls import ModelConfig
from layerzero.ops import table as ops_table
from layerzero.perfdb import Environment
from layerzero.perfdb.shipped import ShippedTable, read_table
from layerzero.planner.plan_file import PlanFile, read_plans
from layerzero.report.document import read_report
from layerzero.selection.dispatch_table import DispatchTable
from layerzero.selection.policy.load import environment_policy, parse_policy
from layerzero.spec import capability_overlays
from layerzero.spec.errors import (
    BackendNotAvailableError,
    BundleRefusedError,
    CacheCorruptionError,
    ConfigurationError,
    FileRefusedError,
    LayerZeroError,
)
from layerzero.spec.gpu_map import read_gpu_map
from layerzero.spec.settings import Settings
from layerzero.warmup.archive import Archive
from layerzero.warmup.manifest import Manifest
from tests.fuzz import sealed
from tests.fuzz.workers import answer_of_a_worker, requests_to_a_worker

_TODAY = date(2026, 11, 23)
CORPUS = Path(__file__).parent / "corpus"
_FOLDER = tempfile.TemporaryDirectory(
    prefix="layerzero-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
)


@dataclass(frozen=True)
class Target:
    """A parser: `parse` takes the bytes of an input and may raise `allowed`, nothing else."""

    name: str
    parse: Callable[[bytes], object]
    allowed: tuple[type[BaseException], ...]
    words: tuple[bytes, ...] = ()

    def corpus(self) -> list[bytes]:
        """The inputs that are kept, those of found defects among them."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).iterdir())]

    def broken_by(self, data: bytes) -> Exception | None:
        """The error that an input must not cause; None where it is read or refused as promised."""
        try:
            self.parse(data)
        except self.allowed:
            return None
        except Exception as error:
            return error
        return None


def _stored(data: bytes, name: str = "input") -> Path:
    path = Path(_FOLDER.name) / name
    path.write_bytes(data)
    return path


@cache
def _kernels() -> tuple[Any, ...]:
    return tuple(k for op in ("rms_norm", "attention") for k in load_builtin(op=op))


def _policy(data: bytes) -> None:
    parse_policy(data, "input", known_ops=frozenset(ops_table.FILES), known_kernels=frozenset({"a.b"}))


def _environment(data: bytes) -> None:
    parts = (line.partition("=") for line in data.decode("utf-8", "surrogateescape").splitlines())
    variables = {name: value for name, _, value in parts}
    environment_policy(variables)
    Settings.load(env={name: text for name, text in variables.items() if name != "LAYERZERO_CONFIG"})


def _settings(data: bytes) -> None:
    Settings.load(_stored(data), env={})


def _dispatch_table(data: bytes) -> None:
    DispatchTable.decode(sealed.table(data, DispatchTable, "buckets"), "input")


def _shipped_table(data: bytes) -> None:
    read_table(_stored(sealed.table(data, ShippedTable, "rows")))


def _capabilities(data: bytes) -> None:
    path = _stored(sealed.capabilities(data))
    if b'"content"' in data:
        capability_overlays.read(path)
    else:
        capability_overlays.load_overlay(path, _kernels())


def _manifest(data: bytes) -> None:
    (Manifest.load if b'"critical"' in data else Workload.load)(_stored(data))


def _bundle(data: bytes) -> None:
    Archive(Path("input"), sealed.bundle(data))


def _hub_archive(data: bytes) -> None:
    unpack_files(_stored(sealed.tar(data)), lambda name: ("a/b", lambda path, content: None))


def _baseline(data: bytes) -> None:
    path = _stored(sealed.table(data, Baseline, "paced"))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    read_baseline(path, Environment(platform="cpu", device="x"), sha256=digest, max_age_days=9, today=_TODAY)


def _report(data: bytes) -> None:
    read_report(_stored(data))


def _record(data: bytes) -> None:
    """A stored record: what cannot be read is set aside and believed to be a quarantine, never an error."""
    folder = Path(_FOLDER.name) / "records"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    (folder / "quick.rms_norm@e00c383eef77b690.json").write_bytes(data)
    JsonQuarantineStore(folder).load()


def _plan(data: bytes) -> None:
    read_plans(_stored(sealed.table(data, PlanFile, "plans")), sealed.DEVICE, "a policy")


class _Transport:
    def abort(self) -> None:
        """Nothing is connected."""


class _Stream(MessageStream):
    def __init__(self) -> None:
        super().__init__()
        self._transport = _Transport()
        self.messages: list[Any] = []

    def _dispatch(self, message: Any) -> None:
        self.messages.append(message)


def _channel(data: bytes) -> None:
    """Bytes in pieces; the first byte says how large they are, and whether lengths are put before them."""
    size = data[0] % 64 + 1 if data else 1
    stream, framed = _Stream(), data[1:]
    if data[:1] >= b"\x80":
        framed = struct.pack(">I", len(framed)) + framed
    for start in range(0, len(framed), size):
        if not stream.refused:
            stream.data_received(framed[start : start + size])
    assert not stream.refused or not stream._buffer, "a refused stream keeps bytes"


def _description(data: bytes) -> None:
    rename_kernels(data, "other", lambda kernel, op: lambda: lambda: None)


def _http(data: bytes) -> None:
    from server import protocol  # the examples' folder is on the path of tests

    protocol.read(data, "tiny", chat=b'"messages"' in data)


def _bad_request() -> type[BaseException]:
    from server.fields import BadRequest

    return BadRequest


def _checkpoint(data: bytes) -> None:
    folder = sealed.checkpoint(data, Path(_FOLDER.name) / "checkpoint")
    load_quantized(folder).check()


def _gpu_map(data: bytes) -> None:
    read_gpu_map(_stored(data))


def _release(data: bytes) -> None:
    read_release(_stored(data))


def _model_config(data: bytes) -> None:
    ModelConfig.load(_stored(data))


def _call(data: bytes) -> None:
    """The words of a command line: an op, then its arguments; what they ask is described as for a choice."""
    op_name, *words = data.decode("utf-8", "surrogateescape").split() or [""]
    op = ops_table.get(op_name)
    op.check(build_call(op, words)[1])


_JSON = (b"null", b"1e999", b"-0", b'"\\ud800"', b"[[", b"{}", b"18446744073709551616", b"\xef\xbb\xbf")
_YAML = (b"&a", b"*a", b"!!python", b"<<: ", b"- ", b": ", b"\n  ", b"---\n", b"~", b"|\n", b"0x1f", b"1e400")
_RULES = (
    b"lock:",
    b"deny:",
    b"boost:",
    b"factor:",
    b"when: ",
    b"Sq > 1",
    b"D % 0 == 0",
    b"dtype in [",
    b"until:",
)
_ZIP = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"\1\0", b"\xff" * 4)
_TAR = (
    b"ustar\x00",
    b"x",
    b"L",
    b"g",
    b"S",
    b"00000000144",
    b"20 path=a/b/c\n",
    b"GNU.sparse.major=1",
    b"\0" * 512,
)
_PACKED = (
    b"\xc0",
    b"\xdc\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x91",
)
TARGETS = {
    target.name: target
    for target in (
        Target("policy", _policy, (ConfigurationError,), _YAML + _RULES),
        Target(
            "environment", _environment, (ConfigurationError,), (b"LAYERZERO_", b"=", b",", b"\n", b"inf")
        ),
        Target("settings", _settings, (ConfigurationError,), (*_YAML, b"version:", b"plugins:")),
        Target("dispatch_table", _dispatch_table, (CacheCorruptionError,), _JSON),
        Target("shipped_table", _shipped_table, (CacheCorruptionError,), _JSON),
        Target("capabilities", _capabilities, (ConfigurationError, CacheCorruptionError), _JSON),
        Target("manifest", _manifest, (ConfigurationError,), _JSON),
        Target("bundle", _bundle, (BundleRefusedError,), _ZIP),
        Target("hub_archive", _hub_archive, (BackendNotAvailableError,), _TAR),
        Target("baseline", _baseline, (BaselineRefusedError,), _JSON),
        Target("report", _report, (FileRefusedError,), (*_JSON, b"<html>", b"<script", b"</script>")),
        Target("record", _record, (), _JSON),
        Target("plan", _plan, (FileRefusedError,), _JSON),
        Target("channel", _channel, (), _PACKED),
        Target("worker_requests", requests_to_a_worker, (), _PACKED),
        Target("worker_answers", answer_of_a_worker, (), _PACKED),
        Target("description", _description, (ConfigurationError,), _PACKED),
        Target("http", _http, (_bad_request(),), _JSON),
        Target("checkpoint", _checkpoint, (FormatError, FileNotFoundError), _JSON),
        Target(
            "gpu_map", _gpu_map, (ConfigurationError,), (b"[[", b"]]", b"sm = ", b"1979-05-27", b"'''", b"0x")
        ),
        Target("release", _release, (ConfigurationError,), _YAML),
        Target("model_config", _model_config, (ConfigurationError,), _JSON),
        Target(
            "call", _call, (click.UsageError, ValueError, TypeError, LayerZeroError), (b"=", b"x", b":bf16")
        ),
    )
}

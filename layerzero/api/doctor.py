"""`doctor`: what this process has to work with, what is missing, and what is wrong, in one report."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from layerzero._util.libraries import LIBRARIES, LibraryStatus, examine
from layerzero.api.inspect import list_kernels
from layerzero.backends import Plugin, installed_plugins
from layerzero.backends.builds import BuildFact, build_facts
from layerzero.calls.blocking import context_runtime
from layerzero.health.breaker import BreakerStatus
from layerzero.native import FAST_PATH
from layerzero.ops import table as ops_table
from layerzero.runtime import Runtime
from layerzero.selection.policy.policy import describe
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import LayerZeroError
from layerzero.spec.hardware import Hardware, probe
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Category
from layerzero.spec.settings import Settings
from layerzero.warmup.bundle import InstallRecord, receipts

Rows = list[tuple[str, ...]]


class HostInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the interpreter; `awaited_path` says whether the awaited ops run compiled."""

    system: str
    python: str
    cpu: Hardware
    cpus: int
    cpu_capability: str
    awaited_path: str


class TorchInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Torch and what it was built with; `onednn` is the version of oneDNN inside it, None without it."""

    version: str
    onednn: str | None
    cuda: str | None
    hip: str | None
    cudnn: int | None
    mps: bool
    driver: str | None
    devices: tuple[Hardware, ...] = ()


class SQLiteInfo(msgspec.Struct, frozen=True):
    """The SQLite of this Python; `wal_reset_bug` says whether two connections may corrupt a WAL file."""

    version: str
    wal_reset_bug: bool


class OpKernels(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels of one op by their state on the default device; `elsewhere` are for other hardware."""

    op: str
    ready: tuple[str, ...] = ()
    cold: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


class IsolatedBackend(msgspec.Struct, frozen=True, kw_only=True):
    """A backend that runs in a process of its own: where, how that process is, and what it has."""

    backend: str
    place: str
    state: str
    python: str = ""
    torch: str = ""
    starts: int = 0


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `doctor` found; `str()` is for people.

    `problems` are broken required parts, one sentence each; `notes` are worth knowing. An optional library
    that is absent or broken is neither.
    """

    host: HostInfo
    torch: TorchInfo
    libraries: tuple[LibraryStatus, ...]
    sqlite: SQLiteInfo
    plugins: tuple[Plugin, ...] = ()
    builds: tuple[BuildFact, ...] = ()
    isolated: tuple[IsolatedBackend, ...] = ()
    bundles: tuple[InstallRecord, ...] = ()
    device: str = ""
    kernels: tuple[OpKernels, ...] = ()
    health: tuple[BreakerStatus, ...] = ()
    policy: tuple[dict[str, Any], ...] = ()
    settings: dict[str, Any] = {}
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every required part works."""
        return not self.problems

    def sections(self) -> Iterator[tuple[str, tuple[str, ...], Rows]]:
        """The report as tables: a title, the column names, the rows."""
        yield "system", ("what", "value"), [*_host_rows(self.host), *_torch_rows(self.torch)]
        yield "sqlite", ("version", "note"), [(self.sqlite.version, _sqlite_note(self.sqlite))]
        yield (
            "optional libraries",
            ("library", "state", "version", "note"),
            [(f.backend, f.state, f.version or "-", f.detail or f.install) for f in self.libraries],
        )
        yield (
            "what libraries were built for",
            ("library", "what", "needs", "this process", "fits"),
            [(b.library, b.what, b.needs, b.got, "yes" if b.fits else "NO") for b in self.builds],
        )
        yield (
            "backends in processes of their own",
            ("backend", "runs in", "process", "Python", "torch", "starts"),
            [
                (i.backend, i.place, i.state, i.python or "-", i.torch or "-", f"{i.starts}")
                for i in self.isolated
            ],
        )
        allowed, states = self.settings.get("plugins", ()), ("not allowed", "allowed")
        yield (
            "backends and ops of other distributions",
            ("plugin", "adds", "distribution", "version", "state"),
            [
                (p.name, p.kind, p.distribution or "-", p.version or "-", states[p.name in allowed])
                for p in self.plugins
            ],
        )
        yield (
            "warm-up bundles",
            ("sha256", "files", "proofs", "measurements", "from", "note"),
            [_bundle_row(bundle) for bundle in self.bundles],
        )
        yield (
            f"kernels on {self.device or 'no device'}",
            ("op", "ready", "cold", "blocked", "for other hardware"),
            [
                (k.op, f"{len(k.ready)}", _names(k.cold), _names(k.blocked), f"{len(k.elsewhere)}")
                for k in self.kernels
            ],
        )
        health: Rows = [(s.kernel, s.state.value, s.why or "-") for s in self.health]
        yield "health", ("kernel", "state", "why"), health
        yield "policy in force", ("rule", "from"), [_policy_row(rule) for rule in self.policy]
        settings: Rows = [(name, repr(value)) for name, value in sorted(self.settings.items())]
        yield "settings that differ from the defaults", ("setting", "value"), settings

    def __str__(self) -> str:
        parts = [
            f"{title}\n{align_rows([names, *rows] if rows else [])}" for title, names, rows in self.sections()
        ]
        parts += [f"note: {note}" for note in self.notes]
        parts += [f"problem: {problem}" for problem in self.problems] or ["every required part works"]
        return "\n\n".join(parts)


def doctor(*, imports: bool = True, timeout_s: float = 60.0) -> DoctorReport:
    """Examine this process; a broken part is in the report's `problems`, never raised.

    With `imports`, each optional library that is installed is imported in a child process, for at most
    `timeout_s` seconds each.

    Raises: ValueError: `timeout_s` is not above 0.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ValueError(f"timeout_s needs a number of seconds above 0, got {timeout_s!r}")
    problems: list[str] = []
    sqlite = _sqlite()
    report = DoctorReport(
        host=_host(),
        torch=_torch(problems),
        sqlite=sqlite,
        libraries=examine(imports=imports, timeout_s=timeout_s),
        plugins=installed_plugins(),
        builds=_attempt("what libraries were built for", _builds, problems) or (),
        bundles=_attempt("what came from warm-up bundles", receipts, problems) or (),
    )
    notes = [f"SQLite {sqlite.version}: {_sqlite_note(sqlite)}"] if sqlite.wal_reset_bug else []
    runtime = _attempt("the runtime", context_runtime, problems)
    of_runtime = (
        {} if runtime is None else _attempt("the device", lambda: _of_runtime(runtime, problems), problems)
    )
    return msgspec.structs.replace(report, **(of_runtime or {}), problems=tuple(problems), notes=tuple(notes))


def _attempt(what: str, act: Callable[[], Any], problems: list[str]) -> Any:
    """What `act` gives, or None and one more problem."""
    try:
        return act()
    except (LayerZeroError, ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        problems.append(f"{what}: {type(error).__name__}: {error}")
        return None


# -- the parts -----------------------------------------------------------------------------------------


def _host() -> HostInfo:
    return HostInfo(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}",
        cpu=probe("cpu"),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        awaited_path=FAST_PATH.describe(),
    )


def _torch(problems: list[str]) -> TorchInfo:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [f"cuda:{index}" for index in range(count)]
    probed = [_attempt(name, functools.partial(probe, name), problems) for name in names]
    devices = tuple(device for device in probed if device is not None)
    return TorchInfo(
        version=str(torch.__version__),
        onednn=onednn_version(torch.__config__.show()) if torch.backends.mkldnn.is_available() else None,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cudnn=torch.backends.cudnn.version() if count else None,
        mps=torch.backends.mps.is_available(),
        driver=devices[0].driver if devices else None,
        devices=devices,
    )


def onednn_version(config: str) -> str:
    """oneDNN's own version as torch's build configuration names it."""
    match = re.search(r"(?:MKL-DNN|oneDNN) v(\d[\w.]*)", config)
    return match.group(1) if match else "present, version not reported"


def _sqlite() -> SQLiteInfo:
    import sqlite3

    from layerzero.perfdb.rows import wal_is_safe

    return SQLiteInfo(sqlite3.sqlite_version, not wal_is_safe())


def _builds() -> tuple[BuildFact, ...]:
    """What every optional library and plugin that is installed was built for."""
    names = {library.distribution for library in LIBRARIES} | {p.distribution for p in installed_plugins()}
    return tuple(fact for name in sorted(filter(None, names)) for fact in build_facts(name))


def _isolated(runtime: Runtime) -> tuple[IsolatedBackend, ...]:
    if runtime.isolation is None:
        return ()
    unmatched = (
        IsolatedBackend(backend=pattern, place=place, state="matches no kernel")
        for pattern, place in runtime.isolation.unmatched(runtime.device().registry.all()).items()
    )
    return *unmatched, *(
        IsolatedBackend(
            backend=backend,
            place=place,
            state=f"{worker.pid}" if worker.running else "not started" if not worker.starts else "ended",
            python=worker.hello.python if worker.hello else "",
            torch=worker.hello.torch if worker.hello else "",
            starts=worker.starts,
        )
        for (backend, place), worker in sorted(runtime.isolation.workers().items())
    )


def _of_runtime(runtime: Runtime, problems: list[str]) -> dict[str, Any]:
    """The default device's kernels, health, and what governs them; one real call at the end."""
    device = runtime.device()
    kernels = tuple(_kernels_of(op, device.hardware) for op in ops_table.names())
    problems += [f"{k.op}: no kernel is ready on {device.device}" for k in kernels if not k.ready]
    x = torch.ones(2, 8, device=device.device)
    _attempt("a first call", lambda: device.launch(ops_table.get("rms_norm"), (x, None, 1e-6)), problems)
    defaults = msgspec.structs.asdict(Settings())
    settings = msgspec.structs.asdict(runtime.settings)
    return {
        "device": str(device.device),
        "kernels": kernels,
        "health": device.health.statuses(),
        "isolated": _isolated(runtime),
        "policy": tuple(dict(rule) for rule in describe(runtime.policy)),
        "settings": {name: value for name, value in settings.items() if value != defaults[name]},
    }


def _kernels_of(op: str, hardware: Hardware) -> OpKernels:
    groups: dict[str, list[str]] = {"ready": [], "cold": [], "blocked": [], "elsewhere": []}
    kernels = context_runtime().device().registry.for_op(op)
    fit = {kernel.id for kernel in kernels if not unfit(kernel, hardware)}
    for info in list_kernels(op):
        groups[info.state if info.id in fit else "elsewhere"].append(info.id)
    return OpKernels(op=op, **{name: tuple(ids) for name, ids in groups.items()})


def unfit(kernel: Kernel, hardware: Hardware) -> str:
    """Why a kernel is not for this hardware whatever it is asked; empty where it is."""
    anything = CallSpec(op=kernel.op, platform=hardware.platform, device=hardware.device)
    reasons = [r for r in rejections(kernel, anything, hardware) if r.reason.category is Category.HARDWARE]
    return "; ".join(map(str, reasons))


# -- as text -------------------------------------------------------------------------------------------


def align_rows(rows: list[tuple[str, ...]], indent: str = "  ") -> str:
    """Rows with their columns under each other; the same rows give the same text on any terminal."""
    if not rows:
        return f"{indent}none"
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


def _host_rows(host: HostInfo) -> Iterator[tuple[str, str]]:
    cpu = host.cpu
    yield "system", host.system
    yield "python", host.python
    yield "cpu", f"{cpu.name} ({cpu.vendor}), {host.cpus} usable, torch uses {cpu.threads} threads"
    yield "isa", f"{', '.join(sorted(cpu.isa)) or 'unknown'}; torch dispatches to {host.cpu_capability}"
    yield "memory", f"{cpu.memory_bytes / 2**30:.1f} GiB"
    yield "awaited path", host.awaited_path


def _torch_rows(info: TorchInfo) -> Iterator[tuple[str, str]]:
    yield "torch", info.version
    yield "oneDNN", info.onednn or "not in this torch"
    if info.cuda is None and info.hip is None:
        yield "cuda", "this torch was built without"
    else:
        kind = f"ROCm {info.hip}" if info.hip else f"CUDA {info.cuda}"
        yield "cuda", f"{kind}, driver {info.driver or 'none'}, cuDNN {info.cudnn or 'none'}"
    for device in info.devices:
        sm = "" if device.sm is None else f", sm {device.sm // 10}.{device.sm % 10} {device.generation.name}"
        yield device.device, f"{device.name}{sm}, {device.memory_bytes / 2**30:.0f} GiB"
    yield "mps", "available" if info.mps else "not available"


def _sqlite_note(sqlite: SQLiteInfo) -> str:
    if sqlite.wal_reset_bug:
        return "has the WAL-reset bug (repaired in 3.51.3, 3.50.7, 3.44.6): one connection a WAL file is safe"
    return "free of the WAL-reset bug"


def _names(kernels: tuple[str, ...]) -> str:
    return ", ".join(kernels) or "-"


def _bundle_row(bundle: InstallRecord) -> tuple[str, ...]:
    altered, counts = bundle.altered(), (len(bundle.files), bundle.proofs, bundle.measurements)
    note = f"{len(altered)} files are gone or altered since" if altered else "-"
    return bundle.sha256[:16], *map(str, counts), bundle.path, note


def _policy_row(rule: dict[str, Any]) -> tuple[str, str]:
    when = f" when {' and '.join(rule['when'])}" if rule["when"] else ""
    text = f"{rule['action']} {', '.join(rule['patterns'])} for {rule['op']}{when}"
    return text, f"{rule['layer']}: {rule['source']}"

"""Getting ready for traffic, and whether one is: `warmup` and `readiness_check`."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import msgspec
import torch

from layerzero._util import log
from layerzero._util.ending import join_at_exit
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.blocking import context_runtime
from layerzero.measure.calls import Call, Workload
from layerzero.runtime import Runtime
from layerzero.warmup import Manifest, WarmedCall, WarmupRunner, manifest_of

if TYPE_CHECKING:
    from layerzero.runtime.bundles import BundleReport

WARMUP_FINISHED = "warmup.finished"

ManifestSource = Manifest | Workload | str | Path | Iterable[Call]
WarmupProgress = Callable[[int, int, WarmedCall], None]


class WarmupReport(msgspec.Struct, frozen=True, kw_only=True):
    """What is ready when `warmup` returns: a record for each critical call and for the others that are done.

    `pending` calls are under way; `problems` concern all calls: a dispatch table that decides nothing here.
    `bundle` is what came from another machine before.
    """

    device: str
    version: str
    seconds: float
    critical: tuple[WarmedCall, ...]
    others: tuple[WarmedCall, ...] = ()
    pending: int = 0
    problems: tuple[str, ...] = ()
    bundle: BundleReport | None = None

    @property
    def ready(self) -> bool:
        """Whether every critical call is, and decided as the settings say."""
        return not self.problems and all(w.state == "ready" for w in self.critical)

    @property
    def compiled(self) -> int:
        """Compilers started for these calls."""
        return sum(len(w.compiled) for w in (*self.critical, *self.others))


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether traffic would meet nothing cold; true and false like a bool.

    `problems` are the calls that are not ready and why, and a dispatch table that decides nothing.
    `cold_calls` counts choices made since the last warm-up finished: calls that were not warmed.
    `pending` calls are still being made ready. `bundles` are the SHA-256 of the warm-up bundles that this
    runtime has loaded.
    """

    ready: bool
    problems: tuple[str, ...] = ()
    cold_calls: int = 0
    pending: int = 0
    bundles: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ready


class _WarmupState:
    """The warm-ups of one runtime, on one device: what they covered, what is under way."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.manifests: dict[str, Manifest] = {}
        self.done: dict[str, WarmedCall] = {}
        self.pending = 0
        self.stop = threading.Event()
        self.selections_before = 0.0
        self.warmup_selections = 0.0
        self.threads: list[threading.Thread] = []

    def close(self) -> None:
        """Begin no further call; wait for the one under way."""
        self.stop.set()
        for thread in self.threads:
            thread.join()


_STATES: weakref.WeakKeyDictionary[Runtime, dict[torch.device, _WarmupState]] = weakref.WeakKeyDictionary()


def _state(runtime: Runtime, device: LocalDevice) -> _WarmupState:
    states = _STATES.setdefault(runtime, {})
    state = states.get(device.device)
    if state is None:
        state = states.setdefault(device.device, _WarmupState())
        runtime.on_close(state.close)
    return state


async def warmup(
    manifest: ManifestSource | None = None,
    *,
    bundle: str | os.PathLike[str] | None = None,
    sha256: str | None = None,
    device: str | None = None,
    timeout_s: float | None = None,
    progress: WarmupProgress | None = None,
) -> WarmupReport:
    """Make the calls of a manifest ready: kernels chosen, imported, compiled and run once.

    `manifest` is a Manifest, a recorded workload, the path of a manifest, or calls. Returns when the critical
    calls are ready, or after `timeout_s` seconds with those that were not marked "late"; the rest continues
    in the background. A kernel that does not compile is blocked with its reason, once, and the call is served
    by another. Processes that warm one machine at the same time compile each kernel once.

    `bundle` is loaded before, as `load_bundle` does, its digest pinned by `sha256`; without `manifest` the
    bundle's own calls are warmed.

    Raises: ConfigurationError: the file is no manifest. BundleRefusedError: the bundle is refused; nothing
        was written or warmed. TypeError: neither a manifest nor a bundle. RuntimeClosedError: after close.
    """
    where = str(context_runtime().device(device).device)  # another thread's current GPU may be another one
    job = await anyio.to_thread.run_sync(_begin, manifest, bundle, sha256, where, progress)
    await anyio.to_thread.run_sync(job.wait, timeout_s, abandon_on_cancel=True)
    return job.report()


def warmup_blocking(
    manifest: ManifestSource | None = None,
    *,
    bundle: str | os.PathLike[str] | None = None,
    sha256: str | None = None,
    device: str | None = None,
    timeout_s: float | None = None,
    progress: WarmupProgress | None = None,
    whole: bool = False,
    forbid: bool = False,
) -> WarmupReport:
    """`warmup`, blocking; `whole` waits for the other calls too, once the critical ones were in time.

    `forbid` lets nothing be compiled: what would be is in the records.

    Example:
        >>> import torch, layerzero as lz
        >>> with lz.start(scoped=True):
        ...     with lz.record() as recorder:
        ...         rows = lz.sync.rms_norm(torch.ones(2, 8))
        ...     report = lz.warmup_blocking(recorder.workload())
        >>> report.ready, [call.call for call in report.critical]
        (True, ['rms_norm x=2x8:float32 eps=1e-06'])
    """
    job = _begin(manifest, bundle, sha256, device, progress, forbid)
    if job.wait(timeout_s) and whole:
        job.join()
    return job.report()


def save_bundle(
    path: str | os.PathLike[str], manifest: ManifestSource | None = None, *, device: str | None = None
) -> BundleReport:
    """Write what this machine has for a device into one file that the next machine like it can use.

    It carries the kernels that were compiled here (FlashInfer's, Triton's, our own), capture proofs,
    measurements, the dispatch table in force, and the calls of `manifest`, all with their digests. Warm up
    first. `report.sha256` is what the next machine pins.

    Raises: FileExistsError: another kind of file is at `path`. OSError: it cannot be written.
    """
    from layerzero.runtime import bundles  # archives are no affair of who brings none

    calls = None if manifest is None else manifest_of(manifest)
    return bundles.save(context_runtime(), path, calls, device)


def load_bundle(
    path: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    device: str | None = None,
    replace: bool = False,
) -> BundleReport:
    """Take over what another machine compiled, proved, measured and decided, out of a bundle of its.

    A bundle is code: take it only from who may run code here, and pin its digest with `sha256`. It is checked
    as a whole before anything is written; where any field of the environment differs (driver, card, CUDA,
    torch, Python, libraries, our version, the CPU where code is for it) it is refused. A file that is here
    and differs is kept, or replaced with `replace`; the report names it. Its decisions are put in force where
    the settings name no dispatch table.

    Raises: BundleRefusedError: it is refused; `problems` are the fields, what they need and what they got.
        OSError: it cannot be read, a file cannot be written, or others can write its folder. ValueError:
        `sha256` is no digest.
    """
    from layerzero.runtime import bundles

    return bundles.load(context_runtime(), path, sha256=sha256, device=device, replace=replace)


def _begin(
    manifest: ManifestSource | None,
    bundle: str | os.PathLike[str] | None,
    sha256: str | None,
    device: str | None,
    progress: WarmupProgress | None,
    forbid: bool = False,
) -> _WarmupJob:
    """Begin to warm the given calls, else the bundle's own, which may have none."""
    if manifest is None and bundle is None:
        raise TypeError("warmup needs a manifest or a bundle, got neither")
    if sha256 is not None and bundle is None:
        raise TypeError("sha256 needs the bundle whose digest it pins, got no bundle")
    loaded = load_bundle(bundle, sha256=sha256, device=device) if bundle is not None else None
    calls = manifest_of(manifest) if manifest is not None else loaded.manifest if loaded is not None else None
    job = _WarmupJob(calls or Manifest(critical=()), loaded, device, progress, forbid)
    job.start()
    return job


class _WarmupJob:
    """One manifest on its way, on a thread of its own."""

    def __init__(
        self,
        manifest: Manifest,
        bundle: BundleReport | None,
        device: str | None,
        progress: WarmupProgress | None,
        forbid: bool,
    ) -> None:
        runtime = context_runtime()
        self._manifest, self._bundle = manifest, bundle  # what was loaded before
        self._device = runtime.device(device)
        self._state = _state(runtime, self._device)
        self._warmer = WarmupRunner(self._device, forbid=forbid)
        self._progress = progress
        self._critical = threading.Event()
        self._warmed: list[WarmedCall] = []
        self._started = time.monotonic()

    def start(self) -> None:
        self._state.manifests[self._manifest.version] = self._manifest
        with self._state.lock:
            self._state.pending += len(self._manifest.calls)
        self._thread = threading.Thread(target=self._run, name="layerzero-warmup", daemon=True)
        self._state.threads = [*(t for t in self._state.threads if t.is_alive()), self._thread]
        self._thread.start()
        join_at_exit(self._thread, self._state.stop.set)

    def join(self) -> None:
        self._thread.join()

    def wait(self, timeout_s: float | None) -> bool:
        """Until the critical calls are done, or the time is over."""
        return self._critical.wait(timeout_s)

    def report(self) -> WarmupReport:
        """What is known now."""
        warmed = tuple(self._warmed[: len(self._manifest.critical)])
        late = tuple(
            WarmedCall(call=str(call), critical=True, state="late")
            for call in self._manifest.critical[len(warmed) :]
        )
        return WarmupReport(
            device=str(self._device.device),
            version=self._manifest.version,
            seconds=time.monotonic() - self._started,
            critical=warmed + late,
            others=tuple(self._warmed[len(self._manifest.critical) :]),
            pending=len(self._manifest.calls) - len(self._warmed),
            problems=_problems(self._device),
            bundle=self._bundle,
        )

    def _run(self) -> None:
        state, count = self._state, len(self._manifest.critical)
        try:
            self._device.table_updater.wait()  # else its arrival would undo what is planned here
            self._warmer.compile_ahead(self._manifest.calls)
            for position, call in enumerate(self._manifest.calls):
                if position == count:
                    self._open()
                if state.stop.is_set() or self._device.closed:
                    break
                self._one(call, position < count)
        finally:
            with state.lock:
                state.pending -= len(self._manifest.calls) - len(self._warmed)
            self._open()
            log.info(WARMUP_FINISHED, version=self._manifest.version, calls=len(self._warmed))

    def _open(self) -> None:
        """The critical calls are done: from now on a choice that warming does not make is a cold call."""
        if not self._critical.is_set():
            self._state.selections_before = (
                self._device.counters.total("selections") - self._state.warmup_selections
            )
            self._critical.set()

    def _one(self, call: Call, critical: bool) -> None:
        before = self._device.counters.total("selections")
        warmed = self._warmer.warm(call, critical=critical)
        self._warmed.append(warmed)
        with self._state.lock:
            self._state.pending -= 1
            self._state.done[str(call)] = warmed
            self._state.warmup_selections += self._device.counters.total("selections") - before
        if self._progress is not None:
            self._progress(len(self._warmed), len(self._manifest.calls), warmed)


def readiness_check(manifest: ManifestSource | None = None, *, device: str | None = None) -> Readiness:
    """Whether this process would serve a manifest's calls without choosing, importing or compiling anything.

    Without `manifest` it asks about all that were warmed in this runtime; with none warmed it is not ready.
    Cheap enough for a health endpoint: plans are looked up, nothing runs.
    """
    runtime = context_runtime()
    local_device = runtime.device(device)
    state = _state(runtime, local_device)
    manifests: Sequence[Manifest] = (
        list(state.manifests.values()) if manifest is None else [manifest_of(manifest)]
    )
    problems = [] if manifests else ["nothing was warmed up: call warmup with a manifest"]
    problems += _problems(local_device)
    for each in manifests:
        for call in each.calls:
            why = _why_cold(local_device, state, call)
            if why:
                problems.append(f"{call}: {why}")
    unwarmed = local_device.counters.total("selections") - state.selections_before - state.warmup_selections
    cold = max(0, int(unwarmed)) if state.manifests else 0
    return Readiness(
        ready=not problems and state.pending == 0,
        problems=tuple(problems),
        cold_calls=cold,
        pending=state.pending,
        bundles=tuple(runtime.bundles),
    )


def _problems(device: LocalDevice) -> tuple[str, ...]:
    """What is wrong with every call of a device: decisions made ahead that do not hold."""
    why = device.dispatch_table.problem(device.snapshot.policy) if device.dispatch_table is not None else ""
    return (f"dispatch_table: {why}",) if why else ()


def _why_cold(device: LocalDevice, state: _WarmupState, call: Call) -> str:
    """What a request like this call would still have to wait for; empty where nothing."""
    warmed = state.done.get(str(call))
    if warmed is None:
        return "not warmed yet"
    if warmed.state != "ready":
        return warmed.error or warmed.state
    if warmed.kernel in device.registry.unready():
        return f"{warmed.kernel} is not loaded"
    blocked = {**device.registry.blocked(), **device.health.blocked_kernels()}
    if warmed.kernel in blocked:
        return f"{warmed.kernel}: {blocked[warmed.kernel]}"
    return ""

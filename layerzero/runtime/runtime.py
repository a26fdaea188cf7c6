"""Runtime: everything that one process runs ops with. Device state belongs to no event loop."""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from layerzero._util import log
from layerzero._util.clock import Clock, MonotonicClock
from layerzero.actors.device.loading import dispatch_table_for
from layerzero.backends import load_builtin, load_plugins
from layerzero.health import JsonQuarantineStore, QuarantineStore
from layerzero.observe.counters import Counters
from layerzero.ops import table as ops_table
from layerzero.runtime.active import ACTIVE
from layerzero.runtime.open_device import apply_settings, move_state, open_device, open_isolation
from layerzero.runtime.policy_layers import PolicyLayers
from layerzero.scheduler.scheduled_device import ScheduledDevice
from layerzero.scheduler.spawn import SpawnedTask, spawn
from layerzero.selection.cost.cost_model import perfdb_path
from layerzero.selection.policy import Policy
from layerzero.spec import gpu_map
from layerzero.spec.errors import ConfigurationError, RuntimeClosedError
from layerzero.spec.hardware import probe
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import READ_AT_START, SETTING_OVERRIDDEN, Settings
from layerzero.warmup.garbage import freeze_again

if TYPE_CHECKING:
    from layerzero.actors.isolation.isolated_kernels import IsolatedBackends
    from layerzero.actors.remote.pool import DevicePool
    from layerzero.spec.capability_overlays import Overlay

T = TypeVar("T")
TIMELINE_BUSY = "timeline.busy"
SETTINGS_HERE_ALONE = "settings.here_alone"
# What a change of is looked at before it is put in force: the device may be missing, the policy be wrong.
_EXTERNAL = ("device", "policy", "strict")


class Runtime:
    """Everything that one process (or one scope) runs ops with.

    `devices` maps a torch.device to its ScheduledDevice, made on first use; `policy` is the process-wide
    policy in force: file, environment and program merged.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        clock: Clock | None = None,
        kernels: Callable[[], list[Kernel]] | None = None,
        store: QuarantineStore | None = None,
    ) -> None:
        self.settings = settings if settings is not None else Settings.load()
        for variable, field in self.settings.overridden().items():
            log.info(SETTING_OVERRIDDEN, variable=variable, field=field)
        self.clock: Clock = clock or MonotonicClock()
        self.counters = Counters()
        self.devices: dict[torch.device, ScheduledDevice] = {}
        self.closed = False
        self.started = False
        self.bundles: list[str] = []  # the digests of the warm-up bundles that were loaded
        if store is None and self.settings.state_dir is not None:
            store = JsonQuarantineStore(self.settings.state_dir)
        self._store = store
        self._device_pool: DevicePool | None = None
        self._kernels = kernels or load_builtin
        self._closers: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._added_kernels: list[Kernel] = []
        self._policy_layers = PolicyLayers(self.clock, self.apply_policy)
        # The backends that run in processes of their own, where there are any.
        self.isolation: IsolatedBackends | None = open_isolation(self.settings, self.counters, self.on_close)
        try:
            self._read_files()
        except BaseException:
            self.close()
            raise
        ALL.add(self)

    def _read_files(self) -> None:
        """Have what the settings name: measurements, GPUs, plugins, capabilities, policy, timeline."""
        perfdb_path(self.settings)
        if gpu_map.VARIABLE in os.environ:  # a process without a GPU would never read it
            gpu_map.gpu_map()
        self._plugins = load_plugins(self.settings.plugins)
        if self.isolation is not None:
            self._plugins += self.isolation.plugins_elsewhere(self._plugins)
        self._overlay_in_force = self._load_overlay()
        layers = self._policy_layers
        layers.external = layers.load_external(self.settings, self._known_kernel_ids)
        self.policy: Policy = layers.merged()
        self._open_timeline()

    def __repr__(self) -> str:
        opened = ", ".join(map(str, self.devices)) or "no device yet"
        return f"<Runtime {'closed' if self.closed else 'open'}: {opened}>"

    # -- devices ----------------------------------------------------------------------------------

    def device(self, device: torch.device | str | None = None) -> ScheduledDevice:
        """The ScheduledDevice for a torch device, made on first use; None is the default device.

        Raises: RuntimeClosedError: after close. ValueError: the device does not exist here.
        """
        if isinstance(device, torch.device) and (known_device := self.devices.get(device)) is not None:
            return known_device
        canonical = _canonical(torch.device(device) if device is not None else self.default_device())
        local_device = self.devices.get(canonical)
        if local_device is not None:
            return local_device
        with self._lock:
            if self.closed:
                raise RuntimeClosedError("this runtime is closed; open another with layerzero.start()")
            local_device = self.devices.get(canonical)
            if local_device is None:
                local_device = self.devices[canonical] = self._open(canonical)
                freeze_again()  # opening imports the kernels' libraries: half as many objects again
            return local_device

    def default_device(self) -> torch.device:
        """The device that `Settings.device` names; "auto" is the current CUDA device, else the CPU."""
        name = self.settings.device
        if name == "auto":
            name = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        return _canonical(torch.device(name))

    def _need_device(self) -> None:
        """Raises: ConfigurationError: the device of the settings does not exist here."""
        try:
            probe(self.default_device())
        except (ValueError, RuntimeError) as error:
            raise ConfigurationError(str(error), field="device") from error

    def _open(self, device: torch.device) -> ScheduledDevice:
        opened = open_device(
            device,
            self.settings,
            self._kernels,
            [*self._plugins, *self._added_kernels],
            self._overlay_in_force,
            self.isolation,
            policy=self.policy,
            store=self._store,
            counters=self.counters,
            clock=self.clock,
        )
        timelines = sys.modules.get("layerzero.observe.timeline")
        if timelines is not None:
            timelines.RUNNING.attach(opened)
        return opened

    def _open_timeline(self) -> None:
        """Begin the timeline of the settings; nothing is imported where they want none."""
        if self.settings.timeline is None:
            return
        from layerzero.observe.timeline import RUNNING, Timeline

        if RUNNING.timeline is not None:
            log.warning(TIMELINE_BUSY, path=self.settings.timeline, runs=str(RUNNING.timeline.path))
            return
        timeline = Timeline(self.settings.timeline, open_devices, nvtx=self.settings.nvtx)
        timeline.start()
        self.on_close(timeline.finish)

    def _load_overlay(self) -> Overlay | None:
        """What the settings' file takes from the kernels; nothing is imported where there is none."""
        if self.settings.capabilities is None:
            return None
        from layerzero.spec.capability_overlays import load_overlay

        return load_overlay(self.settings.capabilities, [*self._kernels(), *self._plugins])

    def _known_kernel_ids(self) -> frozenset[str]:
        return frozenset(kernel.id for kernel in (*self._kernels(), *self._plugins))

    def add_kernel(self, kernel: Kernel) -> None:
        """Register a kernel on every device, now and later.

        Raises: ValueError: its id is taken. KeyError: its op does not exist.
        """
        ops_table.get(kernel.op)
        with self._lock:
            for device in self.devices.values():
                device.registry.add(kernel)
                device.refresh()
            self._added_kernels.append(kernel)

    def remove_kernel(self, kernel_id: str) -> None:
        """Forget a kernel on every device; calls in flight finish with it.

        Raises: KeyError: no kernel has that id.
        """
        with self._lock:
            for device in self.devices.values():
                device.registry.remove(kernel_id)
                device.refresh()
            self._added_kernels = [k for k in self._added_kernels if k.id != kernel_id]

    def quarantine(self, kernel_id: str, why: str) -> None:
        """Take a kernel out of service on every device until `lift`, remembered in `Settings.state_dir`.

        Raises: KeyError: no kernel has that id.
        """
        if kernel_id not in self.kernel_ids():
            raise KeyError(f"no kernel is named {kernel_id!r}")
        for device in list(self.devices.values()):
            device.health.quarantine(kernel_id, why)

    def lift(self, kernel_id: str) -> None:
        """End a quarantine, its stored record included."""
        for device in list(self.devices.values()):
            device.health.lift(kernel_id)

    def kernel_ids(self, op: str | None = None) -> frozenset[str]:
        """The ids of all kernels, or of one op's."""
        device = self.device()
        if op is not None:
            device.registry.complete(op)
        kernels = device.registry.all() if op is None else device.registry.for_op(op)
        return frozenset(kernel.id for kernel in kernels)

    @property
    def device_pool(self) -> DevicePool:
        """Every device of this runtime, here or in the cluster of its settings.

        Raises: ConfigurationError: a cluster is named, and `async with layerzero.start()` has not joined it.
        """
        if self._device_pool is None:
            if self.settings.cluster is not None:
                raise ConfigurationError(
                    f"cluster={self.settings.cluster!r} needs `async with layerzero.start(settings)`",
                    field="cluster",
                )
            from layerzero.actors.remote.pool import local_pool

            self._device_pool = local_pool(self.device())
        return self._device_pool

    @device_pool.setter
    def device_pool(self, device_pool: DevicePool) -> None:
        self._device_pool = device_pool

    # -- policy -----------------------------------------------------------------------------------

    @property
    def program_policy(self) -> Policy:
        """The programmatic layer: what `lock`, `prefer` and `avoid` have added."""
        return self._policy_layers.program

    def set_program_policy(self, program: Policy) -> None:
        """Replace the programmatic layer as a whole; every device swaps once."""
        with self._lock:
            self._policy_layers.program = program
            self.apply_policy()

    def load_policy_file(self, path: str | os.PathLike[str]) -> None:
        """Replace the file layer; on any error the policy in force stays as it is.

        Raises: PolicyLoadError: the file is no valid policy; file and line are named.
        """
        with self._lock:
            settings = self.settings.replace(policy=os.fspath(path))
            self._policy_layers.external = self._policy_layers.load_external(settings, self._known_kernel_ids)
            self.settings = settings
            self.apply_policy()

    def apply_policy(self) -> None:
        """Put the merged policy of this moment in force; what timers of timeboxed rules call."""
        with self._lock:
            if self.closed:
                return
            policy = self._policy_layers.merged()
            if policy.digest == self.policy.digest:
                return
            self.policy = policy
            for device in self.devices.values():
                device.set_policy(policy)

    def reconfigure(self, settings: Settings) -> None:
        """Put other settings in force; every device drops what depended on the old ones."""
        with self._lock:
            for name in READ_AT_START:
                if getattr(settings, name) != getattr(self.settings, name):
                    raise ConfigurationError(f"{name} is read when a runtime opens: open another", field=name)
            # Before anything changes: a strict runtime refuses a table that does not hold.
            solved = [
                dispatch_table_for(settings, device.registry, device.hardware)
                for device in self.devices.values()
            ]
            before, external = self.settings, self._policy_layers.external
            try:
                self.settings = settings
                perfdb_path(settings)
                if any(getattr(settings, name) != getattr(before, name) for name in _EXTERNAL):
                    self._need_device()
                    external = self._policy_layers.load_external(settings, self._known_kernel_ids)
                if settings.state_dir != before.state_dir:
                    self._store = move_state(self.devices.values(), settings.state_dir)
            except BaseException:
                self.settings = before
                raise
            self._policy_layers.external = external
            for device, table in zip(self.devices.values(), solved, strict=True):
                apply_settings(device, settings, table)
            self.apply_policy()
        if settings.cluster is not None:
            log.warning(SETTINGS_HERE_ALONE, cluster=settings.cluster, why="its devices keep what they have")
        if ACTIVE.runtime is self:
            ACTIVE.changed()  # known calls of batched functions hold what the old settings said

    # -- closing ----------------------------------------------------------------------------------

    def on_close(self, closer: Callable[[], None]) -> None:
        """Call `closer` when this runtime closes, last added first."""
        self._closers.append(closer)

    def spawn(
        self, coro: Coroutine[Any, Any, T], *, device: torch.device | str | None = None
    ) -> SpawnedTask[T]:
        """Step a request's coroutine from the batcher of `device`, cheaper than a task; await it for its
        result.

        What asks for the current task (`asyncio.timeout`, task groups) does not work inside it.
        Raises: RuntimeClosedError: after close. RuntimeError: no event loop runs in this thread.
            TypeError: `coro` is no coroutine.
        """
        if not isinstance(coro, Coroutine):
            raise TypeError(f"coro needs a coroutine, got {type(coro).__name__}: {coro!r}")
        try:
            return spawn(self.device(device).loop_drivers.current(), coro)
        except BaseException:
            coro.close()
            raise

    async def drain(self, timeout_s: float) -> bool:
        """Let the callers of the running loop end; False where `timeout_s` cut some off."""
        in_time = True
        for device in list(self.devices.values()):
            in_time = await device.loop_drivers.drain(timeout_s) and in_time
        return in_time

    async def close_device_pool(self) -> None:
        """Close the pool, if it was used, on the loop that used it."""
        if self._device_pool is not None:
            await self._device_pool.close()

    def close(self) -> None:
        """Stop every thread and timer; calls after this raise RuntimeClosedError. Idempotent."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._policy_layers.timer.stop()
            closers, self._closers = self._closers[::-1], []
        for closer in closers:
            closer()
        for device in self.devices.values():
            device.close()
        ALL.discard(self)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and any(d.worker.running for d in self.devices.values()):
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    def reset_after_fork(self) -> None:
        """Fresh locks, no threads and no timers in a forked child."""
        self._lock = threading.RLock()
        self._policy_layers.timer.reset_after_fork()
        for device in self.devices.values():
            device.reset_after_fork()


ALL: weakref.WeakSet[Runtime] = weakref.WeakSet()  # that are open


def open_devices() -> list[ScheduledDevice]:
    """The devices of every open runtime of this process."""
    return [device for runtime in list(ALL) for device in list(runtime.devices.values())]


def _canonical(device: torch.device) -> torch.device:
    if device.type == "cuda" and cast("int | None", device.index) is None:  # torch declares an int
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return device

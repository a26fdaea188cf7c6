"""Isolation: which kernels run in processes of their own, as kernels like all others, and who is to blame."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

import msgspec

from layerzero._util import log
from layerzero._util.fork_safety import renew_after_fork
from layerzero.actors.isolation import frames
from layerzero.actors.isolation.descriptions import rename_kernels
from layerzero.actors.isolation.isolated_worker import IsolatedWorker
from layerzero.backends import PluginRequest, load_plugin_ops, need_own_ids
from layerzero.backends.reference import reference_kernel
from layerzero.health import Health
from layerzero.observe.counters import Counters
from layerzero.ops import table
from layerzero.ops.op import Args, Op
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import Capability
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.kernel import Efficiency, Kernel
from layerzero.spec.reasons import Reason
from layerzero.spec.settings import Settings

OWN_INTERPRETER = "process"
CRASHES_TO_QUARANTINE = 2
CRASH_MEMORY_S = 24 * 3600.0
# What a call costs beyond the kernel, an estimate; benchmarks/isolation.py measures it.
CALL_US = 45.0
# Operands and outputs are written and read once more.
_COPIES = 2.0
_CALLABLES = frozenset({"score_mod", "block_mask"})


class _Device(Protocol):
    @property
    def health(self) -> Health: ...


class IsolatedCall:
    """The callable of a kernel that runs elsewhere; it takes the op's full argument tuple."""

    __slots__ = ("_frames", "_kernel", "_op", "_worker")

    def __init__(self, worker: IsolatedWorker, kernel: str, op: Op) -> None:
        self._worker, self._kernel, self._op = worker, kernel, op
        self._frames: dict[tuple[Any, ...], frames.Frame] = {}

    def __call__(self, *args: Any) -> Any:
        results = self._worker.run(self._kernel, self._frame(args), args)
        return results[0] if len(results) == 1 else tuple(results)

    def _frame(self, args: Args) -> frames.Frame:
        key = frames.key_of(args)
        frame = self._frames.get(key)
        if frame is None:
            if len(self._frames) >= frames.MOST_FRAMES:
                self._frames.clear()
            frame = self._frames[key] = frames.Frame(self._kernel, args, self._op.outputs(args))
        return frame


class IsolatedLoader:
    """How a kernel that runs elsewhere is loaded; one with another `load` runs here, whatever it says."""

    __slots__ = ("_op", "_order", "_worker")

    def __init__(self, worker: IsolatedWorker, order: frames.LoadCommand, op: str) -> None:
        self._worker, self._order, self._op = worker, order, op

    def __call__(self) -> IsolatedCall:
        self._worker.load(self._order)
        return IsolatedCall(self._worker, self._order.kernel, table.get(self._op))


class IsolatedBackends:
    """The isolated backends of one runtime: their workers, and the devices whose health they touch."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        self._settings = settings
        self._counters = counters
        self._lock = threading.Lock()
        self._workers: dict[tuple[str, str], IsolatedWorker] = {}
        # Backend, place, a kernel's name there: its id here.
        self._names: dict[tuple[str, str, str], str] = {}
        self._devices: list[_Device] = []
        self._crashes: dict[str, list[float]] = {}
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child no thread has the lock."""
        self._lock = threading.Lock()

    def attach(self, device: _Device) -> None:
        """Tell this device's health of workers that end."""
        self._devices.append(device)

    def place_of(self, kernel: Kernel) -> str | None:
        """Where a kernel runs: "process", an interpreter's path, None for here; the first rule holds."""
        rules = self._settings.isolate.items()
        return next((place for pattern, place in rules if _names(pattern, kernel)), None)

    def unmatched(self, kernels: Iterable[Kernel]) -> dict[str, str]:
        """The rules of the settings that none of these kernels is under."""
        listed, rules = list(kernels), self._settings.isolate.items()
        return {rule: place for rule, place in rules if not any(_names(rule, kernel) for kernel in listed)}

    def prepared(self, kernel: Kernel) -> Kernel:
        """The kernel as this process has it: itself, or one of the same name that runs in a worker."""
        if isinstance(kernel.load, IsolatedLoader):
            return kernel
        place = self.place_of(kernel)
        if place is None or kernel.load is reference_kernel(table.get(kernel.op)).load:
            return dataclasses.replace(kernel, isolated="") if kernel.isolated else kernel
        order = frames.LoadCommand(kernel.id, kernel.op, self._plugins_here(), kernel.origin)
        return self._isolated(kernel, place, order)

    def _plugins_here(self) -> tuple[str, ...]:
        requests = map(PluginRequest.parse, self._settings.plugins)
        return tuple(request.name for request in requests if not request.python)

    def _isolated(self, kernel: Kernel, place: str, order: frames.LoadCommand) -> Kernel:
        worker = self._worker(kernel.backend, place)
        self._names[kernel.backend, place, order.kernel] = kernel.id
        compiles = kernel.compile is not None

        def compile_there(request: CallSpec) -> None:
            worker.compile(frames.CompileCommand(order.kernel, request))

        is_own = place == OWN_INTERPRETER
        return dataclasses.replace(
            kernel,
            load=IsolatedLoader(worker, order, kernel.op),
            capability=narrow(kernel.capability),
            efficiency=_priced(kernel.efficiency),
            slow_import=True,
            compile=compile_there if compiles else None,
            compile_key=kernel.compile_key if compiles else None,
            on_disk=None,
            distributions=kernel.distributions if is_own else (),
            co_requirements=kernel.co_requirements if is_own else (),
            isolated=place,
        )

    def _worker(self, backend: str, place: str) -> IsolatedWorker:
        with self._lock:
            worker = self._workers.get((backend, place))
            if worker is None:
                python = None if place == OWN_INTERPRETER else place

                def died(kernel: str | None, reason: Reason, why: str) -> None:
                    self._on_death(backend, place, kernel, reason, why)

                def unloaded(kernel: str, why: str) -> None:
                    kernel_id = self._names[backend, place, kernel]
                    for device in self._devices:
                        device.health.rest(kernel_id, f"it does not load in its new process: {why}")

                worker = IsolatedWorker(backend, python, self._settings.isolate_timeout_s, died, unloaded)
                self._workers[backend, place] = worker
            return worker

    def plugins_elsewhere(self, here: Sequence[Kernel]) -> list[Kernel]:
        """The kernels of plugins that the settings take from other environments, as workers describe them.

        `here` are those of the plugins of this one.
        Raises: BackendNotAvailableError: the environment or the plugin is not there. ConfigurationError: what
            it says is no description, or of an op that is not known here, or the id of another kernel.
        """
        kernels: list[Kernel] = []
        for request in map(PluginRequest.parse, self._settings.plugins):
            if request.python:
                kernels += self._described(request)
        need_own_ids([*here, *kernels], self._settings.plugins)
        return kernels

    def _described(self, request: PluginRequest) -> list[Kernel]:
        worker = self._worker(request.alias, request.python)
        described = worker.describe(request.name)
        load_plugin_ops([request.name])
        orders: dict[str, frames.LoadCommand] = {}

        def load(kernel_id: str, op: str) -> Callable[[], Callable[..., Any]]:
            if op not in table.names():
                names = ", ".join(table.names())
                raise ConfigurationError(
                    f"backend {request.alias!r}: {kernel_id!r} needs an op among {names}, got {op!r}"
                )
            alias_id = ".".join((request.alias, *kernel_id.split(".")[1:]))
            orders[alias_id] = frames.LoadCommand(kernel_id, op, (request.name,))
            return _never

        kernels = rename_kernels(described, request.alias, load)
        return [self._isolated(kernel, request.python, orders[kernel.id]) for kernel in kernels]

    # -- ends of workers ---------------------------------------------------------------------------

    def _on_death(self, backend: str, place: str, running: str | None, reason: Reason, why: str) -> None:
        """Rest the backend's kernels; quarantine the one that ran, at its second crash within a day."""
        self._counters.add("isolated_deaths", backend=backend, reason=reason.value)
        culprit = self._names.get((backend, place, running)) if running is not None else None
        loaded = {self._names[backend, place, name] for name in self._workers[backend, place].loaded}
        crashes = self._count_crash(culprit) if culprit is not None else 0
        for health in (device.health for device in self._devices):
            for kernel in loaded - {culprit}:
                health.rest(kernel, f"its process {why} under {culprit or 'no kernel'}")
            if culprit is not None and crashes >= CRASHES_TO_QUARANTINE:
                _quarantine(health, culprit, f"{reason.value} twice: its process {why}")
            elif culprit is not None:
                health.rest(culprit, f"{reason.value}: its process {why}")

    def _count_crash(self, kernel: str) -> int:
        now_s = time.monotonic()
        with self._lock:
            recent = [at for at in self._crashes.get(kernel, ()) if now_s - at < CRASH_MEMORY_S]
            self._crashes[kernel] = [*recent, now_s]
            return len(self._crashes[kernel])

    def workers(self) -> Mapping[tuple[str, str], IsolatedWorker]:
        """Every worker by backend and place."""
        with self._lock:
            return dict(self._workers)

    def close(self) -> None:
        """End every worker."""
        for worker in self.workers().values():
            worker.close()


def _names(pattern: str, kernel: Kernel) -> bool:
    return fnmatchcase(kernel.id, pattern) or fnmatchcase(kernel.backend, pattern)


def narrow(capability: Capability) -> Capability:
    """What of a capability is left in another process: no graph of gradients, no capture, no code of callers.

    Operands are copied densely on their way, so strides and alignment no longer matter.
    """
    return msgspec.structs.replace(
        capability,
        features=capability.features - _CALLABLES,
        contiguous=False,
        last_stride1=False,
        alignment=1,
        gradient=False,
        autocast=False,
        graph_safe=False,
        deterministic=False,
    )


def _priced(efficiency: Efficiency) -> Efficiency:
    share = efficiency.bandwidth
    return dataclasses.replace(
        efficiency,
        bandwidth=share / (1 + _COPIES * share),
        launch_us=efficiency.launch_us + CALL_US,
        source=f"{efficiency.source}; and a process of its own",
    )


def _quarantine(health: Health, kernel: str, why: str) -> None:
    try:
        health.quarantine(kernel, why)
    except OSError as error:  # it is out of service in this process anyway
        log.error("isolation.quarantine_not_kept", kernel=kernel, why=str(error))


def _never() -> Callable[..., Any]:
    raise AssertionError("a description has no code")

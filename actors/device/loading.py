"""What a device does on a thread of its own so that no call waits for it: imports, compiles, files read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerzero._util import log
from layerzero._util.ending import ENDING
from layerzero.actors.device.registry import Registry
from layerzero.actors.device.worker import Worker
from layerzero.observe.counters import Counters
from layerzero.sharing.work import COMPILE, SHARED, SharedFailureError
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import ConfigurationError
from layerzero.warmup.apart import ApartCompiler, compilation_of
from layerzero.warmup.garbage import freeze_again
from layerzero.warmup.monitor import announce

if TYPE_CHECKING:
    from layerzero.selection.active_table import ActiveDispatchTable
    from layerzero.spec.hardware import Hardware
    from layerzero.spec.settings import Settings

_DELAY_S = 0.1


@dataclass(eq=False)
class KernelLoader:
    """The background thread of one device; a kernel is loaded once at a time, and then `changed()` called."""

    _hardware: Hardware
    _registry: Registry
    _counters: Counters
    _clock: Callable[[], float]
    _changed: Callable[[], object]
    _settings: Callable[[], Settings]

    def __post_init__(self) -> None:
        self._thread = Worker(f"layerzero-warm-{self._hardware.device}")
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Nothing is under way in a forked child."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._underway: set[str] = set()
        self._apart = ApartCompiler(lambda: self._settings().compile_processes)

    def submit(self, job: Callable[[], object]) -> bool:
        """Run `job` on the thread; False where that is being closed."""
        if self._closing.is_set():
            return False
        self._thread.submit(job)
        return True

    def run_later(self, job: Callable[[], object]) -> threading.Event:
        """Run `job` on the thread when the call that asked has had time to end; the event is set after it."""
        ended = threading.Event()

        def run() -> None:
            try:
                if self.wait_grace_period():
                    job()
            finally:
                ended.set()

        if not self.submit(run):
            ended.set()
        return ended

    def wait_grace_period(self) -> bool:
        """On the thread: let the call that asked have time to end; False where thread or process are ending.

        An import holds the interpreter for tens of milliseconds at a time; the first call would wait for it.
        """
        return not (self._closing.wait(_DELAY_S) or ENDING.is_set())

    def load_later(self, kernel_id: str, request: CallSpec) -> None:
        """Load a kernel, and compile what `request` needs, behind the call that found it cold."""
        with self._lock:
            # Every call meets the kernel cold until it is there; one of them starts the load.
            if kernel_id in self._underway or self._closing.is_set():
                return
            self._underway.add(kernel_id)
        self._thread.submit(lambda: self._load_after_grace(kernel_id, request))

    def _load_after_grace(self, kernel_id: str, request: CallSpec) -> None:
        if not self.wait_grace_period():
            return
        compiled = self.compile_ahead(kernel_id, request)
        if compiled is None:
            self.load_now(kernel_id, request)
        else:  # the thread is free for others meanwhile
            compiled.add_done_callback(lambda _: self.submit(lambda: self.load_now(kernel_id, request)))

    def compile_ahead(self, kernel_id: str, request: CallSpec) -> Future[bool] | None:
        """Let a process of its own compile what a request needs; None where there is nothing for one."""
        kernel = self._registry.get(kernel_id)
        if kernel is None or not self._apart.takes(kernel, request):
            return None
        shared_as = compilation_of(kernel, request, self._hardware)
        return self._apart.start(kernel, request, self._settings().plugins, shared_as)

    @property
    def compiling(self) -> bool:
        """Whether a process of its own compiles something: what is planned now will be planned again."""
        return self._apart.busy

    @property
    def loading(self) -> bool:
        """Whether a kernel that some call wants is on its way."""
        return bool(self._underway) or self.compiling

    def _wait_for_apart(self, kernel_id: str, request: CallSpec) -> None:
        """Until the process that compiles this, if one does, has ended."""
        kernel = self._registry.get(kernel_id)
        compiled = self._apart.under_way(kernel, request) if kernel is not None else None
        if compiled is not None and compiled.result():
            announce(f"{kernel_id} in a process of its own")

    def load_now(self, kernel_id: str, request: CallSpec | None = None) -> None:
        """Load a kernel in this thread; a failure blocks it, with its reason."""
        started = self._clock()
        try:
            if request is not None:
                self._wait_for_apart(kernel_id, request)
            self._load_shared(kernel_id, request)
        except Exception as error:
            if not threading.main_thread().is_alive():
                return  # the process is ending and takes no more threads: that says nothing of the kernel
            self._count_failure(kernel_id, error)
        else:
            log.info("kernel.loaded", kernel=kernel_id, seconds=round(self._clock() - started, 3))
        # After a failure too: that blocks the kernel, which changes choices as readiness does.
        finally:
            with self._lock:
                self._underway.discard(kernel_id)
            if not self.loading:
                freeze_again()
            self._changed()

    def tell_failure(self, kernel_id: str, error: Exception) -> None:
        """A call loaded a kernel in its own thread, and it failed, which blocks it."""
        self._count_failure(kernel_id, error)
        self._changed()

    def _count_failure(self, kernel_id: str, error: Exception) -> None:
        self._counters.add("load_failures", kernel=kernel_id)
        log.warning("kernel.load_failed", kernel=kernel_id, error=f"{type(error).__name__}: {error}")

    def _load_shared(self, kernel_id: str, request: CallSpec | None) -> None:
        """Load and compile in this thread: of the host's processes that compile the same, one goes first."""
        registry = self._registry
        kernel = registry.get(kernel_id)

        def load() -> None:
            registry.callable_of(kernel_id)
            if request is not None:
                registry.compile(kernel_id, request)

        if kernel is None or (not kernel.slow_import and kernel.compile is None):
            return load()
        sharing = COMPILE
        if request is not None and kernel.on_disk is not None and not kernel.on_disk(request):
            sharing = sharing._replace(fresh_s=0.0)  # what was compiled once is gone
        try:
            SHARED.before_all(sharing, compilation_of(kernel, request, self._hardware), load)
        except SharedFailureError as error:
            registry.refuse(kernel, error)
            raise

    def stop(self) -> None:
        """Begin nothing more."""
        self._closing.set()
        self._apart.close()

    def close(self, timeout_s: float | None = None) -> None:
        """Begin nothing more, and wait for what runs."""
        self.stop()
        self._thread.close(timeout_s)


def dispatch_table_for(
    settings: Settings, registry: Registry, hardware: Hardware
) -> ActiveDispatchTable | None:
    """The dispatch table of `settings`, refused where it does not hold for the device.

    Raises: ConfigurationError: it does not, and the settings are strict; or a next one is wanted of none.
    """
    if settings.dispatch_table is None:
        if settings.next_dispatch_table is not None:
            raise ConfigurationError(
                "next_dispatch_table needs a dispatch_table whose misses it gets, got none",
                field="next_dispatch_table",
            )
        return None
    # A device without a table need not read the module: first calls wait for imports.
    from layerzero.selection.active_table import activate

    return activate(settings.dispatch_table, hardware, registry.of, strict=settings.strict)

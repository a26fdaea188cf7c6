"""The kernels a device knows: what is registered, what could be loaded, and what each became.

Registering, loading and blocking all end in a new generation of the device's snapshot; readers only ever
see whole generations.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from layerzero._util import foreign
from layerzero.ops import table
from layerzero.selection.context import SelectionOptions
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Reason, Rejected


class Registry:
    """Kernels by id and by op, with the callables that have been loaded.

    `kernels` are registered at once; those that `source(op, everything)` gives, when the op is first asked
    for: first what can serve on this device, everything when `complete` or `all` asks. `overlay` is the
    digest of what the deployment took from their capabilities; `prepare` gives each kernel as it runs here.
    """

    def __init__(
        self,
        kernels: Iterable[Kernel],
        availability: Callable[[Kernel], list[Rejected]],
        source: Callable[[str, bool], Iterable[Kernel]] | None = None,
        overlay: str = "",
        prepare: Callable[[Kernel], Kernel] | None = None,
    ) -> None:
        self._overlay = overlay
        self._prepare = prepare
        self._lock = threading.Lock()
        self._source = source
        self._sourced: frozenset[str] = frozenset()
        self._completed: frozenset[str] = frozenset()
        self._availability = availability
        self._by_id: dict[str, Kernel] = {}
        self._by_op: dict[str, tuple[Kernel, ...]] = {}
        self._loaded: dict[str, Callable[..., Any]] = {}
        self._failed: dict[str, Rejected] = {}
        self._missing: dict[str, Rejected] = {}
        self._compiled_units: frozenset[tuple[str, str]] = frozenset()
        for kernel in kernels:
            self._add(kernel)

    def with_overlay(self, knobs: SelectionOptions) -> SelectionOptions:
        """`knobs` with the overlay that applies to these kernels."""
        return dataclasses.replace(knobs, overlay=self._overlay) if self._overlay else knobs

    def add(self, kernel: Kernel) -> None:
        """Register one more kernel.

        Raises: ValueError: a kernel of that id is registered already.
        """
        self._register_from_source(kernel.op)
        with self._lock:
            self._add(kernel)

    def _register_from_source(self, op: str) -> None:
        if self._source is None or op in self._sourced:
            return
        kernels = tuple(self._source(op, False))
        with self._lock:
            # Another thread may have registered them while this one read the source without the lock.
            if op not in self._sourced:
                for kernel in kernels:
                    self._add(kernel)
                self._sourced |= {op}

    def complete(self, op: str) -> bool:
        """Register what cannot serve an op here, too, so that it can be said why; whether it was new."""
        self._register_from_source(op)
        if self._source is None or op in self._completed:
            return False
        kernels = tuple(self._source(op, True))
        with self._lock:
            new_kernels = [k for k in kernels if k.id not in self._by_id and op not in self._completed]
            for kernel in new_kernels:
                self._add(kernel)
            self._completed |= {op}
        return bool(new_kernels)

    def _register_everything(self) -> None:
        if self._source is not None:
            for op in table.names():
                self.complete(op)

    def _add(self, kernel: Kernel) -> None:
        if kernel.id in self._by_id:
            raise ValueError(f"kernel id {kernel.id!r} is already registered")
        if self._prepare is not None:
            kernel = self._prepare(kernel)
        # Copied, never changed in place: readers take no lock.
        self._by_id = {**self._by_id, kernel.id: kernel}
        self._by_op = {**self._by_op, kernel.op: (*self._by_op.get(kernel.op, ()), kernel)}
        reasons = self._availability(kernel)
        if reasons:
            self._missing = {**self._missing, kernel.id: reasons[0]}

    def remove(self, kernel_id: str) -> Kernel:
        """Forget a kernel; plans that hold it finish with it.

        Raises: KeyError: no kernel has that id.
        """
        self._register_everything()
        with self._lock:
            kernel = self._by_id[kernel_id]
            self._by_id = {k: v for k, v in self._by_id.items() if k != kernel_id}
            rest = tuple(k for k in self._by_op[kernel.op] if k.id != kernel_id)
            self._by_op = {**self._by_op, kernel.op: rest}
            self._loaded.pop(kernel_id, None)
            self._failed = {k: v for k, v in self._failed.items() if k != kernel_id}
            self._missing = {k: v for k, v in self._missing.items() if k != kernel_id}
            return kernel

    def replace(self, kernel: Kernel) -> None:
        """Put another implementation under an id, in its place; calls in flight finish with the old one.

        Raises: KeyError: no kernel has that id. ValueError: the replacement serves another op.
        """
        self._register_from_source(kernel.op)
        if self._prepare is not None:
            kernel = self._prepare(kernel)
        with self._lock:
            before = self._by_id[kernel.id]
            if before.op != kernel.op:
                raise ValueError(f"op of the new {kernel.id!r} needs {before.op!r}, got {kernel.op!r}")
            reasons = self._availability(kernel)
            self._by_id = {**self._by_id, kernel.id: kernel}
            self._by_op = {
                **self._by_op,
                kernel.op: tuple(kernel if k is before else k for k in self._by_op[kernel.op]),
            }
            # The new implementation has neither the old one's callable nor its failures.
            self._loaded.pop(kernel.id, None)
            self._failed = {k: v for k, v in self._failed.items() if k != kernel.id}
            others = {k: v for k, v in self._missing.items() if k != kernel.id}
            self._missing = {**others, kernel.id: reasons[0]} if reasons else others

    def get(self, kernel_id: str) -> Kernel | None:
        """The kernel of that id, or None."""
        kernel = self._by_id.get(kernel_id)
        if kernel is None:
            self._register_everything()
            kernel = self._by_id.get(kernel_id)
        return kernel

    def for_op(self, op: str) -> tuple[Kernel, ...]:
        """Every kernel of an op, in registration order."""
        self._register_from_source(op)
        return self._by_op.get(op, ())

    def of(self, op: str) -> tuple[Kernel, ...]:
        """The kernels of one op, or by "*" those of every op."""
        return self.all() if op == "*" else self.for_op(op)

    def all(self) -> tuple[Kernel, ...]:
        """Every kernel, op by op."""
        self._register_everything()
        return tuple(kernel for op in sorted(self._by_op) for kernel in self._by_op[op])

    def blocked(self) -> Mapping[str, Rejected]:
        """The kernels asked for so far that cannot run here: library missing, import or load failed."""
        return {**self._missing, **self._failed}

    def unready(self) -> frozenset[str]:
        """The kernels asked for so far whose loading is slow and has not happened."""
        return frozenset(k.id for k in self._by_id.values() if k.slow_import and k.id not in self._loaded)

    def compiled_units(self) -> frozenset[tuple[str, str]]:
        """(kernel, unit) of everything compiled so far."""
        return self._compiled_units

    def compile(self, kernel_id: str, request: CallSpec) -> None:
        """Compile what `request` needs of a kernel that compiles by unit, once.

        Raises: what the vendor's compiler raises; the failure is remembered and blocks the kernel.
        """
        kernel = self.get(kernel_id)
        if kernel is None or kernel.compile_key is None or kernel.compile is None:
            return
        unit = (kernel_id, kernel.compile_key(request))
        if unit in self._compiled_units:
            return
        try:
            with foreign.outside():
                kernel.compile(request)
        except Exception as error:
            self.refuse(kernel, error)
            raise
        with self._lock:
            self._compiled_units |= {unit}

    def refuse(self, kernel: Kernel, error: Exception) -> None:
        """Block a kernel that failed to load or compile elsewhere."""
        self._failed = {**self._failed, kernel.id: _load_failure(kernel, error)}

    def callable_of(self, kernel_id: str) -> Callable[..., Any]:
        """The loaded callable of a kernel, loading it now if need be.

        Raises: what the vendor's import raises; the failure is remembered and blocks the kernel.
        """
        call = self._loaded.get(kernel_id)
        if call is not None:
            return call
        kernel = self.get(kernel_id)
        if kernel is None:
            raise KeyError(f"no kernel is named {kernel_id!r}")
        try:
            with foreign.outside():
                if kernel.distributions:
                    from layerzero.backends.builds import check_build  # torch's own kernels go without

                    check_build(kernel)
                loaded = kernel.load()
        except SystemExit as error:  # a library that ends its process so ends its kernel alone
            ended = ImportError(f"it ended its process: SystemExit: {error}")
            self.refuse(kernel, ended)
            raise ended from error
        # An interrupt in the middle of an import says nothing of the kernel.
        except BaseException as error:
            if isinstance(error, Exception):
                self.refuse(kernel, error)
            raise
        with self._lock:
            # A kernel that was replaced while it loaded must not replace its successor.
            if self._by_id.get(kernel_id) is kernel:
                return self._loaded.setdefault(kernel_id, loaded)
        return loaded


def _load_failure(kernel: Kernel, error: Exception) -> Rejected:
    reason = Reason.BACKEND_IMPORT_FAILED if isinstance(error, ImportError) else Reason.KERNEL_LOAD_FAILED
    if isinstance(error, BackendNotAvailableError):
        reason = error.context.get("reason", reason)
    return Rejected(reason, "load", f"{kernel.backend} to load", f"{type(error).__name__}: {error}"[:300])

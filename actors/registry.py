"""The kernels a device knows: what is registered, what could be loaded, and what each became.

Registering, loading and blocking all end in a new generation of the device's snapshot; readers only ever
see whole generations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from layerzero.errors import BackendNotAvailableError
from layerzero.kernel import Kernel
from layerzero.reasons import Reason, Rejected


class Registry:
    """Kernels by id and by op, with the callables that have been loaded."""

    def __init__(self, kernels: Iterable[Kernel], availability: Callable[[Kernel], list[Rejected]]) -> None:
        self._lock = threading.Lock()
        self._availability = availability
        self._by_id: dict[str, Kernel] = {}
        self._by_op: dict[str, tuple[Kernel, ...]] = {}
        self._loaded: dict[str, Callable[..., Any]] = {}
        self._failed: dict[str, Rejected] = {}
        self._missing: dict[str, Rejected] = {}
        for kernel in kernels:
            self._add(kernel)

    def add(self, kernel: Kernel) -> None:
        """Register one more kernel.

        Raises: ValueError: a kernel of that id is registered already.
        """
        with self._lock:
            self._add(kernel)

    def _add(self, kernel: Kernel) -> None:
        if kernel.id in self._by_id:
            raise ValueError(f"kernel id {kernel.id!r} is already registered")
        self._by_id = {**self._by_id, kernel.id: kernel}
        self._by_op = {**self._by_op, kernel.op: (*self._by_op.get(kernel.op, ()), kernel)}
        reasons = self._availability(kernel)
        if reasons:
            self._missing = {**self._missing, kernel.id: reasons[0]}

    def remove(self, kernel_id: str) -> Kernel:
        """Forget a kernel; plans that hold it finish with it.

        Raises: KeyError: no kernel has that id.
        """
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
            self._loaded.pop(kernel.id, None)
            self._failed = {k: v for k, v in self._failed.items() if k != kernel.id}
            others = {k: v for k, v in self._missing.items() if k != kernel.id}
            self._missing = {**others, kernel.id: reasons[0]} if reasons else others

    def get(self, kernel_id: str) -> Kernel | None:
        """The kernel of that id, or None."""
        return self._by_id.get(kernel_id)

    def for_op(self, op: str) -> tuple[Kernel, ...]:
        """Every kernel of an op, in registration order."""
        return self._by_op.get(op, ())

    def all(self) -> tuple[Kernel, ...]:
        """Every kernel."""
        return tuple(self._by_id.values())

    def blocked(self) -> Mapping[str, Rejected]:
        """The kernels that cannot run here: library missing, import or load failed."""
        return {**self._missing, **self._failed}

    def unready(self) -> frozenset[str]:
        """The kernels whose loading is slow and has not happened."""
        return frozenset(k.id for k in self._by_id.values() if k.cold and k.id not in self._loaded)

    def callable_of(self, kernel_id: str) -> Callable[..., Any]:
        """The loaded callable of a kernel, loading it now if need be.

        Raises: what the vendor's import raises; the failure is remembered and blocks the kernel.
        """
        found = self._loaded.get(kernel_id)
        if found is not None:
            return found
        kernel = self._by_id[kernel_id]
        try:
            loaded = kernel.load()
        except BaseException as error:
            if isinstance(error, Exception):
                self._failed = {**self._failed, kernel_id: _load_failure(kernel, error)}
            raise
        with self._lock:
            # A kernel that was replaced while it loaded must not stand in for its successor.
            if self._by_id.get(kernel_id) is kernel:
                return self._loaded.setdefault(kernel_id, loaded)
        return loaded


def _load_failure(kernel: Kernel, error: Exception) -> Rejected:
    reason = Reason.BACKEND_IMPORT_FAILED if isinstance(error, ImportError) else Reason.KERNEL_LOAD_FAILED
    if isinstance(error, BackendNotAvailableError):
        reason = error.context.get("reason", reason)
    return Rejected(reason, "load", f"{kernel.backend} to load", f"{type(error).__name__}: {error}"[:300])

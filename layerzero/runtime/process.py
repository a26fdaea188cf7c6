"""The runtime of this process: found, put in place and taken away, and renewed after a fork."""

from __future__ import annotations

import os
import threading

from layerzero.runtime.active import ACTIVE
from layerzero.runtime.runtime import ALL, Runtime
from layerzero.spec.errors import ConfigurationError


def current() -> Runtime:
    """The process's runtime, opened with default settings on first use."""
    runtime = ACTIVE.runtime
    if runtime is not None and not runtime.closed:
        return runtime
    with ACTIVE.lock:
        if ACTIVE.runtime is None or ACTIVE.runtime.closed:
            ACTIVE.put(Runtime())
        assert ACTIVE.runtime is not None
        return ACTIVE.runtime


def install(runtime: Runtime) -> None:
    """Make `runtime` the process's.

    Raises: ConfigurationError: an open runtime that `start` opened is installed already.
    """
    with ACTIVE.lock:
        present = ACTIVE.runtime
        if present is not None and not present.closed and present.started:
            raise ConfigurationError("a runtime is open in this process already; use start(..., scoped=True)")
        ACTIVE.put(runtime)
    if present is not None:
        present.close()


def uninstall(runtime: Runtime) -> None:
    """Forget `runtime` if it is the process's; the next use opens a default one."""
    with ACTIVE.lock:
        if ACTIVE.runtime is runtime:
            ACTIVE.put(None)


def _after_fork_in_child() -> None:
    ACTIVE.lock = threading.RLock()
    for runtime in list(ALL):
        runtime.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

"""Seeing compilations: every compiler that this process starts, every library it loads, Triton's compiler.

The interpreter's audit events are the witness, not a backend's word: a compiler is a process that is
started, a fresh kernel a shared library that is opened. The hook costs nothing while no monitor is open.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

_COMPILERS = re.compile(
    r"(x86_64-linux-gnu-|aarch64-linux-gnu-)?"
    r"(cc|c\+\+|g\+\+|gcc|clang|clang\+\+|nvcc|cicc|ptxas|nvlink|hipcc|ninja|cl|icpx|as|ld|lld|tileiras)"
    r"(-\d+(\.\d+)*)?(\.exe)?"
)
_STARTS = ("subprocess.Popen", "os.posix_spawn", "os.exec")


class CompileEvent(msgspec.Struct, frozen=True):
    """A compiler started or a library opened: `what` is its path or name, `at` the monotonic time."""

    kind: Literal["compiled", "loaded"]
    what: str
    time_s: float


class CompilationForbiddenError(RuntimeError):
    """Something would have been compiled while `watching(forbid=True)`."""


class Monitor:
    """What happened while it watched; grows while it does."""

    def __init__(self, *, forbid: bool = False) -> None:
        self.events: list[CompileEvent] = []
        self._forbid = forbid

    @property
    def compiled(self) -> tuple[CompileEvent, ...]:
        """The compilers that were started."""
        return tuple(e for e in self.events if e.kind == "compiled")

    @property
    def loaded(self) -> tuple[CompileEvent, ...]:
        """The shared libraries that were opened."""
        return tuple(e for e in self.events if e.kind == "loaded")

    def add(self, kind: Literal["compiled", "loaded"], what: str) -> None:
        """Note one event; what compiles in this process without a compiler's process says so here.

        Raises: CompilationForbiddenError: it compiles, and this monitor forbids it.
        """
        self.events.append(CompileEvent(kind, what, time.monotonic()))
        if kind == "compiled" and self._forbid:
            raise CompilationForbiddenError(f"{what} would be started, and nothing may be compiled now")


_ACTIVE: tuple[Monitor, ...] = ()
_LOCK = threading.Lock()


class _Hook:
    installed = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _ACTIVE:
        return
    if event in _STARTS:
        command = _program(args)
        if command:
            _tell("compiled", command)
    elif event == "ctypes.dlopen" and args and args[0]:
        _tell("loaded", os.fsdecode(args[0]))
    elif event == "import" and len(args) > 1 and isinstance(args[1], str):
        # The file is named for extension modules alone.
        _tell("loaded", args[1])


def _program(args: tuple[Any, ...]) -> str:
    """The compiler that a process-starting event names, else nothing."""
    for value in args[:2]:
        words = value if isinstance(value, list | tuple) else [value]
        if words and isinstance(words[0], str | bytes | os.PathLike):
            name = os.path.basename(os.fsdecode(words[0]))
            own_compiler = os.path.basename(os.environ.get("CXX", "")) or None
            if _COMPILERS.fullmatch(name) or name == own_compiler:
                return os.fsdecode(words[0])
    return ""


def _tell(kind: Literal["compiled", "loaded"], what: str) -> None:
    for monitor in _ACTIVE:
        monitor.add(kind, what)


def announce(what: str) -> None:
    """Tell every monitor of a compilation inside this process; for backends whose compiler is a library."""
    _tell("compiled", what)


@contextmanager
def watching(*, forbid: bool = False) -> Iterator[Monitor]:
    """Watch this process for the block; `forbid` makes every compilation an error where it starts."""
    monitor = Monitor(forbid=forbid)
    with _LOCK:
        if not _Hook.installed:
            sys.addaudithook(_audit)  # forever: an audit hook cannot be removed
            _Hook.installed = True
    _change((*_ACTIVE, monitor))
    triton = _watch_triton()
    try:
        yield monitor
    finally:
        _change(tuple(m for m in _ACTIVE if m is not monitor))
        if triton is not None:
            triton()


def _change(active: tuple[Monitor, ...]) -> None:
    globals()["_ACTIVE"] = active


def _watch_triton() -> Any:
    """Have Triton's compiler announce itself, where Triton is imported already; returns what undoes it."""
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    runtime = getattr(knobs, "runtime", None)
    if runtime is None or not hasattr(runtime, "jit_cache_hook"):
        return None
    before = runtime.jit_cache_hook

    def hook(*args: Any, **kwargs: Any) -> Any:
        announce(f"triton {kwargs.get('repr', 'kernel')}")
        return before(*args, **kwargs) if before is not None else None

    runtime.jit_cache_hook = hook

    def undo() -> None:
        runtime.jit_cache_hook = before

    return undo

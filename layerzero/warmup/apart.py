"""Compiling in processes of their own, side by side, as many as cores and free memory allow.

A vendor's compiler takes minutes for a module and gigabytes of memory, and one module after another leaves
most cores idle. What a child compiles stays on disk, where this process finds it; a child that fails or dies
leaves its module to this process. This file is also the child's program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from layerzero._util import log
from layerzero._util.ending import join_at_exit
from layerzero._util.version import VERSION
from layerzero.perfdb import versions_of
from layerzero.sharing.work import COMPILE, SHARED, code_of, digest_of
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.hardware import Hardware, host_free_bytes
from layerzero.spec.kernel import Kernel

COMPILED = "kernel.compiled_apart"
FAILED = "kernel.compile_apart_failed"
TIMEOUT_S = 1800.0
# What a child takes beside its compilers, and what one compiler of a large CUDA template takes.
CHILD_BYTES = 2 << 30
COMPILER_BYTES = 2 << 30

Unit = tuple[str, str]
# Where compilers keep what they made.
_CACHES = (
    "XDG_CACHE_HOME", "HOME", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_EXTENSIONS_DIR", "FLASHINFER_WORKSPACE_BASE",
)  # fmt: skip


class CompileJob(msgspec.Struct, frozen=True):
    """What a child compiles: a kernel, for a request where the kernel compiles by request.

    `shared_as` names it among the host's processes (`compilation_of`).
    """

    kernel: str
    op: str
    request: CallSpec
    plugins: tuple[str, ...] = ()
    shared_as: str = ""


@dataclass(eq=False)
class _Job:
    """One unit on its way; `future` gives whether a child has compiled it."""

    order: CompileJob
    future: Future[bool] = field(default_factory=Future)
    child: subprocess.Popen[bytes] | None = None


class ApartCompiler:
    """The compiling children of one process.

    `limit()` is how many there may be at once: 0 for none, None for as many as fit. `free_bytes()` is the
    memory that can be had; it is measured before each child, and one child may always run.
    """

    def __init__(self, limit: Callable[[], int | None], free_bytes: Callable[[], int] | None = None) -> None:
        self._limit, self._free_bytes = limit, free_bytes or host_free_bytes
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._jobs: dict[Unit, _Job] = {}
        self._closed = False

    def takes(self, kernel: Kernel, request: CallSpec) -> bool:
        """Whether a child would compile something for this request."""
        return kernel.on_disk is not None and self._limit() != 0 and not kernel.on_disk(request)

    def start(
        self, kernel: Kernel, request: CallSpec, plugins: tuple[str, ...] = (), shared_as: str = ""
    ) -> Future[bool]:
        """Compile what a request needs, as soon as there is room; once for each unit of a kernel."""
        unit = unit_of(kernel, request)
        with self._lock:
            job = self._jobs.get(unit)
            if job is not None:
                return job.future
            job = self._jobs[unit] = _Job(
                CompileJob(kernel.id, kernel.op, request, tuple(plugins), shared_as)
            )
            if self._closed:
                job.future.set_result(False)
            else:
                self._waiting.append(job)
        self._start_next()
        return job.future

    def under_way(self, kernel: Kernel, request: CallSpec) -> Future[bool] | None:
        """The result of a unit that was given to a child; None where none was."""
        job = self._jobs.get(unit_of(kernel, request))
        return job.future if job is not None else None

    @property
    def busy(self) -> bool:
        """Whether a child is at work, or will be."""
        return bool(self._running or self._waiting)

    def close(self) -> None:
        """End the children and begin no more; units that wait are not compiled."""
        with self._lock:
            self._closed = True
            waiting, running = list(self._waiting), list(self._running)
            self._waiting.clear()
        for job in running:
            if job.child is not None:
                _kill(job.child)
        for job in waiting:
            job.future.set_result(False)

    def _start_next(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or not self._has_room():
                    return
                job = self._waiting.popleft()
                self._running.append(job)
                compilers = self._compilers()
            thread = threading.Thread(
                target=self._run, args=(job, compilers), name="layerzero-compile", daemon=True
            )
            thread.start()
            join_at_exit(thread, self.close)

    def _has_room(self) -> bool:
        """Whether one more child fits: in number, and in memory what each of them may come to take."""
        running, limit = len(self._running), self._limit()
        if running >= (limit if limit is not None else os.cpu_count() or 1):
            return False
        return not running or self._free_bytes() >= (running + 1) * (CHILD_BYTES + COMPILER_BYTES)

    def _compilers(self) -> int:
        """How many compilers each child may start, by memory: all that wait will want some."""
        children = min(len(self._running) + len(self._waiting), self._limit() or os.cpu_count() or 1)
        share = self._free_bytes() // max(children, 1) - CHILD_BYTES
        return max(1, min(os.cpu_count() or 1, share // COMPILER_BYTES))

    def _run(self, job: _Job, compilers: int) -> None:
        started, done, why = time.monotonic(), False, ""
        try:
            why = self._compile(job, compilers)
            done = not why
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._running.remove(job)
            seconds = round(time.monotonic() - started, 1)
            if done:
                log.info(COMPILED, kernel=job.order.kernel, seconds=seconds, compilers=compilers)
            elif not self._closed:
                log.warning(FAILED, kernel=job.order.kernel, seconds=seconds, why=why[-500:])
            self._start_next()
            job.future.set_result(done)

    def _compile(self, job: _Job, compilers: int) -> str:
        """Run the child to its end; what it said where it failed."""
        limit = os.environ.get("MAX_JOBS", "")
        jobs = min(compilers, int(limit)) if limit.isdigit() and int(limit) else compilers
        child = subprocess.Popen(
            [sys.executable, "-m", "layerzero.warmup.apart"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "MAX_JOBS": str(jobs), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # its compilers end with it
        )
        job.child = child
        try:
            if self._closed:
                return "closing"
            _, stderr = child.communicate(msgspec.json.encode(job.order), timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"took longer than {TIMEOUT_S:g} s"
        finally:
            _kill(child)
        if child.returncode:
            last = stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            return f"status {child.returncode}: {last[0]}"
        return ""


def unit_of(kernel: Kernel, request: CallSpec) -> Unit:
    """What is compiled together: by the kernel's own key, the whole kernel where it has none."""
    return kernel.id, kernel.compile_key(request) if kernel.compile_key is not None else ""


def compilation_of(kernel: Kernel, request: CallSpec | None, hardware: Hardware) -> str:
    """A name for what is compiled for a request, equal in processes that share their compilers' caches."""
    return digest_of(
        VERSION,
        sys.prefix,
        [os.environ.get(name, "") for name in _CACHES],
        kernel.id,
        versions_of(kernel),
        code_of(kernel.load),
        code_of(kernel.compile),
        unit_of(kernel, request)[1] if request is not None else "",
        (hardware.name, hardware.sm, sorted(hardware.isa), hardware.torch, hardware.cuda, hardware.driver),
    )


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child and its compilers, and take its status."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
    child.wait()


def main() -> int:
    """Compile what the order on the standard input names; the process's status."""
    from layerzero.backends import load_builtin

    order = msgspec.json.decode(sys.stdin.buffer.read(), type=CompileJob)
    kernels = load_builtin(order.plugins, op=order.op)
    kernel = next((kernel for kernel in kernels if kernel.id == order.kernel), None)
    if kernel is None:
        print(f"no backend has the kernel {order.kernel!r}", file=sys.stderr)
        return 3
    if order.shared_as:
        # The marker says what was, the disk what is.
        SHARED.once(COMPILE._replace(fresh_s=0.0), order.shared_as, lambda: _compile(kernel, order.request))
    else:
        _compile(kernel, order.request)
    return 0


def _compile(kernel: Kernel, request: CallSpec) -> bytes:
    if kernel.on_disk is None or not kernel.on_disk(request):
        kernel.load()
        if kernel.compile is not None:
            kernel.compile(request)
    return b""


if __name__ == "__main__":
    sys.exit(main())

"""Loads C++ modules: what the installed wheel carries, else what is compiled once per machine and user.

A compiled library is in a folder that only its user can write, under a name made of everything it depends
on: sources, flags, torch, Python and kind of machine. It is what a wheel made here would carry for this CPU.
A file lock lets one process compile while the others wait for its result.
"""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerzero._util import files, log
from layerzero._util.ending import ENDING
from layerzero.native import building
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.reasons import Reason

COMPILE_TIMEOUT_S = 600
WHEEL_UNUSED = "native.wheel_unused"


@dataclass(frozen=True, slots=True)
class CppModule(building.Source):
    """A C++ module as this process gets it."""

    def get(self) -> Any:
        """The module: the wheel's, else this user's, compiled first where it is not there; up to a minute.

        Raises: BackendNotAvailableError: a Python without its lock, no compiler, a compile error, or a cache
            folder that others can write.
        """
        need_lock()
        shipped = self.shipped()
        if shipped is not None:
            try:
                return self._load(str(shipped))
            except BackendNotAvailableError as error:
                log.warning(WHEEL_UNUSED, module=self.name, reason=Reason.KERNEL_LOAD_FAILED, why=str(error))
        target = self.target()
        if not target.exists():
            with file_lock(target.with_suffix(".lock")):
                if not target.exists():
                    self.compile_to(target)
        return self.load(target)

    @property
    def ready(self) -> bool:
        """Whether `get` compiles nothing.

        Raises: BackendNotAvailableError: as `get`, where it would not begin to compile.
        """
        need_lock()
        return self.shipped() is not None or self.target().exists()

    def shipped(self) -> Path | None:
        """The wheel's module where it fits this process; a wheel's that does not is logged, once."""
        if _unfit() != "":
            return None
        path = building.SHIPPED / self.variant()[0]
        return path if path.exists() else None

    def target(self) -> Path:
        """Where the compiled library is, or will be."""
        return cache_folder() / self.file_name

    def compile_to(self, target: Path) -> None:
        """Compile the source and put the library at `target` in one step.

        Raises: BackendNotAvailableError: the compiler says no; its first error is in the message.
        """
        need_compiler()
        part = target.with_suffix(f".{os.getpid()}.part")
        try:
            returned, messages = _run(building.command(self, self.variant()[1], part))
            if returned:
                raise unavailable(Reason.JIT_FAILED, f"did not compile: {first_error(messages)}")
            # In one step: another process may look for it at any moment.
            part.replace(target)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise unavailable(Reason.JIT_FAILED, f"did not compile: {error}") from error
        finally:
            part.unlink(missing_ok=True)

    def load(self, path: Path) -> Any:
        """The module in the shared library at `path`: the very file that was found to be this user's.

        Raises: BackendNotAvailableError: others could have written it, or the loader refuses it.
        """
        try:
            # The file may be exchanged between the check and the load.
            origin = files.pinned_path(path)
        except OSError as error:
            raise unavailable(Reason.KERNEL_LOAD_FAILED, f"does not load: {error}") from error
        return self._load(origin)

    def _load(self, origin: str) -> Any:
        try:
            loader = importlib.machinery.ExtensionFileLoader(self.name, origin)
            spec = importlib.util.spec_from_file_location(self.name, origin, loader=loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except (ImportError, OSError) as error:
            raise unavailable(Reason.KERNEL_LOAD_FAILED, f"does not load: {error}") from error
        return module


def _run(command: list[str]) -> tuple[int, str]:
    """Exit status and errors of a compiler, which ends with this process at the latest."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        atexit.register(running.kill)
        try:
            _, messages = running.communicate(timeout=COMPILE_TIMEOUT_S)
        except BaseException:
            running.kill()
            raise
        finally:
            atexit.unregister(running.kill)
    return running.returncode, messages


def cache_folder() -> Path:
    """`layerzero/native` in the user's cache folder, made for this user alone.

    Raises: BackendNotAvailableError: it belongs to another user or others can write it.
    """
    try:
        return files.own_user_folder("native")
    except OSError as error:
        folder = files.user_folder("native")
        why = f"cannot keep compiled kernels in {folder}, where code is loaded from: {error}"
        raise unavailable(Reason.KERNEL_LOAD_FAILED, why) from error


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold `path`'s lock; it ends with the process that held it, so none is ever left behind.

    Raises: BackendNotAvailableError: this process ends while another one compiles.
    """
    from filelock import FileLock, Timeout  # torch brings it

    lock = FileLock(path)
    while not lock.is_locked:
        if ENDING.is_set():
            raise unavailable(Reason.JIT_FAILED, "not compiled: another process compiles, and this one ends")
        with suppress(Timeout):
            lock.acquire(timeout=1.0)
    try:
        yield
    finally:
        lock.release()


def library(name: str) -> CppModule:
    """The package's own module of that name."""
    own = building.SOURCES[name]
    return CppModule(own.name, own.source, own.flags, own.levelled)


@functools.cache
def _unfit() -> str | None:
    """What keeps the wheel's modules from this process: None where it has none, empty where nothing does."""
    try:
        stamp = json.loads((building.SHIPPED / building.STAMP).read_text())
        if not isinstance(stamp, dict):
            raise ValueError(f"needs an object, got {stamp!r:.40}")
    except FileNotFoundError:
        return None  # a checkout, or a wheel without them
    except (OSError, ValueError) as error:
        differences = [f"something unknown: {building.STAMP} {error}"]
    else:
        here = building.stamp()
        differences = [
            f"{key} {stamp.get(key)!r}, got {here[key]!r}" for key in here if stamp.get(key) != here[key]
        ]
    if not differences:
        return ""
    why = f"the installed wheel's compiled modules are for {'; '.join(differences)}"
    log.warning(WHEEL_UNUSED, reason=Reason.BACKEND_VERSION_MISMATCH, why=why)
    return why


def need_lock() -> None:
    """Refuse a free-threaded build of Python: nothing here is proved to be right without the lock.

    Raises: BackendNotAvailableError: it is one.
    """
    if building.free_threaded():
        why = "needs a Python with its global lock (GIL), got a free-threaded build"
        raise unavailable(Reason.PYTHON_FREE_THREADED, why)


def need_compiler() -> None:
    """Refuse to compile without a C++ compiler: CXX, else g++.

    Raises: BackendNotAvailableError: there is none.
    """
    if building.compiler() is None:
        got = os.environ.get("CXX") or "g++"
        raise unavailable(
            Reason.BACKEND_MISSING, f"needs a C++ compiler with C++20 and OpenMP, got no {got!r}"
        )


def first_error(messages: str) -> str:
    """The first line of a compiler's output that speaks of an error, or the linker's last one."""
    lines = messages.strip().splitlines() or ["it said nothing"]
    # collect2 says only that the linker has failed.
    relevant = [line for line in lines if not line.startswith("collect2: ")]
    otherwise = lines[0] if relevant == lines else (relevant or lines)[-1]
    return next((line for line in relevant if "error" in line.lower()), otherwise)[:250]


def unavailable(reason: Reason, message: str) -> BackendNotAvailableError:
    """The error that blocks what is compiled, with the reason that verdicts show."""
    return BackendNotAvailableError(f"native code: {message}", backend="native", reason=reason)

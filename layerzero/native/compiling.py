"""Compiles and loads C++ modules, once per machine and user.

A library lies in a folder that only its user can write, under a name made of everything it depends on:
sources, flags, torch, Python and, where its flags say so, the CPU's instructions. A file lock lets one
process compile while the others wait for its result.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from layerzero._util import files
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.reasons import Reason

COMPILE_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class CppModule:
    """A C++ module: its name, its source (headers beside it count), its compiler flags."""

    name: str
    source: Path
    flags: tuple[str, ...]

    def get(self) -> Any:
        """The compiled module, compiling it first where this user has not yet; takes up to a minute.

        Raises: BackendNotAvailableError: no compiler, a compile error, or a cache folder that others can
            write.
        """
        target = self.target()
        if not target.exists():
            with locked(target.with_name("lock")):
                if not target.exists():
                    self.compile_to(target)
        return self.load(target)

    def target(self) -> Path:
        """Where the compiled library lies, or will."""
        return cache_folder() / f"{self.name}-{self.fingerprint()}.so"

    def fingerprint(self) -> str:
        """Everything the compiled library depends on, as 32 hexadecimal digits."""
        headers = [header.read_bytes() for header in sorted(self.source.parent.glob("*.h"))]
        built_for = cpu_flags() if "-march=native" in self.flags else platform.machine()
        parts = (
            self.source.read_bytes(), *headers, *self.flags, torch.__version__,
            sys.implementation.cache_tag, built_for,
        )  # fmt: skip
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part if isinstance(part, bytes) else str(part).encode())
            digest.update(b"\0")
        return digest.hexdigest()[:32]

    def compile_to(self, target: Path) -> None:
        """Compile the source and put the library at `target` in one step.

        Raises: BackendNotAvailableError: the compiler says no; its first error is in the message.
        """
        home = Path(torch.__file__).parent
        includes = (
            home / "include",
            home / "include/torch/csrc/api/include",
            sysconfig.get_paths()["include"],
        )
        part = target.with_suffix(f".{os.getpid()}.part")
        command = [
            compiler(), *self.flags, *(f"-I{folder}" for folder in includes),
            f"-DTORCH_EXTENSION_NAME={self.name}",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            str(self.source), "-o", str(part),
            f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
        ]  # fmt: skip
        try:
            returned, messages = _run(command)
            if returned:
                raise unavailable(Reason.JIT_FAILED, f"did not compile: {first_error(messages)}")
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
            origin = files.pinned_path(path)
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

    Raises: BackendNotAvailableError: it belongs to somebody else or others can write it.
    """
    try:
        return files.own_user_folder("native")
    except OSError as error:
        folder = files.user_folder("native")
        why = f"cannot keep compiled kernels in {folder}, where code is loaded from: {error}"
        raise unavailable(Reason.KERNEL_LOAD_FAILED, why) from error


def cpu_flags() -> str:
    """The CPU's name and instructions, which -march=native compiles for."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    named = {line.split(":")[0].strip(): line for line in lines}
    return "".join(named.get(key, "") for key in ("model name", "flags", "Features")) or platform.machine()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `path`'s lock; it ends with the process that held it, so none is ever left behind."""
    from filelock import FileLock  # torch brings it

    with FileLock(path):
        yield


def compiler() -> str:
    """The C++ compiler: CXX, else g++.

    Raises: BackendNotAvailableError: there is none.
    """
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise unavailable(
            Reason.BACKEND_MISSING, f"needs a C++ compiler with C++20 and OpenMP, got no {name!r}"
        )
    return path


def first_error(messages: str) -> str:
    """The first line of a compiler's output that speaks of an error."""
    lines = messages.strip().splitlines() or ["it said nothing"]
    return next((line for line in lines if "error" in line.lower()), lines[0])[:250]


def unavailable(reason: Reason, message: str) -> BackendNotAvailableError:
    """The error that blocks what is compiled, with the reason that verdicts show."""
    return BackendNotAvailableError(f"native code: {message}", backend="native", reason=reason)

"""Compiles and loads the C++ kernels, once per machine and user.

The library lies in a folder that only its user can write, under a name made of everything it depends on:
source, flags, torch, Python and the CPU's instructions. A file lock lets one process compile while the
others wait for its result.
"""

from __future__ import annotations

import functools
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
from pathlib import Path
from typing import Any

import torch

from layerzero.errors import BackendNotAvailableError
from layerzero.reasons import Reason

SOURCE = Path(__file__).with_name("attention.cpp")
MODULE = "layerzero_native"
# No fast-math: it would reorder sums, and bits would depend on the rows beside them.
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp")
COMPILE_TIMEOUT_S = 600


@functools.cache
def library() -> Any:
    """The compiled module, compiling it first where this user has not yet; takes up to a minute.

    Raises: BackendNotAvailableError: no compiler, a compile error, or a cache folder that others can write.
    """
    folder = cache_folder()
    target = folder / f"{MODULE}-{fingerprint()}.so"
    if not target.exists():
        with locked(folder / "lock"):
            if not target.exists():
                compile_to(target)
    return load(target)


def cache_folder() -> Path:
    """`layerzero/native` in the user's cache folder, made for this user alone.

    Raises: BackendNotAvailableError: it belongs to somebody else or others can write it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "layerzero" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise unavailable(
            Reason.KERNEL_LOAD_FAILED, f"cannot keep compiled kernels in {folder}: {error}"
        ) from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise unavailable(
            Reason.KERNEL_LOAD_FAILED,
            f"{folder} needs to belong to this user with mode 700, got owner {found.st_uid} and mode "
            f"{found.st_mode & 0o777:o}; code is loaded from there",
        )
    return folder


def fingerprint() -> str:
    """Everything the compiled library depends on, as 32 hexadecimal digits."""
    parts = (SOURCE.read_bytes(), *FLAGS, torch.__version__, sys.implementation.cache_tag, cpu_flags())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else str(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]


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
    wanted = os.environ.get("CXX") or "g++"
    found = shutil.which(wanted)
    if found is None:
        raise unavailable(
            Reason.BACKEND_MISSING, f"needs a C++ compiler with C++20 and OpenMP, got no {wanted!r}"
        )
    return found


def compile_to(target: Path) -> None:
    """Compile the source and put the library at `target` in one step.

    Raises: BackendNotAvailableError: the compiler says no; its first error is in the message.
    """
    home = Path(torch.__file__).parent
    includes = [home / "include", home / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    made = target.with_suffix(f".{os.getpid()}.part")
    command = [
        compiler(), *FLAGS, *(f"-I{folder}" for folder in includes), f"-DTORCH_EXTENSION_NAME={MODULE}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", str(SOURCE), "-o", str(made),
        f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
    ]  # fmt: skip
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        if ran.returncode:
            raise unavailable(Reason.JIT_FAILED, f"did not compile: {first_error(ran.stderr)}")
        made.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise unavailable(Reason.JIT_FAILED, f"did not compile: {error}") from error
    finally:
        made.unlink(missing_ok=True)


def first_error(said: str) -> str:
    """The first line of a compiler's output that speaks of an error."""
    lines = said.strip().splitlines() or ["it said nothing"]
    return next((line for line in lines if "error" in line.lower()), lines[0])[:250]


def load(path: Path) -> Any:
    """The module in the shared library at `path`.

    Raises: BackendNotAvailableError: the loader refuses it.
    """
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise unavailable(Reason.KERNEL_LOAD_FAILED, f"does not load: {error}") from error
    return module


def unavailable(reason: Reason, message: str) -> BackendNotAvailableError:
    """The error that blocks the kernels, with the reason that verdicts show."""
    return BackendNotAvailableError(f"native kernels: {message}", backend="native", reason=reason)

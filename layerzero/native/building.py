"""What C++ modules this package has and how they are compiled, on a user's machine and into a wheel.

Imports nothing of the package: `setup.py` loads this file by its path, before the package can be imported.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PACKAGE: Final = Path(__file__).resolve().parents[1]
SHIPPED: Final = PACKAGE / "native" / "built"  # what a wheel carries; a checkout has no such folder
STAMP: Final = "stamp.json"

PORTABLE: Final = ("-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden")
# No fast-math: it would reorder sums, and bits would depend on the rows beside them.
KERNELS: Final = (
    "-O3",
    "-std=c++20",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fopenmp",
)

# What a module is compiled for, the best first, and by which names Linux lists what each needs.
LEVELS: Final[Mapping[str, frozenset[str]]] = {
    "x86-64-v4": frozenset(
        {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "f16c"}
    ),
    "x86-64-v3": frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"}),
}


@dataclass(frozen=True, slots=True)
class Source:
    """A C++ module: the name it is imported by, its source (headers beside it count), its compiler flags.

    One that is `levelled` is compiled for each of `LEVELS`; another one is for every CPU of its kind.
    """

    name: str
    source: Path
    flags: tuple[str, ...]
    levelled: bool = False

    def digest(self) -> str:
        """Of source and headers, as hexadecimal digits."""
        digest = hashlib.sha256()
        for path in (self.source, *sorted(self.source.parent.glob("*.h"))):
            digest.update(path.read_bytes())
            digest.update(b"\0")
        return digest.hexdigest()[:32]

    def variants(self) -> dict[str, tuple[str, ...]]:
        """File names and flags of what a wheel carries of it, the best first."""
        if not self.levelled or platform.machine() != "x86_64":
            return {f"{self.name}.so": self.flags}
        return {f"{self.name}.{level}.so": (*self.flags, f"-march={level}") for level in LEVELS}

    def variant(self) -> tuple[str, tuple[str, ...]]:
        """The best of them for this CPU; one that has no level gets a module without."""
        has = cpu_flags()
        for name, flags in self.variants().items():
            level = name.removesuffix(".so").partition(".")[2]
            if not level or LEVELS[level] <= has:
                return name, flags
        return f"{self.name}.so", self.flags

    @property
    def file_name(self) -> str:
        """What a user's cache calls the variant for this CPU."""
        return self.cached_name(self.variant()[1])

    def cached_name(self, flags: tuple[str, ...]) -> str:
        """What a user's cache calls a variant: with a digest of everything that it depends on."""
        import torch

        parts = (self.digest(), *flags, str(torch.__version__), python_abi(), platform.machine())
        return f"{self.name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.so"


_SOURCES = (
    Source("layerzero_hot", PACKAGE / "native/hot.cpp", PORTABLE),
    Source("layerzero_noting", PACKAGE / "native/noting.cpp", PORTABLE),
    Source("layerzero_native", PACKAGE / "backends/native/attention.cpp", KERNELS, levelled=True),
    Source("layerzero_products", PACKAGE / "backends/native/products.cpp", KERNELS, levelled=True),
    Source("layerzero_quantized", PACKAGE / "backends/native/quantized.cpp", KERNELS),
    Source("layerzero_rows", PACKAGE / "backends/native/rows.cpp", KERNELS, levelled=True),
)
SOURCES: Final = {source.name: source for source in _SOURCES}


def compiler() -> str | None:
    """The C++ compiler, CXX or else g++; None where there is none."""
    return shutil.which(os.environ.get("CXX") or "g++")


def command(source: Source, flags: tuple[str, ...], target: Path) -> list[str]:
    """What compiles a module to `target`, for the torch and the Python that run here."""
    import torch

    home = Path(torch.__file__).parent
    includes = (home / "include", home / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    return [
        compiler() or "g++", *flags, *(f"-I{folder}" for folder in includes),
        f"-DTORCH_EXTENSION_NAME={source.name}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        str(source.source), "-o", str(target),
        f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python",
    ]  # fmt: skip


@functools.cache
def cpu_flags() -> frozenset[str]:
    """The instructions of this CPU, as Linux names them; none where it says nothing."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    return frozenset(word for line in lines if line.startswith("flags") for word in line.split()[2:])


def free_threaded() -> bool:
    """Whether this Python was built to run without its lock."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def python_abi() -> str:
    """The Python that a module here is for: implementation, version, build and platform."""
    return str(sysconfig.get_config_var("SOABI") or f"{sys.implementation.cache_tag}-{sys.platform}")


def stamp() -> dict[str, Any]:
    """What a module compiled here runs with: torch's C++ is the same in all builds of one release."""
    import torch

    return {
        "torch": str(torch.__version__).partition("+")[0],
        "cxx11_abi": bool(torch.compiled_with_cxx11_abi()),
        "python": python_abi(),
        "machine": platform.machine(),
        **{f"source of {name}": source.digest() for name, source in SOURCES.items()},
    }


def unbuildable() -> str:
    """Why a wheel made here cannot carry the modules; empty where it can."""
    if sys.platform != "linux":
        return f"needs Linux, got {sys.platform}"
    if free_threaded():
        return "needs a Python with its lock, got a free-threaded build"
    if compiler() is None:
        return f"needs a C++ compiler with C++20 and OpenMP, got no {os.environ.get('CXX') or 'g++'!r}"
    try:
        import torch  # noqa: F401
    except ImportError as error:
        return f"needs torch where the wheel is built (pip's --no-build-isolation), got {error}"
    return ""


def build(folder: Path) -> None:
    """Compile all that a wheel carries into `folder`, with its stamp.

    What a cache folder named by LZ_BUILD_CACHE holds, compiled from the same by the same, is copied.

    Raises: RuntimeError: the compiler says no; with what it said.
    """
    cache = os.environ.get("LZ_BUILD_CACHE")
    folder.mkdir(parents=True, exist_ok=True)

    def made(job: tuple[Source, str, tuple[str, ...]]) -> None:
        source, name, flags = job
        if cache and (cached := Path(cache, source.cached_name(flags))).is_file():
            shutil.copy2(cached, folder / name)
            return
        done = subprocess.run(
            command(source, flags, folder / name), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{source.source.name} did not compile:\n{done.stderr[-4000:]}")

    jobs = [(source, *variant) for source in SOURCES.values() for variant in source.variants().items()]
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), len(jobs))) as pool:
        list(pool.map(made, jobs))
    (folder / STAMP).write_text(json.dumps(stamp(), indent=1, sort_keys=True) + "\n")

"""FlashInfer's modules, imported on demand, and what all its kernels have in common."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from layerzero._util import files, log
from layerzero._util.version import installed_version
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel

DISTRIBUTIONS = ("flashinfer-python>=0.7",)
SOURCE = "flashinfer-python 0.7.2.post1, {}; run against float64 on an H200"
# What its templates read at once.
LOAD_BYTES = 16

CARRIED_UNUSED = "flashinfer.carried_unused"

# Its norms exist twice: compiled anew for every row width (CuTe DSL), or once for all (CUDA).
_CUDA_NORM = "FLASHINFER_USE_CUDA_NORM"
# Its modules import each other in circles: of two threads one may find the package half made, or gone.
_IMPORTING = threading.RLock()


@functools.cache
def module(name: str = "flashinfer") -> Any:
    """A module of FlashInfer's.

    Raises: ImportError: it is not installed, or what it needs is missing.
    """
    os.environ.setdefault(_CUDA_NORM, "1")
    with _IMPORTING, warnings.catch_warnings():
        # The compiler package it brings uses what it has itself deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        imported = importlib.import_module(name)
    _use_carried()
    return imported


def cache_folder() -> Path:
    """The folder of FlashInfer's cache for all its versions, as FlashInfer finds it."""
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()
    return Path(base) / ".cache" / "flashinfer"


def compilation_of(*names: str) -> Callable[[CallSpec], bool]:
    """`Kernel.on_disk` of modules of these names."""
    return lambda _: modules_on_disk(names)


def modules_on_disk(names: Iterable[str]) -> bool:
    """Whether every module was compiled for the installed release: in its cache, by a bundle or a wheel.

    What lies in the cache and is older than the release's files is compiled again by FlashInfer's build.
    """
    version = installed_version("flashinfer-python")
    if version is None:
        return False
    own = [*(cache_folder() / version).glob("*/cached_ops")]
    package = Path(str(distribution("flashinfer-python").locate_file("flashinfer")))
    carried = [*carried_folder(version).glob("*"), package / "data" / "aot", *_folders_of_wheels(version)]
    since = changed_at(package / "__init__.py")

    def is_there(name: str) -> bool:
        file = Path(name) / f"{name}.so"
        return any((folder / file).is_file() for folder in carried) or any(
            (folder / file).is_file() and built_at(folder / file) >= since for folder in own
        )

    return all(map(is_there, names))


def _folders_of_wheels(version: str) -> list[Path]:
    """Where flashinfer-jit-cache of this release, machine code for FlashInfer, has its modules."""
    if (installed_version("flashinfer-jit-cache") or "").partition("+")[0] != version:
        return []
    try:
        shim: Any = importlib.import_module("flashinfer_jit_cache")
        return [Path(provider.jit_cache_dir) for provider in shim.get_jit_cache_providers()]
    except (ImportError, AttributeError):  # another release's layout: FlashInfer itself finds them, or builds
        return []


def built_at(library: Path) -> float:
    """When a module of FlashInfer's cache was built, in seconds.

    What ninja noted beside it counts where that is older: a copy is young, and built again all the same.
    """
    built = changed_at(library)
    with suppress(OSError, ValueError):
        # Start, end, the output's time in nanoseconds, the output, the command's hash; the last line counts.
        for line in (library.parent / ".ninja_log").read_text().splitlines():
            fields = line.split("\t")
            if len(fields) == 5 and Path(fields[3]).name == library.name:
                built = min(changed_at(library), int(fields[2]) / 1e9)
    return built


def changed_at(path: Path) -> float:
    """When a file was last written, in seconds; 0 for what is not there."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def carried_folder(version: str) -> Path:
    """Where modules lie that a warm-up bundle brought, for one of FlashInfer's versions.

    Below it are a folder for the architectures that they were compiled for, and one for each module.
    """
    return files.user_folder("flashinfer") / version


@functools.cache
def _use_carried() -> None:
    """Let FlashInfer find what a warm-up bundle brought, as it finds modules that its own wheels bring.

    A folder that others can write is left alone, with a log event.
    """
    environment = sys.modules.get("flashinfer.jit.env")
    packaged = getattr(environment, "FLASHINFER_AOT_DIR", None)
    workspace = getattr(environment, "FLASHINFER_WORKSPACE_DIR", None)
    if packaged is None or workspace is None:
        return
    folder = carried_folder(workspace.parent.name) / workspace.name
    if not folder.is_dir():
        return
    if packaged.is_dir():
        log.warning(CARRIED_UNUSED, path=str(folder), why=f"{packaged} has modules of its own")
        return
    try:
        for place in (folder, *folder.parents[:3]):
            files.own_folder(place)
    except OSError as error:
        log.warning(CARRIED_UNUSED, path=str(folder), why=str(error))
        return
    environment.FLASHINFER_AOT_DIR = folder  # type: ignore[union-attr]


# A stream's float workspace, which its wrappers share, and what each wrapper keeps on the device.
WORKSPACE_BYTES = 128 << 20
WRAPPER_BYTES = 8 << 20


def planned_bytes(request: CallSpec) -> int:
    """What the first planned call of a stream allocates; later ones find it there.

    Constant: the templates split their work until it fits. Pages that are shared take a second wrapper.
    """
    return WORKSPACE_BYTES + WRAPPER_BYTES * (2 if request.op == "paged_attention" else 1)


ESTIMATE = "an estimate for an H200, {}"
# Seconds, an estimate: three side by side took most of `cold` in benchmarks/results/start_h200.json.
_COMPILE_S = 40.0
kernel = functools.partial(
    Kernel.of,
    platforms="cuda",
    sm_min=80,
    sm_max=121,
    dtypes="float16 bfloat16",
    gradient=False,
    slow_import=True,
    compile_s=_COMPILE_S,
    distributions=DISTRIBUTIONS,
)
# The compute capabilities and the order in a tie of a template; FA3's is written for wgmma.
TEMPLATES: dict[str, dict[str, Any]] = {
    "fa2": {"sm_min": 80, "sm_max": 121, "tie_break_order": 38},
    "fa3": {"sm_min": 90, "sm_max": 90, "tie_break_order": 35},
}

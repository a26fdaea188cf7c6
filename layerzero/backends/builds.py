"""What a library was built for, read out of its files before its code runs, beside what this process has.

A shared object names the libraries, symbol versions and ABI that it needs in its own tables (ELF, System V
ABI). A library built against another CUDA, another C++ ABI, a newer C library or another Python ends the
process that imports it, or worse; here it is refused with the reason.
"""

from __future__ import annotations

import functools
import importlib.metadata
import mmap
import platform
import re
import struct
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from layerzero._util.version import installed_version
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.hardware import probe
from layerzero.spec.kernel import Kernel, version
from layerzero.spec.reasons import Reason

_CUDA = re.compile(rb"\0lib(?:cudart|cublas|cublasLt|nvrtc)\.so\.(\d+)")
_GLIBC = re.compile(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)")
_TORCH = re.compile(rb"\0libtorch(?:_cpu|_cuda|_python)?\.so")
# Functions of torch that take a string of the C++ library: of the old ABI, and of the one since GCC 5.
_OLD_STRING = re.compile(rb"\0_ZN[K]?(?:3c10|2at|5torch)[^\0]*(?:RKSs|ESs)[^\0]*(?=\0)")
_NEW_STRING = re.compile(rb"\0_ZN[K]?(?:3c10|2at|5torch)[^\0]*__cxx11[^\0]*(?=\0)")
_PYTHON = re.compile(r"\.cpython-(\d)(\d+)[a-z]*-")
_MAX_OBJECTS = 64
# What this process runs with already, and what is called without its extension (backends/xformers.py).
_NOT_ASKED = frozenset({"torch", "triton", "xformers"})
_REQUIREMENT_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


class BuildFact(msgspec.Struct, frozen=True):
    """One thing that a library's files need of a process, what this one has, and whether that will do."""

    library: str
    what: str
    needs: str
    got: str
    fits: bool

    def __str__(self) -> str:
        return f"{self.library}: {self.what} needs {self.needs}, got {self.got}"


# The oldest Linux driver of each CUDA. Source: NVIDIA, CUDA compatibility, minor version compatibility.
_LEAST_DRIVER = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}


class _Process(NamedTuple):
    cuda: str
    driver: str
    glibc: tuple[int, ...]
    python: tuple[int, int]
    new_strings: bool


@functools.cache
def _process() -> _Process:
    return _Process(
        (torch.version.cuda or "").split(".")[0],
        (probe("cuda:0").driver or "") if torch.cuda.is_available() else "",
        version(platform.libc_ver()[1] or "0"),
        sys.version_info[:2],
        bool(torch.compiled_with_cxx11_abi()),
    )


def strings_of(path: Path) -> bytes:
    """The dynamic string table of a shared object, with what it needs by name; empty where it is none.

    Only that table is read, however large the file is. Source: System V ABI, chapter 5.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _string_table(data)
    except (OSError, ValueError, struct.error, IndexError, OverflowError):
        return b""


def _string_table(data: mmap.mmap) -> bytes:
    if data[:6] != b"\x7fELF\x02\x01":  # 64 bits, little end first
        return b""
    (headers_at,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    loads, dynamic = [], None
    for index in range(count):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", data, headers_at + index * size)
        if kind == 1:
            loads.append((address, offset, length))
        elif kind == 2:
            dynamic = (offset, length)
    if dynamic is None:
        return b""
    entries = dict(struct.unpack_from("<QQ", data, dynamic[0] + at) for at in range(0, dynamic[1] - 15, 16))
    where, length = entries.get(5, 0), entries.get(10, 0)
    for address, offset, span in loads:
        if address <= where < address + span:
            begin = offset + where - address
            return b"\0" + data[begin : begin + length]
    return b""


def build_facts(distribution: str) -> tuple[BuildFact, ...]:
    """What the shared objects of an installed distribution need: one fact a kind."""
    try:
        package = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ()
    paths = [Path(str(package.locate_file(file))) for file in package.files or () if ".so" in file.name]
    return facts_of(distribution, [path for path in paths if path.suffix == ".so"][:_MAX_OBJECTS])


def facts_of(library: str, paths: list[Path]) -> tuple[BuildFact, ...]:
    """What shared objects need of this process; of variants for several builds those that fit."""
    facts: dict[str, BuildFact] = {}
    for path in paths:
        for fact in _facts_of_file(library, path):
            if fact.what not in facts or (fact.fits and not facts[fact.what].fits):
                facts[fact.what] = fact
    return tuple(facts[what] for what in sorted(facts))


def _facts_of_file(library: str, path: Path) -> Iterator[BuildFact]:
    process = _process()
    built_for = _PYTHON.search(path.name)
    if built_for is not None:
        built_with = (int(built_for[1]), int(built_for[2]))
        suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
        fits = built_with == process.python and path.name.endswith(suffix)
        needs, got = ("{}.{}".format(*python) for python in (built_with, process.python))
        yield BuildFact(library, "Python", needs, got, fits)
    strings = strings_of(path)
    for major in sorted({match.decode() for match in _CUDA.findall(strings)}):
        got = f"CUDA {process.cuda}" if process.cuda else "a torch without CUDA"
        yield BuildFact(library, "CUDA", f"CUDA {major}", got, major == process.cuda)
        least_driver = _LEAST_DRIVER.get(major)
        if least_driver is not None and process.driver:
            fits = version(process.driver) >= version(least_driver)
            yield BuildFact(library, "driver", f">= {least_driver}", process.driver, fits)
    libc = max(((int(a), int(b)) for a, b in _GLIBC.findall(strings)), default=None)
    if libc is not None and process.glibc:
        needs, got = "{}.{}".format(*libc), ".".join(map(str, process.glibc))
        yield BuildFact(library, "C library", f"glibc >= {needs}", f"glibc {got}", process.glibc >= libc)
    if _TORCH.search(strings):
        old, new = bool(_OLD_STRING.search(strings)), bool(_NEW_STRING.search(strings))
        if old or new:
            needs = "the ABI before GCC 5" if old else "the ABI since GCC 5"
            got = "the ABI since GCC 5" if process.new_strings else "the ABI before GCC 5"
            yield BuildFact(library, "C++ of torch", needs, got, process.new_strings is not old)


@functools.lru_cache(maxsize=256)
def _checked(distribution: str, installed: str) -> tuple[BuildFact, ...]:
    return tuple(fact for fact in build_facts(distribution) if not fact.fits)


def check_build(kernel: Kernel) -> None:
    """Refuse a kernel whose libraries were built for something else than this process has.

    Raises: BackendNotAvailableError: with BACKEND_PLATFORM_BUILD, naming library, need and what is here.
    """
    if kernel.isolated and kernel.isolated != "process":
        return  # its own environment is asked there
    for requirement in kernel.distributions:
        name = _REQUIREMENT_NAME.match(requirement)
        if name is None or name[0] in _NOT_ASKED:
            continue
        installed = installed_version(name[0])
        wrong = _checked(name[0], installed) if installed is not None else ()
        if wrong:
            raise BackendNotAvailableError(
                "; ".join(map(str, wrong)), backend=kernel.backend, reason=Reason.BACKEND_PLATFORM_BUILD
            )

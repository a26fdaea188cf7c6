"""Where compiled kernels lie on a machine, and which of them a bundle carries.

Our own C++ modules have everything they depend on in their names. FlashInfer's modules go into a folder of
ours, from which its loader takes them as they are; in its own cache its build tool would compile them again
wherever a header is newer than they. Triton's cache has a folder for each digest of a kernel and its
compiler; the lists of files in it name absolute paths, which a bundle does not carry.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from layerzero._util import files
from layerzero._util.version import installed_version
from layerzero.backends.flashinfer.common import cache_folder, carried_folder
from layerzero.native import building
from layerzero.native.compiling import library
from layerzero.warmup.archive import MEMBER

FLASHINFER = "flashinfer-python"
_GROUP = "__grp__"
_MAX_FILE = 1 << 29


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A list of Triton's: the files of one kernel, and where they are."""

    child_paths: dict[str, str]


def triton_cache() -> Path:
    """Triton's cache folder, as Triton finds it."""
    folder = os.environ.get("TRITON_CACHE_DIR", "").strip()
    return (
        Path(folder) if folder else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
    )


def native_names(*, for_cpu: bool) -> set[str]:
    """The file names of our own modules on this machine, those of one level of CPUs included on request."""
    modules = [library(name) for name in building.SOURCES]
    return {module.file_name for module in modules if for_cpu or not module.levelled}


def target_of(name: str) -> Path:
    """The path of a compiled member on this machine."""
    kind, _, rest = name.partition("/")
    if kind == "native":
        return files.user_folder("native") / rest
    if kind == "flashinfer":
        version, _, rest = rest.partition("/")
        return carried_folder(version) / rest
    return triton_cache() / rest


def is_group(name: str) -> bool:
    """Whether a member is a list of Triton's, which comes behind the files that it names."""
    return name.rpartition("/")[2].startswith(_GROUP)


def content_for(name: str, data: bytes, names: frozenset[str]) -> bytes:
    """The bytes that a member has on this machine: a list of Triton's names this machine's paths.

    Raises: ValueError, msgspec.MsgspecError: it is a list of something else than members beside it.
    """
    if not is_group(name):
        return data
    group = files.decode_json(data, _Group)
    beside = name.rpartition("/")[0]
    for file, path in group.child_paths.items():
        if path != file or f"{beside}/{file}" not in names:
            raise ValueError(f"needs files beside it by name, got {file!r} at {path!r}")
    folder = target_of(name).parent
    return msgspec.json.encode(_Group({file: str(folder / file) for file in group.child_paths}))


def compiled_here(*, for_cpu: bool) -> Iterator[tuple[str, bytes]]:
    """The compiled kernels of this machine as members: name and bytes."""
    folder = files.user_folder("native")
    for file_name in sorted(native_names(for_cpu=for_cpu)):
        if (folder / file_name).is_file():
            yield f"native/{file_name}", files.read_bounded(folder / file_name, _MAX_FILE)
    if not for_cpu:
        yield from _flashinfer_modules()
        yield from _triton_kernels()


def _flashinfer_modules() -> Iterator[tuple[str, bytes]]:
    version = installed_version(FLASHINFER)
    if version is None:
        return
    by_name: dict[str, Path] = {}
    carried = carried_folder(version)
    compiled = cache_folder() / version
    for path in (*carried.glob("*/*/*.so"), *compiled.glob("*/cached_ops/*/*.so")):
        archs = path.parents[1].name if path.is_relative_to(carried) else path.parents[2].name
        name = f"flashinfer/{version}/{archs}/{path.parent.name}/{path.name}"
        if MEMBER.fullmatch(name):
            by_name.setdefault(name, path)
    for name, path in sorted(by_name.items()):
        yield name, files.read_given(path, _MAX_FILE, trusted=True)


def _triton_kernels() -> Iterator[tuple[str, bytes]]:
    """Triton's cached kernels, those whose lists name files that are there."""
    cache = triton_cache()
    for folder in sorted(cache.iterdir()) if cache.is_dir() else ():
        members = {}
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            name = f"triton/{folder.name}/{path.name}"
            if path.is_file() and not path.is_symlink() and MEMBER.fullmatch(name):
                members[name] = files.read_given(path, _MAX_FILE, trusted=True)
        yield from _with_bare_lists(members).items()


def _with_bare_lists(members: dict[str, bytes]) -> dict[str, bytes]:
    """One folder's files, its lists with names in place of paths; none where a list does not hold."""
    bare = {}
    for name, data in members.items():
        if is_group(name):
            try:
                group = files.decode_json(data, _Group)
            except msgspec.MsgspecError:
                return {}
            beside = name.rpartition("/")[0]
            if any(f"{beside}/{file}" not in members for file in group.child_paths):
                return {}
            data = msgspec.json.encode(_Group({file: file for file in group.child_paths}))
        bare[name] = data
    return bare

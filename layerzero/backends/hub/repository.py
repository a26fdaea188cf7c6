"""Kernels of Hugging Face's kernel hub, out of a folder, behind a lock file and an allow list.

`kernels` loads them; what is trusted is decided here, before it: its own lock file pins a commit and no
content. A repository is at `<folder>/<owner>/<name>` as the hub lays it out (`build/<variant>/...`).
Every file of it must be in the lock file with its SHA-256, and nothing may be there that is not: compiled
Python beside the sources would run in their place. `download` fills the folder from the hub, `unpack` from an
archive, both with files that were locked and nothing else; of the variants for several systems one is enough.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from layerzero._util.files import decode_json, own_user_folder, read_bounded, read_given
from layerzero.backends.hub.archive import MAX_BYTES, Check, unpack_files
from layerzero.backends.hub.loading import load_module
from layerzero.backends.hub.refusal import refusal
from layerzero.backends.hub.sources import download_files
from layerzero.spec.capability import Capability
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.kernel import Efficiency, Kernel
from layerzero.spec.reasons import Reason

# Owner and name as the hub spells them; no dot in front, so that no part can be `..`.
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
# No part is empty, `.` or `..`.
_PATH = re.compile(r"(?!\.{0,2}(/|$))[^/\0]+(/(?!\.{0,2}(/|$))[^/\0]+)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)")
_CXX = re.compile(rb"GLIBCXX_3\.4\.(\d+)")
# manylinux_2_28: AlmaLinux 8's C library, and the C++ library of its newest toolset.
_ANY_LIBC: tuple[int, int] = (0, 0)
_MOST_LIBC = (2, 28)
_MOST_CXX = 30
_MAX_LOCK = 16 << 20
_MAX_TURNS = 100


class LockedRepository(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One repository: what is asked for, its commit, and each file's SHA-256 by its path."""

    class Dependency(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
        repo_id: str
        version: int | None = None

    class Lock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        commit: str

    dependency: Dependency
    lock: Lock
    files: dict[str, str]


class Hub:
    """A folder of kernel repositories with the lock file that says what may be in it.

    `allow` are the repositories that may be loaded at all; code of a repository runs in this process. With
    `signed` it must carry a signature of a publisher that `kernels` trusts (sigstore; fetches its roots).
    Raises: ConfigurationError: the lock file is missing, too large or malformed; a repository is twice in it.
    """

    def __init__(
        self, folder: str | Path, lockfile: str | Path, *, allow: Collection[str], signed: bool = False
    ) -> None:
        if isinstance(allow, str) or not isinstance(allow, Collection):
            raise ConfigurationError(f"allow needs a collection of repositories, got {allow!r:.80}")
        self.folder = Path(folder).resolve()
        self.allow = frozenset(allow)
        self.locked = _read(Path(lockfile))
        self._signed = signed

    def entry(self, repository: str) -> LockedRepository:
        """What the lock file says of a repository that may be loaded.

        Raises: BackendNotAvailableError: it is not allowed, or not locked.
        """
        if not _REPOSITORY.fullmatch(repository):
            raise refusal(repository, "its name is no <owner>/<name>")
        if repository not in self.allow:
            raise refusal(repository, "it is not on the allow list")
        if repository not in self.locked:
            raise refusal(repository, "it is not in the lock file")
        return self.locked[repository]

    def download(self, repository: str) -> Path:
        """Fetch the locked commit from the hub, the variant for this system; the repository's folder.

        `kernels` downloads; nothing is asked of the hub before both lists name the repository.
        Raises: BackendNotAvailableError: `entry`; or what the hub has is not what was locked.
        """
        entry = self.entry(repository)
        check = _checker(repository, entry)
        files = download_files(repository, entry.lock.commit, entry.files.keys(), check)
        return self._place(repository, files)

    def unpack(self, archive: str | Path) -> list[Path]:
        """Take the repositories of a tar archive (`<owner>/<name>/build/...`), all or none; their folders.

        Raises: BackendNotAvailableError: `entry`; or a member is a link, a device, elsewhere, or not what was
            locked.
        """

        def wanted(name: str) -> tuple[str, Check]:
            repository = "/".join(name.split("/")[:2])
            entry = self.entry(repository)
            if name.removeprefix(f"{repository}/") not in entry.files:
                raise refusal(repository, f"{name} is not in the lock file")
            return repository, _checker(repository, entry)

        repositories = unpack_files(Path(archive), wanted)
        for repository, files in repositories.items():
            need_whole_variants(repository, files.keys(), self.locked[repository])
        return [self._place(repository, files) for repository, files in repositories.items()]

    def _place(self, repository: str, files: Mapping[str, bytes]) -> Path:
        """Put checked files in place of a repository's folder, never through a link."""
        where = self.folder / repository
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".new-", dir=self.folder) as draft:
                _write_all(Path(draft) / "new", files)
                _exchange(Path(draft), where)
        except OSError as error:
            raise refusal(repository, f"it cannot be written to {where}: {error}") from error
        return where

    def verified(self, repository: str) -> Path:
        """The folder of a repository, after every check that needs no code of it to run.

        Raises: BackendNotAvailableError: it is not allowed, not locked, not there, or not what was locked.
        """
        entry = self.entry(repository)
        where = self.folder / repository
        if not where.is_dir() or where.resolve() != where:
            raise refusal(repository, f"{where} is no folder, or a link that leads elsewhere")
        for _ in _pieces(repository, where, entry):
            pass
        return where

    def _copied(self, repository: str) -> Path:
        """A copy of a verified repository that only this user can write, made of the bytes that were checked.

        Raises: BackendNotAvailableError: as `verified`; or there is no such place.
        """
        where = self.verified(repository)
        entry = self.locked[repository]
        present = _files(repository, where).keys()
        entry = msgspec.structs.replace(entry, files={p: d for p, d in entry.files.items() if p in present})
        name = hashlib.sha256(msgspec.json.encode((repository, sorted(entry.files.items())))).hexdigest()[:32]
        try:
            base = own_user_folder("hub")
            copy = base / name / repository
            if not _intact(copy, entry):
                with tempfile.TemporaryDirectory(prefix="new-", dir=base) as draft:
                    _write_all(Path(draft) / "new" / repository, dict(_pieces(repository, where, entry)))
                    if not _intact(copy, entry):  # another process may have been quicker, and runs from it
                        _exchange(Path(draft), base / name)
            if not _intact(copy, entry):
                raise refusal(repository, f"its copy in {copy} is not what was locked")
        except OSError as error:
            raise refusal(repository, f"no private copy of it can be made: {error}") from error
        return copy

    def load(self, repository: str) -> ModuleType:
        """The module of a verified repository, imported by `kernels` for this system.

        It runs from a copy of what was checked: what is written to the folder later is not looked at.

        Raises: BackendNotAvailableError: as `verified`; or nothing in it was built for this system.
        """
        version = self.entry(repository).dependency.version
        return load_module(repository, self._copied(repository), version, signed=self._signed)


def hub_kernel(
    kernel_id: str,
    op: str,
    hub: Hub,
    repository: str,
    adapt: Callable[[ModuleType], Callable[..., Any]],
    capability: Capability,
    *,
    efficiency: Efficiency | None = None,
    rank: int = 50,
    origin: str = "",
) -> Kernel:
    """A kernel of `op` out of a hub repository; register it with `add_kernel`.

    `adapt(module)` returns the callable that takes the op's full argument tuple. The repository is verified
    and imported when the kernel is loaded, in the background; a refusal blocks the kernel with its reason.
    `origin`, "module:function", names a function that gives this kernel, for a process of its own.
    """
    locked = hub.locked.get(repository)
    return Kernel(
        id=kernel_id,
        op=op,
        backend=kernel_id.partition(".")[0],
        capability=capability,
        load=lambda: adapt(hub.load(repository)),
        efficiency=efficiency or Efficiency(0.5, 0.6, 20.0, "an estimate for a hub kernel; tune measures"),
        tie_break_order=rank,
        slow_import=True,
        distributions=("kernels>=0.17",),
        revision=f"{repository} {locked.lock.commit[:12]}" if locked is not None else "",
        origin=origin,
    )


def lock_folder(
    folder: str | Path, repositories: Mapping[str, tuple[int | None, str]]
) -> list[dict[str, Any]]:
    """What a lock file holds for repositories that were reviewed: `{repository: (version, commit)}`.

    Returns: plain values for `json.dump`.
    Raises: BackendNotAvailableError: a repository is not there, or holds a link.
    """
    entries = []
    for repository, (version, commit) in repositories.items():
        if not _REPOSITORY.fullmatch(repository):
            raise refusal(repository, "its name is no <owner>/<name>")
        files = _files(repository, Path(folder).resolve() / repository)
        digests = {path: _digest(_content(repository, file)) for path, file in sorted(files.items())}
        dependency = {"repo-id": repository, "version": version}
        entries.append({"dependency": dependency, "lock": {"commit": commit}, "files": digests})
    return entries


def _read(path: Path) -> dict[str, LockedRepository]:
    try:
        entries = decode_json(read_given(path, _MAX_LOCK), list[LockedRepository])
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"lockfile needs a readable lock file, got {path}: {error}") from error
    locked: dict[str, LockedRepository] = {}
    for entry in entries:
        name = entry.dependency.repo_id
        if name in locked:
            raise ConfigurationError(f"lockfile needs each repository once, got {name} twice")
        for file, digest in entry.files.items():
            if not _PATH.fullmatch(file):
                raise ConfigurationError(
                    f"lockfile needs paths inside the repository, got {file!r} of {name}"
                )
            if not _SHA256.fullmatch(digest):
                raise ConfigurationError(f"lockfile needs SHA-256 digests in hex, got {digest!r} for {file}")
        locked[name] = entry
    return locked


def _files(repository: str, where: Path) -> dict[str, Path]:
    """Every file by its path with slashes. Links are refused."""
    paths: dict[str, Path] = {}
    for folder, folders, files in os.walk(where):
        for name in (*folders, *files):
            if (Path(folder) / name).is_symlink():
                raise refusal(repository, f"{name} is a link")
        for name in files:
            path = Path(folder) / name
            paths[path.relative_to(where).as_posix()] = path
    if not paths:
        raise refusal(repository, f"{where} holds no file")
    return paths


def _pieces(repository: str, where: Path, entry: LockedRepository) -> Iterator[tuple[str, bytes]]:
    """Every file that is locked, by its path, with its content, once that has been checked.

    Raises: BackendNotAvailableError: a file is not what was locked, missing, or one too many.
    """
    files, check = _files(repository, where), _checker(repository, entry)
    for path in sorted(files.keys() - entry.files.keys()):
        raise refusal(repository, f"{path} is not in the lock file")
    need_whole_variants(repository, files.keys(), entry)
    for path in sorted(entry.files):
        if path in files:
            content = _content(repository, files[path])
            check(path, content)
            yield path, content


def need_whole_variants(repository: str, present: Collection[str], entry: LockedRepository) -> None:
    """Refuse a variant of which a file is missing; variants for other systems may be absent as a whole."""
    variants = {path.split("/")[1] for path in present if path.startswith("build/")}
    for path in sorted(entry.files.keys() - set(present)):
        parts = path.split("/")
        if parts[0] != "build" or parts[1] in variants or not variants:
            raise refusal(repository, f"{path} is locked and not there")


def _checker(repository: str, entry: LockedRepository) -> Check:
    """What refuses a file that is not what was locked."""

    def check(path: str, content: bytes) -> None:
        if path not in entry.files:
            raise refusal(repository, f"{path} is not in the lock file")
        if _digest(content) != entry.files[path]:
            raise refusal(repository, f"{path} is not what was locked")
        if path.endswith(".so"):
            _check_abi(repository, path, content)

    return check


def _write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _exchange(draft: Path, where: Path) -> None:
    """Put `<draft>/new` in place of the folder `where`, which goes into `draft`; others may do it, too.

    Raises: OSError: it cannot be put there; the folder around it is a link.
    """
    around = os.open(where.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for turn in range(_MAX_TURNS):
            with suppress(FileNotFoundError):
                os.rename(where.name, draft / f"old-{turn}", src_dir_fd=around)
            try:
                os.rename(draft / "new", where.name, dst_dir_fd=around)
                return
            except OSError as error:  # another process has put its own there in between
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or turn == _MAX_TURNS - 1:
                    raise
    finally:
        os.close(around)


def _intact(copy: Path, entry: LockedRepository) -> bool:
    """Whether a copy holds every locked file; what Python has compiled beside them is this user's own."""
    try:
        return all(
            _digest(read_bounded(copy / path, MAX_BYTES)) == locked for path, locked in entry.files.items()
        )
    except (OSError, ValueError):
        return False


def _content(repository: str, path: Path) -> bytes:
    try:
        return read_given(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise refusal(repository, f"{path.name} cannot be read: {error}") from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _check_abi(repository: str, path: str, content: bytes) -> None:
    """A shared object must be Python's stable ABI and need no newer C or C++ library than manylinux_2_28."""
    if not path.endswith(".abi3.so"):
        raise refusal(repository, f"{path} is not built for Python's stable ABI (.abi3.so)")
    if not content.startswith(b"\x7fELF"):
        raise refusal(repository, f"{path} is no ELF file")
    libc = max(((int(a), int(b)) for a, b in _LIBC.findall(content)), default=_ANY_LIBC)
    cxx = max((int(a) for a in _CXX.findall(content)), default=0)
    if libc > _MOST_LIBC or cxx > _MOST_CXX:
        needs = f"GLIBC_{libc[0]}.{libc[1]} and GLIBCXX_3.4.{cxx}"
        raise refusal(
            repository, f"{path} needs {needs}, above manylinux_2_28", Reason.BACKEND_PLATFORM_BUILD
        )

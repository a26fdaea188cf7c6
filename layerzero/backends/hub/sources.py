"""Where a repository's files come from: the hub, through the `kernels` library, or an archive.

Both give files that were locked, each with the bytes that were checked; nothing is written here. What a
server lists or an archive holds beside them is a refusal, before its content is read.
"""

from __future__ import annotations

import gzip
import importlib
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO

from layerzero.backends.hub.refusal import refusal
from layerzero.spec.reasons import Reason

# Far above what a kernel's build is, far below what harms a machine.
MAX_BYTES = 2 << 30
Check = Callable[[str, bytes], None]


def download_files(repository: str, commit: str, locked: Collection[str], check: Check) -> dict[str, bytes]:
    """The files of the variant for this system at a commit, each checked by `check(path, content)`.

    Raises: BackendNotAvailableError: the hub lists a file that is not locked or more than `MAX_BYTES`; it has
        nothing for this system; the download fails; or what came is not what was locked.
    """
    library = importlib.import_module("kernels")
    try:
        listed = _listed(repository, commit)
    except Exception as error:  # the library's own, of the connection, of HTTP
        raise _unreachable(repository, error) from error
    for path in listed:
        if path not in locked:
            raise refusal(repository, f"the hub lists {path}, which is not in the lock file")
    total = sum(listed.values())
    if total > MAX_BYTES:
        raise refusal(repository, f"the hub lists {total} bytes, more than {MAX_BYTES}")
    try:
        variant = Path(library.install_kernel(repository, revision=commit, trust_remote_code=[repository]))
        pieces = dict(_read(variant, sorted(listed)))
    except Exception as error:
        raise _unreachable(repository, error) from error
    if not pieces:
        raise refusal(repository, f"the hub has nothing for {variant.name}", Reason.BACKEND_PLATFORM_BUILD)
    for path, content in pieces.items():
        check(path, content)
    return pieces


def _listed(repository: str, commit: str) -> dict[str, int]:
    """The files below `build` at a commit with their sizes, as the hub says."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    tree = HfApi().list_repo_tree(repository, "build", repo_type="kernel", revision=commit, recursive=True)
    return {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}


def _read(variant: Path, listed: list[str]) -> Iterator[tuple[str, bytes]]:
    prefix = f"build/{variant.name}/"
    for path in listed:
        if path.startswith(prefix):
            yield path, (variant / path.removeprefix(prefix)).read_bytes()


def unpack_files(archive: Path, wanted: Callable[[str], tuple[str, Check]]) -> dict[str, dict[str, bytes]]:
    """The repositories of a tar archive: `<owner>/<name>/<path>`, plain files alone.

    `wanted(name)` gives a member's repository with its check, or refuses it. Nothing is unpacked to disk.
    Raises: BackendNotAvailableError: a link, a device, a path that leads elsewhere, a file that is not locked
        or is another, more than `MAX_BYTES` in all, or damage.
    """
    repositories: dict[str, dict[str, bytes]] = {}
    try:
        with archive.open("rb") as file, _opened(file, str(archive)) as outer:
            for member in outer:
                if not member.isreg():
                    kind = "a link" if member.issym() or member.islnk() else "no plain file"
                    raise refusal(str(archive), f"{member.name!r} is {kind}")
                if member.issparse():
                    raise refusal(str(archive), f"{member.name!r} holds what the archive does not: holes")
                repository, check = wanted(member.name)
                path = member.name.removeprefix(f"{repository}/")
                stream = outer.extractfile(member)
                assert stream is not None
                content = stream.read()
                check(path, content)
                repositories.setdefault(repository, {})[path] = content
    except (OSError, EOFError, tarfile.TarError, ValueError, zlib.error) as error:
        raise refusal(str(archive), f"it is no whole archive: {error}") from error
    return repositories


def _opened(file: IO[bytes], name: str) -> tarfile.TarFile:
    """The archive, plain or packed by gzip, bounded by what comes out of it."""
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    content: IO[bytes] = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]
    return tarfile.open(fileobj=_Bounded(content, name), mode="r:")  # type: ignore[call-overload,no-any-return]


class _Bounded:
    """A file that ends in a refusal once more than `MAX_BYTES` of it have been unpacked."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name

    def read(self, size: int = -1) -> bytes:
        """As of a file; never more than the bound at once."""
        if size < 0 or size > MAX_BYTES or self._file.tell() + size > MAX_BYTES:
            raise refusal(self._name, f"it holds more than {MAX_BYTES} bytes")
        return self._file.read(size)

    def seek(self, position: int, whence: int = 0) -> int:
        """As of a file."""
        if position > MAX_BYTES:
            raise refusal(self._name, f"it holds more than {MAX_BYTES} bytes")
        return self._file.seek(position, whence)

    def tell(self) -> int:
        """As of a file."""
        return self._file.tell()


def _unreachable(repository: str, error: Exception) -> Exception:
    reason = Reason.BACKEND_PLATFORM_BUILD if isinstance(error, FileNotFoundError) else None
    return refusal(repository, f"it cannot be downloaded: {type(error).__name__}: {error}"[:400], reason)

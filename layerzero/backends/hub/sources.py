"""A repository's files from the hub, through the `kernels` library.

They are files that were locked, each with the bytes that were checked; nothing is written here. What a server
lists beside them is a refusal, before anything is downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from itertools import islice
from pathlib import Path

from layerzero._util.files import read_given
from layerzero.backends.hub.archive import MAX_BYTES, Check
from layerzero.backends.hub.refusal import refusal
from layerzero.spec.reasons import Reason

MAX_LISTED = 100_000


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
        prefix = f"build/{variant.name}/"
        names = [path.removeprefix(prefix) for path in sorted(listed) if path.startswith(prefix)]
        pieces = {prefix + name: read_given(variant / name, MAX_BYTES) for name in names}
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
    entries = islice(tree, MAX_LISTED)  # a server may list without end
    return {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}


def _unreachable(repository: str, error: Exception) -> Exception:
    reason = Reason.BACKEND_PLATFORM_BUILD if isinstance(error, FileNotFoundError) else None
    return refusal(repository, f"it cannot be downloaded: {type(error).__name__}: {error}"[:400], reason)

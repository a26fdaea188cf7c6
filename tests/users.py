"""Another local user, for tests that ask what such a one can do to this one's files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can stand in for another user")


def planted(folder: Path, what: Callable[[], object]) -> None:
    """Let another local user do `what`, which ends before this returns."""
    folder.chmod(0o777)
    child = os.fork()
    if child == 0:
        try:
            os.umask(0)
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            what()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "the other user could not do it"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder in which everybody may make files, like the system's folder for temporary ones."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o1777)
        yield Path(name)

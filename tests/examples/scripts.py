"""The examples' scripts and what they start, each as a process of its own that finds torch imported."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from tests import children
from tests.examples import loopback
from tests.waiting import LIMIT_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAM = """
import runpy, sys
sys.argv[:] = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# What it spawns finds imported what a spawned process imports first: the main module under another name.
SPAWNING = PROGRAM.replace(
    "runpy.run_path", """
from tests import popen
runpy.run_path(sys.argv[0], run_name="__mp_main__")
popen.fork_what_is_spawned()
runpy.run_path""".lstrip(),
)  # fmt: skip


class Script:
    """A script that runs, with the methods of `subprocess.Popen` for it."""

    def __init__(
        self, name: str, *arguments: str, folder: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        folder = folder or Path(tempfile.mkdtemp(prefix="script-"))
        self.child = children.Child(
            SPAWNING, str(EXAMPLES / name), *arguments, folder=folder, variables=variables
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return int(self.child.process.pid)

    @property
    def said(self) -> str:
        """What it has printed so far."""
        return self.child.out.read_text() + self.child.err.read_text()

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        return self.child.process.poll()

    def wait(self, timeout: float = children.PATIENCE_S) -> int:
        """Its exit status. Raises: AssertionError: it did not end in so many seconds; it is killed."""
        return self.child.ended(timeout).returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self.child.process.send_signal(number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.child.process.kill()
        self.child.process.wait()


def wait_until_healthy(url: str, process: Script | subprocess.Popen[bytes]) -> None:
    """Wait until the server at an address answers."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        assert process.poll() is None, getattr(process, "said", "it has ended")
        try:
            if loopback.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    pytest.fail(f"the server did not answer within {LIMIT_S} seconds")

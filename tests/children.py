"""Programs in a fresh process that finds torch imported: a new interpreter spends its start on that.

The children are forked from a server that has imported torch and nothing of ours. Where the start or the end
of an interpreter, its hash seed or the import of torch itself is what a test is about, it starts one.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

from tests.popen import Fork
from tests.waiting import LIMIT_S

_NUMBERS = itertools.count()
# A little less than pytest gives a test: this limit is for telling what a child that hangs has said, and no
# child should meet it because the machine has other work.
PATIENCE_S = LIMIT_S + 30.0


class _Process(Fork):
    """One that nobody has any more is killed."""

    def __del__(self) -> None:
        if self._child_created and self.poll() is None:
            self.kill()
            self.wait()


class Child:
    """A program that runs; `out` and `err` are the files that it prints to. It imports what is found here."""

    def __init__(
        self, program: str, *arguments: str, folder: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        number = next(_NUMBERS)
        self.out, self.err = (folder / f"child-{number}.{stream}" for stream in ("out", "err"))
        with self.out.open("ab") as out, self.err.open("ab") as err:
            self.process = _Process(
                [sys.executable, "-c", program, *arguments], path=sys.path, env=variables,
                stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            )  # fmt: skip

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def ended(self, timeout: float = PATIENCE_S) -> CompletedProcess[str]:
        """What it printed and its exit status, once it has ended; one that does not is killed.

        Raises: AssertionError: it did not end in so many seconds.
        """
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            said = self.out.read_text()[-1000:] + self.err.read_text()[-1000:]
            raise AssertionError(f"the child needs to end in {timeout} s: {said}") from None
        return CompletedProcess(["-c"], status, self.out.read_text(), self.err.read_text())


def run(
    program: str,
    *arguments: str,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    timeout: float = PATIENCE_S,
) -> CompletedProcess[str]:
    """Run a program to its end; `folder` is for what it prints."""
    return Child(program, *arguments, folder=folder, variables=variables).ended(timeout)

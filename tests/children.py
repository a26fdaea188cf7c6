"""Programs in a fresh process that finds torch imported: a new interpreter spends its start on that.

The children are forked from a server that has imported torch and nothing of ours. Where the start or the end
of an interpreter, its hash seed or the import of torch itself is what a test is about, it starts one.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import CompletedProcess

from tests.waiting import LIMIT_S

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "torch"])
_NUMBERS = itertools.count()
# A little less than pytest gives a test: this limit is for telling what a child that hangs has said, and no
# child should meet it because the machine has other work.
PATIENCE_S = LIMIT_S + 30.0


def _main(program: str, arguments: tuple[str, ...], variables: dict[str, str], out: str, err: str) -> None:
    """What a child does: the program as `python -c` runs it, its two streams in files."""
    for stream, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<child>", "exec"), {"__name__": "__main__"})


class Child:
    """A program that runs; `out` and `err` are the files that it prints to."""

    def __init__(
        self, program: str, *arguments: str, folder: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        number = next(_NUMBERS)
        self.out, self.err = (folder / f"child-{number}.{stream}" for stream in ("out", "err"))
        self.out.touch()
        self.err.touch()
        given = dict(os.environ if variables is None else variables)
        self.process: ForkServerProcess = FORKS.Process(
            target=_main, args=(program, arguments, given, str(self.out), str(self.err))
        )
        self.process.start()

    def ended(self, timeout: float = PATIENCE_S) -> CompletedProcess[str]:
        """What it printed and its exit status, once it has ended; one that does not is killed.

        Raises: AssertionError: it did not end in so many seconds.
        """
        self.process.join(timeout)
        late = self.process.is_alive()
        if late:
            self.process.kill()
            self.process.join()
        out, err = self.out.read_text(), self.err.read_text()
        if late:
            raise AssertionError(f"the child needs to end in {timeout} s: {out[-1000:]}{err[-1000:]}")
        assert self.process.exitcode is not None
        return CompletedProcess(["-c"], self.process.exitcode, out, err)


def run(
    program: str,
    *arguments: str,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    timeout: float = PATIENCE_S,
) -> CompletedProcess[str]:
    """Run a program to its end; `folder` is for what it prints."""
    return Child(program, *arguments, folder=folder, variables=variables).ended(timeout)

"""Programs of this interpreter's, which a test or a library starts, as forks that find torch imported."""

from __future__ import annotations

import atexit
import ctypes
import inspect
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.forks import ForkServer, ask, begin_beside

_TAKE_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER: /usr/include/linux/prctl.h
_TAKING = threading.Lock()
_MEANT = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


@cache
def server() -> ForkServer:
    """The one of this process, begun at its first use."""
    folder = tempfile.TemporaryDirectory(prefix="lz-forks-")
    made = ForkServer(Path(folder.name) / "socket", ["pytest", "torch"])
    atexit.register(folder.cleanup)
    atexit.register(made.close)
    return made


class Fork(subprocess.Popen[Any]):
    """A child of this process like any other; it runs a program of Python's.

    `path` is its `sys.path`, or None: what a new interpreter's would be.
    """

    def __init__(self, args: Sequence[str], *, path: Sequence[str] | None = None, **named: Any) -> None:
        self._path = path
        super().__init__(args, **named)

    def _execute_child(self, *args: Any, **named: Any) -> None:
        if sys.platform != "linux":  # only there a process can take another one's child
            super()._execute_child(*args, **named)  # type: ignore[misc]
            return
        meant = _MEANT.bind(self, *args, **named).arguments
        pipes = [meant[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = {number: pipe if pipe >= 0 else number for number, pipe in enumerate(pipes)}
        passed = {number: number for number in meant["pass_fds"]}
        variables = os.environ if meant["env"] is None else meant["env"]
        try:
            self.pid = _adopted(
                str(server().path), meant["args"][1:], variables, {**streams, **passed}, sys_path=self._path,
                session=meant["start_new_session"], folder=str(meant["cwd"] or os.getcwd()),
            )  # fmt: skip
            self._child_created = True
        finally:
            names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(meant[name] for name in names))  # type: ignore[attr-defined]


def run(args: Sequence[str], *, timeout: float | None = None, check: bool = False, **named: Any) -> Any:
    """As `subprocess.run` with `capture_output` and `text`: the program's end and what it printed."""
    pipe = subprocess.PIPE
    with Fork(args, stdout=pipe, stderr=pipe, text=True, **named) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _adopted(*args: Any, **more: Any) -> int:
    """`ask` for a child of this process."""
    control = ctypes.CDLL(None).prctl
    with _TAKING:
        control(_TAKE_ORPHANS, 1, 0, 0, 0)
        try:
            return ask(*args, adopter=os.getpid(), **more)
        finally:
            control(_TAKE_ORPHANS, 0, 0, 0, 0)


def fork_what_is_spawned() -> None:
    """From now on what multiprocessing spawns here is a fork of this process as it is now."""
    if sys.platform != "linux":
        return
    spawn, (address, alive) = util.spawnv_passfds, begin_beside()

    def forked(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if "--multiprocessing-fork" not in args:
            return int(spawn(path, args, passfds))
        passed = {number: number for number in (0, 1, 2, *passfds)}
        return _adopted(address, args[args.index("-c") :], os.environ, passed)

    forked.server = alive  # type: ignore[attr-defined]  # it ends with this process
    util.spawnv_passfds = forked


class Forking(ModuleType):
    """The module `subprocess` for a module of the library's: this interpreter's programs are forks.

    While `fresh` is set they are not.
    """

    def __init__(self) -> None:
        super().__init__("subprocess")
        self.fresh = False

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, args: Any, **named: Any) -> subprocess.Popen[Any]:
        """As `subprocess.Popen`."""
        of_this = args[0] == sys.executable and not self.fresh
        return (Fork if of_this else subprocess.Popen)(args, **named)

"""Ranks and scripts in processes of their own, forked from one that has imported torch once for all of them.

Importing torch takes longer than what most of them do. The ranks meet in a store of this process, as ranks of
torchrun meet in their launcher's; nobody ends the others when one fails.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not declared

ROOT = Path(__file__).resolve().parents[2]
FORKS = multiprocessing.get_context("forkserver")
# pytest as well: every child looks into what started this process.
FORKS.set_forkserver_preload(["torch.distributed", "layerzero.runtime", "layerzero.actors.gang", "pytest"])


class Ended(NamedTuple):
    """How a process ended; -9 and the like stand for signals."""

    status: int
    stdout: str
    stderr: str


def run(
    arguments: Sequence[str],
    folder: Path,
    timeout_s: float,
    environment: Mapping[str, str | None] | None = None,
) -> Ended:
    """What `python *arguments` gives in a fork: a script and its arguments, or "-m" and a module before them.

    `folder` takes what it prints, `environment` is added to this process's, None takes a name out.
    Raises: AssertionError: it did not end within `timeout_s` seconds.
    """
    return _ended([_started(arguments, folder, environment or {})], timeout_s)[0]


def run_ranks(
    ranks: int,
    arguments: Sequence[str],
    folder: Path,
    timeout_s: float,
    only: Mapping[int, Mapping[str, str]] | None = None,
) -> list[Ended]:
    """The same on each of `ranks` ranks; `only` holds what one rank has besides in its environment."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(ranks):
        of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"}
        of_all |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        of_all |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        of_one = {"RANK": str(rank), "LOCAL_RANK": str(rank), **(only or {}).get(rank, {})}
        started.append(_started(arguments, folder, {**of_all, **of_one}))
    return _ended(started, timeout_s)


def _started(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str | None]
) -> tuple[ForkServerProcess, Path]:
    said = folder / f"{time.monotonic_ns()}.out"
    full: dict[str, str | None] = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    given = {name: value for name, value in full.items() if value is not None}
    process = FORKS.Process(target=_process, args=(list(arguments), given, str(said)), daemon=True)
    process.start()
    return process, said


def _ended(started: Sequence[tuple[ForkServerProcess, Path]], timeout_s: float) -> list[Ended]:
    until = time.monotonic() + timeout_s
    for process, _ in started:
        process.join(max(0.0, until - time.monotonic()))
    late = [process for process, _ in started if process.exitcode is None]
    for process in late:
        process.kill()
        process.join()
    found = [
        Ended(process.exitcode or 0, said.read_text(), said.with_suffix(".err").read_text())
        for process, said in started
    ]
    assert not late, f"{len(late)} of {len(started)} did not end within {timeout_s} s: {found}"
    return found


def _process(arguments: list[str], environment: dict[str, str], said: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    for number, path in ((0, os.devnull), (1, said), (2, str(Path(said).with_suffix(".err")))):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out

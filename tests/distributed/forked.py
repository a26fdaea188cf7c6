"""Ranks and scripts in processes of their own that find torch imported.

The ranks meet in a store of this process, as ranks of torchrun meet in their launcher's; nobody ends the
others when one fails.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not declared

from tests.children import Child

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import runpy, sys
sys.argv = sys.argv[1:]
if sys.argv[0] == "-m":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(
    arguments: Sequence[str],
    folder: Path,
    timeout_s: float,
    environment: Mapping[str, str | None] | None = None,
) -> CompletedProcess[str]:
    """What `python *arguments` gives in a fork: a script and its arguments, or "-m" and a module before them.

    `folder` takes what it prints, `environment` is added to this process's, None takes a name out.
    Raises: TimeoutError: it did not end within `timeout_s` seconds.
    """
    return _started(arguments, folder, environment or {}).ended(timeout_s)


def run_ranks(
    ranks: int,
    arguments: Sequence[str],
    folder: Path,
    timeout_s: float,
    only: Mapping[int, Mapping[str, str]] | None = None,
) -> list[CompletedProcess[str]]:
    """The same on each of `ranks` ranks; `only` holds what one rank has besides in its environment."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"}
    of_all |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    of_all |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    children = []
    until = time.monotonic() + timeout_s
    try:
        for rank in range(ranks):
            of_one = {"RANK": str(rank), "LOCAL_RANK": str(rank), **(only or {}).get(rank, {})}
            children.append(_started(arguments, folder, {**of_all, **of_one}))
        return [child.ended(max(0.1, until - time.monotonic())) for child in children]
    finally:
        for child in children:
            child.process.kill()  # none is left, unless one was late


def _started(arguments: Sequence[str], folder: Path, environment: Mapping[str, str | None]) -> Child:
    full: dict[str, str | None] = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    given = {name: value for name, value in full.items() if value is not None}
    return Child(PROGRAM, *arguments, folder=folder, variables=given)

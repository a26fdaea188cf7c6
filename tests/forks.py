"""A server of forks: what an interpreter does with its arguments, in a process that finds modules imported.

For programs that the library, Ray or a test starts by a command line: a new interpreter spends some seconds
of its start on torch. They end as interpreters do. A test of their start needs a new one.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = b"forks"  # of the process that is a server beside the one that it is forked from
_SET_NAME = 15  # PR_SET_NAME: /usr/include/linux/prctl.h
_MOST = 1 << 20  # bytes of a request
_FREE = 512  # descriptors from here on are nobody's


class ForkServer:
    """Forks of one process that has imported `modules`; it ends with this process. `path` is its socket's."""

    def __init__(self, path: Path, modules: Sequence[str]) -> None:
        self.path = path
        self._alive, theirs = socket.socketpair()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with listening, theirs:
            listening.bind(str(path))
            listening.listen(64)
            # A fork's path is its own alone.
            variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            passed = [listening.fileno(), theirs.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, *map(str, passed), *modules],
                pass_fds=passed, stdin=subprocess.DEVNULL, env=variables,
            )  # fmt: skip

    def close(self) -> None:
        """End the server; what it forked stays."""
        self._alive.close()
        self._process.wait()


def begin_beside() -> tuple[bytes, socket.socket]:
    """Have a fork of this process, as it is now, be a server; its address, and what ends it if closed.

    What it forks can be a child of this process: only who is above a server can take orphans of its.
    """
    alive, theirs = socket.socketpair()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind("")
    listening.listen(64)
    if os.fork():
        theirs.close()
        with listening:
            address: bytes = listening.getsockname()
            return address, alive
    alive.close()
    control, before = ctypes.CDLL(None).prctl, Path("/proc/self/comm").read_bytes().strip()
    control(_SET_NAME, NAME, 0, 0, 0)
    order = _serve(listening, theirs)
    control(_SET_NAME, before, 0, 0, 0)
    _run(order)
    sys.exit()


def ask(
    path: str | bytes,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    descriptors: Mapping[int, int],
    **more: Any,
) -> int:
    """Have a fork do what `python *arguments` does, with `variables` alone; its process id.

    `descriptors` maps what it finds open to what that is here. With an `adopter`, a process that takes
    orphans now, it is that one's child. `folder` is where it works, `session` has it lead one of its own,
    `sys_path` is its `sys.path`, or None: what an interpreter's is.
    Raises: OSError: there is no such server.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MOST)
        connection.connect(path)
        order = {
            "arguments": list(arguments), "variables": dict(variables), "folder": os.getcwd(),
            "numbers": list(descriptors), "adopter": 0, "session": False, "sys_path": None,
        } | more  # fmt: skip
        socket.send_fds(connection, [json.dumps(order).encode()], list(descriptors.values()))
        answer = connection.recv(64)
    if not answer:
        raise OSError("the server of forks ended, or its fork did")
    return int(answer)


def _serve(listening: socket.socket, alive: socket.socket) -> dict[str, Any]:
    """Fork as asked until this process's parent has gone; in a fork, the order."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for one
    while alive not in select.select([listening, alive], [], [])[0]:
        connection, _ = listening.accept()
        message, received, _, _ = socket.recv_fds(connection, _MOST, 16)
        order = json.loads(message)
        if not os.fork():
            if order["adopter"] and os.fork():
                os._exit(0)  # the other one is an orphan now
            alive.close()
            listening.close()
            return _become(order, received, connection)
        connection.close()
        for descriptor in received:
            os.close(descriptor)
    sys.exit()


def _become(order: dict[str, Any], received: list[int], connection: socket.socket) -> dict[str, Any]:
    """Have what an order says, and answer it; the order."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parked = [_parked(descriptor) for descriptor in received]
    for number, descriptor in zip(order["numbers"], parked, strict=True):
        if number == connection.fileno():
            connection = socket.socket(fileno=_parked(connection.detach()))
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["variables"])
    os.chdir(order["folder"])
    while order["adopter"] not in (0, os.getppid()):
        time.sleep(0.0005)
    if order["session"]:
        os.setsid()
    with connection:
        connection.send(str(os.getpid()).encode())
    return order


def _parked(descriptor: int) -> int:
    """A copy of a descriptor where no other is; itself closed."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FREE)
    os.close(descriptor)
    return copy


def _run(order: dict[str, Any]) -> None:
    """Do what the interpreter does with its arguments."""
    safe = order["arguments"][0] == "-P"
    arguments = order["arguments"][safe:]
    if order["sys_path"] is not None:
        sys.path[:] = order["sys_path"]
    else:
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        if arguments[0] in ("-c", "-m") and not safe:
            sys.path.insert(0, os.getcwd())
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.freeze()  # no fork looks through them for garbage, not even at its end
    # It ends as the interpreter that it is: with its status, its threads, its last words.
    _run(_serve(*(socket.socket(fileno=int(each)) for each in sys.argv[1:3])))

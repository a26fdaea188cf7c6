"""A server of forks: what `python -m MODULE` or a script does, in a process that finds modules imported.

For programs that the library or Ray starts with its own command line: a new interpreter spends some seconds of
its start on torch. What the start of an interpreter itself is about needs a new one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

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
            passed = [listening.fileno(), theirs.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, *map(str, passed), *modules],
                pass_fds=passed, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def close(self) -> None:
        """End the server; what it forked stays."""
        self._alive.close()
        self._process.wait()


def ask(
    path: str | Path,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    descriptors: Mapping[int, int],
    **more: Any,
) -> int:
    """Have a fork do what `python *arguments` does, with `variables` alone; its process id.

    `descriptors` maps what it finds open to what that is here. With an `adopter`, a process that takes orphans
    now, it is that one's child. `folder` is where it works, `session` has it lead one of its own.
    Raises: OSError: there is no such server.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MOST)
        connection.connect(str(path))
        order = {
            "arguments": list(arguments), "variables": dict(variables), "folder": os.getcwd(),
            "numbers": list(descriptors), "adopter": 0, "session": False,
        } | more  # fmt: skip
        socket.send_fds(connection, [json.dumps(order).encode()], list(descriptors.values()))
        answer = connection.recv(64)
    if not answer:
        raise OSError("the server of forks ended, or its fork did")
    return int(answer)


def _serve(listening: socket.socket, alive: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for one
    while alive not in select.select([listening, alive], [], [])[0]:
        connection, _ = listening.accept()
        with connection:
            message, received, _, _ = socket.recv_fds(connection, _MOST, 16)
            order = json.loads(message)
            if not os.fork():
                if order["adopter"] and os.fork():
                    os._exit(0)  # the other one is an orphan now
                alive.close()
                listening.close()
                _become(order, received, connection)
            for descriptor in received:
                os.close(descriptor)


def _become(order: dict[str, Any], received: list[int], connection: socket.socket) -> None:
    """Be the process of an order, to its end."""
    status = 1
    try:
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
        if order["adopter"]:
            import time

            while os.getppid() != order["adopter"]:
                time.sleep(0.0005)
        if order["session"]:
            os.setsid()
        connection.send(str(os.getpid()).encode())
        connection.close()
        status = _run(order["arguments"])
    finally:
        os._exit(status)


def _parked(descriptor: int) -> int:
    """A copy of a descriptor where no other is; itself closed."""
    import fcntl

    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FREE)
    os.close(descriptor)
    return copy


def _run(arguments: list[str]) -> int:
    """What the interpreter does with its arguments; its exit status."""
    import atexit
    import runpy
    import threading
    import traceback

    safe = "-P" in arguments[:1]
    arguments = arguments[safe:]
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return status


if __name__ == "__main__":
    import importlib

    for name in sys.argv[3:]:
        importlib.import_module(name)
    _serve(*(socket.socket(fileno=int(each)) for each in sys.argv[1:3]))

"""WorkerLife: one process of a worker, from its start to its end, with its socket and shared memory."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import threading
from contextlib import suppress

import torch

from layerzero.actors.isolation import frames
from layerzero.actors.isolation.arena import Arena
from layerzero.actors.isolation.receiver import Receiver

_SAID = 16_384
_LONGEST_S = 1e9


class WorkerLife:
    """One process of a worker, with its socket and shared memory."""

    def __init__(self, python: str, path: str | None) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * frames.MAX_MESSAGE)
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if path is not None:
            variables["PYTHONPATH"] = path
        arguments = [str(theirs.fileno()), str(torch.get_num_threads())]
        # No pipe: this end can be shut while another process than the worker still has the other.
        self._output, printed = socket.socketpair()
        with theirs, printed:
            try:
                self.process = subprocess.Popen(
                    # -P: what lies in the working directory is no library.
                    [python, "-P", "-m", "layerzero.actors.isolation.serve", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=printed.fileno(),
                    stderr=subprocess.STDOUT,
                    env=variables,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # what a library starts ends with it
                )
            except BaseException:
                self.socket.close()
                self._output.close()
                raise
        self._receiver = Receiver(self.socket)
        self.arenas: dict[str, Arena] = {}
        self.limit_s = 0.0
        self.asked = False  # whether an answer is on its way
        self.said = b""
        self.drained = threading.Event()
        self._ending = threading.Lock()
        self._status: int | None = None

    def limit(self, seconds: float) -> None:
        """Let every answer take at most so long."""
        self.limit_s = seconds
        # To the system 0 is no limit, and a number that it cannot hold none at all.
        timeval = struct.pack("@ll", *divmod(max(1, int(min(seconds, _LONGEST_S) * 1e6)), 1_000_000))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def ask(self, message: bytes) -> bytes:
        """The answer to a message.

        Raises: BlockingIOError: none within the limit. OSError: the process is gone.
        """
        self.asked = True
        self.socket.send(message)
        return self.answer()

    def answer(self) -> bytes:
        """The answer to what was sent; raises as `ask`."""
        reply = self._receiver.receive()
        if not reply:
            raise ConnectionResetError("the worker closed its socket")
        self.asked = False
        return reply

    def drain(self) -> None:
        """Keep the end of what the process prints, until it prints no more."""
        with self._output as stream:
            while piece := stream.recv(65_536):
                self.said = (self.said + piece)[-_SAID:]
        self.drained.set()

    def wait(self) -> None:
        """Return once the process has ended, even where one that it started still has its output."""
        with suppress(ChildProcessError):  # `end` was there before
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> int:
        """Kill the process and what it started; its status."""
        with self._ending:
            if self._status is None:
                # Not waited for before: until then no other process has its number, which is its group's.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self._status = self.process.wait()
                self.socket.close()
                with suppress(OSError):  # it was drained to its end
                    self._output.shutdown(socket.SHUT_RD)
            return self._status

    def last_words(self) -> str:
        """The end of what it printed, complete once it has ended."""
        self.drained.wait(2.0)
        return self.said.decode(errors="replace").strip()


def ending(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"{name}, as the system sends when memory runs out" if name == "SIGKILL" else name


def pause_s(failures: int) -> float:
    """Seconds until a worker begins anew that failed so many times in a row: they double, up to 60."""
    return min(60.0, 0.5 * 2.0 ** min(failures, 60))

"""WorkerProcess: one process of a worker, from its start to its end, with its socket and shared memory."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from layerzero._util.libraries import signal_name
from layerzero.actors.isolation import frames
from layerzero.actors.isolation.arena import Arena, HostArena
from layerzero.actors.isolation.receiver import Receiver
from layerzero.spec.reasons import Reason

_SAID = 16_384
LONGEST_S = 1e9
END_S = 10.0  # that a killed process has to end in while a caller waits
# Not passed on to another interpreter: what tells Python where it lies, and what is named like a secret.
_KEPT_BACK = re.compile(
    r"PYTHON|__PYVENV|(.*_)?[A-Z]*(AUTH|CREDENTIALS?|KEYS?|PASSW[A-Z]*|SECRETS?|TOKENS?)(_.*)?$",
    re.IGNORECASE,
)


class NoAnswerError(Exception):
    """A process gave no answer to what it was asked; `reason` says why to end it, None where it has ended."""

    def __init__(self, why: str, reason: Reason | None = None) -> None:
        super().__init__(why)
        self.reason = reason


class WorkerProcess:
    """One process of a worker, with its socket and shared memory."""

    def __init__(self, python: str, path: str | None) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.socket, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * frames.MAX_MESSAGE)
        if path is None:
            variables = {name: value for name, value in os.environ.items() if not _KEPT_BACK.match(name)}
        else:
            variables = {**os.environ, "PYTHONPATH": path}
        # Its threads would take the caller's cores while they wait for their next work.
        variables.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
        self.known: set[int] = set()  # frames that it has laid out
        self.limit_s = 0.0
        self.asked = False  # whether an answer is on its way
        self._number = 0  # of the last request
        self.said = b""
        self.drained = threading.Event()
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._status: int | None = None

    def limit(self, seconds: float) -> None:
        """Let every answer take at most so long; raises as `ask`."""
        self.limit_s = seconds
        # To the system 0 is no limit, and a number that it cannot hold none at all.
        timeval = struct.pack("@ll", *divmod(max(1, int(min(seconds, LONGEST_S) * 1e6)), 1_000_000))
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        except OSError as error:
            raise NoAnswerError(f"has been ended: {error}") from error

    def ask(self, message: bytes) -> bytes:
        """The answer to a message.

        Raises: NoAnswerError: none within the limit, none that was asked for, or the process is gone.
        """
        self.send(message)
        return self.answer()

    def call(self, frame: frames.Frame) -> bytes:
        """The answer to a call whose operands are there; raises as `ask`."""
        arena = self.arenas.get("cpu")
        slot = arena.slot if isinstance(arena, HostArena) and not frame.cards else None
        if slot is None or frame.number not in self.known or not self._receiver.spins:
            reply = self.ask(frame.message)
            if reply == frames.DONE:
                if len(self.known) >= frames.MOST_FRAMES:  # as it does itself
                    self.known.clear()
                self.known.add(frame.number)
            return reply
        self.asked = True
        self._number += 1
        if slot.ask(self._number, frame.number):
            outcome = self._receiver.spin(slot.answer)
            if outcome == 0:
                self.asked = False
                return frames.DONE
            if outcome is None:
                self._send(frame.message)
                return self.answer(self._receiver.sleep)
        else:
            self._send(frame.message)
        return self.answer()

    def send(self, message: bytes, *descriptors: int) -> None:
        """Begin a request, with the descriptors that it passes on; raises as `ask`."""
        self.asked = True
        self._number += 1
        self._send(message, *descriptors)

    def _send(self, message: bytes, *descriptors: int) -> None:
        try:
            self.socket.send(frames.NUMBER.pack(self._number) + message)
            if descriptors:
                socket.send_fds(self.socket, [b"f"], descriptors)
        except OSError as error:
            raise NoAnswerError(f"could not be asked: {error}") from error

    def answer(self, receive: Callable[[], bytes] | None = None) -> bytes:
        """The answer to what was sent; raises as `ask`."""
        reply = self.hear(receive)
        if reply[: frames.NUMBER.size] != frames.NUMBER.pack(self._number):
            raise NoAnswerError("answered what it was not asked", Reason.WORKER_CRASHED)
        self.asked = False
        return reply[frames.NUMBER.size :]

    def hear(self, receive: Callable[[], bytes] | None = None) -> bytes:
        """What the process says next; raises as `ask`."""
        try:
            reply = (receive or self._receiver.receive)()
        except BlockingIOError as error:
            why = f"gave no answer within {self.limit_s:g} s"
            raise NoAnswerError(why, Reason.WORKER_HUNG) from error
        except OSError as error:
            raise NoAnswerError(f"cannot be heard: {error}") from error
        if not reply:
            raise NoAnswerError("closed its socket")
        return reply

    def start_draining(self, name: str) -> None:
        """Drain on a thread of that name.

        Raises: RuntimeError: the system has no more threads; the process has been ended.
        """
        try:
            threading.Thread(target=self.drain, name=name, daemon=True).start()
        except RuntimeError:
            self.end()
            self.drain()
            raise

    def drain(self) -> None:
        """Keep the end of what the process prints, until it prints no more."""
        with self._output as stream:
            while piece := stream.recv(65_536):
                self.said = (self.said + piece)[-_SAID:]
        self.drained.set()

    def wait(self) -> None:
        """Return once the process has ended, even where one that it started has its output or socket."""
        with suppress(ChildProcessError):  # `end` was there before
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self._ended.set()
        self._hang_up()

    def _hang_up(self) -> None:
        """Wake who waits for an answer: a copy of the process may keep the other end open."""
        with suppress(OSError):  # it is closed
            self.socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> int:
        """Kill the process and what it started; its status."""
        with self._ending:
            if self._status is None:
                # Not waited for before: until then no other process has its number, which is its group's.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                try:
                    self._status = self.process.wait(END_S)
                except subprocess.TimeoutExpired:  # in a driver that does not let it go: `wait` is for that
                    self._status = -signal.SIGKILL
                self._hang_up()
                self.socket.close()
                with suppress(OSError):  # it was drained to its end
                    self._output.shutdown(socket.SHUT_RD)
            self.process.poll()  # takes the status of one that has ended since, whose number others may get
            return self._status

    def bury(self, error: NoAnswerError) -> tuple[Reason, str, int]:
        """End a process that gave no answer; why in a code and in words, and its status."""
        if error.reason is not None:
            return error.reason, f"{error}, and was killed", self.end()
        self._ended.wait(2.0)  # it is on its way out: let it say how
        status = self.end()
        return Reason.WORKER_CRASHED, f"ended with {ending(status)}", status

    def last_words(self) -> str:
        """The end of what it printed, complete once it has ended."""
        self.drained.wait(2.0)
        return self.said.decode(errors="replace").strip()


def ending(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"exit status {status}"
    name = signal_name(-status)
    return f"{name}, as the system sends when memory runs out" if name == "SIGKILL" else name


def pause_s(failures: int) -> float:
    """Seconds until a worker begins anew that failed so many times in a row: they double, up to 60."""
    return min(60.0, 0.5 * 2.0 ** min(failures, 60))

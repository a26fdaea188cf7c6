"""IsolatedWorker: one supervised child process that runs kernels, and what its end means for who waits.

A thread starts the process, drains what it prints, and starts it again when it has ended. A call has a time
limit; a worker that passes it is killed. A caller that waits learns at once, since the socket ends, too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from layerzero._util import log
from layerzero._util.ending import join_at_exit
from layerzero._util.files import decode_packed
from layerzero._util.fork_safety import renew_after_fork
from layerzero._util.version import VERSION
from layerzero.actors.isolation import frames
from layerzero.actors.isolation.arena import Arena, DeviceArena, HostArena
from layerzero.actors.isolation.worker_errors import WorkerError, fault_error
from layerzero.actors.isolation.worker_process import LONGEST_S, NoAnswerError, WorkerProcess, ending, pause_s
from layerzero.ops.op import Args
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.reasons import Reason

STARTED, ENDED, GAVE_UP = "isolation.worker_started", "isolation.worker_ended", "isolation.worker_gave_up"
UNLOADED = "isolation.kernel_left_out"
START_S = 300.0  # to start, to load a library, to compile
MAX_STARTS = 5  # that fail one after another
STEADY_S = 60.0  # one that ends earlier begins anew after a pause, which grows
Died = Callable[[str | None, Reason, str], object]
Unloaded = Callable[[str, str], object]
T = TypeVar("T")


class IsolatedWorker:
    """A backend's worker: `start` and `load` before `run`; a dead one begins anew by itself.

    `python` None is this interpreter with this process's paths. `died(kernel, reason, why)` is called once
    for each process that ended by itself, from the thread that found it, before any caller learns of it; the
    kernel is the one that ran, None where none did. `unloaded(kernel, why)` is called for one that does not
    load in a later process, which serves the others; a call of it loads it again, and has no answer itself.
    """

    def __init__(
        self, name: str, python: str | None, timeout_s: float, died: Died, unloaded: Unloaded
    ) -> None:
        self.name = name
        self.python = python or sys.executable
        self._path = os.pathsep.join(filter(None, sys.path)) if python is None else None
        self._timeout_s = timeout_s
        self._patience_s = min(timeout_s, LONGEST_S)
        self._died, self._unloaded = died, unloaded
        self.hello: frames.Hello | None = None
        self.starts = 0
        self._loads: dict[str, frames.LoadCommand] = {}
        self._failed_loads: dict[str, frames.LoadCommand] = {}
        self._reset()
        renew_after_fork(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._life: WorkerProcess | None = None
        self._starting: WorkerProcess | None = None
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def after_fork(self) -> None:
        """In a forked child: the parent's process is not its own; the next call starts one."""
        life = self._life
        self._reset()
        if life is not None:
            life.socket.close()

    @property
    def running(self) -> bool:
        """Whether its process is up."""
        return self._life is not None

    @property
    def pid(self) -> int | None:
        """The process's id while it is up."""
        life = self._life
        return None if life is None else life.process.pid

    @property
    def loaded(self) -> tuple[str, ...]:
        """The kernels that it has loaded, by their names there."""
        return tuple(self._loads)

    # -- starting and supervising ------------------------------------------------------------------

    def start(self) -> None:
        """Have a process that answers; waits for it.

        Raises: BackendNotAvailableError: it does not start, or is of another version.
        """
        self._begin()
        with self._changed:
            self._changed.wait_for(lambda: self._life is not None or self._failure is not None, START_S)
        if self._life is None:
            raise self._failure or self._unavailable(f"its process did not answer within {START_S:g} s")

    def _begin(self) -> None:
        with self._changed:
            if self._thread is None and not self._closing.is_set():
                self._failure = None
                thread = threading.Thread(
                    target=self._supervise, name=f"layerzero-isolated-{self.name}", daemon=True
                )
                thread.start()
                self._thread = thread  # not before: one that cannot be started is tried again
                join_at_exit(thread, self.close)

    def _supervise(self) -> None:
        failures = 0
        while not self._closing.is_set():
            try:
                life = self._open()
            except Exception as error:
                failures += 1
                if self._closing.is_set():
                    return
                if self.starts == 0 or failures >= MAX_STARTS:
                    self._give_up(error)
                    return
            else:
                began_s = time.monotonic()
                life.wait()
                failures = failures + 1 if time.monotonic() - began_s < STEADY_S else 0
                self._end_idle(life)
            if failures and self._closing.wait(pause_s(failures)):
                return

    def _open(self) -> WorkerProcess:
        try:
            life = self._starting = WorkerProcess(self.python, self._path)
        except OSError as error:
            raise self._unavailable(str(error)) from error
        life.start_draining(f"layerzero-said-{self.name}")
        if self._closing.is_set():  # `close` may have looked before there was anything to end
            life.end()
        try:
            life.limit(START_S)
            self.hello = self._checked_hello(life)
            for order in list(self._loads.values()):
                self._reload(life, order)
            life.limit(self._timeout_s)
        except (NoAnswerError, msgspec.MsgspecError) as error:
            status = life.end()
            last_words = life.last_words()
            last = last_words.rpartition("\n")[2]
            failure = self._unavailable(
                f"its process ended with {ending(status)}, {last or 'without a word'}"
            )
            failure.add_note(last_words)
            raise failure from error
        except BaseException:
            life.end()
            raise
        with self._changed:
            self.starts += 1
            self._life = life
            self._changed.notify_all()
        log.info(STARTED, backend=self.name, python=self.python, pid=life.process.pid, starts=self.starts)
        return life

    def _reload(self, life: WorkerProcess, order: frames.LoadCommand) -> None:
        """Load a kernel in a new process, or leave it out. Raises: NoAnswerError: it ended under it."""
        try:
            self._need_done(life.ask(frames.LOAD + msgspec.msgpack.encode(order)))
        except NoAnswerError as error:
            self._leave_out(order, f"the process {error}")
            if not self._closing.is_set():
                self._tell(order.kernel, *life.bury(error))
            raise
        except Exception as error:
            self._leave_out(order, f"{type(error).__name__}: {error}")

    def _leave_out(self, order: frames.LoadCommand, why: str) -> None:
        self._loads.pop(order.kernel, None)
        self._failed_loads[order.kernel] = order
        log.error(UNLOADED, backend=self.name, kernel=order.kernel, error=why[:500])
        self._unloaded(order.kernel, why)

    def _load_again(self, order: frames.LoadCommand) -> None:
        """On a thread of its own, for loading takes longer than a call may."""
        try:
            self.load(order)
        except Exception as error:
            self._leave_out(order, f"{type(error).__name__}: {error}")

    def _checked_hello(self, life: WorkerProcess) -> frames.Hello:
        hello = decode_packed(life.hear(), frames.Hello)
        if (hello.protocol, hello.version) != (frames.PROTOCOL, VERSION):
            needs, got = f"layerzero-runtime {VERSION}", hello.version
            message = f"the environment of {self.python} needs {needs}, got {got}"
            raise self._unavailable(message, Reason.WORKER_VERSION)
        return hello

    def _unavailable(self, why: str, reason: Reason = Reason.WORKER_FAILED) -> BackendNotAvailableError:
        return BackendNotAvailableError(
            f"isolated backend {self.name!r} ({self.python}): {why}", backend=self.name, reason=reason
        )

    def _give_up(self, error: Exception) -> None:
        log.error(GAVE_UP, backend=self.name, error=str(error)[:500])
        with self._changed:
            self._failure = error
            self._thread = None
            self._changed.notify_all()

    def _end_idle(self, life: WorkerProcess) -> None:
        """The process is gone; where a call was under way, its thread has said so, or is about to."""
        with self._lock:
            unnoticed = self._life is life
            if unnoticed:
                self._life = None
        status = life.end()
        if unnoticed and not self._closing.is_set():
            self._tell(None, Reason.WORKER_CRASHED, f"ended with {ending(status)}", status)

    def _tell(self, kernel: str | None, reason: Reason, why: str, status: int) -> None:
        log.error(ENDED, backend=self.name, kernel=kernel or "", status=status, why=why)
        self._died(kernel, reason, why)

    # -- asking ------------------------------------------------------------------------------------

    def load(self, order: frames.LoadCommand) -> None:
        """Load a kernel there, now and in every later process.

        Raises: BackendNotAvailableError: there is none, or its library is not what it needs. Exception: what
            its import raised. WorkerError: the process died of it.
        """
        self.start()
        self._ask_slowly(order.kernel, frames.LOAD + msgspec.msgpack.encode(order))
        self._loads[order.kernel] = order

    def compile(self, order: frames.CompileCommand) -> None:
        """Compile what a request needs of a loaded kernel; raises as `load`."""
        self._ask_slowly(order.kernel, frames.COMPILE + msgspec.msgpack.encode(order))

    def describe(self, plugin: str) -> bytes:
        """What a plugin of that environment says of its kernels; raises as `load`."""
        self.start()
        return self._ask_slowly(None, frames.DESCRIBE + plugin.encode())

    def _ask_slowly(self, kernel: str | None, message: bytes) -> bytes:
        def ask(life: WorkerProcess) -> bytes:
            life.limit(START_S)
            reply = life.ask(message)
            life.limit(self._timeout_s)
            return self._need_done(reply)

        return self._request(kernel, ask, -1)

    def run(self, kernel: str, frame: frames.Frame, args: Args) -> list[Tensor]:
        """Run a loaded kernel on tensors; its outputs, in memory of their own.

        Raises: WorkerError: it gave no answer. Exception: what the kernel raised, its traceback as a note.
        """
        if kernel not in self._loads:
            if (order := self._failed_loads.pop(kernel, None)) is not None:
                threading.Thread(target=self._load_again, args=(order,), daemon=True).start()
            raise WorkerError(f"{kernel} is being loaded in a process of {self.name!r}", Reason.WORKER_FAILED)
        return self._request(kernel, lambda life: self._outputs(life, frame, args), self._patience_s)

    def _request(self, kernel: str | None, ask: Callable[[WorkerProcess], T], patience_s: float) -> T:
        """What `ask` gets from the process, which answers no other request meanwhile; raises as `run`."""
        if not self._lock.acquire(timeout=patience_s):  # as while it loads another kernel
            message = f"the process of {self.name!r} had other work for {self._timeout_s:g} s"
            raise WorkerError(message, Reason.WORKER_HUNG)
        try:
            life = self._alive()
            return ask(life)
        except NoAnswerError as caught:
            error = caught
            self._life = None
        except BaseException:
            self._interrupted()
            raise
        finally:
            self._lock.release()
        raise self._lost(life, kernel, error) from error  # pyright: ignore[reportPossiblyUnboundVariable]

    def _outputs(self, life: WorkerProcess, frame: frames.Frame, args: Args) -> list[Tensor]:
        """The outputs of a call. Raises: Exception: the fault that it is answered with."""
        arenas = life.arenas
        for device, needed in frame.bytes_on.items():
            arena = arenas.get(device)
            if arena is None or arena.size < needed:
                arenas.pop(device, None)
                life.known.clear()
                arenas[device] = self._new_arena(life, device, needed)
        values = list(frames.flatten(args)) if frame.grouped else args
        for position, device, offset in frame.operands:
            arenas[device].write(offset, values[position])
        for device in frame.cards:
            arenas[device].before_send()
        self._need_done(life.call(frame))
        for device in frame.cards:
            arenas[device].after_reply()
        results = [
            arenas[device].read(offset, shape, dtype) for device, offset, shape, dtype in frame.outputs
        ]
        for device in frame.cards:
            arenas[device].after_read()
        return results

    def _new_arena(self, life: WorkerProcess, device: str, needed: int) -> Arena:
        if device == "cpu":
            try:
                arena, descriptor = HostArena.create(needed)
            except OSError as error:  # of this process: the worker has no part in it
                raise MemoryError(f"no shared memory of {needed} bytes: {error}") from error
            try:
                life.send(frames.HOST_ARENA + str(arena.size).encode(), descriptor)
            finally:
                os.close(descriptor)
            self._need_done(life.answer())
            return arena
        where = torch.device(device)
        shared, handle = DeviceArena.create(needed, where)
        order = frames.DEVICE_ARENA + msgspec.msgpack.encode([device, handle])
        shared.take_answer(where, self._need_done(life.ask(order)))
        return shared

    def _alive(self) -> WorkerProcess:
        """The present process, for who has the lock. Raises: WorkerError: one is being started."""
        life = self._life
        if life is None:
            self._begin()
            raise WorkerError(f"the process of {self.name!r} is being started", Reason.WORKER_FAILED)
        return life

    def _interrupted(self) -> None:
        """Something else than an answer has ended a request: a later one would be given its answer."""
        life = self._life
        if life is not None and life.asked:
            self._life = None
            life.end()

    def _lost(self, life: WorkerProcess, kernel: str | None, error: NoAnswerError) -> WorkerError:
        """What a request gets whose process did not answer; that is dead afterwards, and health knows."""
        reason, why, status = life.bury(error)
        message = f"the process of {self.name!r} {why} under {kernel}"
        lost = WorkerError(message, reason, status, life.last_words())
        if not self._closing.is_set():
            self._tell(kernel, reason, why, status)
        return lost

    def _need_done(self, reply: bytes) -> bytes:
        """What a reply carries. Raises: Exception: the fault that it is."""
        if reply[:1] != frames.DONE:
            raise fault_error(self.name, reply, self._unavailable)
        return reply[1:]

    def close(self) -> None:
        """End the process and its thread; a second close does nothing."""
        self._closing.set()
        with self._changed:  # who waits for a process need not wait longer
            thread = self._thread
            self._failure = self._unavailable("its runtime is closed")
            self._changed.notify_all()
        for opened in (self._life, self._starting):  # a call that waits has the lock, and ends with it
            if opened is not None:
                opened.end()
        if thread is not None and thread is not threading.current_thread():
            thread.join(10.0)

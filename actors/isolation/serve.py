"""The program of a worker: `python -m layerzero.actors.isolation.serve DESCRIPTOR THREADS`.

It answers one request after another on the socket that it was started with, and ends with it, or with the
thread that started it. Whatever a kernel raises goes back as text; a device that is lost ends the process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch
from torch import Tensor

from layerzero._util.version import VERSION
from layerzero.actors.isolation import frames
from layerzero.actors.isolation.arena import Arena, CallSlot, DeviceArena, HostArena
from layerzero.actors.isolation.descriptions import describe
from layerzero.actors.isolation.receiver import Receiver
from layerzero.backends import availability, load_builtin, load_plugins
from layerzero.backends.builds import check_build
from layerzero.health.device_faults import lost_device, text_of
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.kernel import Kernel

_LOOKS = 7  # one less than how many go to shared memory for one at the socket
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG: /usr/include/linux/prctl.h


class Run:
    """One call as it was laid out: the callable, its arguments in shared memory, and where outputs go."""

    __slots__ = ("arenas", "args", "call", "outputs", "process")

    def __init__(
        self, call: Callable[..., Any], args: tuple[Any, ...], outputs: list[Tensor], arenas: list[Arena],
        process: int,
    ) -> None:  # fmt: skip
        self.call, self.args, self.arenas, self.process = call, args, arenas, process
        self.outputs = [(place, place.shape, place.dtype, place.device) for place in outputs]

    def __call__(self) -> None:
        """Run the kernel and put its outputs in their places.

        Raises: RuntimeError: they are not what the op's outputs are; whatever the kernel raises.
        """
        for arena in self.arenas:
            arena.after_receive()
        result = self.call(*self.args)
        _end_copies(self.process)  # before it touches shared memory, which a copy has not
        if len(self.outputs) == 1 and result.__class__ is Tensor:
            self._put(0, result)
        else:
            parts = result if isinstance(result, tuple | list) else (result,)
            if len(parts) != len(self.outputs):
                raise RuntimeError(
                    f"{len(self.outputs)} outputs are needed, the kernel returned {len(parts)}"
                )
            for position, part in enumerate(parts):
                self._put(position, part)
        for arena in self.arenas:
            arena.before_reply()

    def _put(self, position: int, part: Any) -> None:
        place, shape, dtype, device = self.outputs[position]
        if (
            not isinstance(part, Tensor)
            or part.shape != shape
            or part.dtype is not dtype
            or part.device != device
        ):
            raise _wrong(position, part, place)
        place.copy_(part)


def _end_copies(process: int) -> None:
    """End this process where it is a copy: a kernel forked, and has returned in the other process, too."""
    if os.getpid() != process:
        os._exit(0)


def _wrong(position: int, part: Any, place: Tensor) -> RuntimeError:
    needs, got = "a tensor", type(part).__name__
    if isinstance(part, Tensor):
        needs, got = (f"{tuple(t.shape)} of {frames.name_of(t.dtype)} on {t.device}" for t in (place, part))
    return RuntimeError(f"output {position} needs {needs}, the kernel returned {got}")


class Server:
    """The state of a worker: loaded kernels, shared memory, and the calls that were laid out before."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._pid = os.getpid()
        self._kernels: dict[str, Kernel] = {}
        self._calls: dict[str, Callable[..., Any]] = {}
        self._arenas: dict[str, Arena] = {}
        self._runs: dict[int, Run] = {}  # by their frames' numbers
        self._receiver = Receiver(connection)
        self._slot: CallSlot | None = None
        self._number = 0  # of the last request that was seen
        self._in_memory = self._by_message = 0  # the last that the slot asked for, by how it was answered
        self._looks = 0
        self._verbs = {
            frames.LOAD: self._load, frames.COMPILE: self._compile, frames.HOST_ARENA: self._take_host_arena,
            frames.DEVICE_ARENA: self._take_device_arena, frames.DESCRIBE: self._describe,
            frames.CALL: self._call,
        }  # fmt: skip

    def serve(self) -> None:
        """Answer until the other side is gone."""
        while True:
            request = self._receiver.spin(self._look)
            if request is None:
                request = self._sleep()
            if isinstance(request, bytes):
                if not request:
                    return
                self._obey(request)
            else:
                self._number, frame = request
                if (run := self._runs.get(frame)) is not None:  # else a message will ask for it
                    self._run_in_memory(self._number, run)

    def _look(self) -> tuple[int, int] | bytes | None:
        """What is asked for in shared memory, or now and then, as it takes longer to see, by a message."""
        self._looks += 1
        if self._slot is None or not self._looks & _LOOKS:
            return self._receiver.take()
        return self._slot.asked(self._number)

    def _sleep(self) -> tuple[int, int] | bytes:
        """The same, where nothing came while this thread was awake."""
        slot = self._slot
        if slot is None:
            return self._receiver.sleep()
        slot.sleeps(True)
        request = slot.asked(self._number) or self._receiver.sleep()
        slot.sleeps(False)
        return request

    def _run_in_memory(self, number: int, run: Run) -> None:
        assert self._slot is not None
        reply = self._reply(run)
        if reply == frames.DONE:
            self._in_memory = number
        else:
            self._by_message = number
            self._socket.send(frames.NUMBER.pack(number) + reply)
        self._slot.reply(number, reply != frames.DONE)

    def _obey(self, message: bytes) -> None:
        (number,) = frames.NUMBER.unpack_from(message)
        if number == self._by_message:
            return
        self._number, reply = number, frames.DONE
        if number != self._in_memory:
            verb = frames.NUMBER.size
            reply = self._reply(lambda: self._verbs[message[verb : verb + 1]](message[verb + 1 :]))
        self._socket.send(frames.NUMBER.pack(number) + reply)

    def _reply(self, do: Callable[[], bytes | None]) -> bytes:
        """What is said of something that is done now."""
        try:
            reply = frames.DONE + (do() or b"")
            if len(reply) > frames.MAX_MESSAGE - frames.NUMBER.size:
                raise ValueError(f"an answer needs at most {frames.MAX_MESSAGE} bytes, got {len(reply)}")
        except (Exception, SystemExit) as error:
            if lost_device(error):  # this process's alone: the answer would be taken for the caller's
                traceback.print_exc()
                os._exit(1)
            reply = frames.FAULT + msgspec.msgpack.encode(_fault(error))
        _end_copies(self._pid)
        return reply

    def _call(self, body: bytes) -> None:
        (frame,) = frames.NUMBER.unpack_from(body)
        run = self._runs.get(frame) or self._lay_out(body[frames.NUMBER.size :])
        if len(self._runs) >= frames.MOST_FRAMES:
            self._runs.clear()
        self._runs[frame] = run
        run()

    def _lay_out(self, command: bytes) -> Run:
        order = msgspec.msgpack.decode(command, type=frames.CallCommand)
        used: set[str] = set()

        def place(device: str, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            used.add(device)
            return self._arenas[device].view(offset, shape, dtype)

        args = tuple(frames.decode(value, place) for value in order.args)
        outputs = [place(o.device, o.offset, o.shape, getattr(torch, o.dtype)) for o in order.outputs]
        arenas = [self._arenas[name] for name in sorted(used) if name != "cpu"]
        return Run(self._calls[order.kernel], args, outputs, arenas, self._pid)

    def _load(self, body: bytes) -> bytes:
        order = msgspec.msgpack.decode(body, type=frames.LoadCommand)
        kernel = _found(order)
        for missing in availability(kernel):
            raise BackendNotAvailableError(str(missing), backend=kernel.backend, reason=missing.reason)
        check_build(kernel)
        self._calls[order.kernel] = kernel.load()
        self._kernels[order.kernel] = kernel
        self._runs.clear()
        return b""

    def _compile(self, body: bytes) -> bytes:
        order = msgspec.msgpack.decode(body, type=frames.CompileCommand)
        compiles = self._kernels[order.kernel].compile
        if compiles is not None:
            compiles(order.request)
        return b""

    def _describe(self, body: bytes) -> bytes:
        return msgspec.msgpack.encode(describe(load_plugins([body.decode()])))

    def _take_host_arena(self, body: bytes) -> bytes:
        _, descriptors, _, _ = socket.recv_fds(self._socket, 64, 1)
        try:
            self._arenas["cpu"] = arena = HostArena(descriptors[0], int(body))
            arena.keep_from_forks()
            self._slot = arena.slot
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._runs.clear()
        return b""

    def _take_device_arena(self, body: bytes) -> bytes:
        name, handle = msgspec.msgpack.decode(body)
        self._runs.clear()
        self._arenas.pop(name, None)
        self._arenas[name], answered = DeviceArena.open(torch.device(name), handle)
        return answered


def _found(order: frames.LoadCommand) -> Kernel:
    """The kernel of an order. Raises: BackendNotAvailableError: this environment has none of that id."""
    if order.origin:
        return origin_kernel(order.kernel, order.origin)
    kernels = load_builtin(order.plugins, op=order.op)
    for kernel in kernels:
        if kernel.id == order.kernel:
            return kernel
    raise BackendNotAvailableError(
        f"the environment of {sys.executable} has no kernel {order.kernel!r}: one that a program made needs "
        "an origin, the module:function that gives it there",
        backend=order.kernel.split(".")[0],
    )


def origin_kernel(kernel_id: str, origin: str) -> Kernel:
    """The kernel that `module:function` gives in this process.

    Raises: BackendNotAvailableError: it does not import, or gives something else.
    """
    import importlib

    module, _, name = origin.partition(":")
    kernel = getattr(importlib.import_module(module), name)()
    if not isinstance(kernel, Kernel) or kernel.id != kernel_id:
        raise BackendNotAvailableError(
            f"origin {origin!r} needs to give {kernel_id!r}, got {getattr(kernel, 'id', kernel)!r}",
            backend=kernel_id.split(".")[0],
        )
    return kernel


def _fault(error: BaseException) -> frames.Fault:
    reason = error.context.get("reason", "") if isinstance(error, BackendNotAvailableError) else ""
    kind = next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins" or c in _KEPT)
    text, trace = text_of(error)[:2000], traceback.format_exc()[-8000:]
    return frames.Fault(kind, _sendable(text), _sendable(trace), str(reason))


def _sendable(text: str) -> str:
    """A text with halves of letters, which no message holds, spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()


_KEPT = (torch.OutOfMemoryError, BackendNotAvailableError)


def _end_what_it_starts() -> None:
    """Leave a process that ends this one's process group, its own, once this one is gone.

    Who started this one does so too, unless it was killed itself.
    """
    worker = os.getpid()
    if os.fork():
        return
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() == worker:
        signal.sigwait({signal.SIGTERM})
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve the descriptor that was passed on."""
    descriptor, threads = int(sys.argv[1]), int(sys.argv[2])
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getpgid(0) == os.getpid():
            _end_what_it_starts()
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out, this process ends before its caller
    torch.set_num_threads(threads)
    python, of_torch = sys.version.split()[0], str(torch.__version__)
    hello = frames.Hello(frames.PROTOCOL, VERSION, python, of_torch, torch.version.cuda, os.getpid())
    gc.freeze()
    with socket.socket(fileno=descriptor) as connection, torch.inference_mode():
        connection.send(msgspec.msgpack.encode(hello))
        Server(connection).serve()
    os._exit(0)  # a library's own end of process may hang, and nothing here needs it


if __name__ == "__main__":
    main()

"""Which kernel was running when the process died: a few bytes that outlive it, written around each kernel.

A journal is a file mapped into memory. Each thread has a slot of two words: the number of its kernel, and
when it began (0: it has ended). The kernel keeps what was written when the process is killed, so that the
next incarnation of the device, or a watchdog outside, reads who was in flight. Two crashes under one kernel
quarantine it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from layerzero._util import files, log
from layerzero._util.fork_safety import renew_after_fork

_MAGIC = b"LZJ1"
_HEADER = 64
_SLOTS = 256
_WORDS = 2
_SIZE = _HEADER + _SLOTS * _WORDS * 8
CRASHES_TO_QUARANTINE = 2
_MAX_NAME_BYTES = 1 << 20
CRASH_MEMORY_S = 24 * 3600.0

_now = time.monotonic_ns
_log_ids = itertools.count(1)  # of this process


class RunningKernel(msgspec.Struct, frozen=True):
    """A kernel in flight, and for how many seconds."""

    kernel: str
    seconds: float


class Crash(msgspec.Struct, frozen=True):
    """One crash of a device's process under a kernel; `time_s` is wall-clock time in seconds since 1970."""

    kernel: str
    time_s: float


_PRIVATE = 0x10 | getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)  # MAP_FIXED
if hasattr(os, "fork"):
    # Python's own does not replace what is mapped. Looked up here: in a forked child locks may be held.
    _mmap = ctypes.CDLL(None, use_errno=True).mmap
    _mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    _mmap.restype = ctypes.c_ssize_t


class _Local(threading.local):
    slot = -1


class RunningKernelLog:
    """The journal of one incarnation of a device; `wrap` wraps a callable, `close` says that all is well.

    `twin` is the compiled module that notes a call in less time, `layerzero.native.KERNEL_NOTES`'s.
    """

    def __init__(self, folder: Path, name: str, incarnation: str, twin: Any = None) -> None:
        self._twin, self._id = twin, next(_log_ids)
        stem = f"{_plain(name)}.{incarnation}"
        self.path = folder / f"{stem}.journal"
        self._names_path = folder / f"{stem}.kernels"
        while True:
            files.own_folder(folder)
            try:
                os.close(files.create_own(self._names_path))
                break
            except FileNotFoundError:  # a neighbour that closed has taken the empty folder away
                continue
        with os.fdopen(files.create_own(self.path), "r+b") as file:
            file.write(struct.pack("=4sQ", _MAGIC, os.getpid()).ljust(_HEADER, b"\0"))
            file.truncate(_SIZE)
            file.flush()
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._words = memoryview(self._map).cast("Q")
        self._names: list[str] = []
        self._local = _Local()
        self._taken = 0
        self._lock = threading.Lock()
        self._closed = False
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child: the journal and its names are the parent's, and what runs here is not noted."""
        self._lock = threading.Lock()
        self._closed = True
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # What notes without asking, as the compiled twin does, notes in memory of the child's own.
        if _mmap(address, _SIZE, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE, -1, 0) == -1:
            raise OSError(code := ctypes.get_errno(), os.strerror(code))

    def wrap(self, kernel: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, noted in the journal while it runs."""
        number = self._number(kernel)
        if self._twin is not None:
            by_twin: Callable[..., Any] = self._twin.watched(call, number, self._map, self._id, self._slot)
            return by_twin
        words, local, clock_ns, claim = self._words, self._local, _now, self._claim

        def logged(*args: Any) -> Any:
            slot = local.slot
            if slot < 0:
                slot = claim()
            words[slot] = number
            words[slot + 1] = clock_ns()
            try:
                return call(*args)
            finally:
                words[slot + 1] = 0

        return logged

    def _slot(self) -> int:
        slot = self._local.slot
        return self._claim() if slot < 0 else slot

    def _number(self, kernel: str) -> int:
        with self._lock:
            if kernel in self._names:
                return self._names.index(kernel)
            self._names.append(kernel)
            # Calls that are still running after the end in order need a number, but no reader.
            if self._closed:
                return len(self._names) - 1
            # Before the first call: the number must mean something to the reader of the file.
            handle = os.open(self._names_path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0))
            with os.fdopen(handle, "a", encoding="utf-8") as file:
                file.write(kernel + "\n")
            return len(self._names) - 1

    def _claim(self) -> int:
        with self._lock:
            # Threads beyond the last slot share it: one of theirs may be missed, none is made up.
            index = min(self._taken, _SLOTS - 1)
            self._taken += 1
        slot = self._local.slot = _HEADER // 8 + index * _WORDS
        return slot

    def running_kernels(self) -> list[RunningKernel]:
        """The kernels in flight now, longest first."""
        if self._closed:
            return []
        return _running_in(bytes(self._map), self._names)

    def mark_suspects(self) -> None:
        """Leave the last kernel of every thread as in flight: the process ends on an error reported late."""
        for index in range(min(self._taken, _SLOTS)):
            self._words[_HEADER // 8 + index * _WORDS + 1] = _now()

    def close(self) -> None:
        """Remove the files: this incarnation ended in order, and no kernel is suspect."""
        if self._closed:
            return
        self._closed = True
        for path in (self.path, self._names_path):
            path.unlink(missing_ok=True)
        # Removed only when empty, which the system itself decides.
        with suppress(OSError):  # others live there, or their crashes are noted
            self.path.parent.rmdir()


def _running_in(data: bytes, names: list[str]) -> list[RunningKernel]:
    now_ns = _now()
    running = []
    for index in range(_SLOTS):
        number, began = struct.unpack_from("=QQ", data, _HEADER + index * _WORDS * 8)
        if began and number < len(names):
            running.append(RunningKernel(names[number], max(0.0, (now_ns - began) / 1e9)))
    return sorted(running, key=lambda flight: -flight.seconds)


def read(path: Path) -> list[RunningKernel]:
    """The kernels that a journal shows in flight; a file that is none, or is cut short, shows none.

    Reads another process's journal as well as that of a dead one.
    """
    try:
        data = files.read_bounded(path, _SIZE)
        names = files.read_bounded(path.with_suffix(".kernels"), _MAX_NAME_BYTES).decode().split("\n")[:-1]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        log.warning("running_log.unreadable", path=str(path), why=str(error))
        return []
    # A process may have died while it made the file.
    if len(data) != _SIZE or data[:4] != _MAGIC:
        log.warning("running_log.unreadable", path=str(path), bytes=len(data))
        return []
    return _running_in(data, names)


def read_crash_log(folder: Path, name: str) -> list[str]:
    """The kernels that were in flight in earlier incarnations of a device; their journals are removed.

    Only the caller knows that no earlier incarnation runs any more.
    Raises: PermissionError: others can write the folder; which kernels its journals name says nothing.
    """
    suspects: list[str] = []
    if folder.is_dir():
        files.own_folder(folder)
    pattern = re.compile(re.escape(_plain(name)) + r"\.[0-9a-f]+\.journal")
    for path in sorted(folder.glob("*.journal")) if folder.is_dir() else ():
        if pattern.fullmatch(path.name):
            suspects += [flight.kernel for flight in read(path)]
            path.unlink(missing_ok=True)
            path.with_suffix(".kernels").unlink(missing_ok=True)
    return sorted(set(suspects))


class CrashRecords:
    """The crashes of one device, stored in a file beside its journals.

    A crash older than a day no longer counts: a process may be killed from outside under an innocent kernel.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{_plain(name)}.crashes"
        self._crashes: list[Crash] = self._load()

    def _load(self) -> list[Crash]:
        try:
            return files.decode_json(files.read_bounded(self._path, _MAX_NAME_BYTES), list[Crash])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            aside = self._path.with_name(self._path.name + ".damaged")
            log.error("crashes.set_aside", path=str(self._path), moved_to=str(aside), why=str(error))
            os.replace(self._path, aside)
            return []

    def add(self, kernels: Iterable[str], time_s: float) -> list[str]:
        """Note one crash under each of `kernels`; returns those that have now crashed too often."""
        kernels = list(kernels)
        self._crashes = [death for death in self._crashes if time_s - death.time_s < CRASH_MEMORY_S]
        self._crashes += [Crash(kernel, time_s) for kernel in kernels]
        # Deaths under no kernel leave the file as it is: most ends of a process are no kernel's fault.
        if kernels:
            files.write_whole(self._path, msgspec.json.encode(self._crashes))
        counts = [(kernel, self.count(kernel)) for kernel in kernels]
        return [kernel for kernel, count in counts if count >= CRASHES_TO_QUARANTINE]

    def count(self, kernel: str) -> int:
        """How often the device died under a kernel."""
        return sum(death.kernel == kernel for death in self._crashes)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)

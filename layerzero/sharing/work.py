"""SharedWork: one process works, and those that ask the same meanwhile, or soon after, take its answer.

On a host processes meet at a file lock, which ends with the process that held it: a leader that dies is
replaced by the next one that waits. What it found is a file beside the lock, under a name made of everything
that it follows from, with a checksum and the time; another environment never finds it. In a cluster the one
that leads on its host asks the store as well (`leases.py`).

Nothing here is needed: without a folder, a lock, a store or patience a process works for itself, and says so.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from layerzero._util import files, log
from layerzero._util.ending import ENDING
from layerzero._util.fork_safety import renew_after_fork
from layerzero.sharing.leases import Leases, LeaseStore, StoreLostError

if TYPE_CHECKING:
    from filelock import BaseFileLock

LEADER_LATE = "sharing.leader_late"
STORE_LOST = "sharing.store_lost"
FOLDER_UNUSABLE = "sharing.folder_unusable"
ANSWER_NOT_KEPT = "sharing.answer_not_kept"
_SCHEMA = 1
_MAX_BYTES = 64 << 20
_KEPT_S = 7 * 86_400.0
_DIGEST_BYTES = 32


class WorkSpec(NamedTuple):
    """How one kind of work is shared.

    An answer serves those who ask up to `fresh_s` seconds after it; with 0 only those who waited for it. Who
    has waited `wait_s` seconds for a leader works itself. `shares_failure`: those who waited get its failure.
    `travels`: an answer serves other hosts, too.
    """

    name: str
    wait_s: float
    fresh_s: float = 0.0
    poll_s: float = 0.05
    shares_failure: bool = False
    travels: bool = True


# Choosing takes milliseconds; its freshness is a setting.
CHOICE = WorkSpec("choice", wait_s=0.5, poll_s=0.001)
# A compilation takes minutes at worst. What it makes are files of this host, which stay.
COMPILE = WorkSpec("compile", wait_s=900.0, fresh_s=math.inf, shares_failure=True, travels=False)
MEASURE = WorkSpec("measure", wait_s=4 * 3600.0, poll_s=0.2)


class SharedFailureError(Exception):
    """What another process's work failed with, while this one waited for it."""


class SharedResult(NamedTuple):
    """What the work came to; `leader` is the process that did it, empty for this one."""

    body: bytes
    leader: str = ""


class PartialResult:
    """What a leader has of its answer so far: who waited for one that was killed continues it.

    `begun` is what the dead one kept, empty where there is none; `keep` does nothing where another leads.
    """

    def __init__(self) -> None:
        self.begun = b""
        self.keep: Callable[[bytes], None] = lambda body: None


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    schema: int
    key: str
    boot: str
    seconds: float
    leader: str
    body: bytes
    error: str


class SharedWork:
    """The meeting place of this user's processes on this host, and with `join` of a cluster's.

    `folder` is `layerzero/shared` in the user's cache folder by default.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._leases: Leases | None = None
        self._warned = self._pruned = False
        renew_after_fork(self)

    def after_fork(self) -> None:
        """In a forked child: the store's connection is the parent's."""
        self._leases = None

    def join(self, store: LeaseStore | None) -> None:
        """Share with the processes that have this store; with None with this host's alone."""
        self._leases = None if store is None else Leases(store)

    def once(
        self, sharing: WorkSpec, key: str, work: Callable[[], bytes], draft: PartialResult | None = None
    ) -> SharedResult:
        """The answer of `key` (`digest_of`): another process's where there is one, else that of `work()`.

        Where `work` takes long, `draft` hands what it has on to the next leader.

        Raises: what `work` raises. SharedFailureError: another's work failed while this call waited for it.
        """
        asked_at = time.monotonic()
        try:
            path = self._place() / f"{sharing.name}-{key[:40]}"
            if (answer := _read(path, key, asked_at, sharing)) is not None:
                return answer
            lock, waited = self._acquire(path, sharing)
        except (OSError, NotImplementedError) as error:
            if not self._warned:
                self._warned = True
                log.warning(FOLDER_UNUSABLE, why=str(error))
            return self._in_cluster(sharing, key, work)
        if lock is None:
            log.warning(LEADER_LATE, kind=sharing.name, seconds=sharing.wait_s)
            return SharedResult(work())
        try:
            answer = _read(path, key, asked_at, sharing)
            if answer is not None:
                return answer
            part = path.with_name(f"{path.name}.part")
            if not waited:
                part.unlink(missing_ok=True)  # of a leader that died before this process asked
            if draft is not None:
                previous = _read(part, key, 0.0, sharing)
                draft.begun = b"" if previous is None else previous.body
                draft.keep = lambda body: self._keep(part, key, SharedResult(body, _this_process()))
            answer = self._lead(sharing, key, path, work)
            part.unlink(missing_ok=True)
            return answer
        finally:
            lock.release()

    def before_all(self, sharing: WorkSpec, key: str, work: Callable[[], object]) -> None:
        """Do `work()`, which leaves something on this host: one process first, all others side by side after.

        Raises: as `once`.
        """

        def first() -> bytes:
            work()
            return b""

        if self.once(sharing, key, first).leader:
            work()

    def _place(self) -> Path:
        return files.own_user_folder("shared") if self._folder is None else files.own_folder(self._folder)

    def _acquire(self, path: Path, sharing: WorkSpec) -> tuple[BaseFileLock | None, bool]:
        """The lock, held, and whether another held it; None where that takes too long, or this one ends."""
        from filelock import FileLock, Timeout

        lock, until = FileLock(path.with_name(f"{path.name}.lock")), time.monotonic() + sharing.wait_s
        patience, waited = 0.0, False
        while True:
            try:
                lock.acquire(timeout=patience, poll_interval=sharing.poll_s)
            except Timeout:
                waited = True
                if time.monotonic() >= until or ENDING.is_set():
                    return None, waited
                patience = max(0.0, min(1.0, until - time.monotonic()))
            else:
                return lock, waited

    def _lead(self, sharing: WorkSpec, key: str, path: Path, work: Callable[[], bytes]) -> SharedResult:
        try:
            answer = self._in_cluster(sharing, key, work)
        except Exception as error:
            if sharing.shares_failure and not ENDING.is_set():
                why = f"{type(error).__name__}: {error}"[:500]
                self._keep(path, key, SharedResult(b"", _this_process()), why)
            raise
        self._keep(path, key, SharedResult(answer.body, answer.leader or _this_process()))
        return answer

    def _in_cluster(self, sharing: WorkSpec, key: str, work: Callable[[], bytes]) -> SharedResult:
        leases = self._leases
        if leases is None or not sharing.travels:
            return SharedResult(work())
        try:
            body, led = leases.once(
                f"{sharing.name}/{key}",
                work,
                reuse=sharing.fresh_s > 0,
                wait_s=sharing.wait_s,
                poll_s=max(sharing.poll_s, 0.005),
            )
        except StoreLostError as error:
            log.warning(STORE_LOST, why=str(error))
            self._leases = None
            return SharedResult(work())
        return SharedResult(body, "" if led else "another device of the cluster")

    def _keep(self, path: Path, key: str, answer: SharedResult, error: str = "") -> None:
        """Leave the answer for others; those of last week go."""
        stored = _Stored(_SCHEMA, key, _boot(), time.monotonic(), answer.leader, answer.body, error)
        data = msgspec.msgpack.encode(stored)
        try:
            files.put_whole(path, hashlib.sha256(data).digest() + data)
            if not self._pruned:
                self._pruned = True
                _prune(path.parent)
        except OSError as failure:
            log.warning(ANSWER_NOT_KEPT, path=str(path), why=str(failure))


def _read(path: Path, key: str, asked: float, sharing: WorkSpec) -> SharedResult | None:
    """The answer at `path` where it holds for who asked at `asked`; None where there is none.

    Raises: SharedFailureError: it is a failure that came after that. PermissionError: others wrote it.
    """
    try:
        data = files.read_bounded(path, _MAX_BYTES)
        if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
            return None  # cut short, or damaged: it is written again
        stored = msgspec.msgpack.decode(data[_DIGEST_BYTES:], type=_Stored)
    except (FileNotFoundError, msgspec.MsgspecError, ValueError):
        return None
    if (stored.schema, stored.key, stored.boot) != (_SCHEMA, key, _boot()):
        return None
    if stored.error:
        if stored.seconds < asked:
            return None  # the next one tries
        raise SharedFailureError(f"{stored.leader} tried it for all: {stored.error}")
    if asked - stored.seconds >= sharing.fresh_s and stored.seconds < asked:
        return None
    return SharedResult(stored.body, stored.leader)


def _prune(folder: Path) -> None:
    oldest = time.time() - _KEPT_S
    for path in folder.iterdir():
        if path.lstat().st_mtime < oldest:
            path.unlink(missing_ok=True)


def digest_of(*parts: object) -> str:
    """A name for what an answer follows from, equal in every process where all parts are; 64 digits."""
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic", enc_hook=repr)).hexdigest()


def code_of(function: Callable[..., Any] | None) -> str:
    """A digest of what a function does, as far as its code and the plain values that it holds say."""
    if function is None:
        return ""
    partial = getattr(function, "func", None)
    body = getattr(partial or function, "__code__", None)
    cells = [cell.cell_contents for cell in getattr(partial or function, "__closure__", None) or ()]
    values = [*getattr(function, "args", ()), *sorted(getattr(function, "keywords", {}).items()), *cells]
    if body is None:
        return digest_of(type(function).__qualname__, list(map(_plain, values)))[:16]
    names = (body.co_filename, body.co_name, body.co_names)
    return digest_of(body.co_code.hex(), names, [_plain(v) for v in (*body.co_consts, *values)])[:16]


def _plain(value: object) -> str:
    simple = (str, int, float, bytes, tuple, frozenset, Path, type(None))
    return (
        repr(value) if isinstance(value, simple) else getattr(value, "__qualname__", type(value).__qualname__)
    )


@functools.cache
def _boot() -> str:
    """What tells this run of this machine from all others, so that times can be compared.

    A container of its own time namespace counts from another moment; older kernels have none.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
    with suppress(OSError):
        boot += os.readlink("/proc/self/ns/time")
    return boot


def _this_process() -> str:
    return f"process {os.getpid()} of {socket.gethostname()}"


SHARED = SharedWork()

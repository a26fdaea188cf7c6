"""Leases: which process of a cluster does a piece of work, and the answer, in a store that all of them share.

The value under a key says who leads and how often it has shown that it lives, or holds the answer. Every
change is a compare-and-set of what was seen, so that of several that would lead one does, and a leader that
was replaced meanwhile cannot store its answer over that of its successor. Clocks are never compared: who
waits replaces a leader whose value has not changed for `lease_s` seconds of its own clock.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from layerzero._util import log

LEADER_REPLACED = "sharing.leader_replaced"
LEASE_LOST = "sharing.lease_lost"
LEASE_S = 10.0
_MAX_ANSWER = 4 << 20  # the store keeps answers in memory


class LeaseStore(Protocol):
    """What is needed of an agreement store: `compare_set` returns what is stored after it."""

    def get(self, key: str, timeout_s: float) -> bytes | None: ...

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...


class StoreLostError(Exception):
    """The store does not answer, or answers with what no process of the cluster wrote."""


class _Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who leads, its heartbeats so far, and the answer; without a leader the work is free."""

    leader: str
    beat: int = 0
    answer: bytes | None = None


class Leases:
    """The leases of one process over a store."""

    def __init__(self, store: LeaseStore, lease_s: float = LEASE_S) -> None:
        self._store = store
        self._lease_s = lease_s
        self._lock = threading.Lock()  # a store's client is for one thread at a time

    def once(
        self, key: str, work: Callable[[], bytes], *, reuse: bool, wait_s: float, poll_s: float
    ) -> tuple[bytes, bool]:
        """The answer of `key`, and whether this call made it by `work()`.

        `reuse` takes an answer that was there before; otherwise only one that came while this call waited.
        After `wait_s` seconds this call works for itself alone.
        Raises: StoreLostError: the store does not answer; `work` has not run. What `work` raises; the next
            one that waits leads then.
        """
        waited, until = False, time.monotonic() + wait_s
        lease = _Lease(uuid.uuid4().hex)
        seen, changed_at = self._swap(key, b"", lease), time.monotonic()
        while True:
            stored = _decode(seen)
            if stored == lease:
                answer = self._lead(key, lease, work)
                if answer is not None:
                    return answer, True
                seen, changed_at, waited = self._read(key, seen), time.monotonic(), True
                continue
            if stored.answer is not None and (reuse or waited):
                return stored.answer, False
            moment = time.monotonic()
            silent = bool(stored.leader) and stored.answer is None
            if not silent or moment - changed_at > self._lease_s:
                lease = _Lease(uuid.uuid4().hex)
                after = self._swap(key, seen, lease)
                if silent and _decode(after) == lease:
                    log.warning(LEADER_REPLACED, key=key, leader=stored.leader, seconds=self._lease_s)
                seen, changed_at = after, moment
                continue
            if moment > until:
                return work(), True
            waited = True
            time.sleep(poll_s)
            latest = self._read(key, seen)
            if latest != seen:
                seen, changed_at = latest, time.monotonic()

    def _lead(self, key: str, lease: _Lease, work: Callable[[], bytes]) -> bytes | None:
        """The answer of `work`, stored; None where another leads by now, whose answer counts."""
        ended, latest = threading.Event(), [lease]
        beating = threading.Thread(
            target=self._beat, args=(key, latest, ended), name="layerzero-lease", daemon=True
        )
        beating.start()
        try:
            answer = work()
        except BaseException:
            self._end(key, latest, ended, beating, _Lease(""))
            raise
        last = latest[0]
        last_word = _Lease(last.leader, last.beat, answer) if len(answer) <= _MAX_ANSWER else _Lease("")
        return answer if self._end(key, latest, ended, beating, last_word) else None

    def _beat(self, key: str, latest: list[_Lease], ended: threading.Event) -> None:
        """Show that the leader lives, until it has ended or was replaced."""
        while not ended.wait(self._lease_s / 4):
            lease = _Lease(latest[0].leader, latest[0].beat + 1)
            try:
                if _decode(self._swap(key, _encode(latest[0]), lease)) != lease:
                    return
            except StoreLostError as error:
                log.warning(LEASE_LOST, key=key, why=str(error))
                return
            latest[0] = lease

    def _end(
        self,
        key: str,
        latest: list[_Lease],
        ended: threading.Event,
        beating: threading.Thread,
        last: _Lease,
    ) -> bool:
        """Store the leader's last word; False where another leads."""
        ended.set()
        beating.join()
        if last.leader:
            last = _Lease(last.leader, latest[0].beat, last.answer)
        try:
            return self._swap(key, _encode(latest[0]), last) == _encode(last)
        except StoreLostError as error:
            log.warning(LEASE_LOST, key=key, why=str(error))
            return True  # this process's own: who has no store works for itself

    @contextmanager
    def _exchange(self) -> Iterator[LeaseStore]:
        try:
            with self._lock:
                yield self._store
        except Exception as error:
            raise StoreLostError(f"{type(error).__name__}: {error}") from error

    def _swap(self, key: str, expected: bytes, desired: _Lease) -> bytes:
        with self._exchange() as store:
            return store.compare_set(key, expected, _encode(desired))

    def _read(self, key: str, seen: bytes) -> bytes:
        with self._exchange() as store:
            value = store.get(key, self._lease_s)
        return seen if value is None else value


_encode = msgspec.json.Encoder().encode


def _decode(value: bytes) -> _Lease:
    """Raises: StoreLostError: it is none."""
    try:
        return msgspec.json.decode(value, type=_Lease)
    except msgspec.MsgspecError as error:
        raise StoreLostError(f"needs a lease, got {value[:60]!r}: {error}") from error

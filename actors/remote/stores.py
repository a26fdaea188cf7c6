"""TorchStore: where processes of a cluster meet before they can agree, over a store of torch.distributed."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch.distributed import (  # type: ignore[attr-defined]  # public, not declared
    DistNetworkError,
    DistStoreError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from layerzero.spec.errors import ConsistencyError, DeviceLostError

T = TypeVar("T")
PREFIX = "layerzero-group"
_DIGEST_BYTES = 64  # SHA-256 in hexadecimal: `compare_set` of torch takes text
_ANSWER_S = 10.0  # that a store's own answer may take, beyond what it was asked to wait


class TorchStore:
    """The `AgreementStore` over a `TCPStore`, `FileStore` or, for ranks that are threads, `HashStore`.

    Keys are stored under `prefix`. The store outlives process groups, so that ranks can still exchange values
    after a collective failed. One thread at a time uses an instance: it sets the timeout of its own client.

    With a `token` that only the ranks have, each value carries a keyed digest of its key and itself: a store
    of torch answers every process that reaches its port, and what such a process wrote is refused.

    A store that does not answer is lost for good: its answer may come late, to another question.

    Raises (every method): DeviceLostError: the store's process is gone, or its host is cut off.
        ConsistencyError: the value under a key has no digest of this token.
    """

    def __init__(self, store: Store, prefix: str = PREFIX, token: bytes = b"") -> None:
        self._store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self._token = token
        self._lost = False

    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`."""
        sealed = self._seal(key, value)
        self._answered(lambda: self._store.set(key, sealed))  # type: ignore[arg-type]  # bytes as well

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value under `key`, waiting for it; None after `timeout_s` seconds."""
        if not self._come(timeout_s, [key]):
            return None
        return self._open(key, self._answered(partial(self._store.get, key)))

    def wait(self, keys: Sequence[str], timeout_s: float) -> tuple[bool, ...]:
        """Whether each of `keys` is stored, once all are or after `timeout_s` seconds."""
        if self._come(timeout_s, list(keys)):
            present = (True,) * len(keys)
        else:
            present = tuple(bool(self._answered(partial(self._store.check, [key]))) for key in keys)
        if self._token:
            for key, is_present in zip(keys, present, strict=True):
                if is_present:
                    self._open(key, self._answered(partial(self._store.get, key)))
        return present

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store `desired` where `expected` is stored (b"": nothing is); the value stored afterwards."""
        before, after = (self._seal(key, value).decode() if value else "" for value in (expected, desired))
        return self._open(key, self._answered(lambda: self._store.compare_set(key, before, after)))

    def _seal(self, key: str, value: bytes) -> bytes:
        if not self._token:
            return value
        return hmac.digest(self._token, f"{key}\0".encode() + value, "sha256").hex().encode() + value

    def _open(self, key: str, sealed: bytes) -> bytes:
        if not self._token:
            return sealed
        value = sealed[_DIGEST_BYTES:]
        if not hmac.compare_digest(sealed, self._seal(key, value)):
            raise ConsistencyError(f"the store's value of {key!r} was written by no rank of this group")
        return value

    def _come(self, timeout_s: float, keys: list[str]) -> bool:
        # Given with the call: the store's own limit is also that of other ranks in this process.
        timeout = max(timeout_s, 0.001)
        started = time.monotonic()
        try:
            self._answered(lambda: self._store.wait(keys, timedelta(seconds=timeout)), timeout)
        except DistStoreError:
            if time.monotonic() - started < timeout / 2:
                raise  # not a timeout: the store has another problem
            return False
        return True

    def _answered(self, call: Callable[[], T], timeout_s: float = 0.0) -> T:
        """What a call gives, on a thread: torch's own limits do not hold where the network is cut."""
        if self._lost:
            raise DeviceLostError("the store of the ranks was lost before", retryable=True)
        answer: Future[T] = Future()
        threading.Thread(target=_answer, args=(answer, call), name="layerzero-store", daemon=True).start()
        try:
            return answer.result(timeout_s + _ANSWER_S)
        except TimeoutError as error:
            self._lost = True
            what = f"the store of the ranks has not answered for {timeout_s + _ANSWER_S:g} s"
            raise DeviceLostError(f"{what}: its host is cut off", retryable=True) from error


def _answer(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(_reached(call))
    except BaseException as error:
        answer.set_exception(error)


def open_store(host: str, timeout_s: float) -> tuple[TCPStore, tuple[str, int]]:
    """A new store in this process, and where others find it; it ends with the object."""
    store = TCPStore(host, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    return store, (host, store.port)


def connect_store(address: tuple[str, int], prefix: str, token: bytes, timeout_s: float = 10.0) -> TorchStore:
    """The store that a process has opened.

    Raises: DeviceLostError: it does not answer.
    """
    return TorchStore(connect(address, timeout_s), prefix, token)


def connect(address: tuple[str, int], timeout_s: float) -> TCPStore:
    """A client of the store that a process has opened.

    Raises: DeviceLostError: it does not answer.
    """
    where = " at {}:{}".format(*address)
    return _reached(lambda: TCPStore(*address, None, False, timedelta(seconds=timeout_s)), where)


def _reached(call: Callable[[], T], where: str = "") -> T:
    try:
        return call()
    except DistNetworkError as error:
        what = f"the store of the ranks does not answer{where}: {error}"
        raise DeviceLostError(what, retryable=True) from error

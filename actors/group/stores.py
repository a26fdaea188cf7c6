"""TorchStore: where ranks meet before they can agree, over a store of torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]  # public, not declared

from layerzero.spec.errors import DeviceLostError

T = TypeVar("T")
PREFIX = "layerzero-group"


class TorchStore:
    """The `AgreementStore` over a `TCPStore`, `FileStore` or, for ranks that are threads, `HashStore`.

    Keys are stored under `prefix`. The store outlives process groups, so that ranks can still exchange values
    after a collective failed. One thread at a time uses an instance: it sets the timeout of its own client.

    Raises (every method): DeviceLostError: the store's process is gone.
    """

    def __init__(self, store: Store, prefix: str = PREFIX) -> None:
        self._store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self._timeout_s = 0.0

    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`."""
        _reached(lambda: self._store.set(key, value))  # type: ignore[arg-type]  # bytes as well

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value under `key`, waiting for it; None after `timeout_s` seconds."""
        return self._waiting(timeout_s, lambda: self._store.get(key))

    def wait(self, keys: Sequence[str], timeout_s: float) -> tuple[bool, ...]:
        """Whether each of `keys` is stored, once all are or after `timeout_s` seconds."""

        def wait() -> bool:
            self._store.wait(list(keys))
            return True

        if self._waiting(timeout_s, wait):
            return (True,) * len(keys)
        return tuple(bool(_reached(partial(self._store.check, [key]))) for key in keys)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store `desired` where `expected` is stored (b"": nothing is); the value stored afterwards."""
        return _reached(lambda: self._store.compare_set(key, expected.decode(), desired.decode()))

    def _waiting(self, timeout_s: float, wait: Callable[[], T]) -> T | None:
        """The result of a call that waits in the store; None after `timeout_s` seconds."""
        timeout = max(timeout_s, 0.001)
        if timeout != self._timeout_s:
            self._store.set_timeout(timedelta(seconds=timeout))
            self._timeout_s = timeout
        started = time.monotonic()
        try:
            return _reached(wait)
        except DistStoreError:
            if time.monotonic() - started < timeout / 2:
                raise  # not a timeout: the store has another problem
            return None


def _reached(call: Callable[[], T]) -> T:
    try:
        return call()
    except DistNetworkError as error:
        raise DeviceLostError(f"the store of the ranks does not answer: {error}", retryable=True) from error

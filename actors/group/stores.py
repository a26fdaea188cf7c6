"""Where ranks meet before they can agree: one store in process, one over torch.distributed's.

Both keep the contract of `AgreementStore`: the first `swap` of a key wins for everybody. `ray_store.py` has a
third, over Ray.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]  # public, not declared

__all__ = ["LocalStore", "TorchStore"]

T = TypeVar("T")


class LocalStore:
    """A store for ranks that are threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        """Write `value` under `key`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def take(self, key: str, timeout_s: float) -> bytes | None:
        """What stands under `key`, waiting for it; None after `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout_s)
            return self._values.get(key)

    def meet(self, keys: Sequence[str], timeout_s: float) -> tuple[bool, ...]:
        """Whether something stands under each of `keys`, once all are there or after `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s)
            return tuple(key in self._values for key in keys)

    def swap(self, key: str, value: bytes) -> bytes:
        """Write `value` unless something stands under `key`; what stands there now."""
        with self._changed:
            stored = self._values.setdefault(key, value)
            self._changed.notify_all()
            return stored


class TorchStore:
    """A store over torch.distributed's: what torchrun users have already.

    `store` is best a `TCPStore` of its own; keys stand under `prefix`. It outlives process groups, so that
    ranks can still talk after a collective failed.
    It asks through a client of its own, whose timeouts it sets; that is used by one thread at a time.
    """

    def __init__(self, store: Store, prefix: str = "layerzero") -> None:
        self._store = PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]
        self._timeout_s = 0.0

    def put(self, key: str, value: bytes) -> None:
        """Write `value` under `key`."""
        self._store.set(key, value)  # type: ignore[arg-type]  # bytes as well

    def take(self, key: str, timeout_s: float) -> bytes | None:
        """What stands under `key`, waiting for it; None after `timeout_s` seconds.

        Raises: DistNetworkError: the store is gone.
        """
        return self._waiting(timeout_s, lambda: self._store.get(key))

    def meet(self, keys: Sequence[str], timeout_s: float) -> tuple[bool, ...]:
        """Whether something stands under each of `keys`, once all are there or after `timeout_s` seconds.

        Raises: DistNetworkError: the store is gone.
        """

        def waited() -> bool:
            self._store.wait(list(keys))
            return True

        if self._waiting(timeout_s, waited):
            return (True,) * len(keys)
        return tuple(bool(self._store.check([key])) for key in keys)

    def _waiting(self, timeout_s: float, ask: Callable[[], T]) -> T | None:
        """The answer of a question that waits in the store; None where the time is up."""
        timeout = max(timeout_s, 0.001)
        if timeout != self._timeout_s:
            self._store.set_timeout(timedelta(seconds=timeout))
            self._timeout_s = timeout
        started = time.monotonic()
        try:
            return ask()
        except DistNetworkError:
            raise
        except DistStoreError:
            if time.monotonic() - started < timeout / 2:
                raise  # no time was up: the store has another trouble
            return None

    def swap(self, key: str, value: bytes) -> bytes:
        """Write `value` unless something stands under `key`; what stands there now."""
        stored: bytes = self._store.compare_set(key, "", value.decode())
        return stored

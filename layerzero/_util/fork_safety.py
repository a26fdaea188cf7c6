"""What a forked child must not inherit: threads that are not there and locks that no thread will release."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Forkable(Protocol):
    """An object with a thread, a lock or an event loop's state, and how it begins anew in a child."""

    def after_fork(self) -> None: ...


_alive: weakref.WeakSet[Forkable] = weakref.WeakSet()


def renew_after_fork(thing: Forkable) -> None:
    """Call `thing.after_fork()` in every forked child, while `thing` is alive; it is not kept alive."""
    _alive.add(thing)


class ProcessLock:
    """One reentrant lock for what the whole process shares: `with lock.lock:`; a forked child begins anew."""

    def __init__(self) -> None:
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Begin with a lock that no thread holds."""
        self.lock = threading.RLock()


def _in_child() -> None:
    for thing in list(_alive):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)

"""The order in which the library's locks are taken, watched through the whole suite.

Every lock that the library makes is known by the line that makes it. Whoever waits for one lock while holding
another adds an edge; two threads can only wait for each other for ever where edges form a circle, so a circle
is an error even in a run where nobody waited.
"""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(f"{ROOT / folder}/" for folder in ("layerzero", "actors", "scheduler"))
_LOCK, _RLOCK = threading.Lock, threading.RLock


class LockOrder:
    """What was taken while what was held; sites are `file:line` of the line that made a lock."""

    def __init__(self) -> None:
        self.edges: dict[tuple[str, str], str] = {}
        self._mine = threading.local()
        self._judged = 0

    def waits(self, lock: Watched) -> None:
        """This thread is about to wait for `lock`."""
        for held in self._held():
            edge = (held.site, lock.site)
            if held is not lock and edge not in self.edges:
                self.edges[edge] = "".join(traceback.format_stack(sys._getframe(2), limit=6))

    def took(self, lock: Watched) -> None:
        """This thread holds `lock`, perhaps once more."""
        self._held().append(lock)

    def left(self, lock: Watched) -> None:
        """This thread has let go of `lock`; one that another thread took is not its own to count."""
        held = self._held()
        for place in range(len(held) - 1, -1, -1):
            if held[place] is lock:
                del held[place]
                return

    def circle(self) -> list[str]:
        """The sites of one circle, the first named again at the end; empty while there is an order."""
        if len(self.edges) == self._judged:
            return []
        after: dict[str, list[str]] = {}
        for one, other in list(self.edges):
            after.setdefault(one, []).append(other)
        for start in after:
            if found := _back_to(start, after):
                return found
        self._judged = len(self.edges)
        return []

    def told(self, circle: list[str]) -> str:
        """Where each edge of `circle` was first seen."""
        return "\n".join(
            f"{other} is waited for while {one} is held:\n{self.edges[one, other]}"
            for one, other in itertools.pairwise(circle)
        )

    def _held(self) -> list[Watched]:
        held: list[Watched] | None = getattr(self._mine, "held", None)
        if held is None:
            held = self._mine.held = []
        return held


def _back_to(start: str, after: dict[str, list[str]]) -> list[str]:
    paths, seen = [[start]], set()
    while paths:
        path = paths.pop()
        for site in after.get(path[-1], ()):
            if site == start:
                return [*path, site]
            if site not in seen:
                seen.add(site)
                paths.append([*path, site])
    return []


class Watched:
    """A lock of `threading` that tells `order` who waits and who holds."""

    def __init__(self, lock: Any, site: str, order: LockOrder) -> None:
        self._lock, self.site, self._order = lock, site, order
        if hasattr(lock, "_is_owned"):  # what a condition asks of a lock that one thread may take twice
            self._is_owned = lock._is_owned
            self._release_save = self._given_up
            self._acquire_restore = self._taken_again

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking:
            self._order.waits(self)
        taken: bool = self._lock.acquire(blocking, timeout)
        if taken:
            self._order.took(self)
        return taken

    def release(self) -> None:
        self._lock.release()
        self._order.left(self)

    def locked(self) -> bool:
        return bool(self._lock.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _given_up(self) -> Any:
        self._order.left(self)
        return self._lock._release_save()

    def _taken_again(self, state: Any) -> None:
        self._order.waits(self)
        self._lock._acquire_restore(state)
        self._order.took(self)

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()


def _made_by() -> str:
    """The line of this library that makes a lock right now; empty where somebody else does."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    name = frame.f_code.co_filename
    return f"{Path(name).relative_to(ROOT)}:{frame.f_lineno}" if name.startswith(OURS) else ""


def _watching(make: Callable[[], Any], order: LockOrder) -> Callable[[], Any]:
    def made() -> Any:
        site = _made_by()
        return Watched(make(), site, order) if site else make()

    return made


ORDER = LockOrder()


def watch() -> None:
    """Watch every lock that the library makes from now on."""
    threading.Lock = _watching(_LOCK, ORDER)  # type: ignore[assignment]
    threading.RLock = _watching(_RLOCK, ORDER)  # type: ignore[assignment]

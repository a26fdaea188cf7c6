"""Values by key, of those keys that were used last: what is dropped where there is no more room.

Two generations, each of half the room. What is new or used again is in the younger one; when that is full it
becomes the older one, and what has not been used since goes. So a key that is used at least once while half
the room is filled stays, and a hit in the younger generation is a look-up in a plain dict that notes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RecentCache(Generic[K, V]):
    """At most `limit` values; 0 keeps none. Threads may share it: one of them may lose what it has just put.

    `newer` is the younger generation, another dict after each turn.
    """

    __slots__ = ("_older", "_room", "_without_older", "newer")

    def __init__(self, limit: int) -> None:
        self._room = max(limit // 2, min(limit, 1))
        self._without_older = limit < 2
        self.newer: dict[K, V] = {}
        self._older: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """The value of a key, which is young from now on."""
        value = self.newer.get(key)
        if value is None:
            value = self._older.pop(key, None)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        """Keep a value; where the younger generation is full, the older one goes."""
        if not self._room:
            return
        self._older.pop(key, None)
        if len(self.newer) >= self._room and key not in self.newer:
            self._older = {} if self._without_older else self.newer
            self.newer = {}
        self.newer[key] = value

    def __contains__(self, key: K) -> bool:
        return key in self.newer or key in self._older

    def __len__(self) -> int:
        return len(self.newer) + len(self._older)

    def __iter__(self) -> Iterator[K]:
        yield from (*self.newer, *self._older)

    def items(self) -> list[tuple[K, V]]:
        """Every key with its value, the young ones first."""
        return [*self.newer.items(), *self._older.items()]

    def values(self) -> list[V]:
        """Every value, the young ones first."""
        return [*self.newer.values(), *self._older.values()]

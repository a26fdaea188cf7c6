"""The ledger of requests: at most one execution for each id, however often the request arrives.

A network may lose a request, lose its answer, or deliver either late. The client therefore repeats a request
under its number until it is answered, and the host keeps the answer until the client says that it has it.
No loop, no clock, no I/O: the host drives it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Settled(Exception):
    """A request arrived again after its client had settled it; it must not run a second time."""


class Ledger(Generic[T]):
    """What each client has asked and not settled: an entry of type T for each request number.

    Numbers of one client rise from 0. `floor` in a request says that all numbers below it are settled, so the
    memory of a client is bounded by what it has outstanding.
    """

    def __init__(self) -> None:
        self._clients: dict[str, _Client[T]] = {}
        self.executions = 0

    def find(self, client: str, number: int, floor: int) -> T | None:
        """The entry of a request that arrived before, or None for one that is new.

        Raises: Settled: the client has settled this number.
        """
        known = self._clients.setdefault(client, _Client())
        known.raise_floor(floor)
        if number < known.floor or number in known.settled:
            raise Settled(f"request {number} of {client} was settled before")
        return known.entries.get(number)

    def enter(self, client: str, number: int, entry: T) -> None:
        """Keep the entry of a new request, whose execution begins now."""
        self._clients[client].entries[number] = entry
        self.executions += 1

    def settle(self, client: str, numbers: Iterable[int]) -> list[T]:
        """Forget requests that their client needs no more; they will be refused from now on.

        Returns the entries that were kept for them.
        """
        known = self._clients.setdefault(client, _Client())
        gone = []
        for number in numbers:
            if number >= known.floor:
                known.settled.add(number)
                if (entry := known.entries.pop(number, None)) is not None:
                    gone.append(entry)
        return gone

    def forget(self, client: str) -> list[T]:
        """Forget a client that has gone for good; returns the entries that were kept for it."""
        known = self._clients.pop(client, None)
        return [] if known is None else list(known.entries.values())

    def entries(self) -> list[T]:
        """Every entry that is kept, of all clients."""
        return [entry for client in self._clients.values() for entry in client.entries.values()]


class _Client(Generic[T]):
    __slots__ = ("entries", "floor", "settled")

    def __init__(self) -> None:
        self.floor = 0
        self.entries: dict[int, T] = {}
        self.settled: set[int] = set()

    def raise_floor(self, floor: int) -> None:
        if floor > self.floor:
            self.floor = floor
            self.settled = {number for number in self.settled if number >= floor}
            self.entries = {number: entry for number, entry in self.entries.items() if number >= floor}

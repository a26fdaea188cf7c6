"""IdempotencyLog: at most one execution for each id, however often the request arrives.

A network may lose a request, lose its answer, or deliver either late. The client therefore repeats a request
under its number until it is answered, and the host keeps the answer until the client says that it has it.
No loop, no clock, no I/O: the host drives it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class AcknowledgedError(Exception):
    """A request arrived again after its client had settled it; it must not run a second time."""


class IdempotencyLog(Generic[T]):
    """What each client has asked and not settled: an entry of type T for each request number.

    Numbers of one client rise from 0. `ack_watermark` in a request says that all numbers below it are
    settled, so the memory of a client is bounded by what it has outstanding.
    """

    def __init__(self) -> None:
        self._clients: dict[str, _ClientLog[T]] = {}
        self.executions = 0

    def find(self, client: str, number: int, ack_watermark: int) -> T | None:
        """The entry of a request that arrived before, or None for one that is new.

        Raises: AcknowledgedError: the client has settled this number.
        """
        log = self._clients.setdefault(client, _ClientLog())
        log.raise_watermark(ack_watermark)
        # A copy that was delayed: its answer has arrived, and its entry is gone.
        if number < log.ack_watermark or number in log.acked:
            raise AcknowledgedError(f"request {number} of {client} was settled before")
        return log.entries.get(number)

    def add(self, client: str, number: int, entry: T) -> None:
        """Keep the entry of a new request, whose execution begins now."""
        self._clients[client].entries[number] = entry
        self.executions += 1

    def ack(self, client: str, numbers: Iterable[int]) -> list[T]:
        """Forget requests that their client needs no more; they will be refused from now on.

        Returns the entries that were kept for them.
        """
        log = self._clients.setdefault(client, _ClientLog())
        entries = []
        for number in numbers:
            if number >= log.ack_watermark:
                # Also where no entry is: a request may be given up before it arrives.
                log.acked.add(number)
                if (entry := log.entries.pop(number, None)) is not None:
                    entries.append(entry)
        return entries

    def forget(self, client: str) -> list[T]:
        """Forget a client that has gone for good; returns the entries that were kept for it."""
        log = self._clients.pop(client, None)
        return [] if log is None else list(log.entries.values())

    def entries(self) -> list[T]:
        """Every entry that is kept, of all clients."""
        return [entry for client in self._clients.values() for entry in client.entries.values()]


@dataclass(eq=False)
class _ClientLog(Generic[T]):
    ack_watermark: int = 0
    entries: dict[int, T] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)

    def raise_watermark(self, ack_watermark: int) -> None:
        if ack_watermark > self.ack_watermark:
            self.ack_watermark = ack_watermark
            self.acked = {number for number in self.acked if number >= ack_watermark}
            self.entries = {
                number: entry for number, entry in self.entries.items() if number >= ack_watermark
            }

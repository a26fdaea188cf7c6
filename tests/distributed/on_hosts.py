"""What tests of two hosts share: work on a thread of a host, an event loop there, a store of the first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from benchmarks.hosting.namespaces import ADDRESSES, Network
from layerzero.actors.remote.stores import TorchStore, connect_store, open_store
from layerzero.actors.rpc.channel import Listener
from layerzero.actors.rpc.connection import Connection
from tests.waiting import LIMIT_S

TOKEN = bytes(range(32))
SOON_S = 1.0  # what stands here for the limits that are tens of seconds


def at(hosts: Network, number: int, work: Callable[[], Any]) -> Future[Any]:
    """The result of `work` on a thread of a host, which nobody waits for at the end of the process."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            with hosts.inside(number):
                result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def store_of(hosts: Network, kind: type[TorchStore] = TorchStore) -> Callable[[int], TorchStore]:
    """What makes a client, on a host of that number, of a store that the first host has."""
    server, address = at(hosts, 1, lambda: open_store(ADDRESSES[1], LIMIT_S)).result(LIMIT_S)

    def client(number: int) -> TorchStore:
        made: TorchStore = at(hosts, number, lambda: connect_store(address, "test", TOKEN)).result(LIMIT_S)
        made.__class__ = kind
        made._server = server  # type: ignore[attr-defined]  # it ends with its last client
        return made

    return client


class Loop:
    """An event loop on a thread of a host."""

    def __init__(self, hosts: Network, number: int) -> None:
        self._running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._ended = at(hosts, number, lambda: asyncio.run(self._run()))
        self.loop, self._over = self._running.result(LIMIT_S)

    async def _run(self) -> None:
        over = asyncio.Event()
        self._running.set_result((asyncio.get_running_loop(), over))
        await over.wait()

    def run(self, work: Any) -> Any:
        """What a coroutine gives there."""
        running = asyncio.run_coroutine_threadsafe(work, self.loop)
        wait([running], 60.0)
        assert running.done(), "it did not end"  # a TimeoutError would pass for the network's
        return running.result()

    def close(self, *ends: Listener | Connection) -> None:
        """Close what is open there, and end."""

        async def close() -> None:
            for each in ends:
                each.close()
            await asyncio.sleep(0.05)  # transports end in a turn of their own

        self.run(close())
        self.loop.call_soon_threadsafe(self._over.set)
        self._ended.result(LIMIT_S)

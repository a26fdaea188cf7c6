"""A server of several processes: fronts that share one port, and the process behind them that draws tokens.

Each process is started again when it ends. They have no names that others could dial: what they are joined by
are socket pairs, which this process makes and hands over.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from layerzero._util import log
from server import engine_process
from server.counts import NAMES, Counts
from server.front import Options
from server.pipe import hand, readable

CLOSE_S = 10.0
_BACKOFF_S = (0.0, 1.0, 5.0, 30.0)
_STEADY_S = 300.0  # after which an end does not count as one more in a row
_SPAWN = multiprocessing.get_context("spawn")


class KeptProcess:
    """A process, `run(*arguments, line)`, that is started again when it ends.

    `line` brings it its connections, and ends it when this end is closed; `join` is called at each start to
    hand them over, `lost` at each end.
    """

    def __init__(
        self, name: str, run: Callable[..., None], arguments: tuple[Any, ...],
        join: Callable[[], Awaitable[None]], lost: Callable[[], None],
    ) -> None:  # fmt: skip
        self.name, self._run, self._arguments = name, run, arguments
        self._join, self._lost = join, lost
        self._process: Any = None
        self.line: socket.socket | None = None

    async def start(self) -> None:
        """Start it; it is not ready yet."""
        line, there = socket.socketpair()
        self._process = _SPAWN.Process(
            target=self._run, args=(*self._arguments, there), name=self.name, daemon=True
        )
        await asyncio.to_thread(self._process.start)
        there.close()
        self.line = line
        await self._join()

    async def keep(self) -> None:
        """Start it again whenever it has ended. Raises: what `lost` raises."""
        loop, delays = asyncio.get_running_loop(), iter(_BACKOFF_S)
        while True:
            began_s = loop.time()
            await self.ended()
            self._hang_up()
            log.error("server.process_lost", process=self.name, status=self.exit())
            self._lost()
            if loop.time() - began_s > _STEADY_S:
                delays = iter(_BACKOFF_S)
            await asyncio.sleep(next(delays, _BACKOFF_S[-1]))
            await self.start()

    async def ended(self) -> None:
        """Wait until it has ended."""
        if self._process is not None:
            await readable(self._process.sentinel)

    def exit(self) -> str:
        """How it ended."""
        self._process.join(CLOSE_S)
        return f"exit status {self._process.exitcode}"

    def terminate(self) -> None:
        """Ask it to end what it has begun."""
        if self._process is not None:
            self._process.terminate()

    async def close(self) -> None:
        """End it: what is under way there is cancelled."""
        self._hang_up()
        if self._process is not None:
            await asyncio.to_thread(self._process.join, CLOSE_S)
            self._process.kill()

    def _hang_up(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None


def serve(options: Options, run_front: Callable[..., None]) -> int:
    """Serve until SIGTERM or SIGINT; 0 after a drain, 3 where the model or a front does not come up.

    `run_front(options, numbers, row, line)` is what each front runs.
    """
    try:
        reservation = reserved(options)
    except OSError as error:
        log.error("server.not_started", why=f"{options.host}:{options.port}: {error}")
        return 3
    with reservation:
        port = int(reservation.getsockname()[1])
        return asyncio.run(_Server(options, port, run_front).run())


def bound(host: str, port: int, *flags: int) -> socket.socket:
    """A socket at an address; `flags` say who may have it as well, as SO_REUSEPORT: any of this user's."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        for flag in flags:
            found.setsockopt(socket.SOL_SOCKET, flag, 1)
        found.bind((host, port))
    except OSError:
        found.close()
        raise
    return found


def reserved(options: Options) -> socket.socket:
    """The address of the server, kept from others; it does not listen.

    Raises: OSError: another server has it, one with several fronts too.
    """
    with bound(options.host, options.port, socket.SO_REUSEADDR) as alone:  # refused where others listen
        port = alone.getsockname()[1]
    return bound(options.host, port, socket.SO_REUSEPORT)  # refuses those that look before it listens


class _Server:
    """The process that draws, and its fronts."""

    def __init__(self, options: Options, port: int, run_front: Callable[..., None]) -> None:
        self._drain_s, count = options.drain_s, options.front_count
        numbers = _SPAWN.RawArray(ctypes.c_int64, (count + 1) * len(NAMES))
        self._counts = Counts(numbers, count)
        self._engine = KeptProcess("engine", engine_process.run, (options,), self._join, self._engine_lost)
        self._fronts = [self._front((run_front, (options, port, numbers, row))) for row in range(count)]

    def _front(self, what: tuple[Callable[..., None], tuple[Any, ...]]) -> KeptProcess:
        run, arguments = what
        row = Counts(*arguments[2:])

        async def join() -> None:
            self._pair(front)

        def lost() -> None:
            self._lost("front_restarts")
            row.clear("active")

        front = KeptProcess("front", run, arguments, join, lost)
        return front

    async def _join(self) -> None:
        for front in self._fronts:
            self._pair(front)

    def _pair(self, front: KeptProcess) -> None:
        """Join a front and the engine, if both are there; else it is done when the other one is started."""
        if front.line is None or self._engine.line is None:
            return
        for line, end in zip((front.line, self._engine.line), socket.socketpair(), strict=True):
            with end, suppress(OSError):  # a process that has just ended is joined again
                hand(line, end)

    def _engine_lost(self) -> None:
        self._lost("engine_restarts")

    def _lost(self, what: str) -> None:
        if not self._counts.total("ready"):
            raise RuntimeError("a process ended before the server was ready")
        self._counts.add(what)

    async def run(self) -> int:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        every = [self._engine, *self._fronts]
        try:
            for each in every:
                await each.start()
            keepers = [asyncio.ensure_future(each.keep()) for each in every]
            stop = asyncio.ensure_future(stopped.wait())
            await asyncio.wait([stop, *keepers], return_when=asyncio.FIRST_COMPLETED)
            for task in keepers:
                task.cancel()
            failed = [error for error in await asyncio.gather(*keepers, return_exceptions=True)
                      if not isinstance(error, asyncio.CancelledError)]  # fmt: skip
            if failed:
                log.error("server.not_started", why=str(failed[0]))
                return 3
            await self._drain()
            return 0
        finally:
            for front in self._fronts:
                front.terminate()
            for each in reversed(every):
                await each.close()

    async def _drain(self) -> None:
        if not self._counts.total("ready"):
            return  # nothing has begun
        for front in self._fronts:
            front.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s + CLOSE_S):
                for front in self._fronts:
                    await front.ended()

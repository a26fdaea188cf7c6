"""The process that draws tokens for fronts in others: HTTP takes no time from its event loop.

With a cluster it sends requests to replicas, which draw; the fronts see no difference.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from prometheus_client import generate_latest

import layerzero as lz
from layerzero.health.device_faults import lost_device
from server.fleet import FleetService
from server.front import Choice, Front, Options
from server.pipe import End, Pipe, Query, Ready, Reply, Start, Stop, ToEngine, Token, connections
from server.service import LOG, open_service, settings_of

EXIT_AFTER_FAULT = 70


def run(options: Options, line: socket.socket) -> None:
    """Serve the fronts whose connections come over `line`, until its other end is closed."""
    # A terminal sends them to every process of the group. What this process starts does not inherit handlers.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    asyncio.run(_serve(options, line))


async def _serve(options: Options, line: socket.socket) -> None:
    async with lz.start(settings_of(options)) as runtime:
        service = await open_service(options, runtime)
        fronts: set[_Server] = set()
        async for connection in connections(line):
            front = _Server(service, fronts.discard)
            fronts.add(front)
            await front.open(connection)
        await asyncio.gather(*(front.cancel_all() for front in fronts))


class _Server:
    """The requests of one front; `gone` is called when it has ended."""

    def __init__(self, service: Front, gone: Callable[[Any], None] = lambda _: None) -> None:
        self.service, self._gone = service, gone
        self.pipe: Pipe
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def open(self, connection: socket.socket) -> None:
        """Serve the front at the other end."""
        _, self.pipe = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Pipe(ToEngine, self._receive, self._lost), connection
        )
        self.pipe.send(Ready(self.service.max_model_len))

    def _lost(self) -> None:
        """No process wants what the front has left behind."""
        self._gone(self)
        for task in self._tasks.values():
            task.cancel()

    def _receive(self, message: Start | Stop | Query) -> None:
        if isinstance(message, Stop):
            task = self._tasks.get(message.number)
            if task is not None:
                task.cancel()
        else:
            work = self._draw(message) if isinstance(message, Start) else self._answer(message)
            task = self._tasks[message.number] = asyncio.ensure_future(work)
            # Also of a task that is stopped before it begins.
            task.add_done_callback(lambda _: self._tasks.pop(message.number))

    async def _answer(self, query: Query) -> None:
        body: Any
        if query.what == "metrics":
            body = generate_latest(await self.service.exposed()).decode()
        else:
            body = await self.service.state()
        self.pipe.send(Reply(query.number, body))

    async def _draw(self, start: Start) -> None:
        """Draw the tokens of one choice, and say how that ended."""
        number, send, service = start.number, self.pipe.send, self.service
        try:
            grammar = None if isinstance(service, FleetService) else await service.grammar(start.constraint)
            choice = Choice(
                start.prompt, start.sampling, start.max_tokens, start.user, start.constraint,
                start.ignore_eos, start.patient, grammar,
            )  # fmt: skip
            await service.forward(choice, start.so_far, lambda drawn: send(Token(number, *drawn)))
        except lz.OverloadedError as overloaded:
            send(End(number, ("OverloadedError", str(overloaded), overloaded.retry_after)))
        except (lz.DeviceLostError, lz.GrammarLimitError) as ended:  # this process can continue
            send(End(number, (type(ended).__name__, str(ended), 0.0)))
        except Exception as error:
            LOG.exception("a request failed")
            if lost_device(error) is not None:  # no call of this process reaches the device any more
                os._exit(EXIT_AFTER_FAULT)
            send(End(number, (type(error).__name__, str(error), 0.0)))
        else:
            send(End(number))

    async def cancel_all(self) -> None:
        """End what the front has left behind."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

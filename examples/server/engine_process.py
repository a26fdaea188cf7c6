"""The process that draws tokens for a front in another one: HTTP takes no time from its event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import aclosing
from typing import Any

from prometheus_client import generate_latest

import layerzero as lz
from layerzero.health.device_faults import lost_device
from server.front import Options
from server.pipe import End, Pipe, Query, Ready, Reply, Start, Stop, ToEngine, Token
from server.service import LOG, Service, settings_of

EXIT_AFTER_FAULT = 70


def run(options: Options, connection: socket.socket) -> None:
    """Serve the other end of `connection` until it is closed."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a terminal sends them to every process of the group
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_serve(options, connection))


async def _serve(options: Options, connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    async with lz.start(settings_of(options)) as runtime:
        server = _Server(Service(options, runtime))
        _, server.pipe = await loop.connect_accepted_socket(server.connect, connection)
        server.pipe.send(Ready(server.service.max_model_len))
        await server.closed.wait()
        await server.cancel_all()


class _Server:
    """The requests of one front."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.closed = asyncio.Event()
        self.pipe: Pipe
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def connect(self) -> Pipe:
        return Pipe(ToEngine, self._receive, self.closed.set)

    def _receive(self, message: Start | Stop | Query) -> None:
        if isinstance(message, Start):
            self._tasks[message.number] = asyncio.ensure_future(self._draw(message))
        elif isinstance(message, Stop):
            task = self._tasks.get(message.number)
            if task is not None:
                task.cancel()
        else:
            self.pipe.send(Reply(message.number, self._answer(message.what)))

    def _answer(self, what: str) -> Any:
        if what == "metrics":
            return generate_latest(self.service.registry).decode()
        return {**self.service.state(), "captures": self.service.captures}

    async def _draw(self, start: Start) -> None:
        """Draw the tokens of one choice, and say how that ended."""
        number, send, service = start.number, self.pipe.send, self.service
        try:
            tokens = service.engine.generate(
                start.prompt, start.sampling, start.max_tokens, user=start.user,
                grammar=await service.grammar(start.constraint), ignore_eos=start.ignore_eos,
                patient=start.patient, so_far=start.so_far,
            )  # fmt: skip
            async with aclosing(tokens):
                async for drawn in tokens:
                    send(Token(number, *drawn))
        except lz.OverloadedError as overloaded:
            send(End(number, ("OverloadedError", str(overloaded), overloaded.retry_after)))
        except Exception as error:
            LOG.exception("a request failed")
            if lost_device(error) is not None:  # no call of this process reaches the device any more
                os._exit(EXIT_AFTER_FAULT)
            send(End(number, (type(error).__name__, str(error), 0.0)))
        else:
            send(End(number))
        finally:
            del self._tasks[number]

    async def cancel_all(self) -> None:
        """End what the front has left behind."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

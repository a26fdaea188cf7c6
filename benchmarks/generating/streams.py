"""A client of streamed completions that costs little: bytes are kept with their times and read afterwards.

One connection a request. What a server sends is stamped when it arrives; events are parsed when a load has
ended, so that parsing takes no time from the servers and adds none to what is measured.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

WORD = 4  # characters of every token, by which a client counts them


@dataclass(frozen=True, slots=True)
class Shape:
    """What requests look like: tokens of a prompt and of its answer, from the first to the last number."""

    prompt: tuple[int, int] = (32, 1024)
    answer: tuple[int, int] = (16, 256)
    vocabulary: int = 128_256


def bodies(shape: Shape, model: str, seed: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Requests without end, and how many tokens each asks for; the same for the same seed."""
    draw = random.Random(seed)
    while True:
        length, tokens = draw.randint(*shape.prompt), draw.randint(*shape.answer)
        prompt = [draw.randrange(10, shape.vocabulary) for _ in range(length)]
        yield {
            "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True,
            "stream": True,
        }, tokens  # fmt: skip


@dataclass(slots=True)
class Reply:
    """One request: when it was due, what came when, and how it ended."""

    due: float
    asked: int
    received: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""
    # Read from what was received:
    times: list[float] = field(default_factory=list)  # of each event that brought tokens
    counts: list[int] = field(default_factory=list)  # how many it brought

    def read(self) -> None:
        """Find the events; `error` says what is wrong with them."""
        head, done, rest, body = b"", False, b"", b""
        for at, data in self.received:
            rest += data
            if not head:
                before, found, after = rest.partition(b"\r\n\r\n")
                if not found:
                    continue
                head, rest = before, after
            if not head.startswith(b"HTTP/1.1 200"):
                continue
            piece, rest = dechunked(rest)
            *events, body = (body + piece).split(b"\n\n")
            done = done or b"data: [DONE]" in events
            brought = sum(self._tokens(event[6:]) for event in events if event.startswith(b"data: {"))
            if brought:
                self.times.append(at)
                self.counts.append(brought)
        self.received = []
        self.error = self.error or self._wrong(head, done, body + rest)

    def _wrong(self, head: bytes, done: bool, rest: bytes) -> str:
        """What is wrong with the whole answer."""
        count = sum(self.counts)
        if not head.startswith(b"HTTP/1.1 200"):
            said = (head.split(b"\r\n")[0] + b" " + rest[:160]).decode("utf-8", "replace")
            return said.strip() or "nothing was answered"
        if not done:
            return f"cut off after {count} tokens"
        return "" if count == self.asked else f"{count} tokens, not the {self.asked} that were asked for"

    def _tokens(self, event: bytes) -> int:
        said = json.loads(event)
        if "error" in said:
            self.error = json.dumps(said["error"])[:160]
            return 0
        return sum(len(choice["text"]) for choice in said["choices"]) // WORD


def dechunked(raw: bytes) -> tuple[bytes, bytes]:
    """The contents of all whole chunks at the beginning of `raw`, and the rest of it."""
    whole = []
    at = 0
    while (line := raw.find(b"\r\n", at)) >= 0:
        size = int(raw[at:line].split(b";")[0] or b"0", 16)
        end = line + 2 + size + 2
        if end > len(raw):
            break
        whole.append(raw[line + 2 : end - 2])
        at = end
    return b"".join(whole), raw[at:]


class _Stream(asyncio.Protocol):
    """One connection with one request."""

    def __init__(self, reply: Reply, request: bytes, ended: asyncio.Future[None]) -> None:
        self._reply, self._request, self._ended = reply, request, ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._reply.received.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._reply.error = f"{type(exc).__name__}: {exc}"
        if not self._ended.done():
            self._ended.set_result(None)


class Client:
    """Sends requests to one server; `shape` is what they look like."""

    def __init__(self, port: int, model: str, shape: Shape) -> None:
        self.port, self.model, self.shape = port, model, shape

    async def one(self, body: dict[str, Any], asked: int, due: float) -> Reply:
        """One request, to its end."""
        loop = asyncio.get_running_loop()
        reply, data = Reply(due, asked), json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        ended: asyncio.Future[None] = loop.create_future()
        transport = None
        try:
            transport, _ = await loop.create_connection(
                lambda: _Stream(reply, head.encode() + data, ended), "127.0.0.1", self.port
            )
            await ended
        except asyncio.CancelledError:
            reply.error = "not answered in time"
        except OSError as error:
            reply.error = f"{type(error).__name__}: {error}"
        finally:
            if transport is not None:
                transport.abort()
        return reply

    async def closed(self, clients: int, seconds: float, seed: int, drain_s: float) -> list[Reply]:
        """So many clients, each of which asks again at once, for so long."""
        until = time.perf_counter() + seconds
        requests, replies = bodies(self.shape, self.model, seed), list[Reply]()

        async def client() -> None:
            while (now := time.perf_counter()) < until:
                replies.append(await self.one(*next(requests), now))
                if replies[-1].error:
                    await asyncio.sleep(0.05)  # no storm of refusals

        tasks = [asyncio.ensure_future(client()) for _ in range(clients)]
        await _ended(tasks, seconds + drain_s)
        return _read(replies)

    async def poisson(self, rate: float, seconds: float, seed: int, drain_s: float) -> list[Reply]:
        """Arrivals of `rate` a second for so long; all answers are waited for, at most `drain_s` more."""
        draw, requests = random.Random(seed), bodies(self.shape, self.model, seed)
        gaps: list[float] = []
        while sum(gaps) < seconds:
            gaps.append(draw.expovariate(rate))
        prepared = [next(requests) for _ in gaps]  # not while the clock runs
        start = due = time.perf_counter()
        tasks: list[asyncio.Task[Reply]] = []
        for gap, (body, asked) in zip(gaps[:-1], prepared, strict=False):
            due += gap
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.ensure_future(self.one(body, asked, due)))
        await asyncio.sleep(max(0.0, start + seconds - time.perf_counter()))
        await _ended(tasks, drain_s)
        return _read([task.result() for task in tasks])


async def _ended(tasks: list[Any], within_s: float) -> None:
    """Wait for all; those that take longer are cancelled, and say so in their replies."""
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=within_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks)


def _read(replies: list[Reply]) -> list[Reply]:
    for reply in replies:
        reply.read()
    return replies

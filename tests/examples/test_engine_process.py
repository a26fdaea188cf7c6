"""The process that draws for fronts in others, with a front of the test's own, and the other way round."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

for package in ("openai", "starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")

from server.engine import Drawn  # noqa: E402  the skips come first
from server.engine_process import _Server  # noqa: E402
from server.front import Choice  # noqa: E402
from server.pipe import End, Pipe, Ready, Start, Stop, ToEngine, ToFront, Token  # noqa: E402
from server.protocol import Constraint, Sampling  # noqa: E402
from server.split import EngineLink  # noqa: E402

import layerzero as lz  # noqa: E402
from tests.waiting import LIMIT_S  # noqa: E402

pytestmark = pytest.mark.asyncio


class Endless:
    """A service that draws a token a turn of the loop for as long as it is let."""

    max_model_len = 8

    def __init__(self) -> None:
        self.under_way = 0

    async def grammar(self, constraint: object) -> None:
        return None

    async def forward(self, choice: Any, so_far: Sequence[int], take: Callable[[Any], None]) -> None:
        self.under_way += 1
        try:
            while True:
                take((7, None, (), False, True))
                await asyncio.sleep(0)
        finally:
            self.under_way -= 1


async def test_nothing_is_drawn_for_a_front_that_is_gone() -> None:
    """Its connection ends, and so does every request that it had."""
    loop, service = asyncio.get_running_loop(), Endless()
    drawn, gone = asyncio.Event(), asyncio.Event()
    here, there = socket.socketpair()
    engine = _Server(service, lambda _: gone.set())  # type: ignore[arg-type]

    def receive(message: Any) -> None:
        if isinstance(message, Token):
            drawn.set()

    await engine.open(there)
    _, front = await loop.connect_accepted_socket(lambda: Pipe(ToFront, receive, lambda: None), here)
    for number in range(3):
        front.send(start(number))
    async with asyncio.timeout(LIMIT_S):
        await drawn.wait()
        assert service.under_way and not gone.is_set()
        front.close()
        await gone.wait()
        for _ in range(10):  # turns of the loop in which what is cancelled ends
            await asyncio.sleep(0)
    assert service.under_way == 0


async def test_a_request_that_is_stopped_before_it_begins_leaves_nothing() -> None:
    """Both messages are read in one turn of the loop, as those of a client that goes at once are."""
    loop, service = asyncio.get_running_loop(), Endless()
    here, there = socket.socketpair()
    engine = _Server(service)  # type: ignore[arg-type]
    drawn = asyncio.Event()

    def receive(message: Any) -> None:
        if isinstance(message, Token):
            drawn.set()

    await engine.open(there)
    _, front = await loop.connect_accepted_socket(lambda: Pipe(ToFront, receive, lambda: None), here)
    async with asyncio.timeout(LIMIT_S):
        for number in range(3):
            front.send(start(number))
            front.send(Stop(number))
        front.send(start(3))  # it shows that the others have been read
        await drawn.wait()
    assert list(engine._tasks) == [3] and service.under_way == 1
    await engine.cancel_all()
    assert not engine._tasks and service.under_way == 0
    front.close()
    engine.pipe.close()


def start(number: int, constraint: Constraint | None = None) -> Start:
    return Start(number, [1, 2], Sampling(seed=1), 9, "", constraint, False, False, [])


CHOICE = Choice([1, 2], Sampling(seed=1), 3, "", None, False, False)


def linked() -> tuple[EngineLink, list[Any]]:
    """A front's end of a connection that serves, and what it has sent."""
    link, sent = EngineLink(), list[Any]()
    link._pipe = type("Sink", (), {"send": staticmethod(sent.append)})()
    link._receive(Ready(8))
    return link, sent


@pytest.mark.parametrize("error", [("OverloadedError", "full", 1.0), ("RuntimeError", "no", 0.0), None])
async def test_a_request_that_has_ended_there_leaves_nothing_here(error: Any) -> None:
    """A refusal, an error or an early end: no stream is kept, and nothing is left to stop."""
    link, sent = linked()
    tokens = link.generate(CHOICE)
    drawn = asyncio.ensure_future(anext(tokens, None))
    await asyncio.sleep(0)
    assert list(link._streams) == [sent[0].number]
    link._receive(End(sent[0].number, error))
    if error is None:
        assert await drawn is None
    else:
        with pytest.raises(lz.OverloadedError if error[0] == "OverloadedError" else RuntimeError):
            await drawn
    assert not link._streams and len(sent) == 1


async def test_tokens_that_have_come_are_given_though_their_engine_is_gone() -> None:
    """A client that reads slowly gets its whole text: nothing of it is to be drawn any more."""
    link, sent = linked()
    tokens = link.generate(CHOICE)
    first = asyncio.ensure_future(anext(tokens))
    await asyncio.sleep(0)
    for token in range(3):
        link._receive(Token(sent[0].number, token, None, (), False, True))
    link._lost()
    drawn = [await first, *[token async for token in tokens]]
    assert drawn == [Drawn(token, None, (), False, True) for token in range(3)]
    assert not link._streams and len(sent) == 1


async def test_a_message_that_cannot_be_sent_fails_alone() -> None:
    """Its sender is told; what others send in the same turn, and later, arrives."""
    loop = asyncio.get_running_loop()
    here, there = socket.socketpair()
    received, last = list[Any](), asyncio.Event()

    def receive(message: Any) -> None:
        received.append(message)
        if message == Stop(3):
            last.set()

    _, reader = await loop.connect_accepted_socket(lambda: Pipe(ToEngine, receive, lambda: None), there)
    link, _ = linked()
    _, pipe = await loop.connect_accepted_socket(lambda: Pipe(ToFront, print, lambda: None), here)
    link._pipe = pipe
    vast = Constraint("response_format", {"const": 1 << 64})
    pipe.send(Stop(1))
    with pytest.raises(OverflowError):
        pipe.send(start(0, vast))
    with pytest.raises(OverflowError):
        await anext(link.generate(replace(CHOICE, constraint=vast)))
    assert not link._streams
    pipe.send(Stop(2))
    await asyncio.sleep(0)
    pipe.send(Stop(3))
    async with asyncio.timeout(LIMIT_S):
        await last.wait()
    assert [message.number for message in received if message != Stop(0)] == [1, 2, 3]
    pipe.close()
    reader.close()

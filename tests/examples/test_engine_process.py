"""The process that draws for fronts in others, with a front of the test's own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

import pytest

for package in ("openai", "starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")

from server.engine_process import _Server  # noqa: E402  the skips come first
from server.pipe import Pipe, Start, ToFront, Token  # noqa: E402
from server.protocol import Sampling  # noqa: E402

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
        front.send(Start(number, [1, 2], Sampling(seed=1), 9, "", None, False, False, []))
    async with asyncio.timeout(LIMIT_S):
        await drawn.wait()
        assert service.under_way and not gone.is_set()
        front.close()
        await gone.wait()
        for _ in range(10):  # turns of the loop in which what is cancelled ends
            await asyncio.sleep(0)
    assert service.under_way == 0

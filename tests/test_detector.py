"""The suite's detector of blocking calls: it sees one in a loop, and nothing outside of loops."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from blockbuster import BlockingError


def test_a_coroutine_that_sleeps_or_waits_for_a_socket_is_seen() -> None:
    """What would hold up every other request of the loop."""
    left, right = socket.socketpair()

    async def sleeps() -> None:
        time.sleep(0.001)  # noqa: ASYNC251  the planted call

    async def waits() -> None:
        left.recv(1)

    with left, right:
        right.sendall(b"x")
        for planted in (sleeps, waits):
            with pytest.raises(BlockingError):
                asyncio.run(planted())


def test_another_thread_may_block() -> None:
    """That is what threads are for."""
    assert asyncio.run(asyncio.to_thread(time.sleep, 0.001)) is None
    time.sleep(0.001)

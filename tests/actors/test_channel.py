"""The side channel: frames in order, answers, errors, the handshake, and what is read before an end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from layerzero.actors.channel import MAX_FRAME, Address, Connection, Listener, connect
from layerzero.actors.lives import Lifetimes
from layerzero.errors import DeviceLostError
from layerzero.settings import Settings
from tests.clocks import FakeClock

pytestmark = pytest.mark.asyncio

SECRET = b"s" * 32


@asynccontextmanager
async def pair(unix: bool, **handlers: Any) -> AsyncIterator[tuple[Listener, Address, Connection]]:
    listener = Listener(handlers, node="here", host="127.0.0.1", secret=SECRET)
    address = await listener.open()
    connection = await connect(address, client="test", node="here" if unix else "there")
    try:
        yield listener, address, connection
    finally:
        connection.close()
        listener.close()
        await asyncio.sleep(0.05)  # the transports of both ends close on later turns of the loop


@pytest.mark.parametrize("unix", [True, False])
async def test_asking(unix: bool) -> None:
    """Answers of plain and async handlers, errors by their class, unknown kinds; order of notes."""
    noted: list[Any] = []

    async def later(body: Any, _: Connection) -> Any:
        await asyncio.sleep(0.01)
        return body * 2

    def bad(body: Any, _: Connection) -> Any:
        raise KeyError(body)

    handlers = {"echo": lambda b, _: b, "later": later, "bad": bad, "note": lambda b, _: noted.append(b)}
    async with pair(unix, **handlers) as (_, _, connection):
        body = {"a": [1, 2.5, None, b"x", "y"]}
        assert await connection.ask("echo", body) == body
        assert await asyncio.gather(*(connection.ask("later", i) for i in range(20))) == [
            2 * i for i in range(20)
        ]
        with pytest.raises(KeyError, match="which"):
            await connection.ask("bad", "which")
        with pytest.raises(LookupError, match="no handler is registered for 'none'; there are: bad, echo"):
            await connection.ask("none")
        for i in range(500):
            connection.tell("note", i)
        await connection.ask("echo")
        assert noted == list(range(500))


async def test_a_wrong_secret_is_refused() -> None:
    """Nothing is served before the proof, and the refusal ends the socket."""
    async with pair(True, echo=lambda b, _: b) as (_, address, _):
        wrong = msgspec.structs.replace(address, secret=b"w" * 32)
        stranger = await connect(wrong, client="stranger", node="here")
        with pytest.raises(DeviceLostError):
            await stranger.ask("echo", 1)
        stranger.close()


async def test_frames_that_are_no_frames_end_the_socket() -> None:
    """Too long, not msgpack, or a message before the handshake."""
    async with pair(False) as (_, address, _):
        for data in (
            (MAX_FRAME + 1).to_bytes(4, "big"),
            b"\x00\x00\x00\x01\xc1",
            b"\x00\x00\x00\x02\x91\x01",
        ):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(data)
            await asyncio.wait_for(reader.read(), 10.0)  # the challenge, then the end
            assert reader.at_eof()
            writer.close()
            await writer.wait_closed()
        big = await connect(address, client="big", node="there")
        with pytest.raises(ValueError, match="at most"):
            big.tell("x", b"0" * (MAX_FRAME + 1))
        big.close()
        await big.closed.wait()


async def test_what_was_written_before_the_end_is_read() -> None:
    """The end of a socket comes after every frame before it; who still asks gets an error."""
    got: list[int] = []

    async def burst(_: Any, connection: Connection) -> None:
        for i in range(1000):
            connection.tell("item", i)
        await connection.flushed()
        connection.close()

    listener = Listener({"burst": burst}, node="here", host="127.0.0.1", secret=SECRET)
    address = await listener.open()
    connection = await connect(
        address, client="c", node="here", handlers={"item": lambda body, _: got.append(body)}
    )
    seen: list[int] = []
    connection.when_closed(lambda: seen.append(len(got)))
    with pytest.raises(DeviceLostError):
        await connection.ask("burst")
    assert seen == [1000]
    assert got == list(range(1000))
    listener.close()
    assert not os.path.exists(address.path)  # noqa: ASYNC240


async def test_the_crash_loop_breaker() -> None:
    """Delays double, the limit ends it, and deaths of long ago do not count."""
    clock = FakeClock()
    lives = Lifetimes(Settings(max_restarts=3), clock)
    delays = []
    for _ in range(3):
        assert lives.died()
        delays.append(lives.delay_s)
    assert delays == [0.0, 0.1, 0.2]
    assert not lives.died()
    assert "max_restarts=3" in lives.verdict
    other = Lifetimes(Settings(max_restarts=1), clock)
    assert other.died()
    clock.advance(301.0)
    assert other.died()
    assert other.restarts == 2

"""Peers of a side channel that do what they may not: repeat what they overheard, read slowly."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from layerzero.actors.rpc.channel import connect
from layerzero.actors.rpc.connection import Connection, _proof
from layerzero.actors.rpc.frames import Greeting, Notification, decode, encode
from tests.actors.rpc.test_channel import SECRET, pair
from tests.waiting import until, within

pytestmark = pytest.mark.asyncio


async def test_a_proof_that_was_overheard_is_of_no_use(caplog: pytest.LogCaptureFixture) -> None:
    """Each connection has a challenge of its own: the same words again are refused, told and counted."""
    served: list[Any] = []
    async with pair(False, note=lambda body, _: served.append(body)) as (listener, address, _):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        challenge = decode(
            memoryview(await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big")))
        )
        words = [encode(Greeting("friend", _proof(SECRET, challenge.nonce))), encode(Notification("note", 1))]
        frames = b"".join(len(each).to_bytes(4, "big") + each for each in words)
        writer.write(frames)
        await until(lambda: served == [1])
        strange_reader, stranger = await asyncio.open_connection(address.host, address.port)
        stranger.write(frames)
        with suppress(ConnectionError):
            await within(strange_reader.read())
        assert served == [1] and set(listener.connections) == {"test", "friend"}
        said = [
            each.getMessage() for each in caplog.records if "channel.unauthenticated" in each.getMessage()
        ]
        assert len(said) == 1 and "refused=1" in said[0] and "a proof that does not fit" in said[0]
        writer.close()
        stranger.close()


async def test_who_reads_slowly_holds_up_its_own_stream_alone() -> None:
    """What sends it a stream waits for it, with no more than a buffer in memory; others are served."""
    sent: list[int] = []

    async def burst(_: Any, connection: Connection) -> int:
        for number in range(400):
            connection.notify("item", (number, b"x" * 50_000))
            sent.append(connection._transport.get_write_buffer_size())
            await connection.writable()
        return len(sent)

    got: list[int] = []
    async with pair(False, burst=burst, echo=lambda b, _: b) as (_, address, friend):
        handlers: dict[str, Any] = {"item": lambda body, _: got.append(body[0])}
        slow = await connect(address, client="slow", node="there", handlers=handlers)
        loop = asyncio.get_running_loop()
        asked = asyncio.create_task(slow.request("burst"))
        await until(lambda: bool(sent))
        loop.remove_reader(slow._file)  # it reads nothing more
        await until(lambda: sent[-1] > 0)
        for number in range(50):
            assert await within(friend.request("echo", number)) == number
        assert len(sent) < 400 and max(sent) < 1 << 20 and not asked.done()
        loop.add_reader(slow._file, slow._readable)
        assert await within(asked) == 400
        assert got == list(range(400))
        slow.close()

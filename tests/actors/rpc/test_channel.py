"""The side channel: frames in order, answers, errors, the handshake, and what is read before an end."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from layerzero.actors.remote.restarts import RestartPolicy
from layerzero.actors.rpc.channel import MAX_UNAUTHENTICATED, Listener, connect
from layerzero.actors.rpc.connection import MAX_GREETING, Connection
from layerzero.actors.rpc.frames import Address
from layerzero.actors.rpc.message_stream import ITEMS, MAX_FRAME
from layerzero.spec.errors import DeviceLostError
from layerzero.spec.settings import Settings
from tests.children import Child
from tests.clocks import FakeClock
from tests.waiting import EVERY_S, LIMIT_S, until, within

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
        assert await connection.request("echo", body) == body
        assert await asyncio.gather(*(connection.request("later", i) for i in range(20))) == [
            2 * i for i in range(20)
        ]
        with pytest.raises(KeyError, match="which"):
            await connection.request("bad", "which")
        with pytest.raises(LookupError, match="no handler is registered for 'none'; there are: bad, echo"):
            await connection.request("none")
        for i in range(500):
            connection.notify("note", i)
        await connection.request("echo")
        assert noted == list(range(500))


async def test_a_wrong_secret_is_refused() -> None:
    """Nothing is served before the proof, and the refusal ends the socket."""
    async with pair(True, echo=lambda b, _: b) as (_, address, _):
        wrong = msgspec.structs.replace(address, secret=b"w" * 32)
        stranger = await connect(wrong, client="stranger", node="here")
        with pytest.raises(DeviceLostError):
            await stranger.request("echo", 1)
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
            big.notify("x", b"0" * (MAX_FRAME + 1))
        big.close()
        await big.closed.wait()


def ask_frame(body: bytes) -> bytes:
    """A question of the kind "echo" with a body in msgpack."""
    message = b"\x94\xa7request\x01\xa4echo" + body
    return len(message).to_bytes(4, "big") + message


@pytest.mark.parametrize(
    "frame",
    [ask_frame(b"\x91" * 5000 + b"\x01"), ask_frame(b"\xa2\xff\xfe"), ask_frame(b"\xc1")],
    ids=["too deep", "no text", "no msgpack"],
)
@pytest.mark.parametrize("pieces", [1, 2])
async def test_a_frame_that_cannot_be_read_ends_its_channel_alone(frame: bytes, pieces: int) -> None:
    """After the handshake too, whole or in pieces: no exception of the loop's, others are served."""
    async with pair(False, echo=lambda b, _: b) as (listener, address, connection):
        raised: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
        other = await connect(address, client="other", node="there")
        for i in range(pieces):
            other._transport.write(frame[i * len(frame) // pieces : (i + 1) * len(frame) // pieces])
            await asyncio.sleep(0.02)
        await within(other.closed.wait())
        await until(lambda: set(listener.connections) == {"test"})
        assert await connection.request("echo", 1) == 1
        assert raised == []


async def test_what_a_handler_cannot_say_is_an_error_of_its_question() -> None:
    """Too deep, beyond 64 bits, half a character, too long a text; a note that fails costs no other frame."""
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    noted: list[int] = []

    def says(body: Any, _: Connection) -> Any:
        if body == "half":
            raise ValueError("half \ud800")
        if body == "long":
            raise ValueError("x" * (MAX_FRAME + 1))
        return {"deep": deep, "big": 1 << 70}[body]

    def note(body: int, _: Connection) -> None:
        if body == 1:
            raise ValueError("one")
        noted.append(body)

    async with pair(True, says=says, note=note) as (_, _, connection):
        for body, kind in (
            ("deep", TypeError),
            ("big", TypeError),
            ("half", ValueError),
            ("long", ValueError),
        ):
            with pytest.raises(kind):
                await connection.request("says", body)
        for i in range(3):
            connection.notify("note", i)
        with pytest.raises(KeyError):
            await connection.request("says", "no such thing")
        assert noted == [0, 2]


async def test_a_stranger_may_say_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the handshake a frame above a kilobyte is refused by its length: none of it is taken in."""
    async with pair(False) as (listener, address, _):
        monkeypatch.setattr("layerzero.actors.rpc.connection.HANDSHAKE_S", 3600.0)
        for length in (MAX_GREETING + 1, MAX_FRAME):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(length.to_bytes(4, "big"))
            await within(reader.read())  # the challenge, then the end
            assert reader.at_eof()
            writer.close()
        assert set(listener.connections) == {"test"}


async def test_strangers_have_few_places_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred silent connections the latest stand open; who proves itself is served all the same."""
    async with pair(False, echo=lambda b, _: b) as (listener, address, connection):
        monkeypatch.setattr("layerzero.actors.rpc.connection.HANDSHAKE_S", 3600.0)
        sockets = [
            await asyncio.open_connection(address.host, address.port) for _ in range(3 * MAX_UNAUTHENTICATED)
        ]
        await asyncio.gather(*(reader.readexactly(4) for reader, _ in sockets))

        for reader, _ in sockets[: 2 * MAX_UNAUTHENTICATED]:
            with suppress(ConnectionError):
                await within(reader.read())
        assert len(listener._unauthenticated) == MAX_UNAUTHENTICATED
        friend = await connect(address, client="friend", node="there")
        assert await friend.request("echo", 2) == 2
        assert await connection.request("echo", 1) == 1
        friend.close()
        for _, writer in sockets:
            writer.close()


async def test_what_was_written_before_the_end_is_read() -> None:
    """The end of a socket comes after every frame before it; who still asks gets an error."""
    got: list[int] = []

    async def burst(_: Any, connection: Connection) -> None:
        for i in range(1000):
            connection.notify("item", i)
        connection.close()

    listener = Listener({"burst": burst}, node="here", host="127.0.0.1", secret=SECRET)
    address = await listener.open()
    connection = await connect(
        address, client="c", node="here", handlers={"item": lambda body, _: got.append(body)}
    )
    seen: list[int] = []
    connection.on_closed(lambda: seen.append(len(got)))
    with pytest.raises(DeviceLostError):
        await connection.request("burst")
    assert seen == [1000]
    assert got == list(range(1000))
    listener.close()
    with pytest.raises(OSError):
        await connect(address, client="late", node="here")


@pytest.mark.parametrize("unix", [True, False])
async def test_items_of_one_turn_are_one_frame_and_nothing_overtakes_them(unix: bool) -> None:
    """Of many streams, before the answer that is sent behind them; the next turn has a frame of its own."""
    got: list[Any] = []

    async def draw(body: int, connection: Connection) -> str:
        for number in range(body):
            connection.send_item(number, (number, 0.5, None))
        for bad, error in ((object(), TypeError), (bytes(MAX_FRAME), ValueError)):
            with pytest.raises(error):  # its own stream's error: the others go
                connection.send_item(7, bad)
        connection.notify("note", "between")
        connection.send_item(8, "next")
        await asyncio.sleep(0)
        connection.send_item(9, "last")
        return "answer"

    listener = Listener({"draw": draw}, node="here", host="127.0.0.1", secret=SECRET)
    address = await listener.open()
    handlers = {ITEMS: lambda body, _: got.append(body), "note": lambda body, _: got.append(body)}
    connection = await connect(address, client="c", node="here" if unix else "there", handlers=handlers)
    got.append(await connection.request("draw", 50))
    first = [[number, [number, 0.5, None]] for number in range(50)]
    assert got == [first, "between", [[8, "next"]], [[9, "last"]], "answer"]
    connection.close()
    listener.close()


async def test_items_before_a_close_arrive_and_large_ones_need_two_frames() -> None:
    """What was sent in the last turn goes before the end; no frame is above the limit."""
    got: list[Any] = []
    half = bytes(MAX_FRAME * 2 // 3)

    async def draw(_: Any, connection: Connection) -> None:
        connection.send_item(1, half)
        connection.send_item(2, half)
        connection.close()

    listener = Listener({"draw": draw}, node="here", host="127.0.0.1", secret=SECRET)
    address = await listener.open()
    handlers = {ITEMS: lambda body, _: got.append([number for number, _ in body])}
    connection = await connect(address, client="c", node="here", handlers=handlers)
    with pytest.raises(DeviceLostError):
        await connection.request("draw")
    assert got == [[1], [2]]
    listener.close()


async def test_the_crash_loop_breaker() -> None:
    """Delays double, the limit ends it, and deaths of long ago do not count."""
    clock = FakeClock()
    lives = RestartPolicy(Settings(max_restarts=3), clock)
    delays = []
    for _ in range(3):
        assert lives.record_crash()
        delays.append(lives.delay_s)
    assert delays == [0.0, 0.1, 0.2]
    assert not lives.record_crash()
    assert "max_restarts=3" in lives.verdict
    other = RestartPolicy(Settings(max_restarts=1), clock)
    assert other.record_crash()
    clock.advance(301.0)
    assert other.record_crash()
    assert other.restarts == 2


SERVED = """
import asyncio, signal
from layerzero.actors.rpc.channel import Listener

async def slow(body, _):
    await asyncio.sleep(0.02)
    return body

def pace(body, connection):
    return slow(body, connection) if body % 2 else body

async def main():
    handlers = {"echo": lambda body, _: body, "slow": slow, "pace": pace}
    listener = Listener(handlers, node="here", host="127.0.0.1", secret=b"s" * 32)
    address = await listener.open()
    print(address.path, address.port, flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    listener.close()

asyncio.run(main())
"""


@asynccontextmanager
async def served(
    unix: bool, folder: Path, program: str = SERVED, handlers: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Connection, Child]]:
    """A connection to a listener in another process: only there can an answer come while the asker waits."""
    child = Child(program, folder=folder)
    while not (said := child.out.read_text()).endswith("\n"):
        assert child.is_alive(), child.err.read_text()
        await asyncio.sleep(0.005)
    path, port = said.split()
    address = Address(path, "127.0.0.1", int(port), "here", SECRET)
    connection = await connect(address, client="test", node="here" if unix else "there", handlers=handlers)
    try:
        yield connection, child
    finally:
        connection.close()
        child.process.terminate()
        await asyncio.to_thread(child.ended)
        await connection.closed.wait()


def stand_still_until(condition: Callable[[], bool]) -> None:
    """Wait while nothing is read: this loop has no turn."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(EVERY_S)


BURST = """
import asyncio, os
from layerzero.actors.rpc.channel import Listener

async def burst(body, connection):
    for i in range(100):
        connection.notify("item", i)
    os._exit(3)

async def main():
    listener = Listener({"burst": burst}, node="here", host="127.0.0.1", secret=b"s" * 32)
    address = await listener.open()
    print(address.path, address.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("unix", [True, False])
async def test_what_was_written_before_a_death_is_read_after_a_write_met_it(
    unix: bool, tmp_path: Path
) -> None:
    """Who writes to a dead process before reading what it left still gets all of it, and then the end."""
    got: list[int] = []
    items = {"item": lambda body, _: got.append(body)}
    async with served(unix, tmp_path, BURST, items) as (connection, _):
        connection.notify("burst")
        stand_still_until(lambda: connection.peer_closed)
        seen: list[int] = []
        connection.on_closed(lambda: seen.append(len(got)))
        for _ in range(3):  # over TCP the first one draws the reset, which the next one meets
            connection.notify("more")
            stand_still_until(lambda: connection.peer_closed)
        await connection.closed.wait()
        assert got == list(range(100))
        assert seen == [100]


async def test_a_channel_that_was_closed_here_reads_no_more(tmp_path: Path) -> None:
    """Who has left a life hears nothing of it."""
    got: list[int] = []
    items = {"item": lambda body, _: got.append(body)}
    async with served(True, tmp_path, BURST, items) as (connection, _):
        assert not connection.peer_closed
        connection.notify("burst")
        stand_still_until(lambda: connection.peer_closed)
        connection.close()
        await connection.closed.wait()
        assert got == []


@pytest.mark.parametrize("unix", [True, False])
async def test_a_chain_of_quick_answers_leaves_the_loop_its_turns(unix: bool, tmp_path: Path) -> None:
    """Questions that are answered on the spot do not suspend their task; others run all the same."""
    async with served(unix, tmp_path) as (connection, _):
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        await connection.request("echo", 0)
        watching = asyncio.ensure_future(other())
        for i in range(3000):
            assert await connection.request("echo", i) == i
        watching.cancel()
        assert turns > 10
        suspended = 0
        for i in range(200):  # alone again: most of them answer without a turn
            asked = connection.request("echo", i)
            try:
                asked.send(None)
            except StopIteration as answered:
                assert answered.value == i
            else:
                suspended += 1
                asked.close()
                await asyncio.sleep(0.01)
        assert suspended < 200


async def test_answers_that_take_long_are_waited_for_by_the_loop(tmp_path: Path) -> None:
    """A kind that is now quick and now slow, slow ones beside quick ones: every answer is its question's."""
    async with served(True, tmp_path) as (connection, _):
        for i in range(40):
            assert await connection.request("pace", i) == i
        asked = [connection.request(kind, i) for i in range(50) for kind in ("slow", "echo", "pace")]
        assert await asyncio.gather(*asked) == [i for i in range(50) for _ in range(3)]
        with pytest.raises(TimeoutError):
            await connection.request("slow", 1, timeout_s=0.001)
        for _ in range(9):  # an error is an answer as well
            with pytest.raises(LookupError, match="none"):
                await connection.request("none")
        assert await connection.request("echo", 2) == 2


async def test_frames_of_many_pieces_arrive_whole(tmp_path: Path) -> None:
    """Megabytes in both directions, one after the other and at once."""
    async with served(True, tmp_path) as (connection, _):
        bodies = [bytes([i]) * (3 << 20) for i in range(4)]
        for body in bodies:
            assert await connection.request("echo", body) == body
        assert await asyncio.gather(*(connection.request("echo", body) for body in bodies)) == bodies


async def test_a_killed_process_leaves_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the folder of temporary files, and who dials its address is refused."""
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    monkeypatch.setenv("TMPDIR", str(sockets))
    async with served(True, tmp_path) as (connection, child):
        assert sys.platform != "linux" or list(sockets.iterdir()) == []
        child.process.kill()
        await connection.closed.wait()
        with pytest.raises(DeviceLostError):
            await connection.request("echo", 1)


async def test_a_process_that_dies_ends_its_channel(tmp_path: Path) -> None:
    """Who asks on, quickly or not, gets DeviceLostError and no hang."""
    async with served(True, tmp_path) as (connection, child):
        for i in range(50):
            await connection.request("echo", i)
        child.process.kill()
        with pytest.raises(DeviceLostError):
            for i in range(100_000):
                await connection.request("echo", i)

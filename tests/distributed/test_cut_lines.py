"""Sockets between two hosts when the network fails: both ends notice, in either direction, in their time.

A host is a network namespace; where no process of its own is needed there, it is a thread that entered one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from benchmarks.hosting.namespaces import ADDRESSES, Network, cut, mend, shape
from layerzero.actors.group import channel as group_channel
from layerzero.actors.group.channel import FollowerChannel, LeaderChannel
from layerzero.actors.remote import stores
from layerzero.actors.remote.restarts import IncarnationLostError, ItemReceiver
from layerzero.actors.remote.stores import TorchStore
from layerzero.actors.rpc import channel as rpc_channel
from layerzero.actors.rpc.channel import Listener, connect
from layerzero.actors.rpc.connection import Connection
from layerzero.actors.rpc.frames import Address
from layerzero.spec.errors import DeviceLostError
from tests.distributed.on_hosts import SOON_S, TOKEN, Loop, at, store_of
from tests.waiting import LIMIT_S

# -- the store ------------------------------------------------------------------------------------------


def test_every_question_to_a_store_behind_a_cut_ends_and_the_store_is_lost_for_good(
    hosts: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own limits do not hold there: it would hang for a quarter of an hour, until TCP ends it."""
    monkeypatch.setattr(stores, "_ANSWER_S", SOON_S)
    client = store_of(hosts)
    questions: list[Callable[[TorchStore], Any]] = [
        lambda store: store.get("absent", 0.1),
        lambda store: store.wait(["absent"], 0.1),
        lambda store: store.compare_set("key", b"", b"value"),
    ]
    clients = [client(2) for _ in questions]
    clients[0].set("key", b"before")
    assert clients[1].get("key", LIMIT_S) == b"before"
    cut(hosts.cable)
    asked = [at(hosts, 2, partial(q, store)) for q, store in zip(questions, clients, strict=True)]
    for each in asked:
        with pytest.raises(DeviceLostError, match="cut off"):
            each.result(60.0)
    mend(hosts.cable)
    with pytest.raises(
        DeviceLostError, match="was lost before"
    ):  # an answer that comes late fits no question
        clients[2].get("key", LIMIT_S)
    assert client(2).get("key", LIMIT_S) == b"before"


# -- the line of a rank group ---------------------------------------------------------------------------


@pytest.mark.parametrize("towards", [None, 1, 2])
def test_both_ends_of_a_rank_group_s_line_notice_a_cut_of_either_direction(
    hosts: Network, monkeypatch: pytest.MonkeyPatch, towards: int | None
) -> None:
    """While no step runs: rank 0 by heartbeats that nobody confirms, the other by none that come."""
    monkeypatch.setattr(group_channel, "_HEARTBEAT_S", 0.1)
    lost: Future[str] = Future()
    leader = at(hosts, 1, lambda: LeaderChannel([1], ADDRESSES[1], SOON_S)).result(LIMIT_S)
    joining = at(hosts, 2, lambda: FollowerChannel(1, leader.address, LIMIT_S, SOON_S))
    leader.accept(LIMIT_S, lost.set_result)
    follower = joining.result(LIMIT_S)
    leader.send(b"a step")
    assert follower.receive() == b"a step"
    heard = at(hosts, 2, follower.receive)
    cut(hosts.cable, towards)
    try:
        with pytest.raises(DeviceLostError, match=r"no heartbeat|is gone"):
            heard.result(60.0)
        assert "rank 1" in lost.result(60.0)
        with pytest.raises(DeviceLostError, match="rank 1"):
            leader.send(b"another")
    finally:
        follower.close()
        leader.close()


# -- the side channel of a device -----------------------------------------------------------------------


@pytest.fixture
def loops(hosts: Network) -> Iterator[tuple[Loop, Loop]]:
    """A loop on each host."""
    yield Loop(hosts, 1), Loop(hosts, 2)


async def listening(handlers: dict[str, Any]) -> tuple[Listener, Address]:
    """A listener of the second host."""
    listener = Listener(handlers, node="second", host=ADDRESSES[2], secret=TOKEN, silence_s=SOON_S)
    return listener, await listener.open()


@pytest.mark.parametrize("towards", [None, 1])
def test_both_ends_of_a_side_channel_end_when_nothing_comes(
    hosts: Network, loops: tuple[Loop, Loop], towards: int | None
) -> None:
    """A question under way fails in time, an idle end closes: neither waits as long as TCP would."""
    first, second = loops
    waiting = threading.Event()

    async def never(body: Any, connection: Connection) -> None:
        waiting.set()
        await connection.closed.wait()

    async def ended(connection: Connection) -> bool:
        await connection.closed.wait()
        return True

    listener, address = second.run(listening({"never": never}))
    dialled = first.run(connect(address, client="driver", node="first", silence_s=SOON_S))
    idle = first.run(connect(address, client="idle", node="first", silence_s=SOON_S))
    asked = at(hosts, 1, lambda: first.run(dialled.request("never")))
    assert waiting.wait(LIMIT_S)
    served = list(listener.connections.values())
    cut(hosts.cable, towards)
    with pytest.raises(DeviceLostError, match="has ended"):
        asked.result(60.0)
    assert [first.run(ended(each)) for each in (dialled, idle)] == [True, True]
    assert len(served) == 2 and [second.run(ended(each)) for each in served] == [True, True]
    assert not listener.connections
    first.close(dialled, idle)
    second.close(listener)


def test_a_dial_that_no_host_answers_ends(
    hosts: Network, loops: tuple[Loop, Loop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system alone would try for two minutes, more and more rarely, and notice late what is mended."""
    monkeypatch.setattr(rpc_channel, "HANDSHAKE_S", SOON_S)
    first, second = loops
    listener, address = second.run(listening({"echo": lambda body, _: body}))
    cut(hosts.cable)
    with pytest.raises(OSError):
        first.run(connect(address, client="driver", node="first"))
    mend(hosts.cable)
    dialled = first.run(connect(address, client="driver", node="first"))
    assert first.run(dialled.request("echo", 5)) == 5
    first.close(dialled)
    second.close(listener)


@pytest.mark.asyncio
async def test_items_that_never_come_are_a_loss_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer came by another way than the items: a stream that may resume does, any other says so."""
    monkeypatch.setattr("layerzero.actors.remote.restarts._REST_S", 0.01)
    got: list[str] = []
    items = ItemReceiver(got.append)
    items.add("one")
    await items.all(1)
    assert got == ["one"]
    with pytest.raises(IncarnationLostError, match="2 of its items did not come"):
        await items.all(3)


@pytest.mark.parametrize("loss", [0.2])
def test_frames_arrive_once_and_in_order_over_a_line_that_loses_and_delays(
    hosts: Network, loops: tuple[Loop, Loop], loss: float
) -> None:
    """One direction is slower than the other; every question has its own answer."""
    first, second = loops
    seen: list[int] = []

    def note(body: int, _: Connection) -> int:
        seen.append(body)
        return body

    listener, address = second.run(listening({"note": note}))
    dialled = first.run(connect(address, client="driver", node="first", silence_s=LIMIT_S))
    shape(hosts.cable, delay_s=0.001, loss=loss, towards=1)
    shape(hosts.cable, delay_s=0.004, loss=loss, towards=2)

    async def ask() -> list[int]:
        return list(await asyncio.gather(*(dialled.request("note", number) for number in range(200))))

    assert first.run(ask()) == seen == list(range(200))
    assert shape(hosts.cable)[2][1] > 0  # some were lost
    first.close(dialled)
    second.close(listener)

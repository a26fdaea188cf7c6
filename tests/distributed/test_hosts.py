"""Two hosts with a cable between them: what each part of the library does when the network fails.

A host is a network namespace; where no process of its own is needed there, it is a thread that entered one.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosting.namespaces import ADDRESSES, Network, cut, mend, shape, why_not
from layerzero.actors.group import agreement
from layerzero.actors.group import channel as group_channel
from layerzero.actors.group.channel import FollowerChannel, LeaderChannel
from layerzero.actors.remote import stores
from layerzero.actors.remote.restarts import IncarnationLost, Items
from layerzero.actors.remote.stores import TorchStore, connect_store, open_store
from layerzero.actors.rpc import channel as rpc_channel
from layerzero.actors.rpc.channel import Listener, connect
from layerzero.actors.rpc.connection import Connection
from layerzero.actors.rpc.frames import Address
from layerzero.sharing import work
from layerzero.sharing.leases import Leases
from layerzero.spec.errors import DeviceLostError
from tests.children import Child
from tests.distributed import forked
from tests.sharing.test_work import wait_for
from tests.waiting import LIMIT_S

TOKEN = bytes(range(32))
SOON_S = 1.0  # what stands here for the limits that are tens of seconds


class BlindStore(TorchStore):
    """A store whose guard is taken away: it writes whatever is stored already."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        self.set(key, desired)
        return desired


@pytest.fixture(scope="module")
def laid() -> Iterator[Network]:
    """Two hosts."""
    if why := why_not():
        pytest.skip(why)
    with Network() as network:
        yield network


@pytest.fixture
def hosts(laid: Network) -> Iterator[Network]:
    """The hosts, with a cable that is whole before and after a test."""
    yield laid
    shape(laid.cable, delay_s=0.0, loss=0.0)


def at(hosts: Network, number: int, work: Callable[[], Any]) -> Future[Any]:
    """The result of `work` on a thread of a host, which nobody waits for at the end of the process."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            with hosts.inside(number):
                result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def store_of(hosts: Network, kind: type[TorchStore] = TorchStore) -> Callable[[int], TorchStore]:
    """What makes a client, on a host of that number, of a store that the first host has."""
    server, address = at(hosts, 1, lambda: open_store(ADDRESSES[1], LIMIT_S)).result(LIMIT_S)

    def client(number: int) -> TorchStore:
        made: TorchStore = at(hosts, number, lambda: connect_store(address, "test", TOKEN)).result(LIMIT_S)
        made.__class__ = kind
        made._server = server  # type: ignore[attr-defined]  # it ends with its last client
        return made

    return client


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
    asked = [at(hosts, 2, lambda q=q, s=s: q(s)) for q, s in zip(questions, clients, strict=True)]
    for each in asked:
        with pytest.raises(DeviceLostError, match="cut off"):
            each.result(60.0)
    mend(hosts.cable)
    with pytest.raises(
        DeviceLostError, match="was lost before"
    ):  # an answer that comes late fits no question
        clients[2].get("key", LIMIT_S)
    assert client(2).get("key", LIMIT_S) == b"before"


# -- split brain ----------------------------------------------------------------------------------------


def led_twice(hosts: Network, kind: type[TorchStore]) -> list[tuple[bytes, bool]]:
    """What two processes take for the answer, of which one led, was cut off, and was replaced meanwhile."""
    client = store_of(hosts, kind)
    working, go_on = threading.Event(), threading.Event()

    def slow() -> bytes:
        working.set()
        assert go_on.wait(LIMIT_S)
        return b"of the second host"

    def answer(number: int, work: Callable[[], bytes]) -> Future[Any]:
        leases = Leases(client(number), 0.3)
        return at(hosts, number, lambda: leases.once("key", work, reuse=True, wait_s=LIMIT_S, poll_s=0.01))

    second = answer(2, slow)
    assert working.wait(LIMIT_S)
    first_leases = Leases(client(1), 0.3)
    cut(hosts.cable)
    quick = lambda: b"of the first host"  # noqa: E731
    first = at(hosts, 1, lambda: first_leases.once("key", quick, reuse=True, wait_s=LIMIT_S, poll_s=0.01))
    answers = [first.result(LIMIT_S)]
    mend(hosts.cable)
    go_on.set()
    return [*answers, second.result(LIMIT_S)]


def test_of_two_that_lead_on_both_sides_of_a_cut_the_answer_of_one_counts(hosts: Network) -> None:
    """The one that was cut off is replaced, cannot store its answer, and takes that of its successor."""
    assert led_twice(hosts, TorchStore) == [(b"of the first host", True), (b"of the first host", False)]


def test_without_compare_and_set_two_leaders_would_have_two_answers(hosts: Network) -> None:
    """The same cut, with the guard taken away: what the test above is able to see."""
    assert {answer for answer, _ in led_twice(hosts, BlindStore)} == {
        b"of the first host", b"of the second host",
    }  # fmt: skip


@pytest.mark.parametrize("moment", ["before the vote", "after the vote"])
@pytest.mark.parametrize("kind", [TorchStore, BlindStore])
def test_ranks_on_both_sides_of_a_cut_learn_one_outcome(
    hosts: Network, monkeypatch: pytest.MonkeyPatch, moment: str, kind: type[TorchStore]
) -> None:
    """Who did not learn it in time aborts, too late where rank 0 decided. Without the guard they differ."""
    monkeypatch.setattr(stores, "_ANSWER_S", SOON_S)
    client = store_of(hosts, kind)
    rank0, rank1, after = client(1), client(2), client(2)
    learned = threading.Event()

    def vote(plan: bytes) -> None:
        if moment == "before the vote":
            cut(hosts.cable)

    def follow() -> Any:
        plan = rank1.get("p/plan", LIMIT_S)
        assert plan is not None
        vote(plan)
        rank1.set("p/vote/1", b"yes")
        if moment == "after the vote":
            assert learned.wait(LIMIT_S)  # rank 0 has decided, and its word is on the way
        return rank1.get("p/outcome", 0.1)

    following = at(hosts, 2, follow)
    outcome = agreement.propose(rank0, "p", b"the plan", [1], 1.0)
    assert (outcome.plan is None) == (moment == "before the vote")
    cut(hosts.cable)
    learned.set()
    with pytest.raises(DeviceLostError):
        following.result(LIMIT_S)
    mend(hosts.cable)
    # What `answer` does next where a store is there again: it aborts what nobody has decided.
    word = after.compare_set("p/outcome", b"", b"abort:rank 1 saw no decision in time")
    late = agreement._outcome(word, b"the plan")
    if kind is TorchStore:
        assert late == outcome
    else:
        assert late.plan is None and late.reason == "rank 1 saw no decision in time"


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


class Loop:
    """An event loop on a thread of a host."""

    def __init__(self, hosts: Network, number: int) -> None:
        self._running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._ended = at(hosts, number, lambda: asyncio.run(self._run()))
        self.loop, self._over = self._running.result(LIMIT_S)

    async def _run(self) -> None:
        over = asyncio.Event()
        self._running.set_result((asyncio.get_running_loop(), over))
        await over.wait()

    def run(self, work: Any) -> Any:
        """What a coroutine gives there."""
        running = asyncio.run_coroutine_threadsafe(work, self.loop)
        wait([running], 60.0)
        assert running.done(), "it did not end"  # a TimeoutError would pass for the network's
        return running.result()

    def close(self, *ends: Listener | Connection) -> None:
        """Close what is open there, and end."""

        async def close() -> None:
            for each in ends:
                each.close()
            await asyncio.sleep(0.05)  # transports end in a turn of their own

        self.run(close())
        self.loop.call_soon_threadsafe(self._over.set)
        self._ended.result(LIMIT_S)


@pytest.fixture
def loops(hosts: Network) -> Iterator[tuple[Loop, Loop]]:
    """A loop on each host."""
    yield Loop(hosts, 1), Loop(hosts, 2)


async def listening(handlers: dict[str, Any]) -> tuple[Listener, Address]:
    """A listener of the second host."""
    listener = Listener(handlers, node="second", host=ADDRESSES[2], secret=TOKEN, silence_s=SOON_S)
    return listener, await listener.open()


@pytest.mark.parametrize("towards", [None, 1, 2])
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
    items = Items()
    items.add("one")
    assert await items.rest(1) == ["one"]
    with pytest.raises(IncarnationLost, match="2 of its items did not come"):
        await items.rest(3)


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


# -- rank groups ----------------------------------------------------------------------------------------


def test_a_rank_group_over_two_hosts_ends_at_a_cut_and_goes_on_under_the_next_epoch(
    hosts: Network, tmp_path: Path
) -> None:
    """Sums over the cable, on hosts whose clocks differ: none is wrong, and no rank joins an epoch twice."""
    server, (host, port) = at(hosts, 1, lambda: open_store(ADDRESSES[1], LIMIT_S)).result(LIMIT_S)
    script = str(Path(__file__).with_name("spread.py"))
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    shape(hosts.cable, delay_s=0.001, towards=1)
    shape(hosts.cable, delay_s=0.003, towards=2)
    ranks = [
        Child(
            forked.PROGRAM, script, name, str(tmp_path), str(rank), host, str(port),
            folder=tmp_path, variables=variables,
        )
        for rank, name in enumerate((hosts.first, hosts.second))
    ]  # fmt: skip
    try:
        wait_for(lambda: (tmp_path / "stepping").exists() or not all(r.process.is_alive() for r in ranks))
        cut(hosts.cable)
        wait_for(lambda: len(list(tmp_path.glob("ended-*"))) == 2 or not ranks[0].process.is_alive())
        mend(hosts.cable)
        (tmp_path / "mended").touch()
        printed = [each.ended() for each in ranks]
    finally:
        for each in ranks:
            each.process.kill()
    said = [[json.loads(line) for line in each.stdout.splitlines()] for each in printed]
    assert [len(each) for each in said] == [2, 3], printed
    (first0, second0), (first1, again, second1) = said
    assert first0["right"] >= 3 and first0["wrong"] == 0
    assert "DeviceLostError" in first0["error"] and "DeviceLostError" in first1["error"]
    assert "another process has joined as it" in again["again"]
    assert (second0["right"], second0["wrong"], second0["error"]) == (5, 0, "")
    assert second1["error"] == ""
    del server


# -- clocks ---------------------------------------------------------------------------------------------

# Who asks for the time of day, and why that is no other host's affair.
OF_ONE_HOST = {
    "actors/remote/ray_actor.py": "crashes of a device's own processes, in a file beside its journals",
    "layerzero/sharing/work.py": "the age of files in the cache folder",
}


def test_nothing_that_hosts_tell_each_other_is_a_time_of_day() -> None:
    """Leases, heartbeats, epochs, tokens and deadlines are durations, counts and names: clocks may differ."""
    asking = {
        str(path.relative_to(forked.ROOT))
        for folder in ("actors", "scheduler", "layerzero/sharing")
        for path in (forked.ROOT / folder).rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(|\b(datetime|date)\.(now|today|utcnow)\(", path.read_text())
    }
    assert asking == set(OF_ONE_HOST)


_OTHER_CLOCK = """
import sys
sys.argv = ["spread.py", "", ".", "1", "", "0"]
from layerzero.sharing.work import _boot
from tests.distributed import spread
before = _boot()
_boot.cache_clear()
spread.other_clocks()
print(before, _boot(), sep="\\n")
"""


def test_times_of_another_time_namespace_are_not_compared(laid: Network, tmp_path: Path) -> None:
    """A container of the same boot may count from another moment: what it kept is of another time."""
    before, after = Child(_OTHER_CLOCK, folder=tmp_path).ended().stdout.split("\n")[:2]
    assert before == work._boot() != after


# -- everything at once ---------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.stress
@pytest.mark.timeout(900)
def test_no_call_runs_twice_over_links_that_lose_delay_and_are_cut(tmp_path: Path) -> None:
    """A cluster of two hosts: each link, cuts of each direction, short and long, a rank group through one."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'layerzero-runtime[ray]'")
    if why := why_not():
        pytest.skip(why)
    record = tmp_path / "record.json"
    command = [str(forked.ROOT / "benchmarks" / "hosts.py"), "--seconds", "2", "--json", str(record)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = json.loads(record.read_text())
    assert said["calls that ran twice or were lost without a word"] == 0
    assert said["clock of the second host ahead by s"] == 3600
    assert all(part["answered"] > 0 for part in (*said["links"].values(), *said["cuts"].values()))
    short = [part for name, part in said["cuts"].items() if name.endswith("1 s")]
    assert all(part["answered"] == part["calls"] for part in short)
    long = [part for name, part in said["cuts"].items() if name.endswith("noticed")]
    assert all(part["noticed after s"] is not None for part in long)
    group = said["rank group over both hosts, 1 ms"]
    assert group["right after it"] is True and group["epoch"] == 2

"""One incarnation of a remote device as its client knows it, and how many incarnations it may have."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec

from layerzero._util import log
from layerzero._util.clock import Clock
from layerzero.actors.remote.ray_actor import DeviceSpec, Heartbeat, StartReport
from layerzero.actors.rpc.client import DeviceFacts, DeviceHealth
from layerzero.actors.rpc.connection import Connection
from layerzero.actors.rpc.frames import Address
from layerzero.actors.rpc.server import MAX_DECIDED, CallOutcome
from layerzero.actors.rpc.settling import RequestNumbers
from layerzero.spec.settings import Settings

WINDOW_S = 300.0
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
_REST_S = 10.0


class IncarnationLostError(Exception):
    """The incarnation that had a request is over; the text says why."""


class ActorIncarnation:
    """What the client has for one incarnation: its channel, request numbers, which requests may have begun.

    A request begins only when the client has said that it may, so one that is not in `started` never ran in
    this incarnation and never will, whatever became of the network.

    `over` is resolved with the reason when the incarnation has ended, after everything that the process had
    written to the channel has been read.
    """

    def __init__(self, incarnation: str, address: Address) -> None:
        self.incarnation = incarnation
        self.address = address
        self.numbers = RequestNumbers()
        self.started: set[int] = set()
        self._ended: set[int] = set()
        self.last_heartbeat: Heartbeat | None = None
        self.decisions_received = 0  # of its decisions
        self.sending = 0  # requests without an answer
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._sinks: dict[int, ItemReceiver] = {}
        self._channel: Connection | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def channel(self) -> Connection:
        """The side channel."""
        assert self._channel is not None
        return self._channel

    def attach(self, channel: Connection) -> None:
        """Use a channel; its end is the end of this incarnation."""
        self._channel = channel
        channel.on_closed(lambda: self.end("its process or its node has gone"))

    def begin(self, number: int, channel: Connection) -> bool:
        """Whether the host may begin a request; from here on it may have begun."""
        if self.over.done() or not self.numbers.is_outstanding(number) or channel.peer_closed:
            return False
        self.started.add(number)
        if len(self.started) > 2 * self.numbers.outstanding + 256:
            self.started = {n for n in self.started if n >= self.numbers.ack_watermark}
        return True

    def note_ended(self, number: int, _: Connection) -> None:
        """The host has sent the answer to a request."""
        if self.numbers.is_outstanding(number):
            self._ended.add(number)

    def silent(self, number: int) -> bool:
        """Whether a message of this request seems lost: it has not begun, or has ended without an answer."""
        return number not in self.started or number in self._ended

    def forget(self, number: int) -> None:
        """The request was answered."""
        self._ended.discard(number)

    def note_items(self, body: list[tuple[int, Any]], _: Connection) -> None:
        """Items of streams have come: what one turn of the device's loop has sent."""
        for number, item in body:
            sink = self._sinks.get(number)
            if sink is not None:
                sink.add(item)

    def sink(self, number: int, take: Callable[[Any], None]) -> ItemReceiver:
        """Pass the items of a request on to `take`."""
        sink = self._sinks[number] = ItemReceiver(take)
        return sink

    def drop(self, number: int) -> None:
        """Forget a request's items."""
        self._sinks.pop(number, None)

    def release(self, key: str) -> None:
        """Free a kept tensor, from whatever thread collected its handle."""
        if not self.over.done() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.channel.notify, "free", key)

    def end(self, why: str) -> None:
        """Say that the incarnation is over."""
        if not self.over.done():
            self.over.set_result(why)
        if self._channel is not None:
            self._channel.close()


class ItemReceiver:
    """Passes the items of one request on to `take`, in order, in the turn of the loop that read them.

    `count` is how many have come.
    """

    def __init__(self, take: Callable[[Any], None]) -> None:
        self._take = take
        self.count = 0
        self._wanted = 0
        self._complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, item: Any) -> None:
        """One more; none after `take` has raised."""
        if self._complete.done():
            return
        self.count += 1
        try:
            self._take(item)
        except Exception as error:
            self._complete.set_exception(error)
            self._complete.exception()  # who waits gets it; who has gone needs no warning
        else:
            if self.count == self._wanted:
                self._complete.set_result(None)

    async def until(self, request: asyncio.Future[CallOutcome]) -> CallOutcome:
        """The answer to a request. Raises: what `take` raised before it came."""
        either: tuple[asyncio.Future[Any], ...] = (request, self._complete)
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._complete.done():
            self._complete.result()
        return await request

    async def all(self, count: int) -> None:
        """Wait until `count` items have come, after the answer: the channel may be slower than Ray.

        Raises: IncarnationLostError: they do not come. What `take` raised.
        """
        self._wanted = count
        if self.count == count and not self._complete.done():
            return
        try:
            async with asyncio.timeout(_REST_S):
                await self._complete
        except TimeoutError:
            missing = f"{count - self.count} of its items"
            raise IncarnationLostError(f"{missing} did not come {_REST_S:g} s after its end") from None


async def stream_items(
    forward: Callable[[Callable[[Any], None]], Coroutine[Any, Any, None]],
) -> AsyncIterator[Any]:
    """The items that `forward(take)` passes on to `take`, each as soon as it is there.

    Raises: what `forward` raises, behind the items that came before.
    """
    items: deque[Any] = deque()
    arrived = asyncio.Event()

    def take(item: Any) -> None:
        items.append(item)
        arrived.set()

    task = asyncio.ensure_future(forward(take))
    task.add_done_callback(lambda _: arrived.set())
    try:
        while items or not task.done():
            while items:
                yield items.popleft()
            if not task.done():
                arrived.clear()
                await arrived.wait()
        await task
    finally:
        # The consumer may leave in the middle: the generator is closed on the device, too.
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


class RestartPolicy:
    """The crash-loop breaker: how long to wait before the next incarnation, and when to give up.

    More than `Settings.max_restarts` crashes within five minutes are too many; each crash within that time
    doubles the delay. Restarts on request do not count.
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._max_restarts = settings.max_restarts
        self._clock = clock
        self._crashes: list[float] = []
        self.restarts = 0

    def record_crash(self) -> bool:
        """Note a crash; False where there shall be no further incarnation."""
        now_s = self._clock.now()
        self._crashes = [crash_s for crash_s in self._crashes if now_s - crash_s < WINDOW_S] + [now_s]
        if len(self._crashes) > self._max_restarts:
            return False
        self.restarts += 1
        return True

    def record_restart(self) -> None:
        """Note a restart on request."""
        self.restarts += 1

    def reset(self) -> None:
        """Forget every crash: the device was asked to begin anew."""
        self._crashes.clear()
        self.restarts += 1

    @property
    def verdict(self) -> str:
        """Why there is no further incarnation."""
        times, limit = len(self._crashes), self._max_restarts
        return f"it died {times} times within {WINDOW_S:.0f} s, more than max_restarts={limit}"

    @property
    def delay_s(self) -> float:
        """Seconds to wait before the next incarnation."""
        now_s = self._clock.now()
        recent = sum(now_s - crash_s < WINDOW_S for crash_s in self._crashes)
        return 0.0 if recent < 2 else min(FIRST_DELAY_S * 2.0 ** (recent - 2), MAX_DELAY_S)


def with_quarantined(spec: DeviceSpec, started: StartReport) -> DeviceSpec:
    """What the next incarnation begins with, now that this one has said what ended the last one."""
    if started.suspects or started.quarantined:
        log.warning(
            "device.suspects", device=spec.name, kernels=started.suspects, quarantined=started.quarantined
        )
    quarantined = tuple(dict.fromkeys((*spec.quarantined, *started.quarantined)))
    return msgspec.structs.replace(spec, quarantined=quarantined)


def with_decisions(spec: DeviceSpec, heartbeat: Heartbeat) -> DeviceSpec:
    """What the next incarnation begins with, with the decisions that a heartbeat has brought."""
    requests = {repr(request): request for request in (*spec.decided, *heartbeat.decided)}
    return msgspec.structs.replace(spec, decided=tuple(requests.values())[-MAX_DECIDED:])


def health_of(
    device: Any, incarnation: ActorIncarnation | None, facts: DeviceFacts | None, restarts: int, why: str
) -> DeviceHealth:
    """How a device is, as of the last heartbeat."""
    heartbeat = None if incarnation is None else incarnation.last_heartbeat
    longest = heartbeat.running[0] if heartbeat is not None and heartbeat.running else None
    return DeviceHealth(
        name=device.name,
        state=device.state,
        incarnation="" if incarnation is None else incarnation.incarnation,
        node="" if facts is None else facts.node,
        pid=0 if facts is None else facts.pid,
        in_flight=0 if heartbeat is None else heartbeat.in_flight,
        waiting=device.load,
        restarts=restarts,
        kernel="" if longest is None else longest.kernel,
        kernel_s=0.0 if longest is None else longest.seconds,
        blocked={} if heartbeat is None else heartbeat.blocked,
        why=why,
    )

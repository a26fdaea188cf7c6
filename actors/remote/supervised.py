"""SupervisedDevice: the incarnations of a device in a Ray actor, begun, watched, ended and begun again.

Ray places the actor and starts it again. The end of the side channel is the first sign of a crash; an
incarnation that sends no heartbeat, or whose kernel does not end, is ended.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from layerzero._util import log
from layerzero._util.clock import Clock, MonotonicClock
from layerzero._util.fork_safety import renew_after_fork
from layerzero.actors.remote.parcels import Payload
from layerzero.actors.remote.ray_actor import DeviceSpec, Heartbeat, StartReport
from layerzero.actors.remote.restarts import ActorIncarnation, RestartPolicy, with_decisions, with_quarantined
from layerzero.actors.remote.sending import Sender, await_ref, unpickle
from layerzero.actors.rpc.channel import connect
from layerzero.actors.rpc.client import DeviceFacts, DeviceState
from layerzero.actors.rpc.connection import Handler
from layerzero.actors.rpc.frames import Address
from layerzero.actors.rpc.message_stream import ITEMS
from layerzero.actors.rpc.settling import result_of
from layerzero.spec.errors import (
    ConfigurationError,
    DeadlineExceededError,
    DeviceLostError,
    RuntimeClosedError,
)

PAUSE_S = 0.02
_START_S = 1.0
_STARTS = 8
_LAST_S = 5.0
HEARTBEAT_S = 0.25


class SupervisedDevice:
    """What a device pool knows of a device that lives in a Ray actor; `RayDevice` sends it requests.

    `make` creates the actor; it is called once, and again only if Ray has given the actor up. All state
    belongs to the event loop that called `open`.
    """

    def __init__(
        self, spec: DeviceSpec, make: Callable[[], Any], *, node: str, clock: Clock | None = None
    ) -> None:
        self.name = spec.name
        self.state = DeviceState.STARTING
        self._spec = spec
        self._make = make
        self._node = node
        self._client = uuid.uuid4().hex[:12]
        self._sender = Sender(spec.name, self._client)
        self.actor: Any = None  # Ray's handle
        self._facts: DeviceFacts | None = None
        self._incarnation: ActorIncarnation | None = None
        self._serving = asyncio.Event()
        self._restart_policy = RestartPolicy(spec.settings, clock or MonotonicClock())
        self._prepared: list[Payload] = []
        self._why = ""
        self._supervisor: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._restart_requested = self._drained = False
        self._refusal: ConfigurationError | None = None
        self._forked = False
        renew_after_fork(self)

    def after_fork(self) -> None:
        """A forked child has neither the sockets' loop nor Ray's threads."""
        self._forked = True

    # -- what it is ------------------------------------------------------------------------------

    @property
    def facts(self) -> DeviceFacts:
        """What it is, as of its present incarnation.

        Raises: DeviceLostError: it has not begun its first incarnation.
        """
        if self._facts is None:
            raise self._lost("has not started")
        return self._facts

    @property
    def address(self) -> Address:
        """Where the side channel of the present incarnation listens; another process may dial it.

        Raises: DeviceLostError: the device is between two incarnations.
        """
        incarnation = self._incarnation
        if incarnation is None or incarnation.over.done():
            raise self._lost(f"is {self.state.value}")
        return incarnation.address

    def _lost(self, why: str) -> DeviceLostError:
        return DeviceLostError(f"device {self.name!r} {why}", retryable=True)

    @property
    def load(self) -> int:
        """Calls sent and not answered."""
        return 0 if self._incarnation is None else self._incarnation.numbers.outstanding

    # -- incarnations -----------------------------------------------------------------------------------

    async def wait_until_serving(self) -> None:
        """Wait until it serves, or never will."""
        await self._serving.wait()

    async def open(self, timeout_s: float) -> None:
        """Create the actor and wait for its first incarnation.

        Raises: DeviceLostError: it did not begin within `timeout_s`; the message says what it waited for.
            ConfigurationError: it never will with these settings.
        """
        self.actor = self._make()
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())
        try:
            await asyncio.wait_for(self._serving.wait(), timeout_s)
        # Ray itself waits for a place without end.
        except TimeoutError:
            why = self._why or "its actor was not placed"
            await self.close()
            raise self._lost(f"did not start within {timeout_s} s: {why}") from None
        if self.state is DeviceState.DEAD:
            what = f"device {self.name!r} did not start: {self._why}"
            raise self._refusal or DeviceLostError(what, retryable=False)

    async def _supervise(self) -> None:
        """Begin an incarnation, wait until it is over, begin the next, until closed or given up."""
        while self.state is not DeviceState.CLOSED:
            try:
                incarnation = await self._begin_incarnation()
            except Exception as error:
                cause = getattr(error, "cause", error)  # Ray's own text is the actor's whole traceback
                if isinstance(cause, ConfigurationError):  # which no restart changes
                    self._refusal = cause
                    self._give_up(str(cause))
                    return
                if not self._note_end(f"{type(cause).__name__}: {cause}"):
                    return
                continue
            self.state = DeviceState.DRAINING if self._drained else DeviceState.RUNNING
            self._serving.set()
            self._watching = asyncio.get_running_loop().create_task(self._watch(incarnation))
            # Shielded: closing cancels this task, not the future that others wait for.
            why = await asyncio.shield(incarnation.over)
            self._watching.cancel()
            if not self._note_end(why):
                return

    def _note_end(self, why: str) -> bool:
        """Note the end of an incarnation; False where there shall be no other."""
        if self.state is DeviceState.CLOSED:
            return False
        self._serving.clear()
        self._why = why
        # A restart that was asked for is no crash, and does not bring the limit nearer.
        planned, self._restart_requested = self._restart_requested, False
        if not planned:
            log.warning("device.lost", device=self.name, why=why)
            if not self._restart_policy.record_crash():
                self._give_up(f"{self._restart_policy.verdict}; the last time: {why}")
                return False
        self.state = DeviceState.RESTARTING
        return True

    def _give_up(self, why: str) -> None:
        self.state, self._why = DeviceState.DEAD, why
        log.error("device.dead", device=self.name, why=why)
        self._serving.set()  # wakes the waiting callers: it will not come
        self._kill(restart=False)

    async def _start_actor(self) -> StartReport:
        """What the actor's `start` answers; asked again, for Ray needs seconds to miss a message."""
        attempts: set[asyncio.Future[StartReport]] = set()
        try:
            while True:
                # Several at once do no harm, since the actor starts only once; Ray may have lost the first.
                if len(attempts) < _STARTS:
                    attempts.add(asyncio.ensure_future(await_ref(self.actor.start.remote(self._spec))))
                done, _ = await asyncio.wait(attempts, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
                for attempt_done in done:
                    return attempt_done.result()
                self._why = "its process has not come back: no node has room for it, or it is still starting"
        finally:
            for attempt in attempts:
                attempt.cancel()

    async def _begin_incarnation(self) -> ActorIncarnation:
        from ray import exceptions

        await asyncio.sleep(self._restart_policy.delay_s)
        old = self._incarnation
        until = asyncio.get_running_loop().time() + _LAST_S
        while True:
            try:
                started = await self._start_actor()
            # Ray's word for a moment without contact: the actor may be well.
            except exceptions.ActorUnavailableError:
                await asyncio.sleep(PAUSE_S)
                continue
            except exceptions.ActorDiedError:
                self.actor = self._make()
                continue
            if old is None or started.facts.incarnation != old.incarnation:
                break
            # The old process: it has not noticed yet that it was killed, or only its channel has ended.
            if asyncio.get_running_loop().time() > until:
                self._kill(restart=True)
                until += _LAST_S
            await asyncio.sleep(PAUSE_S)
        incarnation = ActorIncarnation(started.facts.incarnation, started.address)
        handlers: dict[str, Handler] = {
            "begin": incarnation.begin,
            "ended": incarnation.note_ended,
            ITEMS: incarnation.note_items,
        }
        hang_s = self._spec.settings.hang_s
        channel = await connect(
            started.address, client=self._client, node=self._node, handlers=handlers, silence_s=hang_s
        )
        incarnation.attach(channel)
        self._incarnation, self._facts = incarnation, started.facts
        self._spec = with_quarantined(self._spec, started)
        # Before the device serves: what it prepares is what calls rely on.
        for payload in self._prepared:
            number = incarnation.numbers.new_number()
            outcome = await self._sender.send(self.actor, incarnation, number, "call", payload, None, None)
            incarnation.numbers.ack(number)
            result_of(unpickle(outcome), self.name)
        if self._prepared:  # a kernel that a preparation registered makes every verdict new
            await incarnation.channel.request("decide")
        return incarnation

    async def _watch(self, incarnation: ActorIncarnation) -> None:
        """Request heartbeats; end an incarnation that sends none, or whose kernel does not end."""
        limit = self._spec.settings.hang_s
        while not incarnation.over.done():
            try:
                heartbeat: Heartbeat | None = await asyncio.wait_for(
                    await_ref(self.actor.heartbeat.remote(incarnation.decisions_received)), limit
                )
            except TimeoutError:
                self._hang(incarnation, f"sent no heartbeat for {limit} s")
                return
            except Exception as error:
                # The end of the channel means a crash; an error of Ray's alone may be a lost message.
                log.debug("device.heartbeat_lost", device=self.name, error=str(error)[:200])
                await asyncio.sleep(HEARTBEAT_S)
                continue
            # An answer of the incarnation before may come late.
            if heartbeat is not None and heartbeat.incarnation == incarnation.incarnation:
                incarnation.last_heartbeat = heartbeat
                incarnation.decisions_received += len(heartbeat.decided)
                if heartbeat.decided:
                    self._spec = with_decisions(self._spec, heartbeat)
                if heartbeat.running and (longest := heartbeat.running[0]).seconds > limit:
                    why = f"kernel {longest.kernel} has run for {longest.seconds:.1f} s, above {limit} s"
                    self._hang(incarnation, why)
                    return
            await asyncio.sleep(HEARTBEAT_S)

    def _hang(self, incarnation: ActorIncarnation, why: str) -> None:
        self.state = DeviceState.HUNG
        log.error("device.hung", device=self.name, why=why)
        incarnation.end(why)
        self._kill(restart=True)

    def _kill(self, *, restart: bool) -> None:
        import ray

        with suppress(Exception):  # it may be gone already, which is what we want
            ray.kill(self.actor, no_restart=not restart)

    def _refuse_a_fork(self) -> None:
        if self._forked:
            raise RuntimeClosedError(
                f"device {self.name!r} belongs to the process that was forked; open a runtime of this "
                "process's own with layerzero.start(), or start the child before the runtime"
            )

    async def _serving_incarnation(self, deadline: float | None, wait: bool = True) -> ActorIncarnation:
        """The present incarnation, waiting for it while the device restarts."""
        self._refuse_a_fork()
        loop = asyncio.get_running_loop()
        if not self._serving.is_set():
            patience = self._spec.settings.placement_timeout_s if wait else 0.0
            timeout_s = patience if deadline is None else min(patience, deadline - loop.time())
            try:
                await asyncio.wait_for(self._serving.wait(), max(0.0, timeout_s))
            except TimeoutError:
                if deadline is not None and loop.time() >= deadline:
                    late = f"device {self.name!r} did not come back in time: {self._why}"
                    raise DeadlineExceededError(late) from None
                raise self._lost(f"is {self.state.value} for more than {patience} s: {self._why}") from None
        # The end wakes waiting callers as well, so the state is asked after the wait.
        if self.state is DeviceState.CLOSED:
            raise RuntimeClosedError(f"device {self.name!r} is closed")
        if self.state is DeviceState.DEAD:
            raise self._lost(f"is dead: {self._why}")
        if self.state is DeviceState.DRAINING:
            raise self._lost("takes no call now: it is draining; nothing ran, try another device")
        assert self._incarnation is not None
        return self._incarnation

    async def drain(self, timeout_s: float) -> bool:
        """Take no more calls, in later incarnations either, until `restart`; those that run end."""
        self._drained = True
        if self.state is DeviceState.RUNNING:
            self.state = DeviceState.DRAINING
        return await self._request_drain(timeout_s)

    async def _request_drain(self, timeout_s: float) -> bool:
        incarnation = self._incarnation
        if incarnation is None or incarnation.over.done():
            return False
        try:
            return bool(await incarnation.channel.request("drain", timeout_s))
        except DeviceLostError:
            return False

    async def restart(self, *, drain_s: float = 30.0) -> None:
        """Drain, end the process, and wait for the next incarnation.

        One that had crashed too often begins anew, with no crash counted.

        Raises: DeviceLostError: there is no next incarnation within `Settings.placement_timeout_s`.
        """
        self._drained = False
        if self.state is DeviceState.DEAD:
            await self._revive()
            return
        if self.state is DeviceState.DRAINING:
            self.state = DeviceState.RUNNING  # it took no calls for the sake of this restart
        incarnation = await self._serving_incarnation(None)
        self.state = DeviceState.RESTARTING
        self._serving.clear()  # calls wait for the next incarnation instead of being refused
        await self._request_drain(drain_s)
        await self._wait_for_answers(incarnation, max(drain_s, _LAST_S))
        if not incarnation.over.done():  # one that has crashed meanwhile counts as that, and is followed
            self._restart_requested = True  # set first: closing the channel below must not count as a crash
            self._restart_policy.record_restart()
            await self._request_leave(incarnation)
            incarnation.end("restarted on request")
            self._kill(restart=True)
        await self._serving_incarnation(None)

    async def _revive(self) -> None:
        self._restart_policy.reset()
        self.state = DeviceState.RESTARTING
        self._serving.clear()
        # It finds that Ray has given the actor up, and makes another.
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())
        await self._serving_incarnation(None)

    async def _wait_for_answers(self, incarnation: ActorIncarnation, max_s: float) -> None:
        """Wait for the answers of what has ended there: one that was lost is asked for again."""
        clock = asyncio.get_running_loop().time
        until = clock() + max_s
        while incarnation.sending and not incarnation.over.done() and clock() < until:  # noqa: ASYNC110
            await asyncio.sleep(PAUSE_S)

    async def _request_leave(self, incarnation: ActorIncarnation) -> None:
        with suppress(Exception):  # a process that cannot end in order is ended all the same
            await asyncio.wait_for(incarnation.channel.request("leave"), _LAST_S)

    async def close(self) -> None:
        """End the actor for good."""
        if self.state is DeviceState.CLOSED:
            return
        self.state = DeviceState.CLOSED
        # Waiting callers look at the state and are refused.
        self._serving.set()
        for task in (self._supervisor, self._watching):
            if task is not None:
                task.cancel()
        if self._incarnation is not None:
            await self._request_leave(self._incarnation)
            self._incarnation.end("closed")
        self._kill(restart=False)

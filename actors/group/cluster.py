"""`lz.remote_rank_group`: a rank group on the devices of a device pool, driven from one process.

Each rank runs in its device's process. When one fails or dies, all of them end, start again as new processes
and meet under the next epoch; what was running resumes there, or its caller is notified. Ray carries the
code, rank 0's channel the step messages, and the ranks' process group the tensors.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from layerzero._util import log
from layerzero._util.clock import MonotonicClock
from layerzero.actors.group.config import GroupConfig, Mode
from layerzero.actors.group.ranks import (
    Build,
    RankSpec,
    call_rank0,
    close_store,
    open_store,
    run_rank,
    stop_rank0,
    stream_rank0,
)
from layerzero.actors.remote.restarts import RestartPolicy
from layerzero.actors.rpc.client import DeviceClient, DeviceState
from layerzero.calls.blocking import context_runtime
from layerzero.spec.errors import ConfigurationError, DeviceLostError, RuntimeClosedError
from layerzero.spec.settings import Settings

_MAX_ATTEMPTS = 4  # incarnations that one request may see the end of without an item of its own
_END_S = 10.0
_POLL_S = 0.05


class RemoteRankGroup:
    """Ranks on a pool's devices that live and end together; `run` and `stream` send code to rank 0.

    `devices` are the ranks in order, `plan_digest` is the plan that they agreed on, `epoch` counts their
    incarnations.
    """

    def __init__(
        self,
        settings: Settings,
        devices: Sequence[DeviceClient],
        config: GroupConfig,
        build: Build,
        collectives: str | None,
    ) -> None:
        self.name = f"layerzero-group-{uuid.uuid4().hex[:8]}"
        self.devices = tuple(devices)
        self.epoch = 0
        self.plan_digest = ""
        self.why = ""
        self._settings = settings
        self._config, self._build, self._collectives = config, build, collectives
        self._restart_policy = RestartPolicy(settings, MonotonicClock())
        self._serving = asyncio.Event()
        self._over = asyncio.Event()  # the end of this epoch
        self._ready: set[int] = set()
        self._failed: BaseException | None = None
        self._closed = False
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.devices)

    @property
    def restarts(self) -> int:
        """How often the rank group has begun again."""
        return self._restart_policy.restarts

    # -- incarnations -----------------------------------------------------------------------------------

    async def __aenter__(self) -> RemoteRankGroup:
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())
        try:
            await self._serving.wait()
            if self._failed is not None:
                raise self._failed
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def _supervise(self) -> None:
        """One epoch after another, until the rank group is closed or crashes too often."""
        while True:
            self.epoch += 1
            self._over = asyncio.Event()
            error = await self._serve_epoch()
            self._serving.clear()
            self._over.set()
            if self._closed:
                return
            self.why = str(error)
            log.warning("rank_group.lost", rank_group=self.name, epoch=self.epoch, why=self.why)
            recoverable = isinstance(error, DeviceLostError) or bool(self.plan_digest)
            if not recoverable or not self._restart_policy.record_crash():
                self._give_up(error, self._restart_policy.verdict if recoverable else "it could not begin")
                return
            await asyncio.sleep(self._restart_policy.delay_s)
            try:
                await asyncio.gather(*(self._renew(device) for device in self.devices))
            except (DeviceLostError, RuntimeClosedError) as lost:
                self._give_up(lost, "a device did not come back")
                return

    def _give_up(self, error: BaseException, verdict: str) -> None:
        first = not self.plan_digest
        lost = DeviceLostError(f"the rank group is dead, {verdict}: {error}", retryable=False)
        lost.__cause__ = error
        self._failed = error if first else lost
        log.error("rank_group.dead", rank_group=self.name, epoch=self.epoch, why=str(error))
        self._serving.set()  # waiting callers get the error

    async def _serve_epoch(self) -> BaseException:
        """Run every rank until one ends; the reason why it ended."""
        loop = asyncio.get_running_loop()
        self._ready = set()
        try:
            store = await self.devices[0].run(open_store, self.name, self._config.timeout_s)
        except Exception as error:
            return error
        # Not published in the store: whatever process reaches it could pass for a follower.
        config = replace(self._config, epoch=self.epoch, token=secrets.token_bytes(32))
        ranks = [
            loop.create_task(self._run_rank(replace(config, rank=rank), store)) for rank in range(self.ranks)
        ]
        try:
            await asyncio.wait(ranks, return_when=asyncio.FIRST_COMPLETED)
            # The first that ended may only have noticed what ended another.
            await asyncio.wait(ranks, timeout=_END_S if self._closed else 10 * _POLL_S)
        finally:
            for rank in ranks:
                rank.cancel()
            errors = await asyncio.gather(*ranks, return_exceptions=True)
        raised = [e for e in errors if isinstance(e, Exception)]
        causes = [e for e in raised if not isinstance(e, DeviceLostError)]
        return (causes or raised or [DeviceLostError("its ranks left", retryable=True)])[0]

    async def _run_rank(self, config: GroupConfig, store: tuple[str, int]) -> None:
        """Run one rank until it ends; when the last one is ready, the rank group serves."""
        spec = RankSpec(
            group=self.name, config=config, store=store, collectives=self._collectives, build=self._build
        )
        async for plan in self.devices[config.rank].stream(run_rank, spec):
            self._ready.add(config.rank)
            if len(self._ready) == self.ranks:
                self.plan_digest = plan
                log.info("rank_group.serving", rank_group=self.name, epoch=self.epoch, plan=plan)
                self._serving.set()

    async def _renew(self, device: DeviceClient) -> None:
        """Give a rank's device a new process, or wait for one. Raises: DeviceLostError: none comes."""
        limit = self._settings.placement_timeout_s
        if device.state is DeviceState.RUNNING:
            with suppress(TimeoutError):
                await asyncio.wait_for(device.restart(drain_s=0.0), limit)
        until = asyncio.get_running_loop().time() + limit
        while device.state is not DeviceState.RUNNING:
            late = asyncio.get_running_loop().time() > until
            if late or device.state in (DeviceState.DEAD, DeviceState.CLOSED):
                state = f"{device.state.value}: {(await device.health()).why}"
                raise DeviceLostError(f"device {device.name!r} is {state}", retryable=True)
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Let every rank leave, and end the supervision. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._serving.is_set() and self._failed is None:
            with suppress(DeviceLostError, RuntimeClosedError, TimeoutError):
                await self.devices[0].run(stop_rank0, self.name, timeout_s=_END_S)
                await asyncio.wait_for(self._over.wait(), _END_S)
                await self.devices[0].run(close_store, self.name, timeout_s=_END_S)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervisor
        self._serving.set()

    # -- code ------------------------------------------------------------------------------------

    async def _serving_epoch(self) -> int:
        """The epoch that serves, once it does. Raises: DeviceLostError, RuntimeClosedError: none will."""
        if self._closed:
            raise RuntimeClosedError(f"{self.name} is closed")
        limit = self._settings.placement_timeout_s
        try:
            await asyncio.wait_for(self._serving.wait(), limit)
        except TimeoutError:
            what = f"the rank group does not serve for more than {limit:g} s: {self.why}"
            raise DeviceLostError(what, retryable=True) from None
        if self._failed is not None:
            raise DeviceLostError(str(self._failed), retryable=False) from self._failed
        return self.epoch

    async def _has_ended(self, epoch: int) -> bool:
        """Whether an epoch has ended, or ends in a moment."""
        if self.epoch == epoch:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), _END_S)
        return self.epoch != epoch or self._over.is_set()

    async def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        idempotent: bool = False,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run `fn(model, *args, **kwargs)` beside rank 0's model, which `build` gave; its result.

        A call that had not started when the rank group was lost runs in the next epoch; `idempotent` ones
        that had started, too.
        Raises: what `fn` raises. DeviceLostError: the rank group was lost; `retryable` says whether nothing
            ran.
        """
        for attempt in range(_MAX_ATTEMPTS):
            epoch = await self._serving_epoch()
            try:
                return await self.devices[0].run(
                    call_rank0, self.name, epoch, fn, args, kwargs, timeout_s=timeout_s
                )
            except DeviceLostError as error:
                may_repeat = (error.retryable or idempotent) and attempt < _MAX_ATTEMPTS - 1
                if not may_repeat or not await self._has_ended(epoch):
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def stream(
        self, fn: Callable[..., Any], /, *args: Any, resume: bool = False, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """The items of the async generator function `fn(model, *args, **kwargs)` beside rank 0's model.

        With `resume`, `fn` also gets `so_far`, the items delivered already, and yields what follows them:
        after the loss of a rank it continues in the next epoch and nothing is delivered twice.
        Raises: as `run`.
        """
        so_far: list[Any] = list(kwargs.pop("so_far", ())) if resume else []
        attempts = 0
        while True:
            epoch = await self._serving_epoch()
            keywords = {**kwargs, "so_far": list(so_far)} if resume else kwargs
            try:
                async for item in self.devices[0].stream(stream_rank0, self.name, epoch, fn, args, keywords):
                    so_far.append(item)
                    attempts = 0
                    yield item
                return
            except DeviceLostError as error:
                attempts += 1
                not_started = error.retryable and not so_far
                may_repeat = (resume or not_started) and attempts < _MAX_ATTEMPTS
                if not may_repeat or not await self._has_ended(epoch):
                    raise


def remote_rank_group(
    build: Build,
    ranks: int | Sequence[str] | None = None,
    *,
    mode: Mode = "inference",
    tp_invariant: bool = False,
    collectives: str | None = "gloo",
    timeout_s: float = 60.0,
) -> RemoteRankGroup:
    """The rank group of some devices of the runtime's pool: `ranks` of them, those of these names, or all.

    `build(handle)` makes one rank's model, in its device's process, and is awaited where it is a coroutine
    function; `collectives` names the backend of torch.distributed's default group there, or is None where the
    model makes its own. `timeout_s` bounds every wait of one rank for another, in seconds.

    Raises: ConfigurationError: there is no cluster, or it has fewer devices. ValueError: no device has that
        name.
    """
    runtime = context_runtime()
    if runtime.settings.cluster is None:
        raise ConfigurationError(
            "build needs a device pool, Settings(cluster=...), got none; a process that is a rank itself "
            "calls rank_group"
        )
    pool = runtime.device_pool
    if isinstance(ranks, int) or ranks is None:
        count = len(pool.devices) if ranks is None else ranks
        if not 1 <= count <= len(pool.devices):
            raise ConfigurationError(f"ranks needs 1 to {len(pool.devices)} devices of the pool, got {count}")
        devices = list(pool.devices.values())[:count]
    else:
        devices = [pool.device(name) for name in ranks]
    config = GroupConfig(
        rank=0, ranks=len(devices), mode=mode, tp_invariant=tp_invariant, timeout_s=timeout_s
    )
    return RemoteRankGroup(runtime.settings, devices, config, build, collectives)

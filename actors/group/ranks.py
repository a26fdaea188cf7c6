"""A rank of a rank group inside a pool's device: what `actors/group/cluster.py` sends there.

`sit` joins, makes the process group and the model, and stays until the rank group ends; while it does, `ask`
and `listen` run code with the model of rank 0.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import anyio
import anyio.to_thread

from layerzero._util import log
from layerzero.actors.group.agreement import AgreementStore
from layerzero.actors.group.join import RankHandle, join_rank_group
from layerzero.actors.group.plan import Mode
from layerzero.actors.group.ray_store import RayStore, address_here
from layerzero.runtime import current
from layerzero.spec.errors import ConfigurationError, DeviceLostError

Build = Callable[[RankHandle], Any]
_DESTROY_S = 5.0


@dataclass(frozen=True)
class RankSpec:
    """Everything that a rank is told: whose it is, which, under which epoch, and what it builds."""

    group: str
    rank: int
    ranks: int
    epoch: int
    mode: Mode
    tp_invariant: bool
    collectives: str | None
    timeout_s: float
    build: Build


@dataclass
class RunningRank:
    """A rank that has joined; `over` ends it, with the reason why it failed or None where it is to leave."""

    handle: RankHandle
    epoch: int
    model: Any
    over: asyncio.Future[str | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end(self, why: str | None) -> None:
        """End the rank; only the first reason counts."""
        if not self.over.done():
            self.over.set_result(why)


_RUNNING: dict[str, RunningRank] = {}


async def run_rank(spec: RankSpec) -> AsyncIterator[str]:
    """Be one rank: yield the plan's digest when everything is ready, and end when the rank group does.

    Raises: ConsistencyError, DeviceLostError: the ranks do not agree, or the rank group has failed. What
    `build`
        raises.
    """
    loop = asyncio.get_running_loop()
    store = RayStore(spec.group)
    failed: asyncio.Future[str | None] = loop.create_future()

    def fail(why: str) -> None:
        if not failed.done():
            failed.set_result(why)

    def on_failure(why: str) -> None:  # on the thread that noticed
        loop.call_soon_threadsafe(fail, why)

    joining = join_rank_group(
        current(),
        spec.ranks,
        rank=spec.rank,
        store=store,
        epoch=spec.epoch,
        mode=spec.mode,
        tp_invariant=spec.tp_invariant,
        host=await anyio.to_thread.run_sync(address_here),
        timeout_s=spec.timeout_s,
        on_failure=on_failure,
    )
    async with _process_group(spec, store), joining as member:
        model = spec.build(member)
        running = RunningRank(
            member, spec.epoch, await model if inspect.isawaitable(model) else model, failed
        )
        _RUNNING[spec.group] = running
        try:
            following = loop.create_task(member.follow()) if spec.rank else None
            yield member.plan_digest
            await _until_over(running, following)
        finally:
            del _RUNNING[spec.group]


async def _until_over(running: RunningRank, following: asyncio.Task[None] | None) -> None:
    waits: set[asyncio.Future[Any]] = {running.over}
    if following is not None:
        waits.add(following)
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if following is not None and not following.done():
            following.cancel()
    if following is not None and following.done():
        following.result()
    elif (why := running.over.result()) is not None:
        raise DeviceLostError(f"the rank group has failed: {why}", retryable=True)


@asynccontextmanager
async def _process_group(spec: RankSpec, store: AgreementStore) -> AsyncIterator[None]:
    """torch.distributed's default group of the rank group's ranks, where one is asked for."""
    if spec.collectives is None:
        yield
        return
    from torch import distributed

    if distributed.is_initialized():
        raise ConfigurationError(
            f"collectives={spec.collectives!r} needs a process without a default group, and rank {spec.rank} "
            "has one; pass collectives=None where the engine makes its own"
        )
    await anyio.to_thread.run_sync(_init_process_group, spec, store)
    try:
        yield
    finally:
        # Not for ever: a group whose peers are gone may wait for them, and then its process is to end anyway.
        with anyio.move_on_after(_DESTROY_S, shield=True):
            await anyio.to_thread.run_sync(distributed.destroy_process_group, abandon_on_cancel=True)


def _init_process_group(spec: RankSpec, store: AgreementStore) -> None:
    from torch import distributed
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not declared

    key, wait = f"rank_group/{spec.epoch}/group", timedelta(seconds=spec.timeout_s)
    if spec.rank == 0:
        host = address_here()
        tcp_store = TCPStore(host, 0, None, True, wait, wait_for_workers=False)
        store.put(key, f"{host} {tcp_store.port}".encode())
    else:
        address = store.take(key, spec.timeout_s)
        if address is None:
            raise DeviceLostError("rank 0 did not open the process group in time", retryable=True)
        host, port = address.decode().split(" ")
        tcp_store = TCPStore(host, int(port), None, False, wait)
    distributed.init_process_group(
        spec.collectives, store=tcp_store, rank=spec.rank, world_size=spec.ranks, timeout=wait
    )


# -- what runs on rank 0 --------------------------------------------------------------------------------


def _running_rank(group: str, epoch: int) -> RunningRank:
    running = _RUNNING.get(group)
    if running is None or running.epoch != epoch:
        raise DeviceLostError(f"epoch {epoch} of the rank group has ended; nothing ran", retryable=True)
    return running


@contextmanager
def _as_group_failure(running: RunningRank) -> Iterator[None]:
    """Raise an error of hosted code as the rank group's failure where it has failed, whatever came of
    that."""
    try:
        yield
    except Exception as error:
        why = running.handle.failure
        if why is None:
            raise
        raise DeviceLostError(f"the rank group failed while the call ran: {why}", retryable=False) from error


async def call_rank0(
    group: str, epoch: int, fn: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """`fn(model, *args, **named)` on rank 0; plain functions run on a thread."""
    running = _running_rank(group, epoch)
    with _as_group_failure(running):
        if inspect.iscoroutinefunction(fn):
            return await fn(running.model, *args, **keywords)
        return await anyio.to_thread.run_sync(
            lambda: fn(running.model, *args, **keywords), abandon_on_cancel=True
        )


async def stream_rank0(
    group: str, epoch: int, fn: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]
) -> AsyncIterator[Any]:
    """The items of `fn(model, *args, **named)` on rank 0."""
    running = _running_rank(group, epoch)
    with _as_group_failure(running):
        async with aclosing(fn(running.model, *args, **keywords)) as items:
            async for item in items:
                yield item


async def stop_rank0(group: str) -> None:
    """Let rank 0 leave: it says the last word, and every other rank's walk ends."""
    if (running := _RUNNING.get(group)) is not None:
        running.end(None)
    else:
        log.debug("rank_group.dismissed_twice", rank_group=group)

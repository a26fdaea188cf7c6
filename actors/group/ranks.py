"""One rank of a rank group inside a pool's device: what `actors/group/cluster.py` runs there.

`run_rank` joins, makes the process group and the model, and stays until the group ends; meanwhile
`call_rank0` and `stream_rank0` run code with the model of rank 0. Rank 0's process holds the store in which
the ranks meet.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import anyio
import anyio.to_thread
import torch
from torch.distributed import (  # type: ignore[attr-defined]  # public, not declared
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from layerzero._util import log
from layerzero.actors.group.config import GroupConfig
from layerzero.actors.group.join import RankHandle, join_with
from layerzero.actors.remote import stores
from layerzero.runtime import current
from layerzero.spec.errors import ConfigurationError, DeviceLostError

Build = Callable[[RankHandle], Any]
_DESTROY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What a device needs to run one rank: of which group, where its store is, and what to build.

    `collectives` names the backend of torch.distributed's default group, None where the model makes its own.
    """

    group: str
    config: GroupConfig
    store: tuple[str, int]
    collectives: str | None
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
_STORES: dict[str, TCPStore] = {}


def node_address() -> str:
    """Where other nodes of the Ray cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def open_store(group: str, timeout_s: float) -> tuple[str, int]:
    """On rank 0's device: where a new store for the next epoch of `group` is; the one before ends."""
    _STORES[group], address = stores.open_store(node_address(), timeout_s)
    return address


def close_store(group: str) -> None:
    """On rank 0's device: end the group's store."""
    _STORES.pop(group, None)


async def run_rank(spec: RankSpec) -> AsyncIterator[str]:
    """Be one rank: yield the plan's digest when everything is ready, and end when the rank group does.

    Raises: ConsistencyError, DeviceLostError: the ranks do not agree, or the rank group has failed. What
        `build` raises.
    """
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[str | None] = loop.create_future()

    def fail(why: str) -> None:
        if not failed.done():
            failed.set_result(why)

    def on_failure(why: str) -> None:  # on the thread that noticed
        loop.call_soon_threadsafe(fail, why)

    store = await anyio.to_thread.run_sync(stores.connect, spec.store, spec.config.timeout_s)
    host = await anyio.to_thread.run_sync(node_address)
    config = replace(spec.config, host=host, on_failure=on_failure)
    async with _process_group(spec, store), join_with(current(), config, store) as handle:
        model = spec.build(handle)
        running = RunningRank(
            handle, config.epoch, await model if inspect.isawaitable(model) else model, failed
        )
        _RUNNING[spec.group] = running
        try:
            following = loop.create_task(handle.follow()) if config.rank else None
            yield handle.plan_digest
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
async def _process_group(spec: RankSpec, store: TCPStore) -> AsyncIterator[None]:
    """torch.distributed's default group of the ranks, where one is requested."""
    if spec.collectives is None:
        yield
        return
    from torch import distributed

    if distributed.is_initialized():
        raise ConfigurationError(
            f"collectives={spec.collectives!r} needs a process without a default group, and rank "
            f"{spec.config.rank} has one; pass collectives=None where the engine makes its own"
        )
    await anyio.to_thread.run_sync(_init_process_group, spec, store)
    try:
        yield
    finally:
        # Bounded: a group whose peers are gone may wait for them, and then its process is to end anyway.
        with anyio.move_on_after(_DESTROY_S, shield=True):
            await anyio.to_thread.run_sync(distributed.destroy_process_group, abandon_on_cancel=True)


def _init_process_group(spec: RankSpec, store: TCPStore) -> None:
    from torch import distributed

    config, device = spec.config, current().device().device
    # NCCL's own group on it now: inside a capture it could not be made.
    bound = torch.device("cuda", device.index or 0) if spec.collectives == "nccl" else None
    distributed.init_process_group(
        spec.collectives,
        device_id=bound,
        store=PrefixStore("process-group", store),
        rank=config.rank,
        world_size=config.ranks,
        timeout=timedelta(seconds=config.timeout_s),
    )


# -- what runs on rank 0 --------------------------------------------------------------------------------


def _running_rank(group: str, epoch: int) -> RunningRank:
    running = _RUNNING.get(group)
    if running is None or running.epoch != epoch:
        raise DeviceLostError(f"epoch {epoch} of the rank group has ended; nothing ran", retryable=True)
    return running


@contextmanager
def _as_group_failure(running: RunningRank) -> Iterator[None]:
    """Raise an error of hosted code as the rank group's failure where it has failed."""
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

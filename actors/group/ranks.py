"""A rank of a gang inside a fleet's device: what `actors/group/cluster.py` sends there.

`sit` joins, makes the process group and the model, and stays until the gang ends; while it does, `ask` and
`listen` run code with the model of rank 0.
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
from layerzero.actors.group.join import Member, open_gang
from layerzero.actors.group.plan import Mode
from layerzero.actors.group.ray_store import RayStore, address_here
from layerzero.runtime import current
from layerzero.spec.errors import ConfigurationError, DeviceLostError

Build = Callable[[Member], Any]
_TAKE_DOWN_S = 5.0


@dataclass(frozen=True)
class Seat:
    """Everything that a rank is told: whose it is, which, under which epoch, and what it builds."""

    gang: str
    rank: int
    ranks: int
    epoch: int
    mode: Mode
    tp_invariant: bool
    collectives: str | None
    timeout_s: float
    build: Build


@dataclass
class Seated:
    """A rank that has joined; `over` ends it, with the reason why it failed or None where it is to leave."""

    member: Member
    epoch: int
    model: Any
    over: asyncio.Future[str | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end(self, why: str | None) -> None:
        """End the rank; only the first reason counts."""
        if not self.over.done():
            self.over.set_result(why)


_SEATED: dict[str, Seated] = {}


async def sit(seat: Seat) -> AsyncIterator[str]:
    """Be one rank: yield the plan's digest when everything is ready, and end when the gang does.

    Raises: ConsistencyError, DeviceLostError: the ranks do not agree, or the gang has failed. What `build`
        raises.
    """
    loop = asyncio.get_running_loop()
    store = RayStore(seat.gang)
    failed: asyncio.Future[str | None] = loop.create_future()

    def fail(why: str) -> None:
        if not failed.done():
            failed.set_result(why)

    def told(why: str) -> None:  # on the thread that noticed
        loop.call_soon_threadsafe(fail, why)

    joining = open_gang(
        current(),
        seat.ranks,
        rank=seat.rank,
        store=store,
        epoch=seat.epoch,
        mode=seat.mode,
        tp_invariant=seat.tp_invariant,
        host=await anyio.to_thread.run_sync(address_here),
        timeout_s=seat.timeout_s,
        on_failure=told,
    )
    async with _group(seat, store), joining as member:
        model = seat.build(member)
        seated = Seated(member, seat.epoch, await model if inspect.isawaitable(model) else model, failed)
        _SEATED[seat.gang] = seated
        try:
            following = loop.create_task(member.follow()) if seat.rank else None
            yield member.plan
            await _until_over(seated, following)
        finally:
            del _SEATED[seat.gang]


async def _until_over(seated: Seated, following: asyncio.Task[None] | None) -> None:
    waits: set[asyncio.Future[Any]] = {seated.over}
    if following is not None:
        waits.add(following)
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if following is not None and not following.done():
            following.cancel()
    if following is not None and following.done():
        following.result()
    elif (why := seated.over.result()) is not None:
        raise DeviceLostError(f"the gang has failed: {why}", retryable=True)


@asynccontextmanager
async def _group(seat: Seat, store: AgreementStore) -> AsyncIterator[None]:
    """torch.distributed's default group of the gang's ranks, where one is asked for."""
    if seat.collectives is None:
        yield
        return
    from torch import distributed

    if distributed.is_initialized():
        raise ConfigurationError(
            f"collectives={seat.collectives!r} needs a process without a default group, and rank {seat.rank} "
            "has one; pass collectives=None where the engine makes its own"
        )
    await anyio.to_thread.run_sync(_make_group, seat, store)
    try:
        yield
    finally:
        # Not for ever: a group whose peers are gone may wait for them, and then its process is to end anyway.
        with anyio.move_on_after(_TAKE_DOWN_S, shield=True):
            await anyio.to_thread.run_sync(distributed.destroy_process_group, abandon_on_cancel=True)


def _make_group(seat: Seat, store: AgreementStore) -> None:
    from torch import distributed
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not declared

    key, wait = f"gang/{seat.epoch}/group", timedelta(seconds=seat.timeout_s)
    if seat.rank == 0:
        host = address_here()
        made = TCPStore(host, 0, None, True, wait, wait_for_workers=False)
        store.put(key, f"{host} {made.port}".encode())
    else:
        said = store.take(key, seat.timeout_s)
        if said is None:
            raise DeviceLostError("rank 0 did not open the process group in time", retryable=True)
        host, port = said.decode().split(" ")
        made = TCPStore(host, int(port), None, False, wait)
    distributed.init_process_group(
        seat.collectives, store=made, rank=seat.rank, world_size=seat.ranks, timeout=wait
    )


# -- what runs on rank 0 --------------------------------------------------------------------------------


def _seated(gang: str, epoch: int) -> Seated:
    found = _SEATED.get(gang)
    if found is None or found.epoch != epoch:
        raise DeviceLostError(f"epoch {epoch} of the gang has ended; nothing ran", retryable=True)
    return found


@contextmanager
def _meaning(seated: Seated) -> Iterator[None]:
    """Raise an error of hosted code as the gang's failure where it has failed, whatever came of that."""
    try:
        yield
    except Exception as error:
        why = seated.member.failure
        if why is None:
            raise
        raise DeviceLostError(f"the gang failed while the call ran: {why}", retryable=False) from error


async def ask(
    gang: str, epoch: int, fn: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """`fn(model, *args, **named)` on rank 0; plain functions run on a thread."""
    seated = _seated(gang, epoch)
    with _meaning(seated):
        if inspect.iscoroutinefunction(fn):
            return await fn(seated.model, *args, **named)
        return await anyio.to_thread.run_sync(
            lambda: fn(seated.model, *args, **named), abandon_on_cancel=True
        )


async def listen(
    gang: str, epoch: int, fn: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
) -> AsyncIterator[Any]:
    """The items of `fn(model, *args, **named)` on rank 0."""
    seated = _seated(gang, epoch)
    with _meaning(seated):
        async with aclosing(fn(seated.model, *args, **named)) as items:
            async for item in items:
                yield item


async def dismiss(gang: str) -> None:
    """Let rank 0 leave: it says the last word, and every other rank's walk ends."""
    if (seated := _SEATED.get(gang)) is not None:
        seated.end(None)
    else:
        log.debug("gang.dismissed_twice", gang=gang)

"""torch's modes are a task's own on every loop: asyncio's, uvloop's, and under factories of eager tasks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
import trio
from torch import Tensor

import layerzero as lz
from tests.calls.test_modes_of_tasks import BLOCKS, CALL, CALLS, modes
from tests.native.twins import both_paths as both_paths


def eager() -> asyncio.AbstractEventLoop:
    """A loop whose tasks begin inside of who makes them."""
    if sys.version_info < (3, 12):
        pytest.skip("asyncio has eager tasks from Python 3.12 on")
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)
    return loop


def eager_class() -> asyncio.AbstractEventLoop:
    """The same with a class of tasks of the user's own."""
    if sys.version_info < (3, 12):
        pytest.skip("asyncio has eager tasks from Python 3.12 on")

    class OwnTask(asyncio.Task[Any]):
        """A task of the user's own."""

    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.create_eager_task_factory(OwnTask))
    return loop


def uvloop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop's, where that is installed."""
    made: asyncio.AbstractEventLoop = pytest.importorskip("uvloop").new_event_loop()
    return made


LOOPS = [asyncio.new_event_loop, uvloop, eager, eager_class]
Served = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop", "eager", "eager-class"])
def serve(request: pytest.FixtureRequest) -> Served:
    """Runs a coroutine on one kind of loop, inside a runtime."""

    def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def inside() -> None:
            async with lz.start(lz.Settings(warm="off")):
                await main()

        with asyncio.Runner(loop_factory=request.param) as runner:
            factory = runner.get_loop().get_task_factory()
            runner.run(inside())
            assert runner.get_loop().get_task_factory() is factory

    return run


@pytest.mark.parametrize("name", CALLS)
def test_children_made_without_grad_have_none(serve: Served, name: str) -> None:
    """All 64 of them, on a loop that has seen calls with grad; the loop's own mode stays."""

    async def main() -> None:
        for _ in range(3):
            assert (await CALLS[name]()).requires_grad
        for _ in range(3):
            with torch.no_grad():
                outs: list[Tensor] = await asyncio.gather(*(CALLS[name]() for _ in range(64)))
            assert not any(out.requires_grad for out in outs) and torch.is_grad_enabled()
            assert all(out.requires_grad for out in await asyncio.gather(*(CALLS[name]() for _ in range(8))))

    serve(main)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_mode_at_a_tasks_creation_decides(serve: Served, block: str) -> None:
    """Whether a task begins at once or later, and whether the block was left while it waited."""
    seen: list[tuple[Any, ...]] = []

    async def child() -> None:
        for _ in range(2):
            seen.append(modes())
            await asyncio.sleep(0)
            seen.append(modes())
            await CALL()

    async def main() -> None:
        plain = modes()
        with BLOCKS[block]():
            entered = modes()
            early = asyncio.create_task(child())
        assert modes() == plain
        async with asyncio.TaskGroup() as group:
            with BLOCKS[block]():
                group.create_task(child())
                await asyncio.sleep(0)
        await early
        assert seen == [entered] * 8 and modes() == plain
        seen.clear()
        await asyncio.create_task(child())
        assert seen == [plain] * 4 and modes() == plain

    serve(main)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_around_an_await_reaches_no_neighbour(serve: Served, block: str) -> None:
    """Tasks that begin inside of a block's owner, or beside it, see what they were made under."""
    found: dict[str, set[bool]] = {"owner": set(), "neighbour": set(), "child": set()}

    async def inside(plain: tuple[Any, ...]) -> None:
        with BLOCKS[block]():
            entered = modes()
            child = asyncio.create_task(beside("child", entered))
            for _ in range(3):
                await asyncio.sleep(0)
                await CALL()
                found["owner"].add(modes() == entered)
            await child
        found["owner"].add(modes() == plain)

    async def beside(who: str, expected: tuple[Any, ...]) -> None:
        for _ in range(4):
            found[who].add(modes() == expected)
            await CALL()
            await asyncio.sleep(0)
        found[who].add(modes() == expected)

    async def main() -> None:
        plain = modes()
        await asyncio.gather(
            *(task for _ in range(3) for task in (inside(plain), beside("neighbour", plain)))
        )
        assert modes() == plain

    serve(main)
    assert found == {who: {True} for who in found}


def test_a_task_that_is_cancelled_inside_a_block_takes_it_along(serve: Served) -> None:
    """Also where it has run until its first wait before its maker goes on."""

    async def main() -> None:
        plain = modes()

        async def stays() -> None:
            with torch.inference_mode(), torch.autocast("cpu"):
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(stays()) for _ in range(3)]
        assert modes() == plain
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks) and modes() == plain

    serve(main)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("before", ["the runtime", "a call"])
def test_children_of_trio_made_without_grad_have_none_and_meet(name: str, before: str) -> None:
    """All 64 of them, in `async with lz.start()` from its first call on, else behind the run's first."""
    outs: list[Tensor] = []

    async def child() -> None:
        outs.append(await CALLS[name]())

    async def crowd(size: int, *, grad: bool) -> int:
        outs.clear()
        async with trio.open_nursery() as nursery:
            with torch.set_grad_enabled(grad):  # left before the first of them begins
                for _ in range(size):
                    nursery.start_soon(child)
        return sum(out.requires_grad for out in outs)

    async def main() -> None:
        for _ in range(3 if before == "a call" else 0):
            assert (await CALLS[name]()).requires_grad
        for _ in range(3):
            assert await crowd(64, grad=False) == 0
            assert torch.is_grad_enabled() and await crowd(8, grad=True) == 8

    async def inside() -> None:
        async with lz.start(lz.Settings(warm="off")) as runtime:
            await main()
            assert max(runtime.device("cpu").loop_drivers.stats().sizes) == 64

    async def around() -> None:
        await main()

    if before == "the runtime":
        trio.run(inside)
    else:
        with lz.start(lz.Settings(warm="off")):
            trio.run(around)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_around_an_await_of_trio_is_its_tasks_own(block: str) -> None:
    """Neighbours never see it; who waits in it finds it again, also after a cancel."""
    seen: list[tuple[Any, ...]] = []
    inner: list[tuple[Any, ...]] = []

    async def blocks() -> None:
        with BLOCKS[block]():
            inner.append(modes())
            for _ in range(4):
                await trio.lowlevel.checkpoint()
                inner.append(modes())
            with trio.move_on_after(0):
                await trio.sleep_forever()
            inner.append(modes())

    async def plain() -> None:
        for _ in range(6):
            seen.append(modes())
            await CALL()

    async def main() -> None:
        async with lz.start(lz.Settings(warm="off")):
            outside = modes()
            async with trio.open_nursery() as nursery:
                for task in (plain, blocks, plain, blocks, plain):
                    nursery.start_soon(task)
            assert set(seen) == {outside} and modes() == outside
            assert len(set(inner)) == 1 and (block == "no autocast" or set(inner) != {outside})

    trio.run(main)

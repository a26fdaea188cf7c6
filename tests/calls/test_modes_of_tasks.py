"""torch's modes belong to the task that entered them: they come with its creation and reach nobody else."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import layerzero as lz
import layerzero.sync
from tests.native.twins import both_paths as both_paths

WEIGHT = torch.randn(8, 8, requires_grad=True)
ROWS: list[int] = []


def projected(x: Tensor) -> Tensor:
    """Rows by a weight that wants a gradient; notes how many."""
    ROWS.append(len(x))
    return x @ WEIGHT


CALLS: dict[str, Callable[[], Awaitable[Tensor]]] = {
    "op": lambda: lz.linear(torch.randn(1, 8), WEIGHT),
    "function": lambda: lz.batched(projected)(torch.randn(1, 8)),
}
CALL = CALLS["function"]


def modes() -> tuple[Any, ...]:
    """What is in force in this thread."""
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch._C._is_fwd_grad_enabled(), torch._C._is_multithreading_enabled(),
        torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(),
        torch.empty(0).device.type,
        torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,  # pyright: ignore[reportAttributeAccessIssue]
    )  # fmt: skip


BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float16, no cache": lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "no forward": lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False),
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "device": lambda: torch.device("meta"),
    "hooks": lambda: saved_tensors_hooks(lambda x: x, lambda x: x),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", CALLS)
async def test_children_made_without_grad_have_none_and_meet(name: str) -> None:
    """All 64 of them, on a loop that has seen calls with grad, and again when their kind is known."""
    async with lz.start(lz.Settings(warm="off")) as runtime:
        for _ in range(3):
            assert (await CALLS[name]()).requires_grad
        for _ in range(3):
            ROWS.clear()
            before = dict(runtime.device("cpu").loop_drivers.stats().sizes)
            with torch.no_grad():
                outs = await asyncio.gather(*(CALLS[name]() for _ in range(64)))
            assert not any(out.requires_grad for out in outs)
            after = runtime.device("cpu").loop_drivers.stats().sizes
            assert {
                size: n - before.get(size, 0) for size, n in after.items() if n != before.get(size, 0)
            } == {64: 1}
            assert torch.is_grad_enabled()


@pytest.mark.asyncio
@pytest.mark.parametrize("block", BLOCKS)
async def test_a_block_around_an_await_is_its_tasks_own(block: str) -> None:
    """Around awaits of ours and of others: neighbours never see it, and its task finds it again."""
    plain, seen, neighbours = modes(), [], []

    async def inside() -> None:
        with BLOCKS[block]():
            entered = modes()
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(modes() == entered)
                await CALL()
                seen.append(modes() == entered)
        seen.append(modes() == plain)

    async def neighbour() -> None:
        for _ in range(4):
            neighbours.append(modes() == plain)
            await CALL()
            neighbours.append(modes() == plain)
            await asyncio.sleep(0)

    async with lz.start(lz.Settings(warm="off")):
        await asyncio.gather(*(task() for _ in range(3) for task in (neighbour, inside)))
    assert modes() == plain
    assert all(seen) and all(neighbours) and len(seen) == 21 and len(neighbours) == 24


@pytest.mark.asyncio
@pytest.mark.parametrize("block", BLOCKS)
async def test_the_mode_at_a_tasks_creation_decides(block: str) -> None:
    """Whether the block was left before the task began, or while it waited; in groups of tasks too."""
    seen: list[tuple[Any, ...]] = []

    async def child() -> None:
        for _ in range(2):
            seen.append(modes())
            await asyncio.sleep(0)
            seen.append(modes())
            await CALL()

    async with lz.start(lz.Settings(warm="off")):
        plain = modes()
        with BLOCKS[block]():
            entered = modes()
            early = asyncio.create_task(child())
        assert modes() == plain
        async with asyncio.TaskGroup() as group:
            with BLOCKS[block]():
                for _ in range(2):
                    group.create_task(child())
                await asyncio.sleep(0)
        await early
        assert seen == [entered] * 12 and (plain != entered or block == "no autocast")
        seen.clear()
        await asyncio.create_task(child())
        assert seen == [plain] * 4


@pytest.mark.asyncio
async def test_blocks_of_other_tasks_do_not_nest() -> None:
    """Tasks that enter and leave in any order leave nothing behind."""
    order: list[str] = []

    async def one(block: str, turns: int) -> None:
        with BLOCKS[block]():
            for _ in range(turns):
                await asyncio.sleep(0)
        order.append(block)

    async with lz.start(lz.Settings(warm="off")):
        plain = modes()
        await asyncio.gather(*(one(block, turns) for turns, block in enumerate([*BLOCKS, *reversed(BLOCKS)])))
        await asyncio.gather(
            *(one(block, 20 - turns) for turns, block in enumerate([*BLOCKS, *reversed(BLOCKS)]))
        )
        assert modes() == plain and len(order) == 4 * len(BLOCKS)


@pytest.mark.asyncio
async def test_a_generator_that_yields_inside_a_block_keeps_to_its_task() -> None:
    """Also where it is never finished, and closed by the loop."""
    neighbours: list[tuple[Any, ...]] = []

    async def rows() -> AsyncIterator[Tensor]:
        with torch.no_grad():
            while True:
                yield await CALL()

    async def takes() -> None:
        async for row in rows():
            assert not row.requires_grad
            break
        gc.collect()
        await asyncio.sleep(0)

    async def neighbour() -> None:
        for _ in range(6):
            neighbours.append(modes())
            await asyncio.sleep(0)

    async with lz.start(lz.Settings(warm="off")):
        plain = modes()
        await asyncio.gather(*(task() for _ in range(3) for task in (takes, neighbour)))
        assert neighbours == [plain] * 18 and modes() == plain


@pytest.mark.asyncio
async def test_who_is_cancelled_or_dropped_inside_a_block_takes_it_along() -> None:
    """Its neighbours and its loop have the modes that they had."""
    async with lz.start(lz.Settings(warm="off")):
        plain = modes()

        async def stays(waits: Awaitable[Any]) -> None:
            with torch.inference_mode(), torch.autocast("cpu"):
                await waits

        tasks = [asyncio.create_task(stays(CALL())) for _ in range(2)]
        tasks += [asyncio.create_task(stays(asyncio.Event().wait())) for _ in range(2)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks) and modes() == plain
        coroutine: Any = asyncio.get_running_loop().get_task_factory()
        dropped = coroutine(asyncio.get_running_loop(), stays(asyncio.sleep(0))).get_coro()
        dropped.send(None)
        del dropped
        tasks.clear()
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0)
        assert modes() == plain


@pytest.mark.asyncio
async def test_what_a_task_sets_for_good_stays() -> None:
    """A start-up handler that turns gradients off does so for who comes after it, as without us."""

    async def starts_up() -> None:
        await CALL()
        torch.set_grad_enabled(False)
        await CALL()

    async def asks() -> bool:
        return (await CALL()).requires_grad

    async with lz.start(lz.Settings(warm="off")):
        try:
            await asyncio.create_task(starts_up())
            assert not await asyncio.create_task(asks())
        finally:
            torch.set_grad_enabled(True)


def test_two_loops_have_modes_of_their_own() -> None:
    """In two threads, one without grad as a whole, one with blocks."""
    found: dict[str, set[bool]] = {"off": set(), "on": set()}

    async def asks(where: str) -> None:
        for _ in range(5):
            found[where].add((await CALL()).requires_grad)
            with torch.no_grad():
                await asyncio.sleep(0)

    async def crowd(where: str) -> None:
        await CALL()
        await asyncio.gather(*(asks(where) for _ in range(4)))

    def serve(where: str) -> None:
        torch.set_grad_enabled(where == "on")
        asyncio.run(crowd(where))

    with lz.start(lz.Settings(warm="off")):
        threads = [threading.Thread(target=serve, args=(where,)) for where in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {"off": {False}, "on": {True}}


@pytest.mark.asyncio
async def test_tasks_are_made_as_before_and_a_closed_runtime_leaves_the_loop_as_it_was() -> None:
    """The loop's own factory makes them; a wrapped coroutine answers for its own to people and debuggers."""
    loop = asyncio.get_running_loop()
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(getattr(coro, "__qualname__", ""))
        return asyncio.Task(coro, loop=loop, **options)

    async def asks() -> Tensor:
        return await CALL()

    loop.set_task_factory(factory)
    try:
        async with lz.start(lz.Settings(warm="off")):
            task = asyncio.create_task(asks(), name="asker")
            coroutine: Any = task.get_coro()
            assert "asks" in repr(task) and task.get_name() == "asker"
            assert coroutine.cr_code.co_name == "asks"
            await task
            with pytest.raises(TypeError, match="a coroutine was expected, got 5"):
                await loop.create_task(5)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert loop.get_task_factory() is factory
        assert any("asks" in name for name in made)
    finally:
        loop.set_task_factory(None)


def test_tasks_made_before_the_loops_first_call_share_modes_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nobody could wrap them: as in torch alone; the next tasks of the loop have their own."""

    async def casts() -> None:
        with torch.autocast("cpu"):
            await CALL()

    async def asks() -> torch.dtype:
        return (await CALL()).dtype

    async def crowd() -> tuple[None, torch.dtype, torch.dtype]:
        await asyncio.gather(casts(), asks(), return_exceptions=True)
        return await asyncio.gather(casts(), asks(), asks())

    with lz.start(lz.Settings(warm="off")):
        _, first, second = asyncio.run(crowd())
    said = [
        record.getMessage() for record in caplog.records if "loop_driver.modes_shared" in record.getMessage()
    ]
    assert first is second is torch.float32
    assert len(said) == 1 and "async with layerzero.start()" in said[0] and "autocast" in said[0]


def sine(x: Tensor) -> Tensor:
    """What saves its operand for the backward pass."""
    return x.sin()


@pytest.mark.asyncio
@pytest.mark.parametrize("limit_us", [0.0, 1e9], ids=["worker", "loop"])
async def test_hooks_around_a_call_see_what_it_saves(limit_us: float) -> None:
    """As they do around a blocking call, in company, and when the kind of call is known."""
    x, weight = torch.randn(2, 8, requires_grad=True), torch.randn(8, 8)
    packed: list[Tensor] = []

    def pack(saved: Tensor) -> Tensor:
        packed.append(saved)
        return saved

    def hooks() -> saved_tensors_hooks:
        return saved_tensors_hooks(pack, lambda saved: saved)

    async def called(call: Callable[[], Awaitable[Tensor]], hooked: bool) -> Tensor:
        with hooks() if hooked else nullcontext():
            return await call()

    calls: list[tuple[Callable[[], Awaitable[Tensor]], Callable[[], Tensor]]] = [
        (lambda: lz.linear(x, weight), lambda: lz.sync.linear(x, weight)),
        (lambda: lz.batched(sine)(x), lambda: sine(x)),
    ]
    async with lz.start(lz.Settings(warm="off", inline_limit_us=limit_us)):
        for call, blocking in calls:
            packed.clear()
            with hooks():
                blocking()
            alone = len(packed)
            assert alone
            for hooked in (True, False, True):
                packed.clear()
                for out in await asyncio.gather(*[called(call, hooked) for _ in range(3)]):
                    out.sum().backward()
                assert len(packed) == (3 * alone if hooked else 0)


GAIN, BIAS, TURN = torch.rand(8), torch.rand(8), torch.randn(8, 8)
APART: dict[str, Callable[[Any, Tensor], Any]] = {
    "one tensor for all": lambda ops, x: ops.rms_norm(x, GAIN),
    "two tensors for all": lambda ops, x: ops.layer_norm(x, GAIN, BIAS),
    "any of several weights": lambda ops, x: ops.linear(x, TURN, BIAS),
    "a function": lambda ops, x: (turned if ops is lz.sync else lz.batched(turned))(x),
}


def turned(x: Tensor) -> Tensor:
    """Rows by a weight that wants no gradient."""
    return x @ TURN


@pytest.mark.asyncio
@pytest.mark.parametrize("name", APART)
async def test_callers_under_other_modes_share_no_batch(name: str) -> None:
    """Each gets the kind of tensor, in the dtype, that it gets blocking; those of one mode meet."""
    blocks: list[Callable[[], AbstractContextManager[Any]]] = [
        torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    ]  # fmt: skip
    x = torch.randn(2, 8)

    async def called(block: Callable[[], AbstractContextManager[Any]]) -> Tensor:
        with block():
            return await APART[name](lz, x)  # type: ignore[no-any-return]

    async with lz.start(lz.Settings(warm="off", inline_limit_us=0.0)) as runtime:
        for _ in range(3):
            for block, out in zip(blocks * 2, await asyncio.gather(*map(called, blocks * 2)), strict=True):
                with block():
                    alone = APART[name](lz.sync, x)
                assert (out.dtype, out.is_inference()) == (alone.dtype, alone.is_inference())
        assert runtime.device("cpu").loop_drivers.stats().sizes == {2: 9}

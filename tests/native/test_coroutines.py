"""An awaited op gives a coroutine like any other: compiled and in Python it behaves the same."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import pickle
import sys
import traceback
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch

import layerzero as lz
from layerzero.native import FAST_PATH, UNUSED, NativeModule
from tests.native.twins import compiled

__all__ = ("compiled",)
Make = Callable[..., Any]
CASES: dict[str, Callable[[Make], Awaitable[Any]]] = {}
SEEN: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nobody")
WIDTH = 4


def case(function: Callable[[Make], Awaitable[Any]]) -> Callable[[Make], Awaitable[Any]]:
    CASES[function.__name__] = function
    return function


def told(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


async def outcome(awaited: Awaitable[Any]) -> Any:
    """Its value as a list, or its error's class and words."""
    try:
        value = await awaited
    except BaseException as error:
        return told(error)
    return value.tolist() if isinstance(value, torch.Tensor) else value


def tried(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except BaseException as error:
        return told(error)


@case
async def runs_in_tasks(make: Make) -> Any:
    tasks = [asyncio.create_task(make()) for _ in range(3)]
    names = [task.get_coro().__qualname__ for task in tasks]  # type: ignore[union-attr]
    return names, [await outcome(task) for task in tasks], await outcome(asyncio.ensure_future(make()))


@case
async def runs_in_groups(make: Make) -> Any:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(make()) for _ in range(2)]
    async with anyio.create_task_group() as other:
        other.start_soon(make)
    return [await outcome(task) for task in tasks], [
        out.tolist() for out in await asyncio.gather(make(), make())
    ]


@case
async def is_waited_for(make: Make) -> Any:
    first = None
    with anyio.move_on_after(60):
        first = await outcome(make())
    return first, await outcome(asyncio.wait_for(make(), 60)), await outcome(asyncio.wait_for(make(), 0))


@case
async def is_cancelled_before_it_starts(make: Make) -> Any:
    task = asyncio.create_task(make())
    task.cancel("mine")
    return await outcome(task), task.cancelled()


@case
async def is_cancelled_while_it_waits(make: Make) -> Any:
    tasks = [asyncio.create_task(make()) for _ in range(2)]
    await asyncio.sleep(0)
    if not tasks[0].done():
        tasks[0].cancel("mine")
    found = [await outcome(task) for task in tasks]
    return found[1], await outcome(make())


@case
async def is_awaited_twice(make: Make) -> Any:
    call = make()
    return await outcome(call), await outcome(call), tried(call.send, None), call.close()


@case
async def wants_none_first(make: Make) -> Any:
    call = make()
    return tried(call.send, 1), await outcome(call)


@case
async def takes_errors(make: Make) -> Any:
    first, second, third, fourth = make(), make(), make(), make()
    found = [
        tried(first.throw, KeyError("mine")),
        tried(second.throw, OSError, "full"),
        tried(third.throw, KeyError),
    ]
    return found, await outcome(first), await outcome(third), tried(fourth.throw, "no error"), fourth.close()


@case
async def takes_errors_while_it_waits(make: Make) -> Any:
    async def thrown(error: BaseException) -> Any:
        call = make()
        ended = isinstance(tried(call.send, None), tuple)  # alone it runs in its first step
        return ended, tried(call.throw, error), await outcome(call)

    found = [
        await asyncio.create_task(thrown(error)) for error in (KeyError("mine"), asyncio.CancelledError())
    ]
    return found, await outcome(make())


@case
async def is_closed(make: Make) -> Any:
    before, begun = make(), make()
    tried(begun.send, None)
    found = [before.close(), begun.close(), begun.close()]
    return found, await outcome(before), await outcome(begun), await outcome(make())


@case
async def warns_where_nobody_awaits_it(make: Make) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
        make().close()
    return [(one.category.__name__, str(one.message), one.filename == __file__) for one in caught]


@case
async def raises_what_is_wrong(make: Make) -> Any:
    wrong = torch.ones(1, WIDTH + 1)
    found = [await outcome(make(wrong)), await outcome(lz.linear()), await outcome(lz.linear("x", "w"))]  # type: ignore[arg-type, call-arg]
    found += [
        await outcome(make(unknown=1)),
        await outcome(make(priority=7)),
        await outcome(make(timeout=-1)),
    ]
    return found, await outcome(make(backend="nobody")), await outcome(make(batching="all"))


@case
async def leads_errors_to_its_caller(make: Make) -> Any:
    async def asks() -> Any:
        return await make(torch.ones(1, WIDTH + 1))

    try:
        await asyncio.create_task(asks())
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        return [frame.name for frame in frames if frame.filename == __file__]


@case
async def keeps_its_context(make: Make) -> Any:
    async def asks(name: str) -> Any:
        SEEN.set(name)
        await make()
        return SEEN.get()

    return await asyncio.gather(asks("a"), asks("b")), SEEN.get()


@case
async def keeps_torchs_modes(make: Make) -> Any:
    async def asks(grad: bool) -> Any:
        with torch.set_grad_enabled(grad):
            out = await make()
            return torch.is_grad_enabled(), out.tolist()

    found = await asyncio.gather(asks(True), asks(False))
    with torch.inference_mode():
        return found, await outcome(make()), torch.is_inference_mode_enabled()


@case
async def notes_its_plan(make: Make) -> Any:
    await make()
    selection = lz.last_selection()
    return selection is not None and (selection.op, selection.request.dims["K"])


@case
async def is_a_coroutine_to_all_who_ask(make: Make) -> Any:
    call = make()
    asked = [
        isinstance(call, Coroutine),
        isinstance(call, Awaitable),
        asyncio.iscoroutine(call),
        inspect.isawaitable(call),
    ]
    asked += [inspect.iscoroutinefunction(lz.linear), asyncio.iscoroutinefunction(lz.linear)]
    asked += [call.__name__, call.__qualname__, tried(pickle.dumps, call)[0], weakref.ref(call)() is call]
    return asked, await outcome(call)


@case
async def is_led_by_another_awaitable(make: Make) -> Any:
    class Around:
        def __await__(self) -> Generator[Any, None, Any]:
            return (yield from make().__await__())

    async def asks() -> Any:
        return await Around()

    return await outcome(Around()), await outcome(asyncio.create_task(asks()))


@asynccontextmanager
async def known_calls(ways: str, module: Any) -> AsyncIterator[Make]:
    """Makes calls that are known: of one task that is alone, or of several in one line."""
    FAST_PATH.use(module)
    limits = {"alone": 1e12, "in a line": 0.0}[ways]
    with lz.start(lz.Settings(warm="off", perfdb=None, inline_limit_us=1e12, max_inline_us=limits)):
        weight, row = torch.eye(WIDTH), torch.ones(1, WIDTH)

        def make(x: torch.Tensor = row, **more: Any) -> Any:
            return lz.linear(x, weight, **more)

        for _ in range(3):
            await asyncio.gather(*(asyncio.create_task(make()) for _ in range(3)))
            await make()
        call = make()
        assert (type(call).__name__ == "Call") is (module is not None)
        call.close()
        yield make


async def told_by(name: str, ways: str, module: Any) -> Any:
    """What a case tells."""
    async with known_calls(ways, module) as make:
        return await CASES[name](make)


@pytest.mark.parametrize("ways", ["alone", "in a line"])
@pytest.mark.parametrize("name", CASES)
def test_a_call_behaves_as_pythons_own_coroutine(name: str, ways: str, compiled: Any) -> None:
    """Every case tells the same, compiled and in Python alone."""
    ours, pythons = (asyncio.run(told_by(name, ways, module)) for module in (compiled, None))
    assert ours == pythons


@pytest.mark.parametrize("ways", ["alone", "in a line"])
def test_a_known_call_needs_no_coroutine_of_pythons(ways: str, compiled: Any) -> None:
    """Neither of a task that is alone, nor of tasks that are new to the queue."""

    async def followed() -> int:
        frames: list[str] = []
        async with known_calls(ways, compiled) as make:
            ended = asyncio.Event()

            async def stays() -> None:
                await make()
                await ended.wait()

            # Two that have called and are still here: nobody is alone.
            others = [] if ways == "alone" else [asyncio.create_task(stays()) for _ in range(2)]
            for _ in range(9):
                await asyncio.sleep(0)
            sys.setprofile(lambda frame, event, _: frames.append(frame.f_code.co_name))
            try:
                await (asyncio.gather(*(asyncio.create_task(make()) for _ in range(3))) if others else make())
            finally:
                sys.setprofile(None)
            ended.set()
            await asyncio.gather(*others)
        return frames.count("follow")

    assert asyncio.run(followed()) == 0


@pytest.mark.asyncio
async def test_a_process_that_awaits_no_op_has_its_tasks_compiled_too(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that passes on what a cluster's devices draw: a step of a task in Python takes far longer."""
    library = SimpleNamespace(ready=True, get=lambda: compiled)  # a second copy's classes would be others
    monkeypatch.setattr(NativeModule, "_library", lambda _: library)
    FAST_PATH.use(None)
    FAST_PATH.state = UNUSED
    async with lz.start(lz.Settings(device="cpu"), scoped=True):
        task = asyncio.ensure_future(asyncio.sleep(0))
        assert type(task.get_coro()) is compiled.IsolatedCoroutine
        await task

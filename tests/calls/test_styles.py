"""Awaited ops meet in one batch however their requests are written, on each kind of loop; real calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import anyio
import pytest
import torch
from torch import Tensor

import layerzero as lz
from tests.calls.test_modes_of_loops import LOOPS

WIDTH, CALLERS, STEPS = 8, 24, 12
WEIGHT = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)) / 4
# Nothing runs at once: every awaited call queues.
SETTINGS = lz.Settings(device="cpu", inference=True, warm="off", max_inline_us=0.0)

Step = Callable[[Tensor], Awaitable[Tensor]]


async def product(x: Tensor) -> Tensor:
    """What every request awaits."""
    out: Tensor = await lz.linear(x, WEIGHT)
    return out


async def by_wait_for(x: Tensor) -> Tensor:
    return await asyncio.wait_for(product(x), 60)


async def in_a_task_group(x: Tensor) -> Tensor:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(product(x))
    return task.result()


async def in_a_group_of_anyio(x: Tensor) -> Tensor:
    out: list[Tensor] = []

    async def step() -> None:
        out.append(await product(x))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(step)
    return out[0]


async def by_generators(x: Tensor) -> Tensor:
    async def one() -> AsyncIterator[Tensor]:
        yield await product(x)

    async def same(source: AsyncIterator[Tensor]) -> AsyncIterator[Tensor]:
        async for out in source:
            yield out

    return await anext(same(one()))


async def cancelled_before(x: Tensor) -> Tensor:
    task = asyncio.ensure_future(product(x))
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return await product(x)


STYLES: dict[str, Step] = {
    style.__name__.replace("_", " "): style
    for style in (product, by_wait_for, in_a_task_group, in_a_group_of_anyio, by_generators, cancelled_before)
}


def served(step: Step, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> float:
    """The mean batch of a crowd over its callers; its results are those of the blocking calls."""

    async def request(number: int) -> Tensor:
        x = torch.full((1, WIDTH), number / CALLERS)
        for _ in range(STEPS):
            x = await step(x)
        return x

    async def main() -> float:
        async with lz.start(SETTINGS) as runtime:
            outs = await asyncio.gather(*map(request, range(CALLERS)))
            stats = runtime.device("cpu").loop_drivers.stats()
            for number, out in enumerate(outs):
                x = torch.full((1, WIDTH), number / CALLERS)
                for _ in range(STEPS):
                    x = lz.sync.linear(x, WEIGHT)
                assert torch.allclose(out, x, atol=1e-6)
            return sum(n * count for n, count in stats.sizes.items()) / stats.batches / CALLERS

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop", "eager", "eager-class"])
@pytest.mark.parametrize("style", STYLES)
def test_a_crowd_shares_its_batches(style: str, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Nine of ten callers in each batch, in the mean."""
    mean = served(STYLES[style], loop)
    assert mean >= 0.9, mean


def test_a_thread_that_calls_beside_them_takes_nothing_from_the_batch() -> None:
    """A blocking caller runs its own calls; those that await meet as before."""
    over = threading.Event()
    ran: list[Tensor] = []

    def blocking() -> None:
        with torch.inference_mode():
            while not over.is_set():
                ran[:] = [lz.sync.linear(torch.ones(1, WIDTH), WEIGHT)]
                over.wait(1e-3)

    thread = threading.Thread(target=blocking)
    thread.start()
    try:
        mean = served(product)
    finally:
        over.set()
        thread.join()
    assert mean >= 0.9 and torch.allclose(ran[0], torch.ones(1, WIDTH) @ WEIGHT.T, atol=1e-6), mean

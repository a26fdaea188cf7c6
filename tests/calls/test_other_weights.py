"""Calls that differ in their weights alone share a batch where few meet by themselves, each with its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import layerzero as lz
from layerzero.scheduler.core.round_robin import BatchQueue
from layerzero.spec.errors import KernelExecutionError
from tests.kernels import kernel
from tests.native.twins import both_paths as both_paths

WIDTH, CALLERS, WEIGHTS = 8, 24, 6
SETTINGS = lz.Settings(device="cpu", inference=True, warm="off", inline_limit_us=1e9)
Call = Callable[[Tensor, Tensor], Coroutine[Any, Any, Tensor]]


def weights() -> list[Tensor]:
    """Of one shape; the product of ones with the n-th is n + 1 in every column."""
    return [torch.full((WIDTH, WIDTH), (n + 1) / WIDTH) for n in range(WEIGHTS)]


def families(runtime: lz.Runtime) -> list[BatchQueue]:
    """The queues in which calls with several weights wait."""
    batcher = runtime.device("cpu").loop_drivers.current().batcher
    return [queue for queue in batcher.round_robin.all_queues() if queue.together]


async def crowd(own: list[Tensor], call: Call = lz.linear, rounds: int = 10) -> None:
    """Every caller goes through all weights in an order of its own, and finds each row its own weight's."""
    alone = [[linear(torch.full((1, WIDTH), float(x)), w) for w in own] for x in range(CALLERS)]

    async def request(number: int) -> None:
        rng, x = random.Random(number), torch.full((1 + number % 3, WIDTH), float(number))
        for _ in range(rounds):
            for index in rng.sample(range(WEIGHTS), WEIGHTS):
                got, each = await call(x, own[index]), alone[number][index]
                assert got.shape == x.shape and torch.allclose(got, each, rtol=1.3e-6, atol=1e-5), (
                    number,
                    index,
                )

    await asyncio.gather(*(request(number) for number in range(CALLERS)))


async def together(runtime: lz.Runtime, own: list[Tensor], call: Call = lz.linear) -> None:
    """Let a crowd call until its calls wait together, 30 rounds at most."""
    for _ in range(10):
        await crowd(own, call, rounds=3)
        if families(runtime):
            return
    raise AssertionError("no calls wait together")


@pytest.mark.asyncio
async def test_calls_with_several_weights_are_one_batch() -> None:
    """Callers that are at different weights at a time make one batch, and each gets its own weight's rows."""
    own = weights()
    async with lz.start(SETTINGS, scoped=True) as runtime:
        await together(runtime, own)
        assert len(families(runtime)) == 1
        before = runtime.device("cpu").loop_drivers.stats()
        batches, done = before.batches, before.done
        await crowd(own, rounds=10)
        after = runtime.device("cpu").loop_drivers.stats()
        assert (after.done - done) / (after.batches - batches) > CALLERS / WEIGHTS


@pytest.mark.asyncio
async def test_a_block_with_biases_gets_its_own() -> None:
    """The feed-forward block, four operands of which are a request's own: equal to the block alone."""
    models = [
        (torch.randn(16, WIDTH), torch.randn(WIDTH, 16), torch.randn(16), torch.randn(WIDTH))
        for _ in range(WEIGHTS)
    ]

    async def request(number: int) -> None:
        rng, x = random.Random(number), torch.randn(1, WIDTH)
        for _ in range(30):
            w_up, w_down, b_up, b_down = rng.choice(models)
            block = (x, w_up, w_down, b_up, b_down)
            got = await lz.mlp(*block, activation="relu")
            torch.testing.assert_close(got, lz.sync.mlp(*block, activation="relu"))

    async with lz.start(SETTINGS, scoped=True) as runtime:
        await asyncio.gather(*(request(number) for number in range(CALLERS)))
        assert families(runtime)


@pytest.mark.asyncio
@pytest.mark.parametrize("determinism", ["default", "strict"])
async def test_the_bits_are_those_of_the_call_alone(determinism: Any) -> None:
    """Under strict determinism bit for bit, else within the tolerance of a batch."""
    own = [torch.randn(16, WIDTH) for _ in range(WEIGHTS)]
    async with lz.start(SETTINGS.replace(determinism=determinism), scoped=True) as runtime:

        async def request(number: int) -> None:
            rng, x = random.Random(number), torch.randn(1 + number % 2, WIDTH)
            for _ in range(40):
                weight = rng.choice(own)
                got, alone = await lz.linear(x, weight), lz.sync.linear(x, weight)
                bound = 0.0 if determinism == "strict" else None  # torch's own
                torch.testing.assert_close(got, alone, rtol=bound, atol=bound)

        await asyncio.gather(*(request(number) for number in range(CALLERS)))
        assert families(runtime)


@pytest.mark.asyncio
async def test_callers_in_inference_mode_have_batches_of_their_own() -> None:
    """Callers of several weights who wait together do so by their modes: each gets its own kind of tensor."""
    own = weights()

    async def request(number: int) -> None:
        rng, x, inference = random.Random(number), torch.randn(1, WIDTH), bool(number % 2)
        with torch.inference_mode() if inference else torch.no_grad():
            for _ in range(40):
                assert (await lz.linear(x, rng.choice(own))).is_inference() is inference

    async with lz.start(SETTINGS.replace(inference=None), scoped=True) as runtime:
        await asyncio.gather(*(request(number) for number in range(2 * CALLERS)))
        assert families(runtime)


@pytest.mark.asyncio
async def test_one_bad_weight_fails_its_callers_alone() -> None:
    """A kernel that raises over one weight: who brought that gets the error, the others their products."""
    own = weights()
    bad = own[2].data_ptr()
    state = {"broken": False}

    def fragile(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if state["broken"] and weight.data_ptr() == bad:
            raise RuntimeError("out of order")
        return linear(x, weight, bias)

    async def call(x: Tensor, weight: Tensor) -> Tensor:
        return await lz.linear(x, weight, backend="t.linear.fragile")

    async with lz.start(SETTINGS, scoped=True) as runtime:
        runtime.add_kernel(kernel("t.linear.fragile", fragile, launch_us=1e-6))
        await together(runtime, own, call)
        state["broken"] = True
        x = torch.ones(1, WIDTH)
        answers = await asyncio.gather(
            *(call(x, own[number % WEIGHTS]) for number in range(CALLERS)), return_exceptions=True
        )
        for number, answer in enumerate(answers):
            if number % WEIGHTS == 2:
                assert isinstance(answer, KernelExecutionError) and "out of order" in str(answer)
            else:
                assert isinstance(answer, Tensor) and torch.equal(answer, linear(x, own[number % WEIGHTS]))


@pytest.mark.asyncio
async def test_what_lies_there_when_the_batch_runs_is_used() -> None:
    """A weight whose memory is exchanged while its call waits: no neighbour's rows meet the new one."""
    own = weights()
    async with lz.start(SETTINGS, scoped=True) as runtime:
        await together(runtime, own)
        x = torch.ones(1, WIDTH)

        async def exchange() -> None:
            own[0].data = torch.full((WIDTH, WIDTH), 100.0 / WIDTH)

        answers, *_ = await asyncio.gather(
            asyncio.gather(*(lz.linear(x, own[number % WEIGHTS]) for number in range(CALLERS))), exchange()
        )
        for number, answer in enumerate(answers):
            place = number % WEIGHTS
            allowed = {1.0, 100.0} if place == 0 else {place + 1.0}
            assert len(found := set(answer.flatten().tolist())) == 1 and found <= allowed


@pytest.mark.asyncio
async def test_a_cancelled_caller_takes_nobody_along() -> None:
    """Of callers of several weights that wait together one leaves; the others get theirs."""
    own = weights()
    async with lz.start(SETTINGS, scoped=True) as runtime:
        await together(runtime, own)
        x = torch.ones(1, WIDTH)
        tasks = [
            asyncio.ensure_future(lz.linear(x, own[number % WEIGHTS], timeout=60))
            for number in range(CALLERS)
        ]
        await asyncio.sleep(0)
        tasks[3].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers.pop(3), asyncio.CancelledError)
        assert all(isinstance(answer, Tensor) for answer in answers)


@pytest.mark.asyncio
async def test_gradients_and_other_shapes_stay_apart() -> None:
    """A weight that wants a gradient, or of another shape, dtype or stride, is never in the family."""
    own = weights()
    async with lz.start(SETTINGS.replace(inference=None), scoped=True) as runtime:
        with torch.no_grad():
            await together(runtime, own)
            (queue,) = families(runtime)
        wanting = torch.full((WIDTH, WIDTH), 0.5, requires_grad=True)
        out = await lz.linear(torch.ones(1, WIDTH), wanting)
        assert out.requires_grad
        for other in (torch.randn(WIDTH, WIDTH).T, torch.randn(16, WIDTH)):
            await lz.linear(torch.ones(1, WIDTH), other)
        assert queue.family is not None
        batcher = runtime.device("cpu").loop_drivers.current().batcher
        led = [key for key, to in batcher.round_robin.queues.items() if to is queue and key is not queue.key]
        assert len(led) <= WEIGHTS

"""On the CPU, calls that few others can join run in their callers' own steps, with the same results."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.scheduler import batch_runs, inline_runs
from layerzero.scheduler.core import at_once
from layerzero.scheduler.core.at_once import ImmediateGroups
from layerzero.scheduler.core.limits import BatcherStats
from layerzero.scheduler.inline_runs import InlineRuns
from tests.kernels import kernel
from tests.native.twins import both_paths as both_paths

WIDTH, CALLERS = 8, 4
# No call is too long to run at once, whatever this machine does beside it.
SETTINGS = lz.Settings(device="cpu", inference=True, warm="off", inline_limit_us=1e9)


class Model:
    """A weight of its own, and a function over rows."""

    def __init__(self, seed: int) -> None:
        self.weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) / 4
        self.runs = 0

    def rows(self, x: Tensor) -> Tensor:
        """Two more than that."""
        self.runs += 1
        return x + 2

    async def request(self, steps: int, **how: Any) -> Tensor:
        """A product and the function, so many times."""
        x = torch.ones(1, WIDTH)
        for _ in range(steps):
            x = await lz.batched(self.rows)(await lz.linear(x, self.weight, **how))
        return x

    def expected(self, steps: int) -> Tensor:
        """The same, blocking."""
        x = torch.ones(1, WIDTH)
        for _ in range(steps):
            x = lz.sync.linear(x, self.weight) + 2
        return x


def stats(runtime: lz.Runtime) -> BatcherStats:
    """What the batchers have counted."""
    return runtime.device("cpu").loop_drivers.stats()


@pytest.mark.asyncio
async def test_models_of_one_caller_each_need_no_queue() -> None:
    """After a few calls nothing queues; results are those of the blocking calls, and all are counted."""
    models = [Model(seed) for seed in range(CALLERS)]
    together = asyncio.Barrier(CALLERS)

    async def request(model: Model) -> Tensor:
        result = await model.request(50)
        await together.wait()  # the last one is not alone: whoever is runs inline, and is counted nowhere
        return result

    async with lz.start(SETTINGS, scoped=True) as runtime:
        results = await asyncio.gather(*map(request, models))
        counted = stats(runtime)
        assert counted.at_once + counted.submitted == CALLERS * 50 * 2
        assert counted.at_once > 0.8 * CALLERS * 50 * 2
        for model, result in zip(models, results, strict=True):
            assert torch.allclose(result, model.expected(50))
            assert model.runs == 50


@pytest.mark.asyncio
@pytest.mark.parametrize("later", [False, True], ids=["opened", "configured"])
async def test_where_nothing_may_run_inline_callers_of_one_model_share_batches(later: bool) -> None:
    """`max_inline_us=0` means that every call queues: four callers that walk together stay together."""
    off = {"max_inline_us": 0.0}
    settings = SETTINGS if later else lz.Settings(
        device="cpu", inference=True, warm="off", inline_limit_us=1e9, max_inline_us=0.0
    )  # fmt: skip
    async with lz.start(settings) as runtime:
        model = Model(0)
        await asyncio.gather(*(model.request(20) for _ in range(CALLERS)))
        if later:
            lz.configure(**off)
            await asyncio.gather(*(model.request(5) for _ in range(CALLERS)))
        before = stats(runtime)
        ran, batches = before.at_once, sum(before.sizes.values())
        await asyncio.gather(*(model.request(20) for _ in range(CALLERS)))
        after = stats(runtime)
    assert after.at_once == ran
    assert sum(after.sizes.values()) - batches <= 1.5 * 20 * 2


@pytest.mark.asyncio
async def test_a_call_with_a_priority_or_a_deadline_queues() -> None:
    """Whoever asks for an order gets one, where others run at once."""
    models = [Model(seed) for seed in range(CALLERS)]
    async with lz.start(SETTINGS, scoped=True) as runtime:
        await asyncio.gather(*(model.request(20) for model in models))
        for how in ({"priority": 0}, {"timeout": 30.0}):
            before = stats(runtime).submitted
            await asyncio.gather(*(model.request(5, **how) for model in models))
            assert stats(runtime).submitted - before >= 5 * CALLERS


@pytest.mark.asyncio
async def test_a_caller_that_runs_at_once_leaves_others_their_turns() -> None:
    """A task beside callers that never queue goes on while they run, and one that is cancelled ends."""
    models = [Model(seed) for seed in range(CALLERS)]
    settings = SETTINGS.replace(max_inline_us=1.0)
    async with lz.start(settings, scoped=True) as runtime:
        tasks = [asyncio.ensure_future(model.request(2000)) for model in models]
        turns = 0
        while turns < 50:
            await asyncio.sleep(0)
            turns += 1
        assert not any(task.done() for task in tasks)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        for model, result in zip(models[1:], results[1:], strict=True):
            assert isinstance(result, Tensor) and torch.allclose(result, model.expected(2000))
        assert stats(runtime).at_once > 1000


@pytest.mark.asyncio
async def test_what_a_call_at_once_raises_is_its_callers_alone() -> None:
    """An error in one caller's own step reaches nobody else."""
    models = [Model(seed) for seed in range(CALLERS)]

    async def wrong(model: Model) -> None:
        await model.request(20)
        await lz.linear(torch.ones(1, WIDTH + 1), model.weight)

    async with lz.start(SETTINGS, scoped=True):
        results = await asyncio.gather(
            wrong(models[0]), *(model.request(40) for model in models[1:]), return_exceptions=True
        )
        assert isinstance(results[0], ValueError)
        assert all(isinstance(result, Tensor) for result in results[1:])


async def products(weights: list[Tensor], steps: int) -> None:
    """A request that goes through several products, so many times."""
    for _ in range(steps):
        for weight in weights:
            await lz.linear(torch.ones(1, WIDTH), weight)


@pytest.mark.asyncio
async def test_requests_join_the_groups_of_others_that_have_gone_without_a_look(
    monkeypatch: pytest.MonkeyPatch, both_paths: str
) -> None:
    """Each request is a task of its own, new to every group: nobody asks for each who is still there."""
    monkeypatch.setattr(at_once, "BATCH_US", 1e9)  # however long a call takes here, few share it
    asked = {"_look": 0, "joins": 0}
    for kind, name in ((ImmediateGroups, "_look"), (InlineRuns, "joins")):
        answer = getattr(kind, name)

        def counted(self: Any, *given: Any, name: str = name, answer: Any = answer) -> Any:
            asked[name] += 1
            return answer(self, *given)

        monkeypatch.setattr(kind, name, counted)
    models = [[Model(9 * seed + layer).weight for layer in range(8)] for seed in range(CALLERS)]
    async with lz.start(SETTINGS) as runtime:
        await asyncio.gather(*(products(weights, 60) for weights in models))
        before, requests = stats(runtime).at_once, 8 * CALLERS
        asked.update(_look=0, joins=0)
        for _ in range(8):
            await asyncio.gather(*(products(weights, 2) for weights in models))
        assert stats(runtime).at_once - before >= 0.7 * requests * 8 * 2
        assert asked["_look"] <= requests
        assert asked["joins"] <= (2 * requests if both_paths == "compiled" else 0)  # one new task each


class Ticking:
    """A clock by which whatever is timed takes 30 microseconds."""

    now_s = 0.0

    def perf_counter(self) -> float:
        """Later than the last time."""
        self.now_s += 30e-6
        return self.now_s


@pytest.mark.asyncio
async def test_one_caller_too_many_ends_what_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of 30 us run at once for two callers that are there, and queue from the third on."""
    monkeypatch.setattr(inline_runs, "time", Ticking())
    weights = [Model(0).weight]
    async with lz.start(SETTINGS) as runtime:
        for _ in range(4):
            await asyncio.gather(*(products(weights, 30) for _ in range(2)))
        before = stats(runtime)
        await asyncio.gather(*(products(weights, 5) for _ in range(2)))
        after = stats(runtime)
        assert (after.at_once - before.at_once, after.submitted - before.submitted) == (10, 0)
        all_there = asyncio.Barrier(4)

        async def request(own: Tensor) -> None:
            await products([own, *weights * 5], 1)  # the driver knows it from the first one on
            await all_there.wait()

        await asyncio.gather(*(request(Model(seed).weight) for seed in range(1, 5)))
        assert stats(runtime).submitted - after.submitted >= 4 + 9


@pytest.mark.asyncio
@pytest.mark.usefixtures("both_paths")
async def test_a_group_whose_callers_have_gone_asks_python_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few may share a group here: after two requests it is full of those that have gone."""
    monkeypatch.setattr(inline_runs, "time", Ticking())
    asked, joins = [0], InlineRuns.joins

    def counted(self: InlineRuns, *given: Any) -> bool:
        asked[0] += 1
        return joins(self, *given)

    models = [[Model(2 * seed + layer).weight for layer in range(2)] for seed in range(2)]
    async with lz.start(SETTINGS) as runtime:
        for _ in range(4):
            await asyncio.gather(*(products(weights, 30) for weights in models))
        before = stats(runtime).at_once
        monkeypatch.setattr(InlineRuns, "joins", counted)
        for _ in range(12):
            await asyncio.gather(*(products(weights, 5) for weights in models))
        assert stats(runtime).at_once - before == 12 * 2 * 2 * 5
        assert asked[0] <= 12 * 2  # each once, as a task that nobody knows


@pytest.mark.asyncio
@pytest.mark.usefixtures("both_paths")
async def test_a_request_that_has_gone_is_not_the_one_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is there is no question of memory: a new request lies where that of another model lay before."""
    monkeypatch.setattr(inline_runs, "time", Ticking())
    weights = [Model(seed).weight for seed in range(8)]
    async with lz.start(SETTINGS) as runtime:
        for _ in range(2):  # of the first the last one runs alone
            await asyncio.gather(*(products([weight], 60) for weight in weights))
        before = stats(runtime).submitted
        for first in range(1, 49):
            turned = weights[first * 3 % 8 :] + weights[: first * 3 % 8]
            await asyncio.gather(*(products([weight], 5) for weight in turned))
        assert stats(runtime).submitted == before


@pytest.mark.asyncio
@pytest.mark.usefixtures("both_paths")
async def test_those_that_pause_between_two_batches_do_not_become_a_crowd_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of eight callers few fit into one turn with what each runs at once; all eight meet in every batch."""
    monkeypatch.setattr(inline_runs, "time", Ticking())
    monkeypatch.setattr(batch_runs, "MOST_TURNS", 0)  # as where turns were waited in vain before
    own, shared, steps = [Model(seed).weight for seed in range(8)], Model(9).weight, 20
    async with lz.start(SETTINGS.replace(max_inline_us=25.0)) as runtime:  # 100 for all: three calls
        for _ in range(3):
            await asyncio.gather(*(products([weight], 30) for weight in own))
        sizes, ran = Counter(stats(runtime).sizes), stats(runtime).at_once
        await asyncio.gather(*(products([shared, weight], steps) for weight in own))
        after = stats(runtime)
        assert after.at_once - ran >= 0.8 * len(own) * steps
        assert after.sizes[len(own)] - sizes[len(own)] >= 0.8 * steps, after.sizes


@pytest.mark.asyncio
async def test_what_may_run_at_once_waits_for_the_worker_without_a_batch_of_its_own() -> None:
    """While the worker writes, no caller runs anything; then those that waited run at once, as before."""
    models = [Model(seed) for seed in range(CALLERS)]
    begun, go_on = threading.Event(), threading.Event()

    def slow(x: Tensor) -> Tensor:
        begun.set()
        assert go_on.wait(60)
        return x

    async def visitor() -> None:
        await lz.batched(slow, key="slow")(torch.ones(1, WIDTH))  # the first time, on the worker

    async with lz.start(SETTINGS, scoped=True) as runtime:
        for _ in range(2):
            await asyncio.gather(*(model.request(60) for model in models))
        visits = asyncio.ensure_future(visitor())
        assert await asyncio.to_thread(begun.wait, 60)
        before, runs = stats(runtime).submitted, [model.runs for model in models]
        callers = [asyncio.ensure_future(model.request(5)) for model in models]
        for _ in range(20):
            await asyncio.sleep(0)
        assert [model.runs for model in models] == runs
        go_on.set()
        await asyncio.gather(visits, *callers)
        assert stats(runtime).submitted == before


@pytest.mark.asyncio
async def test_closing_wakes_who_has_paused() -> None:
    """A caller that waits for its share of a turn when its driver is closed gets the error of the others."""
    models = [Model(seed) for seed in range(CALLERS)]
    async with lz.start(SETTINGS.replace(max_inline_us=1.0), scoped=True) as runtime:
        tasks = [asyncio.ensure_future(model.request(100_000)) for model in models]
        for _ in range(200):
            await asyncio.sleep(0)
        runtime.device("cpu").loop_drivers.current().close()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert all(isinstance(result, lz.RuntimeClosedError) for result in results), results


@pytest.mark.asyncio
async def test_at_once_too_a_kernel_that_raises_is_followed_by_the_next_one() -> None:
    """Of the process's own runtime, whose calls the compiled twin runs; the callers do not notice."""
    models = [Model(seed) for seed in range(CALLERS)]
    state = {"broken": False, "runs": 0}

    def fragile(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        state["runs"] += 1
        if state["broken"]:
            raise RuntimeError("out of order")
        return torch.nn.functional.linear(x, weight, bias)

    async with lz.start(SETTINGS) as runtime:
        runtime.add_kernel(kernel("t.linear.fragile", fragile, launch_us=1e-6))
        with torch.no_grad():
            wanted = [model.expected(20) for model in models]
            await asyncio.gather(*(model.request(60) for model in models))
            before, state["runs"] = stats(runtime).at_once, 0
            state["broken"] = True
            results = await asyncio.gather(*(model.request(20) for model in models))
        assert state["runs"] and stats(runtime).at_once > before
        for want, result in zip(wanted, results, strict=True):
            assert torch.allclose(result, want)

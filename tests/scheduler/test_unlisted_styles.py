"""The batch holds for many ways of writing a request, on a device that answers early and on the CPU."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import pytest

from layerzero.actors.device.worker import Worker
from layerzero.scheduler.batch_runs import BatchRuns
from layerzero.scheduler.core.pending_call import TaskTree
from tests.clocks import run_virtually
from tests.scheduler.styles import CALLERS, STYLES, Host, mean_batch
from tests.scheduler.test_expected_callers import HERE, PASS_S, Machine


@pytest.mark.parametrize("style", STYLES)
def test_a_device_that_answers_early_runs_the_whole_crowd(worker: Worker, style: str) -> None:
    """Nine of ten callers in the mean, however a request is written."""
    mean, runs = mean_batch(style, lambda: Machine(worker))
    assert mean >= 0.9, (mean, runs)


@pytest.mark.parametrize("short", [False, True], ids=["thread", "loop"])
@pytest.mark.parametrize("style", STYLES)
def test_the_cpu_runs_the_whole_crowd(style: str, short: bool) -> None:
    """The same where batches run on a thread, and on the loop's."""
    mean, runs = mean_batch(style, lambda: Host(short))
    # Who makes a task for each op leaves no trace of where in its program it is: places of one group share a
    # batch only by chance.
    assert mean >= (0.6 if style == "a task for each op" else 0.9), (mean, runs)


def test_turns_are_seldom_waited_in_vain() -> None:
    """Half of the callers are away for longer than turns of the loop: the others seldom wait for them."""
    batches, waited = 128, 0

    async def main() -> int:
        host = Host(short=False)
        runs = host.front._runs
        yields = runs._yields_to_resumed

        async def request(number: int) -> None:
            while len(host.device.runs) < batches:
                await host.token()
                if number % 2:
                    await asyncio.sleep(2.5 * PASS_S)

        def counted() -> bool:
            nonlocal waited
            waits = yields()
            waited += waits
            return waits

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchRuns, "_yields_to_resumed", lambda _: counted())
            await asyncio.gather(*map(request, range(8)))
        return waited

    assert 0 < run_virtually(main()) < batches / 2


def test_who_ends_for_good_is_waited_for_once(worker: Worker) -> None:
    """Half of the requests, each a task a step, end: the others lose one grace, and no more."""

    async def main() -> tuple[float, int]:
        machine = Machine(worker)

        async def request(number: int) -> None:
            for _ in range(10 if number % 2 else 40):
                await asyncio.wait_for(machine.token(), 1e3)

        begin = machine.loop.time()
        await asyncio.gather(*map(request, range(8)))
        return (machine.loop.time() - begin) / PASS_S, len(machine.device.runs)

    took, runs = run_virtually(main())
    assert runs == 40 and took < 40.5, (took, runs)


@pytest.mark.parametrize(("calls", "needs"), [(1, 1.7), (8, 1.2 * 4.5)])
def test_requests_that_come_at_random_meet(worker: Worker, calls: int, needs: float) -> None:
    """Of one call or up to eight, eight calls a pass: who comes waits for the batch that runs, and for no
    other after it. Each batch of one call ran alone before, further and further behind."""

    async def main() -> float:
        machine, draw = Machine(worker, host_s=PASS_S / 50), random.Random(1)
        took: list[float] = []

        async def request() -> None:
            begin = machine.loop.time()
            for _ in range(draw.randint(1, calls) if took else 1):  # the first one is short
                await machine.token()
            took.append((machine.loop.time() - begin) / PASS_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(500):
                await asyncio.sleep(draw.expovariate(16 / (calls + 1)) * PASS_S)
                group.create_task(request())
        return sum(took) / len(took)

    assert run_virtually(main()) < needs


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_hops_through_a_thread_are_waited_for_while_that_pays(worker: Worker, share: float) -> None:
    """All hops one after another take a share of a pass, as they do under one lock of the interpreter: one
    crowd that waits for its last caller is faster than two that take turns, which need two passes a step."""

    async def main() -> float:
        machine, free_at, host = Machine(worker, host_s=0.15 * PASS_S), 0.0, 0.15

        async def request(number: int) -> None:
            nonlocal free_at
            await asyncio.sleep(number * PASS_S / 4)
            while True:
                await machine.token()
                now = machine.loop.time()
                free_at = max(free_at, now) + share * PASS_S / CALLERS
                await asyncio.sleep(free_at - now)

        requests = [asyncio.ensure_future(request(number)) for number in range(CALLERS)]
        await asyncio.sleep(20 * PASS_S)
        begin, before = machine.loop.time(), sum(machine.device.runs)
        await asyncio.sleep(50 * PASS_S)
        steps = (sum(machine.device.runs) - before) / CALLERS
        for each in requests:
            each.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        return (machine.loop.time() - begin) / PASS_S / steps / (1.0 + share + host)

    assert run_virtually(main()) < 1.05


async def _by_its_parent(machine: Machine, reading: Any) -> None:
    await machine.read(await asyncio.ensure_future(machine.step()))


async def _later_by_its_parent(machine: Machine, reading: Any) -> Any:
    started = machine.readback.start(await asyncio.ensure_future(machine.step()), HERE)
    if reading is not None:
        await reading
    return started


async def _in_one_task(machine: Machine, reading: Any) -> None:
    await asyncio.wait_for(machine.token(), 1e3)


@pytest.mark.parametrize("called_before", [False, True], ids=["", "a task above them has called"])
@pytest.mark.parametrize("row", [0.05, 0.4])
@pytest.mark.parametrize("step", [_by_its_parent, _later_by_its_parent, _in_one_task])
def test_two_crowds_whose_steps_are_tasks_meet(
    worker: Worker, step: Any, row: float, called_before: bool
) -> None:
    """The other half comes while the device runs the first: it is not taken for the first one's next tasks.
    On a GPU the halves took turns for good."""

    async def main() -> tuple[list[int], float]:
        machine = Machine(worker, host_s=0.1 * PASS_S)
        host: Any = machine.loop
        if called_before:
            await machine.token()

        async def request(number: int) -> None:
            await asyncio.sleep(number % 2 * PASS_S / 2)
            reading = None
            for _ in range(40):
                reading = await step(machine, reading)
                host.spend(row * PASS_S / CALLERS)

        begin = machine.loop.time()
        await asyncio.gather(*map(request, range(CALLERS)))
        return machine.device.runs, (machine.loop.time() - begin) / PASS_S

    runs, took = run_virtually(main())
    assert runs[10:38] == [CALLERS] * 28, runs
    # The host's part lies on the path of those that wait for what they have just asked.
    assert took < 43 if step is _later_by_its_parent else took < 42 * (1.1 + row), took


def test_a_request_that_makes_a_task_of_each_step_keeps_no_tree_of_those_before(worker: Worker) -> None:
    """Each task makes the next one: what it was made in goes when that one's own tree begins."""

    async def main() -> int:
        machine, ended = Machine(worker), asyncio.get_running_loop().create_future()

        async def next_step(left: int) -> None:
            await machine.token()
            if left:
                tasks[0] = asyncio.ensure_future(next_step(left - 1))
            else:
                ended.set_result(None)

        tasks = [asyncio.ensure_future(next_step(50))]
        await ended
        gc.collect()
        return sum(type(each) is TaskTree for each in gc.get_objects())

    before = sum(type(each) is TaskTree for each in gc.get_objects())
    assert run_virtually(main()) - before <= 4

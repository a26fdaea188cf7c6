"""`run_ahead` and reads that start before they are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.actors.device.worker import Worker
from layerzero.api import readback as module
from layerzero.api.readback import HostReadback
from layerzero.scheduler.modes.torch_modes import Modes, capture, with_stream
from tests.clocks import run_virtually
from tests.scheduler.test_expected_callers import HERE, PASS_S, Machine


@pytest.mark.asyncio
async def test_a_read_is_awaited_later_and_again() -> None:
    """What was started is there whenever it is asked for; a task can be made of it."""
    reading = lz.to_host(torch.arange(3))
    assert reading.done
    assert (await reading).tolist() == (await reading).tolist() == [0, 1, 2]
    assert (await asyncio.create_task(lz.to_host(torch.ones(2)))).tolist() == [1.0, 1.0]
    assert [t.tolist() for t in await asyncio.gather(*[lz.to_host(torch.ones(1)) for _ in range(2)])] == [
        [1]
    ] * 2
    lz.to_host(torch.ones(1)).close()


def started(machine: Machine) -> Callable[[Tensor], HostReadback]:
    """`to_host` for the results of a virtual device."""

    def modes() -> Modes:
        return with_stream(capture(), HERE)

    return lambda out: HostReadback(None, machine.readback.start(out, HERE), machine.front, modes)


def test_a_read_of_a_device_is_awaited_later_and_again(worker: Worker) -> None:
    """It starts when it is called; a second wait and a task get the same tensor; a cancelled wait is one."""

    async def main() -> None:
        machine = Machine(worker)
        to_host = started(machine)
        reading = to_host(await machine.step())
        assert not reading.done
        await asyncio.sleep(1.1 * PASS_S)
        assert reading.done, "nobody has awaited it"
        first = await reading
        assert first.tolist() == [2.0] and await reading is first
        task = asyncio.ensure_future(to_host(await machine.step()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await asyncio.create_task(to_host(await machine.step()))).tolist() == [2.0]

    run_virtually(main())


def tokens(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, max_steps: int | None
) -> AsyncGenerator[Tensor]:
    """A loop over a virtual device whose step doubles its argument."""
    monkeypatch.setattr(module, "to_host", started(machine))

    async def step(ids: Tensor) -> Tensor:
        doubled: Tensor = await machine.step(args=(ids,))
        return doubled

    return lz.run_ahead(step, torch.ones(1), max_steps=max_steps)


def test_the_device_is_one_step_in_front(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain loop takes a pass a step although each launch takes a quarter of one; results come in order."""

    async def main() -> tuple[float, list[list[float]]]:
        machine = Machine(worker, host_s=PASS_S / 4)

        async def reader() -> list[float]:
            return [float(token) async for token in tokens(machine, monkeypatch, 20)]

        begin = machine.loop.time()
        rows = await asyncio.gather(reader(), reader())
        return (machine.loop.time() - begin) / PASS_S / 20, list(rows)

    took, rows = run_virtually(main())
    assert rows == [[2.0**n for n in range(1, 21)]] * 2
    assert took < 1.1


def test_leaving_the_loop_wastes_one_step(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three results read, four steps run."""

    async def main() -> list[int]:
        machine = Machine(worker)
        read = 0
        async for _ in tokens(machine, monkeypatch, None):
            read += 1
            if read == 3:
                break
        await asyncio.sleep(2 * PASS_S)
        return machine.device.runs

    assert run_virtually(main()) == [1] * 4


@pytest.mark.asyncio
async def test_where_results_are_there_at_once_nothing_runs_ahead() -> None:
    """On the CPU a step that nobody asked for would delay the one that somebody reads."""
    calls: list[Any] = []

    async def step(ids: Tensor) -> Tensor:
        calls.append(ids)
        return ids + 1

    read = 0
    async for _ in lz.run_ahead(step, torch.tensor([0])):
        read += 1
        assert len(calls) == read
        if read == 3:
            break


@pytest.mark.asyncio
async def test_bad_arguments_are_named() -> None:
    """Steps below one, and a step that returns no tensor."""

    async def step(ids: Tensor) -> Any:
        return 3

    with pytest.raises(ValueError, match="max_steps needs an int >= 1, got 0"):
        await anext(lz.run_ahead(step, torch.tensor([0]), max_steps=0))
    with pytest.raises(TypeError, match=r"tensor needs a torch\.Tensor, got int"):
        await anext(lz.run_ahead(step, torch.tensor([0])))


def test_a_device_lost_with_two_steps_in_flight_fails_every_loop(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step runs, the next one stands behind it: each loop has the device's error, and nothing is left."""

    async def main() -> None:
        machine, lost = Machine(worker), RuntimeError("its device is gone")

        async def reader() -> list[float]:
            read: list[float] = []
            with pytest.raises(RuntimeError, match="its device is gone"):
                async for token in tokens(machine, monkeypatch, None):
                    read.append(float(token))
            return read

        readers = [asyncio.ensure_future(reader()) for _ in range(3)]
        await asyncio.sleep(2.5 * PASS_S)  # two results are read, two steps are launched beyond them
        machine.loop.call_soon(machine.readback.lose, lost)
        assert await asyncio.wait_for(asyncio.gather(*readers), 2 * PASS_S) == [[2.0, 4.0]] * 3
        assert machine.device.runs == [3] * 4
        await asyncio.sleep(4 * PASS_S)
        assert machine.settled and machine.device.runs == [3] * 4

    run_virtually(main())

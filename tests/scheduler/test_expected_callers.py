"""Callers that read results back from a device that answers later stay one crowd, within bounds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerzero.actors.device.worker import Worker
from layerzero.scheduler.core.expected_callers import ExpectedCallers
from layerzero.scheduler.core.limits import BatchLimits
from layerzero.scheduler.core.pending_call import PENDING_CALL, PendingCall
from layerzero.scheduler.core.round_robin import BatchQueue
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.modes.readback import Readback
from layerzero.scheduler.spawn import spawn
from layerzero.spec.errors import DeadlineExceededError, RuntimeClosedError
from layerzero.spec.settings import Settings
from tests.clocks import run_virtually
from tests.scheduler.devices import Double, Later

OP = Double()
HERE = (0, 0, 0)
PASS_S = 0.004
HOLD_S = 0.05


class Machine:
    """A front of the running loop over a device that answers later, and its read-backs."""

    def __init__(self, worker: Worker, pass_s: float = PASS_S, host_s: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        self.loop = loop
        self.device = Later(loop, pass_s, host_s)
        streams: Any = self.device
        self.front = LoopDriver(loop, self.device, worker, Settings(), always_inline=True, streams=streams)
        self.readback = Readback(self.front, self.device, self.device)  # type: ignore[arg-type]
        self.front.readback = self.readback

    async def step(self, group: str = "step", *, args: tuple[Any, ...] | None = None, **more: Any) -> Any:
        """One awaited call."""
        ticket: PendingCall = PENDING_CALL.cls(OP, args or (torch.ones(1),), group, 1.0, **more)
        return await self.front.submit(ticket)

    async def token(self, group: str = "step", **more: Any) -> float:
        """One step, and its result on the host."""
        return float(await self.read(await self.step(group, **more)))

    async def read(self, out: torch.Tensor) -> Any:
        """What `out` is, on the host."""
        return await self.readback.start(out, HERE)

    @property
    def settled(self) -> bool:
        """Whether nothing is left and every call is accounted for."""
        lane = self.front.batcher
        return (
            lane.unfinished == lane.queued == lane.inflight_batches == len(lane.expected_callers or ()) == 0
        )


def crowds(worker: Worker, program: list[str], spawned: bool = False) -> list[int]:
    """The batches of 16 callers that arrive one by one and read the last result of each round back."""

    async def main() -> list[int]:
        machine = Machine(worker)

        async def caller(number: int) -> None:
            for _ in range(20):
                for group in program[:-1]:
                    await machine.step(group)
                assert await machine.token(program[-1]) == 2.0

        async def client(number: int) -> None:
            await asyncio.sleep(number * PASS_S / 5)
            await (spawn(machine.front, caller(number)) if spawned else caller(number))

        await asyncio.gather(*map(client, range(16)))
        await asyncio.sleep(0)
        assert machine.settled
        return machine.device.runs

    return run_virtually(main())


@pytest.mark.parametrize("spawned", [False, True])
@pytest.mark.parametrize("program", [["step"], ["embed", "layer", "layer", "sample"]])
def test_callers_that_read_back_stay_one_crowd(worker: Worker, program: list[str], spawned: bool) -> None:
    """They come to walk together, although the loop is idle while the device computes."""
    runs = crowds(worker, program, spawned)
    late = runs[-10 * len(program) : -4 * len(program)]  # before the first of them has ended
    assert late == [16] * len(late), runs


class Soon:
    """A worker whose jobs run in the loop's next turn."""

    inside = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def submit(self, job: Callable[[], object]) -> None:
        self._loop.call_soon(job)


def test_callers_of_what_a_worker_launches_stay_one_crowd() -> None:
    """A step with collectives is launched by another thread: from then on the device runs it."""

    async def main() -> list[int]:
        worker: Any = Soon(asyncio.get_running_loop())
        machine = Machine(worker)

        async def caller(number: int) -> None:
            await asyncio.sleep(number * PASS_S / 5)
            for _ in range(40):
                step: PendingCall = PENDING_CALL.cls(OP, (torch.ones(1),), "step", float("inf"))
                assert float(await machine.read(await machine.front.submit(step))) == 2.0

        await asyncio.gather(*map(caller, range(16)))
        await asyncio.sleep(0)
        assert machine.settled
        return machine.device.runs

    runs = run_virtually(main())
    assert runs[8:38] == [16] * 30, runs


def test_reads_of_a_device_that_is_lost_fail_at_once(worker: Worker) -> None:
    """Those that wait and those that come, and who waits for news of it gets its batch; until it is back."""

    async def main() -> None:
        machine, lost = Machine(worker, pass_s=1e6), RuntimeError("its peer is gone")
        begin = machine.loop.time()

        async def read() -> Any:
            try:
                return await machine.read(await machine.step())
            except RuntimeError as error:
                await asyncio.sleep(1.0)  # it is there, and does not call
                return error

        async def twice() -> Any:
            await machine.step()
            return await machine.step()  # held for those that read

        readers, held = [asyncio.ensure_future(read()) for _ in range(2)], asyncio.ensure_future(twice())
        await asyncio.sleep(0.01)
        assert not held.done() and machine.device.runs == [3]
        machine.loop.call_soon(machine.readback.lose, lost)
        out = await asyncio.wait_for(held, 0.5)
        assert await asyncio.gather(*readers) == [lost] * 2
        with pytest.raises(RuntimeError, match="its peer is gone"):
            await machine.read(out)
        assert machine.loop.time() - begin < 2.0
        machine.loop.call_soon(machine.readback.lose, None)
        await asyncio.sleep(0)
        machine.device.free_at = machine.loop.time()
        assert float(await machine.read(out)) == 2.0

    run_virtually(main())


def test_one_that_never_comes_back_is_waited_for_once(worker: Worker) -> None:
    """A caller that goes away for ten seconds costs the others one grace, not one at each of their steps."""

    async def main() -> tuple[float, list[int]]:
        machine = Machine(worker)

        async def slow() -> None:
            await machine.token()
            await asyncio.sleep(10.0)

        async def quick() -> float:
            begin = machine.loop.time()
            for _ in range(20):
                await machine.token()
            return machine.loop.time() - begin

        late = asyncio.ensure_future(slow())
        took = await asyncio.gather(quick(), quick())
        waiting = not late.done()
        await late
        await asyncio.sleep(0)
        assert waiting and machine.settled
        return max(took), machine.device.runs

    took, runs = run_virtually(main())
    assert took < 21 * PASS_S, took / PASS_S
    assert runs == [3] + [2] * 19


async def _reads_at_once(machine: Machine, steps: int, breath_s: Callable[[], float | None]) -> None:
    for _ in range(steps):
        await machine.token()
        if (seconds := breath_s()) is not None:
            await asyncio.sleep(seconds)


async def _reads_behind(machine: Machine, steps: int, breath_s: Callable[[], float | None]) -> None:
    """One token behind, itself."""
    before: Any = None
    for _ in range(steps):
        out = await machine.step()
        if before is not None:
            await machine.read(before)
        before = out


async def _reads_later(machine: Machine, steps: int, breath_s: Callable[[], float | None]) -> None:
    """Starts to read at once, and waits for it behind its next step."""
    reading: Any = None
    for _ in range(steps):
        out = await machine.step()
        started = machine.readback.start(out, HERE)
        if reading is not None:
            await reading
        reading = started
    await reading


async def _reads_in_a_task(machine: Machine, steps: int, breath_s: Callable[[], float | None]) -> None:
    """One token behind, through a task for each read-back."""
    reading: asyncio.Future[Any] | None = None
    for _ in range(steps):
        out = await machine.step()
        if reading is not None:
            await reading
        reading = asyncio.ensure_future(machine.read(out))
    if reading is not None:
        await reading


async def _reads_elsewhere(machine: Machine, steps: int, breath_s: Callable[[], float | None]) -> None:
    """Another task reads and hands the tokens on, as a server with a writer of its own does."""
    queue: asyncio.Queue[Any] = asyncio.Queue()

    async def reader() -> None:
        for _ in range(steps):
            await queue.put(await machine.read(await outs.get()))

    outs: asyncio.Queue[Any] = asyncio.Queue()
    reading = asyncio.ensure_future(reader())
    for _ in range(steps):
        await outs.put(await machine.step())
        await queue.get()
    await reading


# How a request is written, the breath it draws between two steps in passes, and how many passes the crowd may
# take for a step of all its requests: one, plus the breath where it lies on every step's path.
STYLES: dict[str, tuple[Any, tuple[float, float] | None, float]] = {
    "reads at once": (_reads_at_once, None, 1.0),
    "gives the loop a turn": (_reads_at_once, (0.0, 0.0), 1.0),
    "reads behind": (_reads_behind, None, 1.0),
    "reads behind in a task": (_reads_in_a_task, None, 1.0),
    "starts to read and waits later": (_reads_later, None, 1.0),
    "is read by another task": (_reads_elsewhere, None, 1.0),
    "waits for I/O of up to a quarter": (_reads_at_once, (0.0, 0.25), 1.25),
    "waits for I/O of a quarter": (_reads_at_once, (0.25, 0.25), 1.25),
    "waits for I/O of up to a pass": (_reads_at_once, (0.0, 1.0), 2.0),
    "waits for I/O of up to three": (_reads_at_once, (0.0, 3.0), 3.5),
}


def passes(
    worker: Worker, styles: list[str], steps: int = 60, host_s: float = 0.0
) -> tuple[float, list[int]]:
    """Passes of the device that 16 callers of these styles take a step, and the sizes of the batches.

    `host_s` is what the launch of each batch takes of the loop's thread.
    """

    async def main() -> tuple[float, list[int]]:
        machine = Machine(worker, host_s=host_s)

        async def client(number: int) -> None:
            style, breath, _ = STYLES[styles[number % len(styles)]]
            draw = random.Random(number)
            await asyncio.sleep(number * PASS_S / 5)
            await style(machine, steps, lambda: breath and draw.uniform(*breath) * PASS_S)

        begin = machine.loop.time()
        await asyncio.gather(*map(client, range(16)))
        await asyncio.sleep(0)
        assert machine.settled
        return (machine.loop.time() - begin) / PASS_S / steps, machine.device.runs

    return run_virtually(main())


@pytest.mark.parametrize("style", STYLES)
def test_the_batch_holds_however_a_request_is_written(worker: Worker, style: str) -> None:
    """All callers of one style walk together: a step of all takes what one takes alone, and its breath."""
    took, runs = passes(worker, [style])
    assert took < 1.15 * STYLES[style][2], (took, runs)


@pytest.mark.parametrize("style", ["reads behind in a task", "starts to read and waits later"])
def test_who_reads_behind_keeps_the_device_busy(worker: Worker, style: str) -> None:
    """A launch that takes a quarter of a pass costs nothing, since the device runs the step before meanwhile;
    who waits for each token pays for it."""
    took, runs = passes(worker, [style], host_s=PASS_S / 4)
    assert took < 1.1, (took, runs)
    assert passes(worker, ["reads at once"], host_s=PASS_S / 4)[0] > 1.2


def test_styles_mix(worker: Worker) -> None:
    """Requests of every quick style, side by side, are one crowd."""
    took, runs = passes(worker, list(STYLES)[:6])
    assert took < 1.15 and sum(runs[20:-10]) > 15 * len(runs[20:-10]), (took, runs)


def test_a_deadline_ends_a_hold(worker: Worker) -> None:
    """A held call that must start sooner than the hold would end starts in time, with who waits beside it."""

    async def main() -> list[float]:
        machine = Machine(worker, pass_s=1.0)

        async def held(within: float | None) -> float:
            await machine.step()
            at = machine.loop.time()
            await machine.step(deadline=None if within is None else at + within)
            return machine.loop.time() - at

        reader = asyncio.ensure_future(machine.token())
        ended = await asyncio.gather(held(0.02), held(None))
        assert not reader.done()
        await reader
        assert machine.settled
        return list(ended)

    ended = run_virtually(main())
    assert min(ended) > 0.01 and max(ended) <= 0.02, ended


def test_a_cancelled_reader_holds_nobody(worker: Worker) -> None:
    """Whoever waits for it goes on in the next turn."""

    async def main() -> float:
        machine = Machine(worker, pass_s=1.0)

        async def steps(count: int) -> None:
            for _ in range(count):
                await machine.step()

        reader = asyncio.ensure_future(machine.token())
        first = asyncio.ensure_future(steps(2))
        await asyncio.sleep(0.001)
        at = machine.loop.time()
        assert not first.done()
        reader.cancel()
        await first
        took = machine.loop.time() - at
        await asyncio.gather(reader, return_exceptions=True)
        await asyncio.sleep(0)
        assert machine.settled
        return took

    assert run_virtually(main()) < 1e-3


def test_other_groups_go_on_while_one_is_held(worker: Worker) -> None:
    """What no caller that is away would call next is not held up by it."""

    async def main() -> float:
        machine = Machine(worker, pass_s=1.0)

        async def stranger() -> float:
            at = machine.loop.time()
            await machine.step("stranger")
            return machine.loop.time() - at

        async def steps() -> None:
            await machine.step()
            await machine.step()

        reader, beside = asyncio.ensure_future(machine.token()), asyncio.ensure_future(steps())
        await asyncio.sleep(0.001)
        took = await stranger()
        assert not beside.done()
        await asyncio.gather(reader, beside)
        return took

    assert run_virtually(main()) < 1e-3


def test_a_call_held_too_long_for_its_deadline_is_told(worker: Worker) -> None:
    """A deadline that no batch can keep is an error, as without a hold."""

    async def main() -> None:
        machine = Machine(worker, pass_s=1.0)

        async def steps() -> None:
            await machine.step()
            with pytest.raises(DeadlineExceededError):
                await machine.step(deadline=machine.loop.time())

        await asyncio.gather(machine.token(), steps())
        await asyncio.sleep(0)
        assert machine.settled

    run_virtually(main())


def test_a_copy_that_fails_is_every_readers_error(worker: Worker) -> None:
    """Who still waits is told; who was cancelled before is not told twice, and nobody stays expected."""

    async def main() -> list[Any]:
        machine = Machine(worker)

        class Broken:
            def launch(self, tensors: list[torch.Tensor], sources: set[Any]) -> Any:
                readers[1].cancel()
                raise RuntimeError("no pinned memory")

        machine.readback = Readback(machine.front, worker, Broken())
        readers = [asyncio.ensure_future(machine.token()) for _ in range(3)]
        found = await asyncio.gather(*readers, return_exceptions=True)
        await asyncio.sleep(0)
        assert machine.settled
        return list(found)

    found = run_virtually(main())
    assert [type(error) for error in found] == [RuntimeError, asyncio.CancelledError, RuntimeError]


def test_a_device_that_cannot_be_asked_holds_nobody(worker: Worker) -> None:
    """Where its event thread is closed no hold lasts, neither the first nor a later one."""

    async def main() -> int:
        machine = Machine(worker)
        asked = 0

        def closed(modes: Any, on_done: Any) -> None:
            nonlocal asked
            asked += 1
            raise RuntimeClosedError("the event thread is closed")

        machine.device.notify_when_done = closed  # type: ignore[method-assign]

        async def steps() -> None:
            for _ in range(5):
                await machine.step()

        async def away() -> None:
            for _ in range(3):
                await machine.step()
                await asyncio.sleep(PASS_S / 2)

        await asyncio.wait_for(asyncio.gather(steps(), away()), 10 * PASS_S)
        return asked

    assert run_virtually(main()) > 1


def test_requests_that_end_do_not_stop_the_others(worker: Worker) -> None:
    """A crowd that reads behind and whose requests end and begin anew: each waits for its last result, and
    the others' next step does not wait with it. With every pause for a launch a step took 1.14 passes."""

    async def main() -> tuple[float, float]:
        machine = Machine(worker, host_s=PASS_S / 6)
        tokens, over = 0, False

        async def request(draw: random.Random) -> None:
            nonlocal tokens
            reading: Any = None
            for _ in range(draw.randint(16, 48)):
                started = machine.readback.start(await machine.step(), HERE)
                if reading is not None:
                    await reading
                    tokens += 1
                reading = started
                if over:
                    break
            await reading
            tokens += 1

        async def client(number: int) -> None:
            draw = random.Random(number)
            await asyncio.sleep(number * PASS_S / 5)
            while not over:
                await request(draw)

        clients = [asyncio.ensure_future(client(number)) for number in range(64)]
        await asyncio.sleep(20 * PASS_S)
        begin, before, batches = machine.loop.time(), tokens, len(machine.device.runs)
        await asyncio.sleep(200 * PASS_S)
        took = (machine.loop.time() - begin) / PASS_S / ((tokens - before) / 64)
        runs = machine.device.runs[batches:]
        over = True
        await asyncio.gather(*clients)
        return took, sum(runs) / len(runs)

    took, mean = run_virtually(main())
    assert took < 1.07 and mean > 60, (took, mean)


def test_a_pause_of_the_device_is_no_time_that_its_batch_needs() -> None:
    """Each launch comes too late, and takes the host as long as a tenth of a batch: what a batch is known to
    need stays what the device needs. Else each late launch made the next one later."""
    expected, group = ExpectedCallers(BatchLimits()), BatchQueue(("step",), solo=False)
    now = 0.0
    for _ in range(20):
        launch = expected.launched([], group, now)
        now += 1.0  # the host launches
        expected.handed_over(launch, now)
        assert expected.busy_s(now) == pytest.approx(group.run_s)
        now += 10.0  # the device runs
        expected.completed(launch.number, now)
        now += 2.0  # nobody has launched anything
    assert group.run_s == pytest.approx(10.0) and expected.launch_s == pytest.approx(1.0)

"""Prompts beside decoding, on a device whose steps take the longer the more rows they have."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from layerzero.actors.device.worker import Worker
from layerzero.scheduler.core.pending_call import PENDING_CALL, PendingCall
from layerzero.scheduler.loop_driver import LoopDriver
from layerzero.scheduler.modes.readback import Readback
from layerzero.spec.settings import Settings
from tests.clocks import run_virtually
from tests.scheduler.devices import Double, Later

OP, HERE = Double(), (0, 0, 0)
# A step of a model of 8 billion parameters: its weights, and its rows; the launch of a captured step.
WEIGHTS_S, ROW_S, LAUNCH_S = 0.0055, 22e-6, 0.001
MOST_ROWS, PIECE = 1024, 768


class ByRows(Later):
    """A device whose batches take the time of their rows; `steps` are the rows and the calls of each."""

    spans = None

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, WEIGHTS_S, LAUNCH_S)
        self.steps: list[tuple[int, int]] = []

    def execute(self, op: Any, calls: Sequence[tuple[Any, ...]], modes: Any, snapshot: Any) -> list[Any]:
        rows = sum(len(args[0]) for args in calls)
        self.steps.append((rows, len(calls)))
        self.pass_s = step_s(rows)
        return super().execute(op, calls, modes, snapshot)


def step_s(rows: int) -> float:
    """What the device needs for so many rows."""
    return WEIGHTS_S + ROW_S * rows


class Server:
    """Requests that share steps of at most `MOST_ROWS` rows; each reads its tokens one step behind."""

    def __init__(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        self.loop, self.device = loop, ByRows(loop)
        streams: Any = self.device
        settings = Settings(max_num_batched_tokens=MOST_ROWS, priority_aging_ms=2000.0)
        self.front = LoopDriver(loop, self.device, worker, settings, always_inline=True, streams=streams)
        self.readback = Readback(self.front, self.device, self.device)  # type: ignore[arg-type]
        self.front.readback = self.readback
        self.gaps: list[float] = []
        self.firsts: list[float] = []
        self.tokens = 0

    async def step(self, rows: int) -> Any:
        """`rows` of one request; next tokens go before prompts."""
        ticket: PendingCall = PENDING_CALL.cls(
            OP, (torch.ones(rows),), "step", 1.0, tokens=rows, priority=1 + (rows > 1)
        )
        return await self.front.submit(ticket)

    async def request(self, prompt: int, answer: int) -> None:
        """A prompt in pieces, and the tokens behind it."""
        began, last, reading = self.loop.time(), None, None
        while prompt > PIECE:
            await self.step(PIECE)
            prompt -= PIECE
        for rows in [prompt, *[1] * (answer - 1), 0]:
            out = await self.step(rows) if rows else None
            if reading is not None:
                await reading
                now = self.loop.time()
                if last is None:
                    self.firsts.append(now - began)
                else:
                    self.gaps.append(now - last)
                last = now
                self.tokens += 1
            reading = None if out is None else self.readback.start(out, HERE)


def served(worker: Worker, arrivals: list[tuple[float, int, int]]) -> Server:
    """The server behind requests (when, prompt, answer)."""

    async def main() -> Server:
        server = Server(worker)

        async def request(at: float, prompt: int, answer: int) -> None:
            await asyncio.sleep(at)
            await server.request(prompt, answer)

        await asyncio.gather(*(request(*arrival) for arrival in arrivals))
        return server

    return run_virtually(main())


def test_a_burst_of_prompts_leaves_next_tokens_in_every_step(worker: Worker) -> None:
    """32 requests decode when 16 prompts come at once: no token waits longer than the fullest step takes.

    A full batch of prompts stands behind the step that runs in any case; launched at once, several of them
    went before the next tokens of everybody, whose step was still running.
    """
    decoding = [(0.0, 8, 200)] * 32
    burst = [(0.5, 500 + 20 * number, 40) for number in range(16)]
    server = served(worker, decoding + burst)
    assert max(server.gaps) < step_s(MOST_ROWS) + 2 * LAUNCH_S, sorted(server.gaps)[-5:]


def test_a_burst_of_prompts_is_answered_as_fast_as_its_rows_allow(worker: Worker) -> None:
    """Its last first token is there when the device has run its rows beside those of who decodes."""
    burst = [(0.5, 700, 40)] * 12
    server = served(worker, [(0.0, 8, 200)] * 32 + burst)
    steps = -(-12 * 700 // (MOST_ROWS - 44))
    assert max(server.firsts) < 1.25 * (steps + 1) * step_s(MOST_ROWS), max(server.firsts)


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_prompts_that_come_at_random_keep_the_device_at_work(worker: Worker, share: float) -> None:
    """Poisson arrivals at a share of what the device can do: the tail of gaps is the fullest step."""
    draw, at, arrivals = random.Random(7), 0.0, []
    a_request_s = ROW_S * 528 + 136 * (WEIGHTS_S / 48 + ROW_S)
    for _ in range(90):
        at += draw.expovariate(share / a_request_s)
        arrivals.append((at, draw.randint(32, 1024), draw.randint(16, 256)))
    server = served(worker, arrivals)
    gaps, firsts = sorted(server.gaps), sorted(server.firsts)
    assert gaps[int(0.99 * len(gaps))] < 1.1 * step_s(MOST_ROWS), gaps[int(0.99 * len(gaps))]
    assert firsts[int(0.5 * len(firsts))] < 0.1


def test_what_was_read_tells_nothing_of_the_batch_behind_it(worker: Worker) -> None:
    """A copy that is launched just before a batch comes before it: the device still runs that batch."""

    async def main() -> tuple[float, float]:
        server = Server(worker)
        expected = server.front.batcher.expected_callers
        assert expected is not None
        for _ in range(4):  # what a step takes is known
            await server.readback.start(await server.step(8), HERE)
        reading = server.readback.start(await server.step(8), HERE)
        stepping = server.front.submit(PENDING_CALL.cls(OP, (torch.ones(8),), "step", 1.0, tokens=8))
        while server.front.batcher.queued:  # before the loop's next turn, which would launch the copy
            server.front._tick()
        await reading
        await stepping
        return expected.busy_s(server.loop.time()), server.device.free_at - server.loop.time()

    busy_s, left_s = run_virtually(main())
    assert left_s > 0.9 * step_s(8) and busy_s == pytest.approx(left_s, rel=0.25)


def test_a_full_batch_waits_for_no_other_models_batches(worker: Worker) -> None:
    """One caller has gone elsewhere, and another model keeps the device at work: prompts that fill a batch go
    when the device has run what that caller is expected from, not when it pauses, which it never does."""

    async def main() -> float:
        server, over = Server(worker), False

        async def gone() -> None:
            for _ in range(3):
                await server.step(8)
            await asyncio.sleep(100.0)

        async def other() -> None:
            reading: Any = None
            while not over:
                call: PendingCall = PENDING_CALL.cls(OP, (torch.ones(8),), "other", 1.0, tokens=8)
                out = await server.front.submit(call)
                if reading is not None:
                    await reading
                reading = server.readback.start(out, HERE)

        others = [asyncio.ensure_future(task()) for task in (gone, other, other)]
        await asyncio.sleep(0.2)
        began = server.loop.time()
        await asyncio.gather(*(server.step(600) for _ in range(4)))
        took, over = server.loop.time() - began, True
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        return took

    assert run_virtually(main()) < 6 * step_s(1200)

"""Puts one load on an encoder in five ways and says how fast, how late and how blocked the loop was.

The ways: one text after another, all together, Poisson arrivals, one hand-batched job, and a hand-written
batching server under the same arrivals. A latency counts from the moment a request was due, not from when the
loop got to it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

import torch
from models.minilm import MiniLM
from torch import Tensor

Embed = Callable[[str], Awaitable[Tensor]]
LAG_PERIOD_S = 0.002


@dataclass(slots=True)
class Run:
    """What one phase measured: embeddings (B, C) in host memory in the texts' order, times in seconds.

    `batches` counts launches by how many requests they served.
    """

    seconds: float
    latency_s: list[float]
    embeddings: Tensor
    lag_s: list[float] = field(default_factory=list)
    batches: dict[int, int] = field(default_factory=dict)

    @property
    def throughput(self) -> float:
        """Return texts per second."""
        return len(self.latency_s) / self.seconds

    def latency_ms(self, quantile: float) -> float:
        """Return a quantile of the latencies in milliseconds."""
        return percentile(self.latency_s, quantile) * 1e3

    def lag_ms(self, quantile: float) -> float:
        """Return a quantile of the loop's lag in milliseconds."""
        return percentile(self.lag_s, quantile) * 1e3


def percentile(values: Sequence[float], quantile: float) -> float:
    """Return the smallest value that at least `quantile` of the values do not exceed; 0 for no values."""
    if not values:
        return 0.0
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(quantile * len(ranked)))]


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return `count` arrival times in seconds, `rate` a second on average, the same for the same seed."""
    draw = random.Random(seed)
    times, now_s = [], 0.0
    for _ in range(count):
        now_s += draw.expovariate(rate)
        times.append(now_s)
    return times


class LoopLag:
    """Measures how late the event loop runs what is due, on a fixed grid of 2 ms.

    The grid does not move with the loop: one blocked for 20 ms is late for ten points, not for one.
    """

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> LoopLag:
        self._due = asyncio.get_running_loop().time() + LAG_PERIOD_S
        self._tick()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._record(asyncio.get_running_loop().time())

    def _record(self, now_s: float) -> None:
        while self._due <= now_s:
            self.late_s.append(now_s - self._due)
            self._due += LAG_PERIOD_S

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._record(loop.time())
        self._handle = loop.call_at(self._due, self._tick)


async def one_after_another(embed: Embed, texts: Sequence[str]) -> Run:
    """Embed each text when the one before it is done."""
    latency, rows = [], []
    async with LoopLag() as lag:
        start = time.perf_counter()
        for text in texts:
            began = time.perf_counter()
            rows.append(await embed(text))
            latency.append(time.perf_counter() - began)
        seconds = time.perf_counter() - start
    return Run(seconds, latency, torch.stack(rows), lag.late_s)


async def all_together(embed: Embed, texts: Sequence[str]) -> Run:
    """Embed all texts at once, each in its own task."""
    return await arriving(embed, texts, [0.0] * len(texts))


async def arriving(embed: Embed, texts: Sequence[str], arrivals: Sequence[float]) -> Run:
    """Embed each text in its own task, begun at its arrival time (seconds from now, ascending)."""
    latency = [0.0] * len(texts)

    async def request(index: int, due: float) -> Tensor:
        row = await embed(texts[index])
        latency[index] = time.perf_counter() - due
        return row

    async with LoopLag() as lag, asyncio.TaskGroup() as group:
        start = time.perf_counter()
        tasks = []
        for index, arrival in enumerate(arrivals):
            if (wait := start + arrival - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(request(index, start + arrival)))
        rows = [await task for task in tasks]
        seconds = time.perf_counter() - start
    return Run(seconds, latency, torch.stack(rows), lag.late_s)


async def hand_batched(model: MiniLM, texts: Sequence[str], batch: int, worker: ThreadPoolExecutor) -> Run:
    """Embed all texts as one job of sorted, padded batches on `worker`; a text is done with its batch."""
    latency = [0.0] * len(texts)
    sizes: dict[int, int] = {}

    def job() -> tuple[float, Tensor]:
        out = torch.empty(len(texts), model.words.shape[1])
        start = time.perf_counter()
        for indexes, rows in model.batches(texts, batch):
            out[torch.tensor(indexes)] = rows.to(out.device)
            sizes[len(indexes)] = sizes.get(len(indexes), 0) + 1
            done = time.perf_counter() - start
            for index in indexes:
                latency[index] = done
        return time.perf_counter() - start, out

    async with LoopLag() as lag:
        seconds, out = await asyncio.get_running_loop().run_in_executor(worker, job)
    return Run(seconds, latency, out, lag.late_s, sizes)


class BatchingServer:
    """A server of single texts, batched by hand: what one writes today without LayerZero.

    Whatever arrived while the worker was busy is taken when it is free, sorted, padded, run on the worker
    thread, and answered batch by batch.
    """

    def __init__(self, model: MiniLM, batch: int, worker: ThreadPoolExecutor) -> None:
        self.sizes: dict[int, int] = {}
        self._model = model
        self._batch = batch
        self._worker = worker
        self._waiting: list[tuple[str, asyncio.Future[Tensor]]] = []
        self._serving: asyncio.Task[None] | None = None

    async def embed(self, text: str) -> Tensor:
        """Return the embedding of one text in host memory, (C,)."""
        answer: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, answer))
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        return await answer

    async def _serve(self) -> None:
        """Run batches until nobody waits; a failed batch fails those who wait for it."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await loop.run_in_executor(self._worker, self._run, loop, batch)
            except Exception as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
        self._serving = None

    def _run(self, loop: asyncio.AbstractEventLoop, batch: list[tuple[str, asyncio.Future[Tensor]]]) -> None:
        """Embed what was taken and hand each batch to the loop as soon as it is done."""
        for indexes, rows in self._model.batches([text for text, _ in batch], self._batch):
            rows = rows.to("cpu")
            self.sizes[len(indexes)] = self.sizes.get(len(indexes), 0) + 1
            loop.call_soon_threadsafe(_answer, [batch[index][1] for index in indexes], rows)


def _answer(waiting: list[asyncio.Future[Tensor]], rows: Tensor) -> None:
    for answer, row in zip(waiting, rows.unbind(0), strict=True):
        if not answer.done():
            answer.set_result(row)

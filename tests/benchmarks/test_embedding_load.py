"""The load generator of the embedding demo: arrivals, latencies, loop lag, and the hand-written server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

load: Any = pytest.importorskip("benchmarks.embedding.load", reason="needs safetensors and tokenizers")


class Doubler:
    """An encoder of numbers: the embedding of "7" is [7, 14]; it fails on what is no number."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.words = torch.zeros(1, 2)

    def batches(self, texts: Sequence[str], batch: int) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the texts from last to first, `batch` at once."""
        order = list(range(len(texts)))[::-1]
        for start in range(0, len(order), batch):
            indexes = order[start : start + batch]
            yield indexes, torch.tensor([[float(texts[i]), 2 * float(texts[i])] for i in indexes])


async def double(text: str) -> Tensor:
    """Return what Doubler computes, one text at a time."""
    await asyncio.sleep(0)
    return torch.tensor([float(text), 2 * float(text)])


TEXTS = [str(number) for number in range(7)]
WANTED = torch.tensor([[float(number), 2.0 * number] for number in range(7)])


def test_percentiles() -> None:
    """The quantile of ranked values, and 0 where nothing was measured."""
    assert load.percentile([], 0.99) == 0.0
    assert load.percentile([3.0], 0.99) == 3.0
    assert load.percentile([float(n) for n in range(100, 0, -1)], 0.5) == 51.0
    assert load.percentile([float(n) for n in range(100)], 1.0) == 99.0


def test_arrivals_are_repeatable_and_keep_their_rate() -> None:
    """The same seed gives the same ascending times, with the mean gap that the rate says."""
    times = load.poisson_arrivals(20_000, 250.0, seed=3)
    assert times == load.poisson_arrivals(20_000, 250.0, seed=3)
    assert times != load.poisson_arrivals(20_000, 250.0, seed=4)
    assert times == sorted(times)
    assert abs(times[-1] / 20_000 - 1 / 250.0) < 0.05 / 250.0


@pytest.mark.asyncio
async def test_every_way_keeps_the_order_of_the_texts() -> None:
    """Row i belongs to text i, whichever way it was computed, and every latency was taken."""
    with ThreadPoolExecutor(1) as worker:
        server = load.BatchingServer(Doubler(), 3, worker)
        runs = [
            await load.one_after_another(double, TEXTS),
            await load.all_together(double, TEXTS),
            await load.arriving(double, TEXTS, [0.001 * number for number in range(7)]),
            await load.arriving(server.embed, TEXTS, [0.001 * number for number in range(7)]),
            await load.hand_batched(Doubler(), TEXTS, 3, worker),
        ]
    for run in runs:
        torch.testing.assert_close(run.embeddings, WANTED)
        assert len(run.latency_s) == len(TEXTS)
        assert all(0 < latency <= run.seconds for latency in run.latency_s)
        assert run.throughput == len(TEXTS) / run.seconds
    assert runs[-1].batches == {3: 2, 1: 1}
    assert sum(size * count for size, count in server.sizes.items()) == len(TEXTS)


@pytest.mark.asyncio
async def test_a_failed_batch_fails_its_callers_and_the_server_goes_on() -> None:
    """The error reaches who waited for it; the next request is served."""
    with ThreadPoolExecutor(1) as worker:
        server = load.BatchingServer(Doubler(), 4, worker)
        with pytest.raises(ValueError, match="could not convert"):
            await server.embed("no number")
        assert (await server.embed("5")).tolist() == [5.0, 10.0]


@pytest.mark.asyncio
async def test_a_blocked_loop_is_late_at_every_point_of_the_grid() -> None:
    """A loop that was blocked once for 100 ms is late for fifty points of 2 ms, not for one."""
    async with load.LoopLag() as lag:
        await asyncio.sleep(0.01)
        time.sleep(0.1)  # noqa: ASYNC251  the block is what is measured
        await asyncio.sleep(0.01)
    late = [value for value in lag.late_s if value > 0.02]
    assert len(late) >= 35
    assert max(late) >= 0.09

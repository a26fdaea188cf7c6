"""Threads of one process that call one kernel of one GPU at once, each on a stream of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="threads on streams need a CUDA device"),
]
THREADS, ROUNDS = 32, 20


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[lz.Runtime]:
    """One runtime for all threads, which is the process's."""
    with lz.start(lz.Settings(device="cuda", warm="off", perfdb=None)) as opened:
        yield opened


def rand(generator: torch.Generator, *shape: int) -> Tensor:
    """Random numbers on the GPU."""
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def norm(generator: torch.Generator) -> Callable[[], Tensor]:
    """Rows of a norm."""
    x, weight = rand(generator, 64, 1024), rand(generator, 1024)
    return lambda: lz.sync.rms_norm(x, weight, backend="torch")


def fused(generator: torch.Generator) -> Callable[[], Tensor]:
    """A Triton kernel with two outputs."""
    pytest.importorskip("triton", reason="Triton is not installed")
    x, residual, weight = rand(generator, 64, 1024), rand(generator, 64, 1024), rand(generator, 1024)
    return lambda: torch.stack(lz.sync.add_rms_norm(x, residual, weight, backend="triton"))


def dense(generator: torch.Generator) -> Callable[[], Tensor]:
    """torch's attention, whose implementations take workspaces."""
    q, k, v = (rand(generator, 2, 8, 128, 64) for _ in range(3))
    return lambda: lz.sync.attention(q, k, v, is_causal=True, backend="torch")


def paged(generator: torch.Generator) -> Callable[[], Tensor]:
    """FlashInfer's paged attention, which plans into a workspace of its stream."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    q, keys, values = rand(generator, 4, 8, 128), *(rand(generator, 64, 16, 8, 128) for _ in range(2))
    tables = torch.randperm(64, generator=generator, device="cuda").view(4, 16).int()
    lengths = torch.randint(1, 257, (4,), generator=generator, device="cuda").int()
    return lambda: lz.sync.paged_attention(q, keys, values, tables, lengths, backend="flashinfer")


def drawn(generator: torch.Generator) -> Callable[[], Tensor]:
    """Sampling whose filter meets over several blocks of a row, in a state of its stream."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    logits = rand(generator, 8, 128_256)
    return lambda: lz.sync.sample(logits, top_k=50, seed=7, backend="flashinfer")


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """`work` of every thread's number, begun together; what each gave, in order."""
    gate = threading.Barrier(THREADS)

    def begin(number: int) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            gate.wait(60.0)
            return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


@pytest.mark.parametrize("made", [norm, fused, dense, paged, drawn], ids=lambda made: made.__name__)
def test_every_thread_gets_what_it_would_get_alone(
    made: Callable[[torch.Generator], Callable[[], Tensor]],
) -> None:
    """32 threads, 32 streams, 20 calls each: every result to the bit, none missing, none of a neighbour."""
    calls = [made(torch.Generator("cuda").manual_seed(number)) for number in range(THREADS)]
    alone = [call().clone() for call in calls]
    torch.cuda.synchronize()
    assert not torch.equal(alone[0], alone[1])

    def work(number: int) -> list[Tensor]:
        found = [calls[number]() for _ in range(ROUNDS)]
        torch.cuda.current_stream().synchronize()
        return found

    found = at_once(work)
    assert [len(results) for results in found] == [ROUNDS] * THREADS
    wrong = [n for n, results in enumerate(found) if not all(torch.equal(r, alone[n]) for r in results)]
    assert not wrong, f"threads {wrong} got something else than alone"
    if made is paged:
        from layerzero.backends.flashinfer import planning

        planning.release()


def test_awaits_of_every_threads_loop_are_all_answered(runtime: lz.Runtime) -> None:
    """32 event loops on 32 streams, 4 callers each: every caller its own result, and the batchers lost
    none."""
    weight = torch.eye(256, device="cuda")
    before = runtime.device("cuda").loop_drivers.stats()

    async def caller(stream: Any, value: float) -> bool:
        with torch.cuda.stream(stream):
            out = await lz.linear(torch.full((1, 256), value, device="cuda"), weight)
            return bool((out == value).all())

    async def crowd(number: int, stream: Any) -> list[bool]:
        found: list[bool] = []
        for _ in range(ROUNDS):
            found += await asyncio.gather(*(caller(stream, float(number * 4 + each)) for each in range(4)))
        return found

    def work(number: int) -> list[bool]:
        stream: Any = torch.cuda.current_stream()
        with torch.cuda.stream(torch.cuda.default_stream()):  # a loop's own stream; its callers enter theirs
            return asyncio.run(crowd(number, stream))

    found = at_once(work)
    assert found == [[True] * (4 * ROUNDS)] * THREADS
    after = runtime.device("cuda").loop_drivers.stats()
    assert after.submitted == after.ended
    assert after.done - before.done == after.submitted - before.submitted > 0

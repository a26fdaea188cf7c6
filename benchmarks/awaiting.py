"""What awaiting adds: a lone caller over the blocking call, one of 64 callers beyond their batched kernel."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from harness import Plan, summary
from torch import Tensor

import layerzero as lz

CALLERS = 64
STEPS = 30
NullKernel = Callable[[str, Tensor], lz.Kernel]


def measure(plan: Plan, null_kernel: NullKernel) -> dict[str, Any]:
    """Row e: every number with null kernels, so that it is ours alone."""
    q, k, v = (torch.randn(1, 8, 16, 64) for _ in range(3))
    kernel = null_kernel("attention", q)
    with lz.start() as runtime:
        runtime.add_kernel(kernel)
        lz.lock("attention", kernel.id)
        inline = asyncio.run(_lone(plan, q, k, v))
        spawns = hasattr(runtime, "spawn")
    with lz.start(lz.Settings(inline_limit_us=0.0)) as runtime:
        runtime.add_kernel(kernel)
        lz.lock("attention", kernel.id)
        worker = asyncio.run(_lone(plan, q, k, v))
    spawned = _crowd(plan, "linear", rejoined=True, spawn=True)["beyond_kernel"] if spawns else None
    return {
        "lone_inline": inline,
        "lone_worker": worker,
        "one_of_64": {
            "fresh": _crowd(plan, "linear", rejoined=False),
            "rejoined": _crowd(plan, "linear", rejoined=True),
            "rejoined_with_collector": _crowd(plan, "linear", rejoined=True, collector=True),
            "rms_norm_rejoined": _crowd(plan, "rms_norm", rejoined=True),
            "embedding": _crowd(plan, "embedding", rejoined=False),
        },
        "one_of_64_spawn": spawned,
    }


async def _lone(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Microseconds of an await beyond the blocking call, round by round."""
    count = max(1, plan.round_ns // 20_000)
    call, blocking = lz.attention, lz.sync.attention
    for _ in range(20):
        await call(q, k, v)
        blocking(q, k, v)
    wall, cpu = [], []
    for _ in range(plan.rounds):
        begin, ran = time.perf_counter_ns(), time.process_time_ns()
        for _ in itertools.repeat(None, count):
            await call(q, k, v)
        middle, half = time.perf_counter_ns(), time.process_time_ns()
        for _ in itertools.repeat(None, count):
            blocking(q, k, v)
        wall.append((2 * middle - begin - time.perf_counter_ns()) / count)
        cpu.append((2 * half - ran - time.process_time_ns()) / count)
    return {"wall_us": summary(wall, 1e-3), "cpu_us": summary(cpu, 1e-3)}


# -- one of 64 ------------------------------------------------------------------------------------------


def _null_rows(op: str, width: int) -> tuple[lz.Kernel, list[int]]:
    """A kernel that hands back as many rows as it was given, and the batch sizes it saw."""
    buffer = torch.randn(4096, width)
    seen: list[int] = []

    def null(x: Tensor, *_: Any) -> Tensor:
        rows = x.shape[0]
        seen.append(rows)
        return buffer[:rows]

    kernel = lz.Kernel(
        id=f"bench.{op}.rows",
        op=op,
        backend="bench",
        capability=lz.Capability(source="takes anything", features=frozenset({"bias", "no_weight"})),
        load=lambda: null,
        efficiency=lz.Efficiency(1.0, 1.0, 0.001, "does nothing"),
    )
    return kernel, seen


def _crowd(
    plan: Plan, op: str, *, rejoined: bool, spawn: bool = False, collector: bool = False
) -> dict[str, Any]:
    """Microseconds of one call of one of 64 callers, beyond what the batched kernel itself takes.

    `rejoined`: each call takes the last one's row, which lies beside its neighbours' in the batch's output;
    otherwise each caller brings rows of its own, which are gathered. The bare loop, the same coroutines
    awaiting nothing, is taken off. The garbage collector rests during the rounds, as in every comparison
    here, unless `collector`.
    """
    kernel, seen = _null_rows(op, 64)
    weight = torch.randn(64, 64) if op != "rms_norm" else torch.randn(64)
    with lz.start() as runtime:
        runtime.add_kernel(kernel)
        lz.lock(op, kernel.id)
        call = getattr(lz, op)
        steps = STEPS if plan.rounds > 10 else 4
        run = runtime.spawn if spawn else None  # type: ignore[attr-defined]
        gc.collect()
        if not collector:
            gc.disable()
        try:
            wall, cpu, own = asyncio.run(_rounds(plan, call, op, weight, steps, rejoined, run))
        finally:
            gc.enable()
    # What the null kernel itself takes: one slice of a buffer a batch.
    return {
        "beyond_kernel": {"wall_us": summary(wall, 1e-3), "cpu_us": summary(cpu, 1e-3)},
        "kernel_us_a_batch": own,
        "mean_batch": round(sum(seen) / len(seen), 1),
        "steps": steps,
    }


async def _rounds(
    plan: Plan, call: Callable[..., Awaitable[Tensor]], op: str, weight: Tensor, steps: int, rejoined: bool,
    spawn: Callable[..., Any] | None,
) -> tuple[list[float], list[float], float]:  # fmt: skip
    rows = [torch.randint(0, 64, (1,)) if op == "embedding" else torch.randn(1, 64) for _ in range(CALLERS)]

    async def caller(x: Tensor) -> Tensor:
        for _ in range(steps):
            out = await call(x, weight)
            if rejoined:
                x = out
        return x

    async def nothing(x: Tensor) -> Tensor:
        for _ in range(steps):
            pass
        return x

    start = spawn or asyncio.ensure_future
    wall, cpu = [], []
    for _ in range(max(3, plan.rounds // 3)):
        begin, ran = time.perf_counter_ns(), time.thread_time_ns()
        await asyncio.gather(*[start(caller(x)) for x in rows])
        middle, half = time.perf_counter_ns(), time.thread_time_ns()
        await asyncio.gather(*[start(nothing(x)) for x in rows])
        end, done = time.perf_counter_ns(), time.thread_time_ns()
        calls = CALLERS * steps
        wall.append((2 * middle - begin - end) / calls)
        cpu.append((2 * half - ran - done) / calls)
    batch = torch.randn(4096, 64)
    begin = time.perf_counter_ns()
    for _ in range(1000):
        batch[:CALLERS]
    own = (time.perf_counter_ns() - begin) / 1e6
    per_call = own * 1e3 / CALLERS
    return [v - per_call for v in wall], [v - per_call for v in cpu], round(own, 3)

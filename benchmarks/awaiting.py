"""What awaiting adds: a lone caller over the blocking call, one of 64 callers beyond their batched kernel."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import SETTLING, Plan, settled, summary
from torch import Tensor

import layerzero as lz
from layerzero.ops import table as ops_table
from layerzero.runtime import current
from layerzero.scheduler.scheduled_device import ScheduledDevice

CALLERS = 64
STEPS = 30


def measure(plan: Plan) -> dict[str, Any]:
    """Row e: over the real kernels, called directly in the same rounds; one row with a null kernel."""
    q, k, v = (torch.randn(1, 8, 16, 64) for _ in range(3))
    with lz.start():
        inline = asyncio.run(_lone(plan, q, k, v))
    with lz.start(lz.Settings(inline_limit_us=0.0)):
        worker = asyncio.run(_lone(plan, q, k, v))
    return {
        "lone_inline": inline,
        "lone_worker": worker,
        "one_of_64": {
            "real": {
                "linear, rows of its own": _crowd(plan, "linear"),
                "linear, rows of the last batch": _crowd(plan, "linear", rejoined=True),
                "rms_norm, rows of the last batch": _crowd(plan, "rms_norm", rejoined=True),
                "embedding": _crowd(plan, "embedding"),
            },
            "real_with_collector": _crowd(plan, "linear", rejoined=True, collector=True),
            "real_spawn": _crowd(plan, "linear", rejoined=True, spawn=True),
            "null": _crowd(plan, "linear", rejoined=True, null=True),
        },
    }


async def _lone(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Microseconds of an await beyond the blocking call, round by round."""
    count = max(1, plan.round_ns // 20_000)
    call, blocking = lz.attention, lz.sync.attention
    for _ in range(20):
        await call(q, k, v)
        blocking(q, k, v)
    for _ in range(SETTLING):
        blocking(q, k, v)
        if settled(plan, _device(), lz.last_selection()):
            break
    await call(q, k, v)
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


def _null_rows(op: str, width: int) -> lz.Kernel:
    """A kernel that hands back as many rows as it was given."""
    buffer = torch.randn(4096, width)
    return lz.Kernel(
        id=f"bench.{op}.rows",
        op=op,
        backend="bench",
        capability=lz.Capability(source="takes anything", features=frozenset({"bias", "no_weight"})),
        load=lambda: lambda x, *_: buffer[: x.shape[0]],
        efficiency=lz.Efficiency(1.0, 1.0, 0.001, "does nothing"),
    )


def _crowd(
    plan: Plan,
    op: str,
    *,
    rejoined: bool = False,
    spawn: bool = False,
    collector: bool = False,
    null: bool = False,
) -> dict[str, Any]:
    """Microseconds of one call of one of 64 callers, beyond what its batch's kernel takes by itself.

    `rejoined`: each call takes the last one's row, which lies beside its neighbours' in the batch's output;
    otherwise each caller brings rows of its own, which are gathered. Two things are taken off, both measured
    in the same round: the chosen kernel called directly over 64 rows, once a step; and the bare loop, the
    same coroutines awaiting nothing. The garbage collector rests during the rounds, as in every
    comparison here, unless `collector`. `null`: a kernel that does nothing stands in for the real one.
    """
    torch.manual_seed(0)
    weight = torch.randn(64, 64) if op != "rms_norm" else torch.randn(64)
    rows = [torch.randint(0, 64, (1,)) if op == "embedding" else torch.randn(1, 64) for _ in range(CALLERS)]
    with lz.start() as runtime:
        if null:
            kernel = _null_rows(op, 64)
            runtime.add_kernel(kernel)
            lz.lock(op, kernel.id)
        crowd = _Crowd(
            op, weight, rows, STEPS if plan.rounds > 10 else 4, rejoined, runtime.spawn if spawn else None
        )
        gc.collect()
        if not collector:
            gc.disable()
        try:
            rounds = asyncio.run(crowd.rounds(plan, max(3, plan.rounds // 3)))
        finally:
            gc.enable()
    calls = CALLERS * crowd.steps
    beyond = [(whole - alone - bare) / calls for whole, alone, bare in rounds]
    return {
        "kernel": crowd.kernel,
        "beyond_kernel": {"wall_us": summary(beyond, 1e-3)},
        "whole_us": summary([whole / calls for whole, _, _ in rounds], 1e-3),
        "kernel_us_a_batch": summary([alone / crowd.steps for _, alone, _ in rounds], 1e-3),
        "mean_batch": crowd.mean_batch,
        "steps": crowd.steps,
    }


class _Crowd:
    """64 callers of one op, their loop without the op, and the kernel of their batch called directly."""

    def __init__(
        self,
        op: str,
        weight: Tensor,
        rows: list[Tensor],
        steps: int,
        rejoined: bool,
        spawn: Callable[..., Any] | None,
    ) -> None:
        self.op = op
        self.weight = weight
        self.rows = rows
        self.steps = steps
        self.rejoined = rejoined
        self.start = spawn or asyncio.ensure_future
        self.kernel = ""
        self.mean_batch = 0.0

    async def caller(self, x: Tensor) -> Tensor:
        """The op, `steps` times."""
        call, weight, rejoined = getattr(lz, self.op), self.weight, self.rejoined
        for _ in range(self.steps):
            out = await call(x, weight)
            if rejoined:
                x = out
        return x

    async def nothing(self, x: Tensor) -> Tensor:
        """The same loop without the op."""
        for _ in range(self.steps):
            pass
        return x

    async def rounds(self, plan: Plan, count: int) -> list[tuple[float, float, float]]:
        """Nanoseconds of each round: the callers, the kernel alone, the loop alone."""
        for _ in range(SETTLING):
            await asyncio.gather(*[self.start(self.caller(x)) for x in self.rows])
            if settled(plan, _device(), lz.last_selection()):
                break
        direct = self._direct()
        clock = time.perf_counter_ns
        taken = []
        for _ in range(count):
            begin = clock()
            await asyncio.gather(*[self.start(self.caller(x)) for x in self.rows])
            middle = clock()
            for _ in itertools.repeat(None, self.steps):
                direct()
            ran = clock()
            await asyncio.gather(*[self.start(self.nothing(x)) for x in self.rows])
            taken.append((float(middle - begin), float(ran - middle), float(clock() - ran)))
        stats = _device().loop_drivers.current().batcher.stats
        self.mean_batch = round(stats.done / max(stats.batches, 1), 1)
        return taken

    def _direct(self) -> Callable[[], Any]:
        """What ran last for all of them, as a bare call of that kernel over their rows together."""
        selection = lz.last_selection()
        assert selection is not None
        self.kernel = selection.kernel
        call = _device().registry.callable_of(selection.kernel)
        _, full = ops_table.get(self.op).build(torch.cat(self.rows), self.weight)
        return lambda: call(*full)


def _device() -> ScheduledDevice:
    device = current().device("cpu")
    assert isinstance(device, ScheduledDevice)
    return device

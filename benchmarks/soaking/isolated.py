"""Calls of a backend in a process of its own, on a thread and a loop of their own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from typing import Any

import torch

import layerzero as lz
from benchmarks.soaking.ends import ANSWERED, Ends
from layerzero.actors.isolation import isolated_worker
from layerzero.health import BreakerState

BACKEND = "torch"
KERNEL = "torch.rms_norm.native"
WIDTHS = (32, 64, 256)
TIMEOUT_S = 2.0  # of a call in the worker; a stopped one is killed after it
STEADY_S = 1.0  # a worker that lived longer begins anew at once: else its pauses would grow to a minute
PROGRESS = 10
STOPPED = 0.3  # of the faults are SIGSTOP, which is a hang


class Isolated:
    """Awaited norms of a scoped runtime; where the worker is away, another kernel answers the same call."""

    weight = 4.0

    def __init__(self, began_s: float) -> None:
        self.ends = Ends("isolated", began_s)
        self.running = True
        self.kills = 0
        self.counted: dict[str, float] = {}
        self.lane: dict[str, int] = {}
        self.quarantines = self.there = 0
        self._runtime: lz.Runtime | None = None
        self._killed, self._answers = 0, 0

    async def run(self) -> None:
        """Callers until `running` is taken back, and the counters behind them."""
        await asyncio.to_thread(lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        isolated_worker.STEADY_S = STEADY_S
        settings = lz.Settings(
            device="cpu", inference=True, warm="off", perfdb=None, shipped_tables=False, cooldown_s=0.2,
            cooldown_max_s=1.0, isolate={BACKEND: "process"}, isolate_timeout_s=TIMEOUT_S, max_queue_size=32,
            queue_full_policy="reject",
        )  # fmt: skip
        with lz.start(settings, scoped=True) as runtime:
            await asyncio.to_thread(runtime.device().warm, [KERNEL])
            self._runtime = runtime
            with lz.prefer(KERNEL, op="rms_norm"):
                await asyncio.gather(self._lift(runtime), *(self._caller(c) for c in range(4)))
                await self._deaths_are_told(runtime)
            stats = runtime.device().loop_drivers.stats()
            names = ("submitted", "done", "failed", "cancelled", "expired", "rejected", "at_once")
            self.lane = {name: getattr(stats, name) for name in names}
            self.counted = self._counters(runtime)
            self._runtime = None

    async def _caller(self, caller: int) -> None:
        draw = random.Random(100 + caller)
        while self.running:
            x = torch.randn(draw.choice((1, 1, 4)), draw.choice(WIDTHS))
            limit = draw.choice((0.0005, 0.5)) if draw.random() < 0.1 else None

            async def norm(x: torch.Tensor = x, limit: float | None = limit) -> torch.Tensor:
                got: torch.Tensor = await lz.rms_norm(x, eps=1e-6, timeout=limit)
                chosen = lz.last_selection()
                self.there += chosen is not None and chosen.kernel == KERNEL
                return got

            def right(got: Any, x: torch.Tensor = x) -> bool:
                return torch.allclose(got, torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6), atol=1e-5)

            cancel = draw.uniform(0, 0.01) if draw.random() < 0.1 else None
            how = await self.ends.call(norm(), right, cancel)
            self._answers += how == ANSWERED
            await asyncio.sleep(draw.uniform(0, 0.04))

    async def _lift(self, runtime: lz.Runtime) -> None:
        """What an operator does who knows that it was no fault of the kernel's."""
        health = runtime.device().health
        while self.running:
            for kernel in [s.kernel for s in health.statuses() if s.state is BreakerState.QUARANTINED]:
                health.lift(kernel)
                runtime.device().refresh()
                self.quarantines += 1
            await asyncio.sleep(0.2)

    async def _deaths_are_told(self, runtime: lz.Runtime) -> None:
        """Call for a while: that a stopped worker gives no answer, only a call finds out."""
        for _ in range(300):
            if self._deaths(self._counters(runtime)) >= self.kills:
                return
            await lz.rms_norm(torch.randn(1, WIDTHS[0]), eps=1e-6)
            await asyncio.sleep(0.1)

    @staticmethod
    def _counters(runtime: lz.Runtime) -> dict[str, float]:
        found = runtime.counters.snapshot().items()
        return {" ".join((s.name, *(f"{k}={v}" for k, v in s.labels))): n for s, n in found}

    @staticmethod
    def _deaths(counted: dict[str, float]) -> float:
        return sum(n for name, n in counted.items() if name.startswith("isolated_deaths"))

    def _pid(self) -> int | None:
        runtime = self._runtime
        workers = {} if runtime is None or runtime.isolation is None else runtime.isolation.workers()
        return next((worker.pid for worker in workers.values()), None)

    def ready(self) -> bool:
        """Whether a new worker is up, and calls were answered since the last fault."""
        return self._pid() not in (None, self._killed) and self._answers >= PROGRESS

    def strike(self, draw: random.Random) -> str:
        """SIGKILL of the worker, or SIGSTOP, behind which it gives no answer."""
        pid = self._pid()
        assert pid is not None
        stop = draw.random() < STOPPED
        self._killed, self._answers = pid, 0
        os.kill(pid, signal.SIGSTOP if stop else signal.SIGKILL)
        self.kills += 1
        return "worker stopped" if stop else "worker killed"

    def checks(self) -> dict[str, bool]:
        """What has to hold once nothing is under way, and the runtime is closed."""
        lane = self.lane
        ended = sum(lane[name] for name in ("done", "failed", "cancelled", "expired", "rejected"))
        left = [
            t.name
            for t in threading.enumerate()
            if t.name.startswith(("layerzero-isolated", "layerzero-said"))
        ]
        return {
            **self.ends.checks(),
            "isolated: every call that the batcher took has ended": lane["submitted"] == ended,
            "isolated: a death is counted for each fault": self._deaths(self.counted) == self.kills,
            "isolated: its worker answered, too": self.there > 0,
            "isolated: no thread is left": not left,
        }

    def record(self) -> dict[str, Any]:
        """What is written down."""
        return {
            **self.ends.record(), "answered by the worker": self.there, "kills": self.kills,
            "quarantines lifted": self.quarantines, "batcher": self.lane, "counters": self.counted,
        }  # fmt: skip

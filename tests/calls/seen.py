"""What can be seen of a runtime's settings, one function a behaviour; the same calls for every runtime."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import layerzero as lz
import layerzero.sync
from layerzero.health import BreakerState
from layerzero.ops import table as ops_table
from layerzero.runtime import Runtime
from layerzero.scheduler.batch_executor import BatchExecutor
from layerzero.scheduler.loop_drivers import LoopDrivers
from layerzero.scheduler.modes.streams import DeviceStreams
from layerzero.scheduler.scheduled_device import ScheduledDevice
from layerzero.selection.plan import CheckedCall
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel
from tests.clocks import FakeClock
from tests.kernels import kernel

X, WEIGHT = torch.randn(8, 512), torch.randn(512)
FAST = "fast.rms_norm"
RAN_IN: list[str] = []


def noting(*args: Any) -> Any:
    """The reference, which says on which thread it ran."""
    RAN_IN.append(threading.current_thread().name)
    return ops_table.get("rms_norm").reference(*args)


def made() -> list[Kernel]:
    """Kernels apart by what settings decide between them."""
    large = kernel("large.layer_norm", launch_us=0.5)
    return [
        kernel(FAST, noting, launch_us=5.0, rank=60, graph_safe=True),
        kernel("near.rms_norm", launch_us=5.5, rank=10),
        kernel("usual.rms_norm", launch_us=7.0, default=True),
        kernel("cold.rms_norm", launch_us=1.0, cold=True),
        kernel("same.rms_norm", launch_us=90.0, batch_invariant=True),
        kernel("dense.layer_norm", contiguous=True),
        dataclasses.replace(large, workspace_bytes=lambda _: 1 << 20),
    ]


@dataclass
class Site:
    """A runtime with what observing it takes: its CPU, its loop, its clock, a folder, what was counted."""

    runtime: Runtime
    clock: FakeClock
    folder: Path
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    @property
    def cpu(self) -> ScheduledDevice:
        return self.runtime.device("cpu")

    def run(self, coro: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coro)

    def idle(self) -> None:
        """Until the background thread has done what it was given, and what came of that."""
        for _ in range(2):
            done = threading.Event()
            if self.cpu.loader.submit(done.set):
                assert done.wait(60)


def which(at: Site) -> Any:
    """The kernel of a call and where its price comes from, once all is read."""
    at.cpu.wait_for_costs(60.0)
    try:
        chosen = lz.select("rms_norm", X, WEIGHT)
    except lz.NoKernelFoundError:
        return None
    accepted = chosen.candidate(chosen.kernel).accepted
    return chosen.kernel, accepted.source if accepted is not None else "", chosen.why.partition(",")[0]


async def crowd() -> list[Any]:
    """Eight callers at once of an op and of a function, twice, so that the second time they are known."""
    results: list[Any] = []
    for _ in range(2):
        calls = [lz.rms_norm(X, WEIGHT) for _ in range(8)]
        results = list(await asyncio.gather(*calls, return_exceptions=True))
    return results


def doubled(x: torch.Tensor) -> torch.Tensor:
    """A function over rows."""
    return x * 2


async def crowd_of_functions() -> None:
    """The same of an `lz.batched` function."""
    function = lz.batched(doubled)
    for _ in range(2):
        await asyncio.gather(*[function(X) for _ in range(8)])


def sizes(at: Site) -> Any:
    """How large batches were."""

    def counted() -> dict[int, int]:
        return dict(at.cpu.loop_drivers.stats().sizes)

    found = []
    for calls in (crowd(), crowd_of_functions()):
        before = counted()
        at.run(calls)
        found.append({s: n - before.get(s, 0) for s, n in counted().items() if n != before.get(s, 0)})
    return found


def refused(at: Site) -> Any:
    """Whether the queue had no room for some of eight callers."""
    return any(isinstance(result, lz.OverloadedError) for result in at.run(crowd()))


def where(at: Site) -> Any:
    """The threads on which a lone caller's kernel runs."""

    async def alone() -> None:
        for _ in range(5):
            await lz.rms_norm(X, WEIGHT, backend=FAST)

    RAN_IN.clear()
    at.run(alone())
    return set(RAN_IN)


def turns(at: Site) -> Any:
    """Whether a lone caller's loop turns between its calls."""

    async def alone() -> int:
        count, going = 0, True

        def turn() -> None:
            nonlocal count
            count += 1
            if going:
                at.loop.call_soon(turn)

        at.loop.call_soon(turn)
        for _ in range(50):
            await lz.rms_norm(X, WEIGHT)
        going = False
        return count

    return at.run(alone()) >= 25


def order(at: Site) -> Any:
    """The order in which callers of several priorities are served one by one."""
    served: list[int] = []

    async def call(number: int, priority: int) -> None:
        await lz.rms_norm(X, WEIGHT, priority=priority)
        served.append(number)

    async def all_of_them() -> None:
        await asyncio.gather(*[call(n, p) for n, p in enumerate((2, 2, 2, 0, 0))])

    at.run(all_of_them())
    return served


def reaped(at: Site) -> Any:
    """Whether callers on streams are answered when their batch has run, and how many may be ahead."""
    before = REAPED[0]
    at.run(crowd())
    return REAPED[0] > before, [
        front.batcher.limits.max_inflight_batches for front in at.cpu.loop_drivers.by_loop.values()
    ]


REAPED = [0]


class NoStreams(DeviceStreams):
    """What a CUDA device has for streams, on a device that has none."""

    def default_stream(self) -> Any:
        return None

    def notify_when_done(self, modes: Any, on_done: Callable[[Exception | None], object]) -> None:
        REAPED[0] += 1
        on_done(None)


class StreamedDevice(ScheduledDevice):
    """A CPU whose queues are made as those of a CUDA device."""

    def _make_loop_drivers(self, cuda: int | None) -> LoopDrivers:
        across = NoStreams(0, self.event_thread, self.settings.completion)
        return LoopDrivers(
            BatchExecutor(self), self.worker, self.settings, always_inline=True, streams=across
        )


def remembered(at: Site) -> Any:
    """Keys that a table holds after calls of six sizes."""
    for n in range(6):
        layerzero.sync.rms_norm(torch.randn(4**n, 512), WEIGHT)
    return len(at.cpu.table(ops_table.get("rms_norm")).by_key)


def expiring(at: Site) -> Any:
    """Whether a call is decided anew six seconds later."""
    op = ops_table.get("rms_norm")
    layerzero.sync.rms_norm(torch.randn(3, 512), WEIGHT)
    before = at.cpu.table(op)
    at.clock.advance(6.0)
    return at.cpu.table(op) is not before


def sharing(at: Site) -> Any:
    """Whether choices are taken from other processes and left for them."""
    return at.cpu._inputs.chooser is not None


_MISSED = itertools.count(1)


def learning(at: Site) -> Any:
    """Whether a call that the dispatch table misses is kept to be measured."""
    waiting = at.clock.waiting
    layerzero.sync.rms_norm(torch.randn(9000 << next(_MISSED) % 2, 512), WEIGHT)
    return at.clock.waiting - waiting


def loaded(at: Site) -> Any:
    """Whether a better kernel that is cold has been loaded behind a call."""
    layerzero.sync.rms_norm(X, WEIGHT)
    at.idle()
    return "cold.rms_norm" not in at.cpu.registry.unready()


def compiled_apart(at: Site) -> Any:
    """Whether a process of its own would compile a kernel."""
    slow = dataclasses.replace(at.cpu.registry.for_op("rms_norm")[0], on_disk=lambda _: False)
    return at.cpu.loader._apart.takes(slow, CallSpec(op="rms_norm"))


def repaid(at: Site) -> Any:
    """Whether a module that gains little is compiled for that."""
    small = kernel("module.layer_norm", launch_us=0.25, cold=True)
    if at.cpu.registry.get(small.id) is None:
        at.runtime.add_kernel(dataclasses.replace(small, compile_s=40.0, on_disk=lambda _: False))
    return lz.select("layer_norm", X, WEIGHT).when_warm


def fitting(at: Site) -> Any:
    """The kernel of a call for which one wants a workspace."""
    chosen: Any = None
    for _ in range(2):
        chosen = lz.which("layer_norm", X, WEIGHT)
        layerzero.sync.layer_norm(X, WEIGHT)
        at.clock.advance(2.0)
        at.idle()
    return chosen


def transformed(at: Site) -> Any:
    """Whether a call may be copied into the layout that a kernel needs."""
    try:
        return lz.select("layer_norm", X.repeat(1, 2)[:, ::2], WEIGHT, backend="dense").transforms
    except lz.NoKernelFoundError:
        return None


def differentiated(at: Site) -> Any:
    """Whether a result wants a gradient, and whether its kernel was asked for one."""
    weight = WEIGHT.clone().requires_grad_()
    with torch.no_grad():  # what is remembered of such a call must not answer for the other
        layerzero.sync.rms_norm(X, weight, backend=FAST)
    wants = layerzero.sync.rms_norm(X, weight, backend=FAST).requires_grad
    selection = lz.last_selection()
    assert selection is not None
    return wants, "grad" in selection.request.modes


def safe(at: Site) -> Any:
    """Whether a kernel that only declares it may be captured."""
    rules = at.cpu._rules("rms_norm", at.cpu.snapshot.policy)
    return [k.capability.graph_safe for k in rules.kernels if k.id == FAST]


def rechecked(at: Site) -> bool:
    """Whether a plan's outputs are looked at again after some seconds."""
    layerzero.sync.rms_norm(X, WEIGHT)
    at.clock.advance(10.0)
    known = at.cpu.table(ops_table.get("rms_norm")).by_signature
    return any(isinstance(plan.call, CheckedCall) for plans in known for plan in plans.values())


def sampled(at: Site) -> Any:
    """What stands around the plans that are made."""
    return [type(watcher).__name__ for watcher in at.cpu.compiler.middlewares]


def default_device(at: Site) -> Any:
    """Where calls go that name no device."""
    return str(at.runtime.default_device())


def to_open(at: Site) -> Any:
    """Failures that open a circuit, and for how long; then a round that fails again."""
    health, count = at.cpu.health, 0
    health.quarantine(FAST, "")
    health.lift(FAST)
    while health.state(FAST) is BreakerState.CLOSED and count < 50:
        count += 1
        health.failure(FAST, "boom")
        at.clock.advance(7.0)
    waits = []
    for _ in range(2):
        due = health.next_change()
        if due is None:
            break
        waits.append(due - at.clock.now())
        at.clock.advance(waits[-1])
        probe = health.take_probe(FAST)
        assert probe is not None
        probe.fail("again")
    return count, [round(wait) for wait in waits]


def probing(at: Site) -> Any:
    """How many probes run at once, and whether one that never returns has failed after 70 s."""
    to_open(at)
    due = at.cpu.health.next_change()
    assert due is not None
    at.clock.advance(due - at.clock.now())
    probes = [at.cpu.health.take_probe(FAST) for _ in range(5)]
    at.clock.advance(70.0)
    at.cpu.health.tick()
    return sum(probe is not None for probe in probes), at.cpu.health.state(FAST)

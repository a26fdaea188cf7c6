"""A timeline of what really ran: who waited for which batch, why it went; and nothing while it is off."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.observe.timeline import RUNNING
from layerzero.observe.trace import Trace
from layerzero.runtime import current
from layerzero.scheduler.core.launch_reasons import REASONS
from tests.native.twins import both_paths as both_paths
from tests.observe.trace_check import arrows_into, read_trace, row_names, slices
from tests.waiting import until

CALLERS = 64
WEIGHT = torch.randn(32, 32)


def norm_twice(x: torch.Tensor) -> torch.Tensor:
    return lz.sync.rms_norm(lz.sync.rms_norm(x))


def named(call: Awaitable[torch.Tensor], name: str) -> asyncio.Task[torch.Tensor]:
    """A task of a call, by the name that the timeline gives its row."""

    async def wait() -> torch.Tensor:
        return await call

    return asyncio.create_task(wait(), name=name)


@pytest.mark.asyncio
async def test_64_callers_have_a_row_each_and_an_arrow_to_their_batch(tmp_path: Path) -> None:
    """Plain awaits and a batched function: a batch tells its size, rows, kernels and why it went."""
    path = tmp_path / "trace.json"
    step = lz.batched(norm_twice)

    async def caller() -> None:
        x = torch.randn(2, 32)
        for _ in range(3):
            x = await lz.linear(x, WEIGHT)
            x = await step(x)

    async with lz.start(scoped=True):
        with torch.no_grad():
            async with lz.timeline(path):
                tasks = [asyncio.create_task(caller(), name=f"request {n}") for n in range(CALLERS)]
                await asyncio.gather(*tasks)
    trace = read_trace(path)
    names = row_names(trace)
    rows = Counter(names[call["pid"], call["tid"]] for call in slices(trace, "caller", "linear"))
    assert rows == Counter({f"request {n}": 3 for n in range(CALLERS)})
    batches = slices(trace, "batches")
    assert {batch["name"] for batch in batches} == {"linear", "norm_twice"}
    for batch in batches:
        facts = batch["args"]
        assert facts["why"] in ("turn", "limit") and facts["rows"] == 2 * facts["callers"]
        kind = "linear" if batch["name"] == "linear" else "rms_norm"
        assert facts["kernels"] and all(f".{kind}." in kernel for kernel in facts["kernels"])
        sources = [
            source for source in arrows_into(trace, batch) if names[source["pid"], source["tid"]] in rows
        ]
        assert len(sources) == len({source["tid"] for source in sources}) == facts["callers"]
    served = sum(batch["args"]["callers"] for batch in batches if batch["name"] == "linear")
    assert served == 3 * CALLERS
    assert len(slices(trace, "caller", "queued")) == 6 * CALLERS
    (process,) = trace["otherData"]["processes"]
    assert (process["dropped_events"], process["unfinished_batches"]) == (0, 0)


@pytest.mark.asyncio
async def test_a_batch_on_the_devices_thread_has_its_run_there(tmp_path: Path) -> None:
    """The worker's row has the run, and in it the kernels, with an arrow from the batch."""
    path = tmp_path / "trace.json"
    async with lz.start(lz.Settings(inline_limit_us=0.0), scoped=True), lz.timeline(path):
        with torch.no_grad():
            await asyncio.gather(*(lz.linear(torch.randn(1, 32), WEIGHT) for _ in range(3)))
    trace = read_trace(path)
    names = row_names(trace)
    (run,) = slices(trace, "thread", "run linear")
    assert names[run["pid"], run["tid"]] == "thread layerzero-cpu"
    (batch,) = slices(trace, "batches")
    (arrow,) = arrows_into(trace, run)
    assert (arrow["tid"], arrow["ts"]) == (batch["tid"], batch["ts"])
    kernels = [each for each in slices(trace, "thread") if each["tid"] == run["tid"] and each is not run]
    assert [kernel["name"] for kernel in kernels] == batch["args"]["kernels"]
    assert run["ts"] <= kernels[0]["ts"]


def fails(x: torch.Tensor) -> torch.Tensor:
    raise LookupError("no luck")


@pytest.mark.asyncio
async def test_a_batch_that_raises_says_what(tmp_path: Path) -> None:
    """On the batch and on each of its callers; the kernels' order of falling back shows, too."""
    path = tmp_path / "trace.json"
    async with lz.start(scoped=True), lz.timeline(path):
        calls = (lz.batched(fails)(torch.ones(1, 2)) for _ in range(2))
        errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [LookupError, LookupError]
    trace = read_trace(path)
    (batch,) = slices(trace, "batches")
    assert batch["args"]["raised"] == "LookupError"
    assert [call["args"]["outcome"] for call in slices(trace, "caller", "fails")] == ["failed", "failed"]


@pytest.mark.asyncio
async def test_cancelled_callers_end_where_they_left(tmp_path: Path) -> None:
    """One leaves the queue, one a batch that runs: each has a slice without an arrow, the others theirs."""
    path, gate, entered = tmp_path / "trace.json", threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        entered.set()
        assert gate.wait(60)
        return x * 2

    call = lz.batched(slow, key="slow")
    async with lz.start(lz.Settings(inline_limit_us=0.0), scoped=True), lz.timeline(path):
        running = [named(call(torch.ones(1, 2)), f"running {n}") for n in range(2)]
        await until(entered.is_set)
        waiting = [named(call(torch.ones(1, 2)), f"waiting {n}") for n in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running[0].cancel()
        waiting[0].cancel()
        await asyncio.wait([running[0], waiting[0]])
        gate.set()
        await asyncio.gather(running[1], waiting[1])
    trace = read_trace(path)
    names = row_names(trace)
    outcomes = {
        names[call["pid"], call["tid"]]: call["args"]["outcome"] for call in slices(trace, "caller", "slow")
    }
    assert outcomes == {
        "running 0": "cancelled", "running 1": "done", "waiting 0": "cancelled", "waiting 1": "done",
    }  # fmt: skip
    first, second = slices(trace, "batches")
    assert (first["args"]["callers"], first["args"]["cancelled"]) == (2, 1)
    assert second["args"]["callers"] == 1 and "cancelled" not in second["args"]
    (left,) = (c for c in slices(trace, "caller", "slow") if names[c["pid"], c["tid"]] == "running 0")
    assert left["args"]["raised"] == "CancelledError"
    assert left["ts"] + left["dur"] < first["ts"] + first["dur"]


@pytest.mark.asyncio
async def test_a_batch_that_still_runs_is_written_as_unfinished(tmp_path: Path) -> None:
    """A trace of a program that hangs shows who waits for what."""
    path, gate, entered = tmp_path / "trace.json", threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        entered.set()
        assert gate.wait(60)
        return x

    async with lz.start(lz.Settings(inline_limit_us=0.0), scoped=True):
        async with lz.timeline(path):
            task = named(lz.batched(slow, key="hangs")(torch.ones(1, 2)), "stuck")
            await until(entered.is_set)
        gate.set()
        await task
    trace = read_trace(path)
    (batch,) = slices(trace, "batches")
    assert batch["args"]["unfinished"] is True
    (call,) = slices(trace, "caller", "hangs")
    assert row_names(trace)[call["pid"], call["tid"]] == "stuck" and call["args"]["outcome"] == "running"
    (process,) = trace["otherData"]["processes"]
    assert process["unfinished_batches"] == 1


@pytest.mark.asyncio
async def test_without_a_timeline_nothing_is_attached(tmp_path: Path) -> None:
    """Before and after one: no plan is wrapped, no driver watched, no batch has a record."""
    path = tmp_path / "trace.json"

    def attached() -> tuple[Any, ...]:
        device = current().device("cpu")
        driver = device.loop_drivers.current()
        plans = device.snapshot.tables["rms_norm"].by_signature
        calls = {repr(plan.call) for by_signature in plans for plan in by_signature.values()}
        return (
            device.compiler.middlewares, driver.watch,
            any("timed" in call for call in calls), RUNNING.timeline,
        )  # fmt: skip

    async def crowd() -> None:
        await asyncio.gather(*(lz.rms_norm(torch.randn(1, 16)) for _ in range(3)))
        lz.sync.rms_norm(torch.randn(1, 16))

    async with lz.start():
        await crowd()
        off = attached()
        async with lz.timeline(path) as timeline:
            await crowd()
            on = attached()
        await crowd()
        seen = len(timeline.encode())
        await crowd()
        assert attached() == off == ((), None, False, None)
        assert len(timeline.encode()) == seen
    assert on[0] == (timeline,) and on[1].timeline is timeline and on[2:] == (True, timeline)


def test_a_timeline_around_a_program_sees_the_runtime_that_opens_inside(tmp_path: Path) -> None:
    """`with lz.timeline(...): asyncio.run(main())`, and a runtime, a loop and a thread that begin later."""
    path = tmp_path / "trace.json"

    async def main() -> None:
        async with lz.start(lz.Settings(device="cpu")):
            await asyncio.gather(*(lz.linear(torch.ones(1, 32), WEIGHT) for _ in range(2)))
            await asyncio.to_thread(lz.sync.rms_norm, torch.ones(1, 8))

    with torch.no_grad(), lz.timeline(path):
        asyncio.run(main())
    trace = read_trace(path)
    assert [batch["args"]["callers"] for batch in slices(trace, "batches", "linear")] == [2]
    (norm,) = (each for each in slices(trace, "thread") if ".rms_norm." in each["name"])
    assert row_names(trace)[norm["pid"], norm["tid"]].startswith("thread asyncio_")


@pytest.mark.asyncio
async def test_spawned_requests_and_a_lone_caller_are_in_the_trace(tmp_path: Path) -> None:
    """Spawned coroutines have rows; who is alone runs inline, so that its kernels stand on its thread's."""
    path = tmp_path / "trace.json"

    async def request() -> None:
        await lz.rms_norm(torch.ones(1, 8))

    async with lz.start(scoped=True) as runtime, lz.timeline(path):
        await asyncio.gather(*(runtime.spawn(request()) for _ in range(3)))
        for _ in range(4):
            await lz.layer_norm(torch.ones(1, 8))
    trace = read_trace(path)
    names = row_names(trace)
    rows = {names[call["pid"], call["tid"]] for call in slices(trace, "caller", "rms_norm")}
    assert rows == {"spawned 1", "spawned 2", "spawned 3"}
    assert any(".layer_norm." in each["name"] for each in slices(trace, "thread"))


@pytest.mark.asyncio
async def test_a_batch_says_why_it_was_launched_when_it_was(tmp_path: Path) -> None:
    """What the batcher decided by travels with the batch."""
    path = tmp_path / "trace.json"
    settings = lz.Settings(inline_limit_us=0.0, max_batch_size=2)
    x = torch.randn(1, 16)
    async with lz.start(settings, scoped=True), lz.timeline(path):
        await asyncio.gather(*(lz.rms_norm(x) for _ in range(3)))
        await asyncio.gather(lz.layer_norm(x), lz.rms_norm(x, priority=0))
        await asyncio.gather(*(lz.rms_norm(x, batching="off") for _ in range(2)))
    trace = read_trace(path)
    whys = [(batch["name"], batch["args"]["why"]) for batch in slices(trace, "batches")]
    assert whys[:2] == [("rms_norm", "limit"), ("rms_norm", "turn")]
    assert ("rms_norm", "priority") in whys
    assert whys[-2:] == [("rms_norm", "alone"), ("rms_norm", "alone")]
    assert {why for _, why in whys} <= set(REASONS)


def test_a_batch_names_the_kernels_of_its_own_time_and_thread() -> None:
    """Each once; neither those before and behind it nor those of another thread."""
    trace = Trace(0, 100, {}, {})
    trace.add_kernels(
        [(name, thread, at, at + 1, None) for name, thread, at in
         (("before", 1, 5), ("its", 1, 15), ("its", 1, 17), ("another's", 2, 16), ("behind", 1, 25))]
    )  # fmt: skip
    assert trace.kernels_in(1, 10, 20) == ["its"]

"""What judges a soak with faults: each of its verdicts is seen to fail where it has to."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import layerzero as lz
from benchmarks.soaking import comparing, ends, resources, serving
from benchmarks.soaking.ends import ANSWERED, CANCELLED, STUCK, WRONG, Ends
from layerzero.actors.isolation.arena import HostArena
from layerzero.cli.deployment import Deployment, compare, examine
from tests.waiting import EVERY_S, LIMIT_S

TIMES = [float(second) for second in range(0, 600, 5)]


def is_flat(value: Callable[[float], float]) -> bool:
    """What the trend says of the open files, where everything else is constant."""
    constant = {name: [100.0] * len(TIMES) for name in resources.BOUNDS}
    trends = resources.trends(TIMES, constant | {"files": [value(t) for t in TIMES]})
    assert all(trend["flat"] for name, trend in trends.items() if name != "files")
    return bool(trends["files"]["flat"])


def test_a_leak_under_what_comes_and_goes_is_seen() -> None:
    """Two files a minute stay, under forty that come and go; without those that stay it is flat."""

    def coming_and_going(t: float) -> float:
        return 60 + random.Random(int(t)).randrange(40)

    assert is_flat(coming_and_going)
    assert not is_flat(lambda t: coming_and_going(t) + t / 30)


def test_one_sample_decides_nothing() -> None:
    """A peak at the very end is no trend, nor a high minute, nor what grew in the first half alone."""
    assert is_flat(lambda t: 500.0 if t == TIMES[-1] else 60.0)
    assert is_flat(lambda t: 500.0 if 430.0 <= t < 520.0 else 60.0)
    assert is_flat(lambda t: 60.0 + min(t, 280.0))


@pytest.mark.asyncio
async def test_every_way_to_end_is_counted_once_and_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer, a wrong one, a named error, another, a cancel, no end: the sums are those of the calls."""

    async def raises(error: Exception) -> Any:
        raise error

    async def gives(value: int, seconds: float = 0.0) -> int:
        await asyncio.sleep(seconds)
        return value

    def verdicts() -> list[bool]:
        return list(found.checks().values())

    found = Ends("one", time.monotonic())
    assert await found.call(gives(1), lambda got: got == 1) == ANSWERED
    assert await found.call(gives(1, 60.0), cancel_s=0.0) == CANCELLED
    named = lz.DeviceLostError("gone", retryable=False)
    assert await found.call(raises(named)) == "DeviceLostError, it had begun"
    assert await found.call(raises(httpx.ReadError("gone"))) == "ReadError"
    assert verdicts() == [True, True, True] and found.begun == 4 == sum(found.ended.values())
    for bad, how in ((gives(2), WRONG), (raises(KeyError("x")), "unnamed error: KeyError: 'x'")):
        kept = Ends("other", time.monotonic())
        assert await kept.call(bad, lambda got: got == 1) == how
        assert not list(kept.checks().values())[1]
    monkeypatch.setattr(ends, "LONGEST_S", 0.01)
    assert await found.call(gives(1, 60.0)) == STUCK
    assert verdicts() == [True, False, True]
    found.count(ANSWERED)
    assert verdicts()[0] is False, "an end too many"


@pytest.mark.asyncio
async def test_a_caller_that_is_cut_has_ended_as_cancelled() -> None:
    """There has to be one who waits."""
    found = Ends("one", time.monotonic())
    assert not found.cut(random.Random(0))
    call = asyncio.ensure_future(found.call(asyncio.sleep(60.0)))
    await asyncio.sleep(0)
    assert found.cut(random.Random(0))
    assert await call == CANCELLED and not found.tasks


def test_shared_memory_is_counted_while_something_has_it() -> None:
    """A mapping whose descriptor is closed counts; one that is dropped does not."""
    before = resources.segments([os.getpid()])
    arena, descriptor = HostArena.create(1000)
    os.close(descriptor)
    assert len(resources.segments([os.getpid()]) - before) == 1 and arena.size >= 1000
    del arena
    assert resources.segments([os.getpid()]) == before


def test_processes_are_found_after_their_parents_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a mark in their environment: who lost the parent is a child of the system's first process."""
    monkeypatch.setenv(resources.MARK, f"a test of process {os.getpid()}")
    assert resources.marked() == []
    script = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3).pid)"
    printed = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, check=True)
    orphan = int(printed.stdout)
    try:
        until = time.monotonic() + LIMIT_S
        while not resources.marked() and time.monotonic() < until:
            time.sleep(EVERY_S)  # within exec a process has no environment for a moment
        assert resources.marked() == [orphan]
    finally:
        os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize("plant", comparing.PLANTED, ids=lambda plant: plant.__name__)
@pytest.mark.asyncio
async def test_a_comparison_sees_each_planted_device_and_blames_no_equal_one(plant: Any) -> None:
    """The manifest of the soak, over this process's devices of two runtimes."""
    calls = comparing.CALLS[:1]
    settings = lz.Settings(device="cpu", inference=True, perfdb=None, shipped_tables=False)

    async def look(planted: bool) -> Any:
        async with lz.start(settings, scoped=True) as runtime:
            if planted:
                await plant()
            (facts,) = runtime.device_pool.facts
            return facts, await runtime.device_pool.run(examine, calls)

    manifest = Deployment(calls)
    facts, one = await look(planted=False)
    _, other = await look(planted=False)
    _, altered = await look(planted=True)
    of_two = {name: facts for name in ("a", "b")}
    assert compare(manifest, of_two, {"a": one, "b": other}).findings == ()
    assert compare(manifest, of_two, {"a": one, "b": altered}).findings


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, []),
        ({"pages_free": 95}, ["1 pages are held"]),
        ({"requests": 1}, ["1 requests are under way"]),
        ({"open": 1}, ["1 clients wait"]),
        ({"rejected": 2}, ["1 rejected, and no client knows", "1 requests are missing"]),
        ({"done": 3}, ["1 done, fewer than its clients know"]),
        ({"failed": 1}, ["1 failed", "1 requests are too many"]),
        ({"in_flight": 2}, ["2 batched calls have no end"]),
    ],
)
def test_a_servers_books_are_those_of_its_clients(change: dict[str, int], says: list[str]) -> None:
    """Five requests with a status, one that left before: each difference is said, equal books are not."""
    given = {
        "pages_free": 96,
        "requests": 0,
        "open": 0,
        "rejected": 1,
        "done": 2,
        "failed": 0,
        "in_flight": 0,
    }
    given |= change
    life = serving.Life(None, "", took=5, unsure=1, rejected=1, done=given["done"], open=given["open"])  # type: ignore[arg-type]
    counts = {"done": 2, "cancelled": 3, "failed": given["failed"], "rejected": given["rejected"]}
    if "rejected" in change:
        counts["cancelled"] = 0
    counted = {f'requests_total{{outcome="{how}"}}': float(count) for how, count in counts.items()}
    counted['layerzero_batcher_in_flight{device="cpu"}'] = float(given["in_flight"])
    health = {"pages": 96, "pages_free": given["pages_free"], "requests": given["requests"]}
    assert serving.differences(life, health, counted) == says


@pytest.mark.asyncio
async def test_a_server_that_cannot_be_started_ends_its_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the error in its words: its clients would wait for a server for ever, and nobody would be told."""
    monkeypatch.setattr(serving, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match="the server ended with status 2 before it served"):
        await asyncio.wait_for(serving.Serving(tmp_path, 0.0).run(), 60.0)


@pytest.mark.asyncio
async def test_cycles_are_collected_before_they_are_taken_for_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage that nothing but a collection frees is gone in some look of every window."""

    class Circle:
        def __init__(self) -> None:
            self.me = self

    monkeypatch.setenv(resources.MARK, "a test")
    monkeypatch.setattr(resources, "OWN_S", 0.01)
    freed = asyncio.Event()
    watch = resources.Watch(asyncio.get_running_loop().time(), 0.5)
    watching = asyncio.ensure_future(watch.run())
    gc.disable()
    try:
        weakref.finalize(Circle(), freed.set)
        await asyncio.wait(
            [watching, asyncio.ensure_future(freed.wait())], timeout=30.0, return_when="FIRST_COMPLETED"
        )
        assert freed.is_set() and not watching.done()
        await asyncio.sleep(0.1)
        assert set(watch.last()) == set(resources.BOUNDS) and len(watch.load) == len(watch.times)
    finally:
        gc.enable()
        watching.cancel()

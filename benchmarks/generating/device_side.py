"""What a GPU did in a span: launches and device time of a step, the host's share; and planted stream bugs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

import torch

import layerzero as lz
from generating.crowd import Span
from generating.where import Where
from layerzero.backends.flashinfer import norm_rope, sampling
from layerzero.spec.call_spec import CallSpec

CUDA = torch.cuda.is_available()


def look(run: Callable[[], Span], requests: int) -> dict[str, Any]:
    """Where the time of a span goes: first the host's by samples, then the device's by its profiler.

    `host_us` is the time that the thread was busy for one step of all requests; a loop by hand that waits
    for the device by turning counts that wait too.
    """
    begin, busy = time.perf_counter(), time.thread_time()
    with Where() as sampled:
        span = run()
    wall, busy = time.perf_counter() - begin, time.thread_time() - busy
    steps = max(1.0, span.tokens / requests * wall / span.seconds)
    found: dict[str, Any] = {
        "mean_batch": round(span.mean_batch, 2),
        "step_us": round(span.seconds / max(1.0, span.tokens / requests) * 1e6, 1),
        "host_us": round(busy / steps * 1e6, 1),
        "host_busy": round(busy / wall, 3),
        "host": sampled.shares(),
    }
    return found | (_profiled(run, requests) if CUDA else {})


def _profiled(run: Callable[[], Span], requests: int) -> dict[str, Any]:
    """Launches of a step and the part of the time in which the device was busy, from a traced span."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        begin = time.perf_counter()
        span = run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begin
    results: Any = trace.profiler.kineto_results  # type: ignore[union-attr]
    kernels, copies = [], 0
    by_name: dict[str, float] = {}
    for event in results.events():
        if "CUDA" not in str(event.device_type()):
            continue
        name = event.name()
        if name.startswith(("Memcpy", "Memset")):
            copies += 1
        elif not event.is_user_annotation():
            kernels.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            by_name[name[:80]] = by_name.get(name[:80], 0.0) + event.duration_ns()
    steps = max(1.0, span.tokens / requests * wall / span.seconds)
    longest = sorted(by_name.items(), key=lambda pair: -pair[1])[:12]
    return {
        "launches_a_step": round(len(kernels) / steps, 1),
        "copies_a_step": round(copies / steps, 1),
        "device_us_a_step": round(covered(kernels) / steps / 1e3, 1),
        "device_busy": round(covered(kernels) / 1e9 / wall, 3),
        "longest_us_a_step": {name: round(ns / steps / 1e3, 1) for name, ns in longest},
    }


ATTENTION = ("FlashAttnFwd", "_decode", "BatchDecode")  # what attention's kernels are called


def one_layer(run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """The kernels from one attention to the next in the middle of a span: name, us, and us since the last."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    results: Any = trace.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted(
        (event.start_ns(), event.duration_ns(), event.name())
        for event in results.events()
        if "CUDA" in str(event.device_type()) and not event.is_user_annotation()
    )
    marked = [place for place, event in enumerate(events) if any(name in event[2] for name in ATTENTION)]
    if len(marked) < 4:
        return []
    begin, end = marked[len(marked) // 2], marked[len(marked) // 2 + 1]
    if end - begin > 40:  # the end of a step stands between them
        begin, end = end, marked[len(marked) // 2 + 2]
    found = []
    for place in range(begin, end):
        start, duration, name = events[place]
        before = events[place - 1]
        found.append((name[:100], duration / 1e3, (start - before[0] - before[1]) / 1e3))
    return found


def profiled_step(run: Callable[[], float], requests: int) -> dict[str, Any]:
    """Launches and device time of a step of a span that tells its tokens/s: see `look`."""

    def span() -> Span:
        begin = time.perf_counter()
        speed = run()
        seconds = time.perf_counter() - begin
        return Span(seconds, int(speed * seconds))

    return _profiled(span, requests)


def covered(spans: list[tuple[int, int]]) -> int:
    """The length of the union of (begin, end) spans."""
    total, reached = 0, -1
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def kernels_of(runtime: lz.Runtime, device: torch.device) -> dict[str, list[str]]:
    """The kernels that a device's plans have run, by op."""
    tables = runtime.device(device).snapshot.tables
    found: dict[str, set[str]] = {}
    for op, table in list(tables.items()):
        for plans in table.by_signature:
            found.setdefault(op, set()).update(plan.kernel for plan in list(plans.values()))
    return {op: sorted(ids) for op, ids in sorted(found.items()) if ids}


def flashinfer_is_built() -> bool:
    """Whether FlashInfer is missing or brings its modules as machine code: else each compiles when needed."""
    try:
        from flashinfer.jit import env
    except ImportError:
        return True
    folders = env.FLASHINFER_AOT_DIR, env.FLASHINFER_JIT_DIR
    return any((folder / "rope" / "rope.so").exists() for folder in folders)


def deny_for_graphs() -> str:
    """Leave out what of FlashInfer no graph can take, and what would compile for minutes; what, and why.

    The environment says so to the processes that this one starts, too.
    """
    why = "planned on the host, so that no graph holds it, or not built ahead"
    denied = ["flashinfer.*attention.*"]
    if CUDA and not flashinfer_is_built():
        why, denied = "its modules are not built ahead, and take minutes", ["flashinfer.*"]
    elif CUDA:
        kernels = (*norm_rope.KERNELS, *sampling.KERNELS)
        denied += [k.id for k in kernels if k.on_disk is not None and not k.on_disk(CallSpec(op=k.op))]
    os.environ["LAYERZERO_DENY"] = ",".join(filter(None, [os.environ.get("LAYERZERO_DENY"), *denied]))
    return f"{', '.join(denied)}: {why}"


def planted() -> dict[str, Callable[[], bool]]:
    """Checks that say whether each planted bug of several streams is caught, and that without it none is."""
    from layerzero.scheduler.modes import streams
    from tests.cuda import test_streams as bugs

    def under(what: Callable[[], bool], name: str | None = None) -> bool:
        kept = {known: getattr(streams, known) for known in ("wait_for_stream", "record_stream")}
        if name is not None:
            setattr(streams, name, lambda *_: None)
        try:
            with lz.start(bugs.settings(), scoped=True):
                return what()
        finally:
            for known, whole in kept.items():
                setattr(streams, known, whole)

    def produced() -> bool:
        return all(asyncio.run(bugs.slow_producers(4)))

    def consumed() -> bool:
        return asyncio.run(bugs.slow_consumers())

    return {
        "slow producers are waited for": lambda: under(produced),
        "a missing wait is caught": lambda: not under(produced, "wait_for_stream"),
        "a slow consumer's memory is kept": lambda: under(consumed),
        "an early drop is caught": lambda: not under(consumed, "record_stream"),
    }

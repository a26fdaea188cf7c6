"""Timing kernels against each other in interleaved rounds, launched by the host or replayed as a graph.

On CUDA a sample is a row of calls between two events, over several copies of the operands, so that together
they do not fit into the last-level cache. Launched eagerly, such a row takes the longer of the host's and the
device's time; replayed as a graph, the device's alone. On the CPU a sample is wall time.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from layerzero.ops.captures import passing_captures
from layerzero.ops.op import Args
from layerzero.perfdb.record import FEW_SAMPLES, LONG_US, MIN_SAMPLES, Cache, Launch

Run = Callable[..., Any]

_MAX_COPIES = 64
_COLD = 2.5  # times the last-level cache
# Calls below this size are the launch, not the memory: a few copies do.
_SMALL_BYTES = 2 << 20
_SMALL_COPIES = 8
# Kernels this many times slower than the fastest get the fewest samples that count.
_HOPELESS = 4.0
# Kernels that cannot be distinguished yet are sampled this many times as long; medians this near need not be.
_MORE = 2
_EQUAL = 0.02
_ROW_US = 4000.0
# A row launched by the host has to be long: its first call waits for the host and then for the device, and
# only the calls behind it overlap the two.
_LAUNCHED_ROW_US = 2000.0
_LAUNCHED_CALLS = 3
_MAX_CALLS = 200
_WARM_ENOUGH_S = 0.01
# A call this long finds the same caches whatever ran before it.
_LONG_CALL_US = 10_000.0


class TimingBudget(msgspec.Struct, frozen=True):
    """How long one kernel is timed: `samples` of about `sample_us`, over at most `budget_s` seconds."""

    samples: int = 15
    sample_us: float = 300.0
    budget_s: float = 0.15
    warmup: int = 3


QUICK = TimingBudget(7, 100.0, 0.03, 2)


class Timing(msgspec.Struct, frozen=True):
    """The samples of one kernel, in microseconds a call, sorted."""

    samples: tuple[float, ...]
    cache: Cache

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples)

    def quantile_us(self, share: float) -> float:
        """The time below which `share` of the samples lie."""
        return self.samples[min(len(self.samples) - 1, int(len(self.samples) * share))]

    @property
    def variance(self) -> float:
        """The variance of the middle half: preempted samples say nothing about the kernel."""
        cut = len(self.samples) // 4
        return statistics.pvariance(self.samples[cut : len(self.samples) - cut])


@dataclass(slots=True)
class _Contestant:
    run: Run
    argument_sets: Sequence[Args]
    calls: int = 1
    next: int = 0
    estimate_us: float = 0.0
    graph: torch.cuda.CUDAGraph | None = None
    samples: list[float] = field(default_factory=list)

    def step(self) -> None:
        for _ in range(self.calls):
            args = self.argument_sets[self.next]
            self.next = (self.next + 1) % len(self.argument_sets)
            self.run(*args)


def time_kernels(
    runs: dict[str, Run], copies: Sequence[Args], device: torch.device, launch: Launch, effort: TimingBudget
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time every kernel on the same operands, in turns; what failed is returned by kernel, in words.

    `copies` are equal calls on operands of their own (`copies_for` says how many make the cache cold).
    """
    cuda = device.type == "cuda"
    measure = _time_replay if cuda and launch == "graph" else _time_with_events if cuda else _time_on_host
    arms: dict[str, _Contestant] = {}
    failed: dict[str, str] = {}
    for name, run in runs.items():
        arm = _Contestant(run, copies)
        try:
            _prepare(arm, measure, device, launch, effort)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        arms[name] = arm
    order = list(arms)
    started = time.perf_counter()
    rounds = 0
    fastest = min((arm.estimate_us for arm in arms.values()), default=0.0)
    rng = random.Random(len(order))
    while order and rounds < effort.samples:
        # Shuffled, not rotated: threads that one library leaves spinning must not always meet the same arm.
        for name in rng.sample(order, len(order)):
            arms[name].samples.append(measure(arms[name]))
        rounds += 1
        remaining = [name for name in order if _needs_more_samples(arms[name], fastest)]
        if len(remaining) < len(order):
            order, started = remaining, time.perf_counter()  # the slow had their time, the others begin
        if rounds >= MIN_SAMPLES and time.perf_counter() - started > effort.budget_s * len(order):
            break
    started = time.perf_counter()
    for _ in range(_MORE * effort.samples):
        close = _undecided({name: arms[name].samples for name in order})
        if not close or time.perf_counter() - started > _MORE * effort.budget_s * len(close):
            break
        for name in rng.sample(close, len(close)):
            arms[name].samples.append(measure(arms[name]))
    operand_bytes = sum(a.nbytes for args in copies for a in args if isinstance(a, Tensor))
    cache: Cache = "cold" if cuda and operand_bytes > 1.5 * _cache_bytes(device) else "warm"
    return {n: Timing(tuple(sorted(a.samples)), cache) for n, a in arms.items()}, failed


def _needs_more_samples(arm: _Contestant, fastest: float) -> bool:
    """Whether a kernel is sampled in the next round, too: a slow one as a row of it needs."""
    enough = MIN_SAMPLES if arm.estimate_us < LONG_US else FEW_SAMPLES
    return arm.estimate_us <= fastest * _HOPELESS or len(arm.samples) < enough


def _undecided(samples: dict[str, list[float]]) -> list[str]:
    """Who may yet be the fastest: kernels whose middle halves overlap while their medians differ.

    Empty where the fastest is clear, and where all that overlap are as good as equal.
    """
    if not samples:
        return []
    timings = {name: Timing(tuple(sorted(times)), "warm") for name, times in samples.items()}
    best = min(timings.values(), key=lambda t: t.median_us)
    close = [name for name, own in timings.items() if own.quantile_us(0.25) <= best.quantile_us(0.75)]
    apart = any(timings[name].median_us > best.median_us * (1 + _EQUAL) for name in close)
    return close if apart else []


def copies_for(bytes_a_call: int, device: torch.device, free_bytes: int | None = None) -> int:
    """How many copies of a call's operands overflow the last-level cache; 1 on the CPU and where too big."""
    if device.type != "cuda":
        return 1
    if bytes_a_call < _SMALL_BYTES:
        return _SMALL_COPIES
    count = int(_COLD * _cache_bytes(device) / bytes_a_call) + 1
    limit = count if free_bytes is None else max(1, free_bytes // bytes_a_call)
    return max(1, min(count, _MAX_COPIES, limit))


def _cache_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _prepare(
    arm: _Contestant,
    measure: Callable[[_Contestant], float],
    device: torch.device,
    launch: Launch,
    effort: TimingBudget,
) -> None:
    began, last = time.perf_counter(), 0.0
    for turn in range(effort.warmup):
        begin = time.perf_counter()
        arm.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        last = time.perf_counter() - begin
        # A first call may compile: one that long says nothing yet.
        if begin + last - began > _WARM_ENOUGH_S and (turn or last * 1e6 < LONG_US):
            break
    if measure is _time_replay:
        arm.estimate_us = _time_with_events(arm)
        # A row of a slow kernel overflows the cache by itself: fewer calls do.
        arm.calls = max(1, min(len(arm.argument_sets), int(_ROW_US / max(arm.estimate_us, 0.1))))
        _capture(arm)
        arm.estimate_us = min(measure(arm) for _ in range(2))
        return
    if last * 1e6 > LONG_US:
        arm.estimate_us = last * 1e6
        arm.samples.append(arm.estimate_us)
        return
    arm.estimate_us = min(measure(arm) for _ in range(2))
    row_us = effort.sample_us
    if measure is _time_with_events:
        row_us = max(row_us, _LAUNCHED_ROW_US, min(_LAUNCHED_CALLS * arm.estimate_us, _LONG_CALL_US))
        arm.calls = _calls_per_sample(arm.estimate_us, row_us)
        arm.estimate_us = min(arm.estimate_us, measure(arm))
    arm.calls = _calls_per_sample(arm.estimate_us, row_us)


def _calls_per_sample(call_us: float, row_us: float) -> int:
    """How many calls of `call_us` make a sample of about `row_us`."""
    return max(1, min(_MAX_CALLS, int(row_us / max(call_us, 0.1))))


def _time_on_host(arm: _Contestant) -> float:
    if arm.estimate_us < _LONG_CALL_US:
        # Not counted: it finds the caches and the thread pool as the arm before left them.
        arm.run(*arm.argument_sets[0])
    begin = time.perf_counter_ns()
    arm.step()
    return (time.perf_counter_ns() - begin) / arm.calls / 1e3


def _time_with_events(arm: _Contestant) -> float:
    return _time_on_device(arm.step) / arm.calls


def _time_on_device(run: Callable[[], None]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures of a device: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)


def _capture(arm: _Contestant) -> None:
    """Record a row of calls on a side stream after warming up there: libraries keep plans by stream."""
    side = _capture_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        arm.step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with passing_captures(), torch.cuda.graph(graph, stream=side):
        arm.step()
    arm.graph = graph
    graph.replay()
    torch.cuda.synchronize()


def _time_replay(arm: _Contestant) -> float:
    assert arm.graph is not None
    return _time_on_device(arm.graph.replay) / arm.calls

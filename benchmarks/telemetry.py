"""What telemetry costs: a call or a generation step with each kind of it beside without, and one count alone.

    python benchmarks/telemetry.py --out benchmarks/results/telemetry_cpu.json
    python benchmarks/telemetry.py --parts steps counts --out benchmarks/results/telemetry_steps_cpu.json

Three tables. `calls`: two processes on one core, by turns, as `lz gate` compares paces: microseconds of a
call without, and by how much it takes longer with. `steps`: a generation step of 64 requests to the shipped
model, two runtimes of one process by turns; the first row has nothing on in both: what the machine adds. In
a row "sampled" each request of both is in a recorded span of its own.
`counts`: nanoseconds of what a decision, a batch or a remembered call counts, without the loop around it.
Exit status 1 where kernel times take more than a twentieth of a call of 20 us or longer, or more than a
hundredth of a generation step, or where a remembered call counts for longer than 50 ns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from contextvars import copy_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # the model is an example

import torch
from generate import SamplingParams, generate
from generating.models import build
from harness import environment, write

import layerzero as lz
from layerzero.calls.call_cache import BlockingCallCache
from layerzero.gates.paired_rounds import PacedCall, PaceProcess
from layerzero.observe.counters import Counters
from layerzero.observe.histograms import Histograms
from layerzero.observe.kernel_times import KERNEL_SECONDS, KernelTimes
from layerzero.observe.selection_events import SELECTION_SECONDS
from layerzero.ops import table as ops_table

CALLS = (
    PacedCall("rms_norm x=16x512:float32 weight=512:float32"),
    PacedCall("linear x=16x512:float32 weight=512x512:float32"),
    PacedCall("attention q=1x8x64x64:float32 k=1x8x64x64:float32 v=1x8x64x64:float32"),
    PacedCall("rms_norm x=1x512:float32 weight=512:float32", callers=64),
)
KINDS = {
    "kernel times": {"LAYERZERO_KERNEL_TIMES": "1"},
    "spans of calls": {"LAYERZERO_CALL_SPANS": "1"},
    "timeline": {"LAYERZERO_TIMELINE": "{folder}/trace.json"},
}
MOST, LONG_US = 1.05, 20.0
WARM_BLOCKS = 30
PARTS = {
    "calls": ["call", "us", *(each for name in KINDS for each in (f"{name}: us more", "share"))],
    "steps": ["on", "ms a step without", "with over without", "rounds that were longer", "kernels timed"],
    "counts": ["counted", "ns"],
}
# Of a generation step: what is on beside nothing.
ON: dict[str, Any] = {
    "nothing": {}, "kernel times": {"kernel_times": True}, "spans": {"spans": True},
    "sampled": {}, "sampled, spans": {"spans": True}, "sampled, spans of calls": {"call_spans": True},
}  # fmt: skip
REQUESTS, PROMPT, TOKENS, PAGE, MOST_OF_A_STEP = 64, 16, 12, 16, 0.01
A_HIT, MOST_OF_A_HIT_NS = "a remembered call", 50.0
BATCH = 1000


def started(stack: ExitStack, call: PacedCall, variables: dict[str, str], cpu: int) -> PaceProcess:
    """A process whose settings are these variables."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        return stack.enter_context(PaceProcess(call, cpu=cpu))
    finally:
        os.environ.clear()
        os.environ.update(before)


def price(call: PacedCall, variables: dict[str, str], rounds: int) -> tuple[float, float]:
    """Microseconds of a call without, and the median of its ratio with over without."""
    cpu = max(os.sched_getaffinity(0))
    with ExitStack() as stack:
        plain = started(stack, call, {}, cpu)
        told = started(stack, call, variables, cpu)
        plain.start()
        told.start()
        told.use_calls_of(plain)
        for _ in range(WARM_BLOCKS):
            plain.block(), told.block()
        ratios, times = [], []
        for number in range(rounds):
            order = (plain, told) if number % 2 else (told, plain)
            took = {id(process): process.block() for process in order}
            ratios.append(took[id(told)] / took[id(plain)])
            times.append(plain.call_us(took[id(plain)]))
    return statistics.median(times), statistics.median(ratios)


def calls(rounds: int, folder: str) -> tuple[list[list[Any]], bool]:
    """Rows: call, its microseconds, then for each kind the microseconds that it adds."""
    found, good = [], True
    for call in CALLS:
        row: list[Any] = [str(call)]
        for name, variables in KINDS.items():
            settings = {key: value.format(folder=folder) for key, value in variables.items()}
            us, ratio = price(call, settings, rounds)
            row += [round(us, 2)] if len(row) == 1 else []
            row += [round(us * (ratio - 1), 2), f"{ratio - 1:.1%}"]
            good = good and (name != "kernel times" or us < LONG_US or ratio <= MOST)
        found.append(row)
    return found, good


def steps(rounds: int) -> tuple[list[list[Any]], bool]:
    """Rows: what is on, ms of a step without, median ratio of processor time, longer rounds, kernels."""
    model = build("shipped", pages=(REQUESTS + 1) * -(-(PROMPT + TOKENS) // PAGE), page_size=PAGE)

    tracer = sdk_tracer()

    async def crowd(sampled: bool) -> None:
        async def one(seed: int) -> None:
            with tracer.start_as_current_span("request") if sampled else nullcontext():
                await alone(seed)

        async def alone(seed: int) -> None:
            prompt = [(seed * 31 + place) % model.config.vocab_size for place in range(PROMPT)]
            async for _ in generate(model, prompt, SamplingParams(max_tokens=TOKENS, seed=seed)):
                pass

        await asyncio.gather(*(one(seed) for seed in range(REQUESTS)))

    def step_ms(sampled: bool) -> float:
        begin = time.process_time()
        asyncio.run(crowd(sampled))
        return (time.process_time() - begin) / TOKENS * 1e3

    found, good = [], True
    for name, changes in ON.items():
        ratios, times = [], []
        with ExitStack() as stack:
            ways = [copy_context(), copy_context()]
            for way, settings in zip(ways, (lz.Settings(), lz.Settings(**changes)), strict=True):
                started = lz.start(settings, scoped=True)
                runtime = way.run(started.__enter__)
                stack.callback(way.run, started.__exit__, None, None, None)
            histograms = runtime.counters.histograms
            for number in range(-2, rounds):
                timed_before = histograms.count(KERNEL_SECONDS)
                first = number % 2
                took = {way: ways[way].run(step_ms, name.startswith("sampled")) for way in (first, 1 - first)}
                if number >= 0:
                    ratios.append(took[1] / took[0])
                    times.append(took[0])
            timed = (histograms.count(KERNEL_SECONDS) - timed_before) / TOKENS  # of the last round
        ratio, longer, ms = (
            statistics.median(ratios),
            sum(each > 1 for each in ratios),
            statistics.median(times),
        )
        found.append([name, round(ms, 3), round(ratio, 4), f"{longer} of {rounds}", timed])
        good = good and timed * a_kernel_s() * 1e3 <= MOST_OF_A_STEP * ms
    return found, good


def sdk_tracer() -> Any:
    """The tracer of a provider that records all and exports to nowhere."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    trace.set_tracer_provider(provider)
    return trace.get_tracer("requests")


def a_kernel_s() -> float:
    """Seconds that timing one kernel adds to running it."""
    op, runs = ops_table.get("rms_norm"), [nothing]
    with lz.start(lz.Settings(device="cpu"), scoped=True):
        lz.sync.rms_norm(torch.ones(2, 8))
        selection = lz.last_selection()
    assert selection is not None
    runs.append(KernelTimes(Counters()).wrap(op, selection, nothing))
    plain, timed = (each_ns(run) for run in runs)
    return (timed - plain) * 1e-9


def nothing() -> None:
    """What a kernel does here."""


def each_ns(call: Callable[[], object]) -> float:
    """Nanoseconds of a call at the median of many batches, without the loop around it."""
    took = []
    for _ in range(200):
        begin = time.perf_counter_ns()
        for _ in range(BATCH):
            call()
        end = time.perf_counter_ns()
        for _ in range(BATCH):
            pass
        took.append((2 * end - begin - time.perf_counter_ns()) / BATCH)
    return statistics.median(took)


def counts() -> tuple[list[list[Any]], bool]:
    """Rows: what is counted, nanoseconds at the median; a remembered call is one step of its op's count."""
    counters, series = Counters(), Histograms().series(SELECTION_SECONDS, op="rms_norm")
    known = BlockingCallCache(ops_table.get("rms_norm"), None, lambda: None)
    ways: dict[str, Callable[[], object]] = {
        A_HIT: known.count_known,
        "a counter": lambda: counters.add("selections", op="rms_norm"),
        "the histogram of selections": lambda: series.observe(1e-5),
        "nothing": lambda: None,
    }
    found: list[list[Any]] = [[name, round(each_ns(count), 1)] for name, count in ways.items()]
    found.append(["timing one kernel", round(a_kernel_s() * 1e9, 1)])
    return found, found[0][1] <= MOST_OF_A_HIT_NS


def main() -> int:
    """Run, print, and write where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--step-rounds", type=int, default=120)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    tables, good = {}, True
    for part in given.parts:
        with tempfile.TemporaryDirectory() as folder:
            rows, holds = (
                calls(given.rounds, folder) if part == "calls"
                else steps(given.step_rounds) if part == "steps"
                else counts()
            )  # fmt: skip
        tables[part] = {"columns": PARTS[part], "rows": rows}
        good = good and holds
    for name, table in tables.items():
        print(name)
        for row in [table["columns"], *table["rows"]]:
            print("  " + " | ".join(str(cell) for cell in row))
    if given.out is not None:
        write(given.out, {"environment": environment(), "tables": tables})
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())

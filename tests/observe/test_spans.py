"""OpenTelemetry spans through the real SDK: whose trace, which kernel, why; and nothing unless asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.ops import table as ops_table
from tests import children
from tests.kernels import kernel

pytest.importorskip("opentelemetry.sdk.trace", reason="spans need opentelemetry-sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

EXPORTER = InMemorySpanExporter()


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """The spans of one test; a process has one provider for ever."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
        trace.set_tracer_provider(provider)
    EXPORTER.clear()
    yield EXPORTER
    EXPORTER.clear()


def named(exporter: InMemorySpanExporter, name: str) -> list[Any]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def told() -> Any:
    return lz.start(lz.Settings(call_spans=True), scoped=True)


@asynccontextmanager
async def request() -> AsyncIterator[None]:
    """What a program does with its own span around it."""
    with trace.get_tracer("user").start_as_current_span("request"):
        yield


X = torch.randn(2, 64)


@pytest.mark.asyncio
async def test_a_blocking_call_is_a_span_of_the_callers_trace(exporter: InMemorySpanExporter) -> None:
    """With the kernel that ran and why, at every call; the choice has a span of its own, once."""
    async with told():
        with trace.get_tracer("user").start_as_current_span("request") as request:
            for _ in range(3):
                lz.sync.rms_norm(X)
            last = lz.last_selection()
    assert last is not None
    ran = named(exporter, "layerzero.rms_norm")
    chosen = named(exporter, "layerzero.select")
    assert len(ran) == 3 and len(chosen) == 1
    for span in (*ran, *chosen):
        assert span.context.trace_id == request.get_span_context().trace_id
        assert span.attributes["layerzero.kernel"] == last.kernel
        assert span.attributes["layerzero.reason"] == last.why
        assert span.attributes["layerzero.dims"] == "N=2 C=64"
    assert chosen[0].attributes["layerzero.takes"] >= 1


def twice(x: torch.Tensor) -> torch.Tensor:
    return lz.sync.rms_norm(x) * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("function", ["op", "batched"])
async def test_a_batch_links_to_its_callers(exporter: InMemorySpanExporter, function: str) -> None:
    """Each caller waits in its own trace; the batch's own has the kernel that ran for all, every time."""
    tracer = trace.get_tracer("user")

    async def caller() -> int:
        with tracer.start_as_current_span("request") as request:
            await (lz.rms_norm(X) if function == "op" else lz.batched(twice)(X))
            return request.get_span_context().trace_id

    async with told():
        for _ in range(2):
            exporter.clear()
            traces = await asyncio.gather(*(caller() for _ in range(4)))
            waits = named(exporter, "layerzero.await")
            (batch,) = named(exporter, "layerzero.batch")
            assert sorted(span.context.trace_id for span in waits) == sorted(traces)
            assert {link.context.span_id for link in batch.links} == {span.context.span_id for span in waits}
            assert batch.attributes["layerzero.callers"] == 4
            # A caller's span says what is its own: eight rows are the batch's.
            assert all(set(span.attributes) <= {"layerzero.op", "layerzero.kernel"} for span in waits)
            assert batch.parent is None
            if function == "op":
                (ran,) = named(exporter, "layerzero.rms_norm")
                assert ran.parent.span_id == batch.context.span_id
                assert ran.attributes["layerzero.dims"] == "N=8 C=64"
                answered = {span.attributes["layerzero.kernel"] for span in waits}
                assert answered == {ran.attributes["layerzero.kernel"]}


@pytest.mark.asyncio
@pytest.mark.parametrize("function", ["op", "batched"])
async def test_a_batch_is_one_span_however_many_wait(exporter: InMemorySpanExporter, function: str) -> None:
    """Unless calls are asked for: it links to what the callers are in, who have no span of their waiting."""
    tracer = trace.get_tracer("user")
    doubled = lz.batched(twice)

    async def caller() -> int:
        with tracer.start_as_current_span("request") as request:
            await (lz.rms_norm(X) if function == "op" else doubled(X))
            return request.get_span_context().span_id

    async with lz.start(lz.Settings(spans=True), scoped=True):
        lz.sync.rms_norm(X)  # its choice has a span
        await asyncio.gather(*(caller() for _ in range(4)))
        exporter.clear()
        for _ in range(3):  # each time: a remembered call is told, too
            mine = await asyncio.gather(*(caller() for _ in range(4)))
            await asyncio.gather(*(doubled(X) if function == "batched" else lz.rms_norm(X) for _ in range(4)))
            batch, other = named(exporter, "layerzero.batch")
            assert {link.context.span_id for link in batch.links} == set(mine) and batch.parent is None
            assert batch.attributes["layerzero.callers"] == 4 and other.links == ()
            names = [span.name for span in exporter.get_finished_spans()]
            assert sorted(names) == ["layerzero.batch"] * 2 + ["request"] * 4
            exporter.clear()
        with tracer.start_as_current_span("request"):
            lz.sync.rms_norm(X)
        assert [span.name for span in exporter.get_finished_spans()] == ["request"]


@pytest.mark.asyncio
async def test_links_go_around_where_many_wait(exporter: InMemorySpanExporter) -> None:
    """A batch of forty links to thirty-two of them, the next to the other eight first; one span is one."""
    tracer = trace.get_tracer("user")
    ready = asyncio.Event()

    async def caller() -> int:
        with tracer.start_as_current_span("request") as request:
            await ready.wait()
            await lz.batched(twice)(X)
            await lz.batched(twice)(X)
            return request.get_span_context().span_id

    async with lz.start(lz.Settings(spans=True), scoped=True):
        waiting = asyncio.gather(*(caller() for _ in range(40)))
        await asyncio.sleep(0)
        ready.set()
        mine = await waiting
        batches = named(exporter, "layerzero.batch")
        linked = [{link.context.span_id for link in batch.links} for batch in batches]
        assert [len(each) for each in linked] == [32, 32] and linked[0] | linked[1] == set(mine)
        exporter.clear()
        with tracer.start_as_current_span("request"):
            await asyncio.gather(*(lz.rms_norm(X) for _ in range(5)))
        (batch,) = named(exporter, "layerzero.batch")
        assert len(batch.links) == 1 and batch.attributes["layerzero.callers"] == 5


@pytest.mark.asyncio
async def test_a_fallback_says_which_kernel_failed_and_why(exporter: InMemorySpanExporter) -> None:
    """In the trace of the call that it saved."""

    def broken(*args: Any) -> Any:
        raise RuntimeError("no luck")

    async with told() as runtime:
        runtime.add_kernel(kernel("acme.rms_norm.broken", broken))
        started = trace.get_tracer("user").start_as_current_span("request")
        with started as request, lz.prefer("acme.rms_norm.broken"):
            out = lz.sync.rms_norm(X)
    assert out.shape == X.shape
    (fallback,) = named(exporter, "layerzero.fallback")
    assert fallback.context.trace_id == request.get_span_context().trace_id
    assert fallback.attributes["layerzero.failed"] == "acme.rms_norm.broken"
    assert fallback.attributes["layerzero.kernel"] != "acme.rms_norm.broken"
    assert "no luck" in fallback.attributes["layerzero.reason"]
    (failed,) = named(exporter, "layerzero.rms_norm")
    assert not failed.status.is_ok


@pytest.mark.asyncio
async def test_what_fails_or_is_cancelled_ends_its_spans(exporter: InMemorySpanExporter) -> None:
    """With an error as their status, and nothing kept of who waited."""

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("x needs luck")

    async with told() as runtime, request():
        call = lz.batched(fails, key="fails")
        errors = await asyncio.gather(call(X), call(X), return_exceptions=True)
        waiting = asyncio.ensure_future(lz.rms_norm(X))
        other = asyncio.ensure_future(lz.rms_norm(X))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, other, return_exceptions=True)
        assert runtime.device("cpu").spans._waiting == {}
    assert all(isinstance(error, ValueError) for error in errors)
    waits = named(exporter, "layerzero.await")
    assert len(waits) == 4 and sum(not span.status.is_ok for span in waits) >= 2
    assert not named(exporter, "layerzero.batch")[0].status.is_ok


@pytest.mark.asyncio
async def test_spans_end_when_the_settings_do_so(exporter: InMemorySpanExporter) -> None:
    """They are switched on and off in a running runtime."""
    async with lz.start(scoped=True), request():
        lz.sync.rms_norm(X)
        assert exporter.get_finished_spans() == ()
        lz.configure(call_spans=True)
        lz.sync.rms_norm(X)
        assert len(named(exporter, "layerzero.rms_norm")) == 1
        lz.configure(call_spans=False)
        exporter.clear()
        lz.sync.rms_norm(X)
        assert exporter.get_finished_spans() == ()


def test_a_run_that_the_sampler_leaves_out_costs_nothing_else(exporter: InMemorySpanExporter) -> None:
    """It is not made current, and nothing is kept of a caller who waits."""
    with told() as runtime:
        spans = runtime.device("cpu").spans
        recorded, spans._tracer = spans._tracer, TracerProvider(sampler=ALWAYS_OFF).get_tracer("layerzero")
        lz.sync.rms_norm(X)
        selection = lz.last_selection()
        assert selection is not None
        call = spans.wrap(ops_table.get("rms_norm"), selection, lambda *args: trace.get_current_span())
        with trace.get_tracer("user").start_as_current_span("request") as request:
            assert call(X) is request
            with spans.waiting("rms_norm", (X,)) as answered:
                assert spans._waiting == {}
                answered(None)
        spans._tracer = recorded
    assert [span.name for span in exporter.get_finished_spans()] == ["request"]


@pytest.mark.asyncio
@pytest.mark.parametrize("parent", ["none", "not sampled", "sampled elsewhere"])
async def test_what_belongs_to_no_trace_asks_no_sampler(exporter: InMemorySpanExporter, parent: str) -> None:
    """Callers without a span that is kept: one span a batch, none a run or a call; a remote one counts."""
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent == "sampled elsewhere" else 0)
    context = trace.SpanContext(trace_id=7, span_id=8, is_remote=True, trace_flags=flags)
    outer = trace.INVALID_SPAN if parent == "none" else trace.NonRecordingSpan(context)
    with trace.use_span(outer):
        async with told() as runtime:
            await asyncio.gather(*(lz.rms_norm(X) for _ in range(4)))
            exporter.clear()
            await asyncio.gather(*(lz.rms_norm(X) for _ in range(4)))
            (batch,) = named(exporter, "layerzero.batch")
            ran = [span.parent.span_id for span in named(exporter, "layerzero.rms_norm")]
            waits = named(exporter, "layerzero.await")
            exporter.clear()
            asked: list[str] = []
            spans = runtime.device("cpu").spans
            started = spans._tracer.start_span

            def start(name: str, *args: Any, **more: Any) -> Any:
                asked.append(name)
                return started(name, *args, **more)

            spans._tracer.start_span = start
            lz.sync.rms_norm(X)
    assert batch.end_time > batch.start_time and batch.attributes["layerzero.callers"] == 4
    if parent == "sampled elsewhere":
        assert ran == [batch.context.span_id]
        assert len(waits) == len(batch.links) == 4 and {span.context.trace_id for span in waits} == {7}
        assert [span.parent.span_id for span in named(exporter, "layerzero.rms_norm")] == [8]
    else:
        assert (
            ran == waits == [] and batch.links == () and exporter.get_finished_spans() == () and asked == []
        )


ABSENT = """
import sys
sys.modules["opentelemetry.trace"] = None
import torch, layerzero as lz
lz.sync.rms_norm(torch.ones(2, 4))
assert "layerzero.observe.spans" not in sys.modules
try:
    with lz.start(lz.Settings(spans=True)):
        lz.sync.rms_norm(torch.ones(2, 4))
except lz.ConfigurationError as error:
    print(error)
"""


def test_without_opentelemetry_nothing_is_imported_and_asking_says_what_to_install(tmp_path: Any) -> None:
    """No module of it is loaded by a runtime that tells nothing."""
    plain = children.run(
        "import sys, torch, layerzero as lz; lz.sync.rms_norm(torch.ones(2, 4)); "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])",
        folder=tmp_path,
    )
    assert plain.stdout.strip() == "[]", plain.stderr
    absent = children.run(ABSENT, folder=tmp_path)
    assert "pip install 'layerzero-runtime[otel]'" in absent.stdout, absent.stderr

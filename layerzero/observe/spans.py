"""OpenTelemetry spans of ops, batches, choices and fallbacks.

Imported only where `Settings.spans` or `Settings.call_spans` asks for it. A batch is a trace of its own that
links to the callers it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Protocol

from layerzero.ops.op import Args, Op
from layerzero.selection.plan import Plan
from layerzero.selection.record import Selection
from layerzero.spec.errors import ConfigurationError

try:
    from opentelemetry.context import Context, attach
    from opentelemetry.trace import (
        Link,
        Span,
        SpanContext,
        Status,
        StatusCode,
        get_current_span,
        get_tracer,
        use_span,
    )
except ImportError as missing:
    raise ConfigurationError(
        "spans needs opentelemetry-api, which is not installed: pip install 'layerzero-runtime[otel]'"
    ) from missing


def _variable() -> ContextVar[Context] | None:
    """Where OpenTelemetry keeps a task's context; None where it is in no context variable."""
    probe = Context()
    attach(probe)
    return next((variable for variable, value in copy_context().items() if value is probe), None)


_VARIABLE = copy_context().run(_variable)
Attributes = dict[str, str | int]
_KERNEL = "layerzero.kernel"
MOST_LINKS = 32


class WaitingCall(Protocol):
    """A call in a batch; its `context` is that of the task that waits for it."""

    args: Args


class Spans:
    """What a device tells the program's tracer; a watcher of its plans.

    `layerzero.batch` is one batch, `layerzero.select` one choice, `layerzero.fallback` a kernel that answered
    for another. With `calls` also `layerzero.<op>`, one run of a kernel, and `layerzero.await`, a caller's
    waiting, which a batch then links to in place of the caller's span: parts of a caller's trace. Where none
    is recorded, they have no span and ask no sampler. What the sampler leaves out is not made current: what a
    kernel opens itself then belongs to the caller's span, or to the batch's.
    """

    reads_arguments = False

    def __init__(self, *, calls: bool) -> None:
        self.calls = calls
        self._tracer = get_tracer("layerzero")
        self._waiting: dict[int, Span] = {}  # by the identity of the arguments that wait
        self._first = 0  # of the callers that the next batch links to

    def wrap(self, op: Op, selection: Selection, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` in a span; the choice that led to it has one now. A graph capture runs no Python later."""
        chosen = _attributes_of(selection)
        takes = sum(candidate.eligible for candidate in selection.trace)
        with self._tracer.start_as_current_span("layerzero.select", attributes=chosen) as span:
            span.set_attribute("layerzero.takes", takes)
            span.set_attribute("layerzero.refuses", len(selection.trace) - takes)
        if not self.calls or "capture" in selection.request.modes:
            return call
        start, name = self._tracer.start_span, f"layerzero.{op.name}"

        def traced(*args: Any) -> Any:
            if not _is_traced(get_current_span()):
                return call(*args)
            span = start(name, attributes=chosen)
            if not span.is_recording():
                return call(*args)
            with use_span(span, end_on_exit=True):
                return call(*args)

        return traced

    @contextmanager
    def waiting(self, name: str, args: Args) -> Iterator[Callable[[Plan | None], None]]:
        """A caller's span while its call is in the batcher; gives what notes the plan that answered."""
        span = get_current_span()
        if _is_traced(span):
            span = self._tracer.start_span("layerzero.await", attributes={"layerzero.op": name})
        if not span.is_recording():
            yield lambda plan: None
            return

        def answered(plan: Plan | None) -> None:
            if plan is not None:
                span.set_attribute(_KERNEL, plan.kernel)  # the sizes are the batch's; its span has them

        self._waiting[id(args)] = span
        try:
            yield answered
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            self._waiting.pop(id(args), None)
            span.end()

    @contextmanager
    def batch(self, name: str, calls: Sequence[WaitingCall]) -> Iterator[Callable[[BaseException], None]]:
        """The span of a batch, with links to the spans that callers are in; gives what notes a failure.

        It has no parent: which context the thread has is chance. Where no caller's span is recorded, what
        runs in it does not know it.
        """
        links = self._links(calls)
        attributes: Attributes = {"layerzero.op": name, "layerzero.callers": len(calls)}
        span = self._tracer.start_span("layerzero.batch", Context(), attributes=attributes, links=links)
        with self._around(span, current=bool(links)):
            yield partial(_fail, span)

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """The span of a function that runs for one caller, in the caller's own step."""
        attributes: Attributes = {"layerzero.op": name, "layerzero.callers": 1}
        current = _is_traced(get_current_span())
        with self._around(self._tracer.start_span("layerzero.batch", attributes=attributes), current=current):
            yield

    @contextmanager
    def _around(self, span: Span, *, current: bool) -> Iterator[None]:
        if current:
            with use_span(span, end_on_exit=True):
                yield
            return
        try:
            yield
        except BaseException as error:
            _fail(span, error)
            raise
        finally:
            span.end()

    def _links(self, calls: Sequence[WaitingCall]) -> list[Link]:
        """Links to the recorded spans that callers are in, or to those of their waiting, where they have one.

        To 32 at most: a link is what a span of many callers costs. Which of more are linked goes around.
        """
        first = self._first % len(calls) if len(calls) > MOST_LINKS else 0
        contexts: dict[int, SpanContext] = {}
        for call in (*calls[first:], *calls[:first]):
            span = self._waiting.get(id(call.args)) if self.calls else _span_around(call)
            if span is not None and _is_traced(span):
                context = span.get_span_context()
                contexts[context.span_id] = context
                if len(contexts) == MOST_LINKS:
                    break
        self._first = first + MOST_LINKS
        return [Link(context) for context in contexts.values()]

    def fell_back(self, plan: Plan, used: str, error: Exception) -> None:
        """One kernel answered for another."""
        attributes: Attributes = {
            "layerzero.op": plan.op.name,
            _KERNEL: used,
            "layerzero.failed": plan.kernel,
            "layerzero.reason": f"{type(error).__name__}: {error}"[:300],
        }
        with self._tracer.start_as_current_span("layerzero.fallback", attributes=attributes):
            pass

    def close(self) -> None:
        """Nothing to stop: spans end by themselves."""


def _span_around(call: WaitingCall) -> Span | None:
    """The span that a caller is in while it waits; None where there is none."""
    context = getattr(call, "context", None)  # a caller that is not resumed has none
    otel_context = None if context is None or _VARIABLE is None else context.get(_VARIABLE)
    return get_current_span(otel_context) if otel_context else None


def _fail(span: Span, error: BaseException) -> None:
    span.record_exception(error)
    span.set_status(Status(StatusCode.ERROR, type(error).__name__))


def _is_traced(span: Span) -> bool:
    """Whether what runs inside belongs to a trace that is kept, here or by the process that called."""
    return span.is_recording() or span.get_span_context().trace_flags.sampled


def _attributes_of(selection: Selection) -> Attributes:
    request = selection.request
    return {
        "layerzero.op": selection.op,
        _KERNEL: selection.kernel,
        "layerzero.reason": selection.why,
        "layerzero.dtype": request.dtype,
        "layerzero.dims": " ".join(f"{name}={size}" for name, size in request.dims.items()),
    }

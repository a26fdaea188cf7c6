"""OpenTelemetry spans of ops, batches, choices and fallbacks.

Imported only where `Settings.spans` asks for it. A batch is a trace of its own that links to the
callers it serves; each caller's own span says which kernel answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from layerzero.ops.op import Args, Op
from layerzero.selection.plan import Plan
from layerzero.selection.record import Selection
from layerzero.spec.errors import ConfigurationError

try:
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        Link,
        Span,
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

Attributes = dict[str, str | int]
_KERNEL = "layerzero.kernel"


class Spans:
    """What a device tells the program's tracer; a watcher of its plans.

    `layerzero.<op>` is one run of a kernel, `layerzero.select` one choice, `layerzero.await` a caller's
    waiting, `layerzero.batch` one batch, `layerzero.fallback` a kernel that answered for another.
    A run and a caller's waiting are parts of a caller's trace: where none is recorded, they have no span and
    ask no sampler, and a batch is one span. What the sampler leaves out is not made current: what a kernel
    opens itself then belongs to the caller's span, or to the batch's.
    """

    reads_arguments = False

    def __init__(self) -> None:
        self._tracer = get_tracer("layerzero")
        self._waiting: dict[int, Span] = {}  # by the identity of the arguments that wait

    def wrap(self, op: Op, selection: Selection, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` in a span; the choice that led to it has one now. A graph capture runs no Python later."""
        chosen = _attributes_of(selection)
        takes = sum(candidate.eligible for candidate in selection.trace)
        with self._tracer.start_as_current_span("layerzero.select", attributes=chosen) as span:
            span.set_attribute("layerzero.takes", takes)
            span.set_attribute("layerzero.refuses", len(selection.trace) - takes)
        if "capture" in selection.request.modes:
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
    def batch(
        self, name: str, calls: Sequence[Args], *, inside: bool = False
    ) -> Iterator[Callable[[BaseException], None]]:
        """The span of a batch, with links to its callers; gives what notes why it failed.

        It is separate: which context the thread has is chance. `inside` is a caller's own run. Where no trace
        of a caller is recorded, it is the one span of the batch: what runs in it has none.
        """
        waiting = [self._waiting.get(id(args)) for args in calls]
        links = [Link(span.get_span_context()) for span in waiting if span is not None]
        attributes: Attributes = {"layerzero.op": name, "layerzero.callers": len(calls)}
        span = self._tracer.start_span(
            "layerzero.batch", None if inside else Context(), attributes=attributes, links=links
        )
        if links or (inside and _is_traced(get_current_span())):
            with use_span(span, end_on_exit=True):
                yield partial(_fail, span)
            return
        try:
            yield partial(_fail, span)
        except BaseException as error:
            _fail(span, error)
            raise
        finally:
            span.end()

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

"""The metrics of a Prometheus collector as OpenTelemetry instruments, read when the meter's reader asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from layerzero.spec.errors import ConfigurationError

try:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter
except ImportError as missing:
    raise ConfigurationError(
        "metrics for OpenTelemetry need opentelemetry-api: pip install 'layerzero-runtime[otel]'"
    ) from missing

if TYPE_CHECKING:
    from layerzero.observe.counters import Collector


def export_metrics(collector: Collector, names: Iterable[str] = (), meter: Meter | None = None) -> None:
    """Register an observable instrument for each metric of `collector`, on `meter` or the program's own.

    What only grows is a counter, any other value a gauge; a histogram is its count, its sum, and its
    count up to each bound (`le`). `names` are metrics that have no sample yet, such as counters before their
    first use.
    """
    target = get_meter("layerzero") if meter is None else meter
    kinds = {sample.name: family.type for family in collector.collect() for sample in family.samples}
    for name in (*kinds, *(name for name in names if name not in kinds)):
        is_gauge = kinds.get(name) == "gauge"
        make = target.create_observable_gauge if is_gauge else target.create_observable_counter
        make(name, callbacks=[_reader(collector, name)])


def _reader(collector: Collector, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def read(options: CallbackOptions) -> Iterable[Observation]:
        samples: Iterable[Any] = (s for family in collector.collect() for s in family.samples)
        return [Observation(s.value, dict(s.labels)) for s in samples if s.name == name]

    return read

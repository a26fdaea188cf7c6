"""`lz top`: what a running process does now, from its metrics: devices, batches, queues, health, KV pages."""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.error import URLError
from urllib.request import urlopen

import click
import msgspec

from layerzero.cli.common import output
from layerzero.cli.common.options import SecondsRange, json_option

URL: Final = "http://127.0.0.1:8000/metrics"
TIMEOUT_S: Final = 5.0
MAX_BYTES: Final = 1 << 24
COLUMNS: Final = (
    "device", "calls/s", "batches/s", "tokens/s", "calls a batch", "waited ms", "in flight", "queued",
    "failed", "cancelled", "kernels out", "KV pages",
)  # fmt: skip


class DeviceCounts(msgspec.Struct):
    """What a process has counted of one device, and what is so now."""

    calls: float = 0.0
    batches: float = 0.0
    batched_calls: float = 0.0
    tokens: float = 0.0
    wait_s: float = 0.0
    wait_max_s: float = 0.0
    in_flight: float = 0.0
    queued: float = 0.0
    ended: dict[str, float] = {}
    kernels_out: dict[str, float] = {}
    kv_pages: dict[str, float] = {}
    batch_sizes: dict[str, float] = {}


# The samples that are read: the field, and the label that keys it where it is a table.
_FIELDS: Final[Mapping[str, tuple[str, str | None]]] = {
    "batcher_items_total": ("calls", None),
    "batcher_batch_size_bucket": ("batch_sizes", "le"),
    "batcher_batch_size_count": ("batches", None),
    "batcher_batch_size_sum": ("batched_calls", None),
    "batcher_tokens_total": ("tokens", None),
    "batcher_queue_wait_seconds_sum": ("wait_s", None),
    "batcher_queue_wait_max_seconds": ("wait_max_s", None),
    "batcher_in_flight": ("in_flight", None),
    "batcher_queued": ("queued", None),
    "batcher_calls_total": ("ended", "outcome"),
    "kernels_out": ("kernels_out", "state"),
    "kv_pages": ("kv_pages", "state"),
}


@click.command()
@click.argument("url", default=URL)
@click.option("--interval", type=SecondsRange(min=0.1), default=1.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Print what was counted since the process began, and end.")
@click.option("--prefix", default="layerzero_", show_default=True, help="Of the metrics' names.")
@json_option
def top(url: str, interval: float, once: bool, prefix: str, json_: bool) -> None:
    """Watch the process whose metrics are at URL, until interrupted.

    The Starlette integration and the example servers serve them at /metrics. Away from a terminal it prints
    once, like --once.
    """
    counts = read_counts(url, prefix)
    if json_:
        output.as_json(counts)
    elif once or not output.on_terminal(sys.stdout):
        output.table(url, COLUMNS, rows_of(counts, {}, None))
    else:
        watch(url, prefix, interval, counts)


def watch(url: str, prefix: str, interval: float, before: dict[str, DeviceCounts]) -> None:
    """Draw the table anew every `interval` seconds; a process that is away for a while is waited for."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    at_s = time.monotonic()
    drawn: Any = output.rich_table(url, COLUMNS, rows_of(before, {}, None))
    with Live(drawn, console=Console(), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                try:
                    counts, now_s = read_counts(url, prefix), time.monotonic()
                except click.ClickException as error:
                    live.update(Text(error.format_message(), style="red"), refresh=True)
                    continue
                rows = rows_of(counts, before, now_s - at_s)
                live.update(output.rich_table(url, COLUMNS, rows), refresh=True)
                before, at_s = counts, now_s
        except KeyboardInterrupt:  # how one leaves it
            return


def read_counts(url: str, prefix: str) -> dict[str, DeviceCounts]:
    """The counts of each device, by its name.

    Raises: click.UsageError: the URL is none of http. click.ClickException: no process answers there, or what
        answers has no such metrics.
    """
    if not url.startswith(("http://", "https://")):
        raise click.UsageError(f"URL needs http:// or https://, got {url!r}")
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError as missing:
        needs = "lz top needs prometheus_client: pip install 'layerzero-runtime[serve]'"
        raise click.ClickException(needs) from missing
    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer:
            text = answer.read(MAX_BYTES).decode("utf-8")
        families = list(text_string_to_metric_families(text))
    except (URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise click.ClickException(f"{url}: {error}") from error
    counts: dict[str, DeviceCounts] = {}
    for sample in (sample for family in families for sample in family.samples):
        field = _FIELDS.get(sample.name.removeprefix(prefix)) if sample.name.startswith(prefix) else None
        if field is None or "device" not in sample.labels:
            continue
        device = counts.setdefault(sample.labels["device"], DeviceCounts())
        name, key = field
        if key is None:
            setattr(device, name, sample.value)
        else:
            getattr(device, name)[sample.labels[key]] = sample.value
    if not counts and f"{prefix}batcher_" not in text:
        raise click.ClickException(f"{url}: answers, but has no metrics that begin with {prefix}batcher_")
    return counts


def rows_of(
    counts: Mapping[str, DeviceCounts], before: Mapping[str, DeviceCounts], seconds: float | None
) -> Sequence[tuple[str, ...]]:
    """A row a device: rates over `seconds` since `before`, or totals where that is None."""
    return [_row(name, device, before.get(name, DeviceCounts()), seconds) for name, device in counts.items()]


def _row(name: str, now: DeviceCounts, before: DeviceCounts, seconds: float | None) -> tuple[str, ...]:
    def rate(field: str) -> str:
        passed = getattr(now, field) - getattr(before, field)
        return f"{passed:.0f} in all" if seconds is None else f"{max(passed, 0.0) / seconds:.1f}"

    batches, batched = now.batches - before.batches, now.batched_calls - before.batched_calls
    used, free = now.kv_pages.get("used", 0.0), now.kv_pages.get("free", 0.0)
    troubles = [f"{state} {count:.0f}" for state, count in now.kernels_out.items() if count]
    return (
        name, rate("calls"), rate("batches"), rate("tokens"),
        f"{batched / batches:.1f}" if batches > 0 else "-",
        f"{(now.wait_s - before.wait_s) / batched * 1e3:.2f}" if batched > 0 else "-",
        f"{now.in_flight:.0f}", f"{now.queued:.0f}",
        f"{now.ended.get('failed', 0.0):.0f}", f"{now.ended.get('cancelled', 0.0):.0f}",
        ", ".join(troubles) or "none",
        f"{used:.0f} of {used + free:.0f}" if used + free else "-",
    )  # fmt: skip

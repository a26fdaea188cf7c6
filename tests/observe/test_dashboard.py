"""The dashboard and the rules of `examples/observability`, by the parsers and models that their readers have.

Grafana itself is in no package index; `grafana-foundation-sdk` has its models, `promql-parser` the grammar of
Prometheus' queries. tests/observe/test_prometheus.py asks a real Prometheus where one is installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import layerzero as lz
from layerzero.api import metrics

OURS = Path(__file__).resolve().parents[2] / "examples" / "observability"
DASHBOARD = json.loads((OURS / "dashboard.json").read_text())
RULES = [
    rule for group in yaml.safe_load((OURS / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
ASKED = {
    **{
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    },
    **{rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES},
}
# What Prometheus itself adds to whatever it scrapes.
ADDED = frozenset({"instance", "job"})


def scraped(runtime: Any) -> dict[str, set[str]]:
    """The labels of all samples of a scrape by name, as Prometheus' own client parses them."""
    pytest.importorskip("prometheus_client")
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics.collector(runtime))
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.fixture(scope="module")
def there() -> dict[str, set[str]]:
    """The scrape of a process that decided, remembered, ran, failed and cached."""
    from layerzero.kvcache import KVCacheSpec, PagedCache

    with lz.start(lz.Settings(device="cpu", warm="off", kernel_times=True)) as runtime:
        for _ in range(2):
            lz.sync.rms_norm(torch.ones(3, 8))
        runtime.counters.add("failures", kernel="a.rms_norm")
        runtime.counters.add("fallbacks", kernel="a.rms_norm", reason="RuntimeError")
        cache = PagedCache(KVCacheSpec(num_kv_heads=1, head_dim=4), pages=8, page_size=4)
        found = scraped(runtime)
        del cache
    return found


def wanted(query: Any, named: frozenset[str] = frozenset()) -> Iterator[tuple[str, frozenset[str]]]:
    """Each metric below a part of a parsed query, with the labels that the query says it has."""
    modifier = getattr(query, "modifier", None)
    if modifier is not None:
        matching = getattr(modifier, "matching", modifier)
        named |= frozenset(matching.labels if matching is not None else ())
    if hasattr(query, "matchers"):
        yield query.name, named | {matcher.name for matcher in query.matchers.matchers}
    for part in ("lhs", "rhs", "expr", "vector_selector"):
        if hasattr(query, part):
            yield from wanted(getattr(query, part), named)
    for part in getattr(query, "args", ()):
        yield from wanted(part, named)


@pytest.mark.parametrize("name", ASKED)
def test_every_query_parses_and_names_what_a_scrape_has(name: str, there: dict[str, set[str]]) -> None:
    """Prometheus' grammar and types; every metric is there, with every label that is summed by or matched."""
    parser = pytest.importorskip("promql_parser", reason="needs promql-parser")
    asked = list(wanted(parser.parse(ASKED[name])))
    assert asked
    for metric, labels in asked:
        assert metric in there
        assert labels - ADDED <= there[metric]


def test_a_wrong_query_is_told_from_a_right_one(there: dict[str, set[str]]) -> None:
    """The proof is not blind: of a query that is cut, mistyped or of other labels each is seen."""
    parser = pytest.importorskip("promql_parser", reason="needs promql-parser")
    for query in (
        "sum by (op (layerzero_kv_pages)",
        "rate(layerzero_kv_pages)",
        "layerzero_kv_pages{",
    ):
        with pytest.raises(ValueError, match=r"unclosed|expected|unexpected"):
            parser.parse(query)
    (asked,) = wanted(parser.parse('sum by (nowhere) (layerzero_kv_pages{state="used"})'))
    assert asked == ("layerzero_kv_pages", frozenset({"nowhere", "state"}))
    assert "nowhere" not in there["layerzero_kv_pages"] and len(ASKED) > 20


def test_grafana_reads_the_whole_dashboard() -> None:
    """Its own models lose nothing of the file: every key is one that Grafana has, of the type that it has."""
    names = ("models.dashboard", "cog.encoder", "cog.plugins")
    models, encoder, plugins = (
        pytest.importorskip(f"grafana_foundation_sdk.{name}", reason="needs grafana-foundation-sdk")
        for name in names
    )
    plugins.register_default_plugins()
    read = json.loads(encoder.JSONEncoder().encode(models.Dashboard.from_json(DASHBOARD)))
    assert list(lost(DASHBOARD, read)) == []


def lost(written: Any, read: Any, place: str = "") -> Iterator[str]:
    """Where `read` lacks or changes something of `written`."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            yield from lost(value, read[key], f"{place}/{key}") if key in read else [f"{place}/{key}"]
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for number, (mine, other) in enumerate(zip(written, read, strict=True)):
            yield from lost(mine, other, f"{place}/{number}")
    elif written != read:
        yield place

"""What a real Prometheus makes of the example server under load: its scrape, our rules, every query of ours.

Runs where `prometheus` and `promtool` are on PATH (Debian's package `prometheus`); `.ci/run` fetches them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from server import app as server_app

from tests.examples.serving import Running, asked, serving
from tests.observe.test_dashboard import RULES
from tests.waiting import LIMIT_S

OURS = Path(__file__).resolve().parents[2] / "examples" / "observability"
DASHBOARD = json.loads((OURS / "dashboard.json").read_text())
TARGETS = [
    (target["expr"], target["legendFormat"], panel["fieldConfig"]["defaults"]["unit"])
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
QUERIES = [query for query, _, _ in TARGETS]
LACKING = [tool for tool in ("prometheus", "promtool") if shutil.which(tool) is None]
real = pytest.mark.skipif(
    bool(LACKING), reason=f"needs {' and '.join(LACKING)} on PATH: apt-get install prometheus"
)
# No batch of a CPU's is held: the mean of none is no number.
NEVER_HELD = "layerzero_batcher_hold_seconds_sum"


class Scraped:
    """A Prometheus that scrapes a server, and the text of one scrape."""

    def __init__(self, url: str, text: str) -> None:
        self.url, self.text = url, text
        self.client = httpx.Client()

    def get(self, path: str, **query: str) -> Any:
        """The data of an answer of its API."""
        answer = self.client.get(f"{self.url}/api/v1/{path}", params=query).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def until(self, found: Any, why: Any) -> Any:
        """What `found` returns, once it is something; `why` it should have been is asked at the end."""
        end = time.monotonic() + LIMIT_S / 4
        while not (result := found()):
            assert time.monotonic() < end, why() if callable(why) else why
            time.sleep(0.1)
        return result


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _load(server: Running, stop: threading.Event) -> None:
    seed = threading.get_ident()
    while not stop.is_set():
        answer = httpx.post(
            f"{server.url}/v1/completions", json=asked(seed=seed % 99, max_tokens=4), timeout=60
        )
        assert answer.status_code == 200, answer.text
        _plant(server)


def _plant(server: Running) -> None:
    """What does not happen in a healthy server: a kernel that fails, under a name that has to be escaped."""
    counters = server.app.state.runtime.counters
    counters.add("failures", kernel='a"b\\c\nd')
    counters.add("fallbacks", kernel='a"b\\c\nd', reason="RuntimeError")


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Our configuration with another address, more often."""
    folder = tmp_path_factory.mktemp("prometheus")
    config, port, stop = yaml.safe_load((OURS / "prometheus.yml").read_text()), _port(), threading.Event()
    with pytest.MonkeyPatch.context() as patched, serving_with_times(patched) as server:
        config["global"] = dict.fromkeys(("scrape_interval", "evaluation_interval"), "200ms")
        config["rule_files"] = [str(OURS / "alerts.yml")]
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        _plant(server)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                ["prometheus", *words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
            )
        load = [threading.Thread(target=_load, args=(server, stop)) for _ in range(4)]
        try:
            for thread in load:
                thread.start()
            made = Scraped(f"http://127.0.0.1:{port}", "")
            made.until(lambda: _answers(made.url), (folder / "log").read_text)
            made.until(lambda: made.get("query", query="up == 1")["result"], "the server is not up for it")
            made.text = httpx.get(f"{server.url}/metrics").text
            yield made
            made.client.close()
        finally:
            stop.set()
            for thread in load:
                thread.join()
            process.terminate()
            process.wait(30)


def serving_with_times(patched: pytest.MonkeyPatch) -> Any:
    """The example server that counts calls by kernel."""
    patched.setenv("LAYERZERO_KERNEL_TIMES", "1")
    return serving(server_app.Options(pages=256))


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready").status_code == 200
    except httpx.TransportError:
        return False


@real
def test_names_and_types_are_as_prometheus_wants_them(scraped: Scraped) -> None:
    """Its linter is silent, and it knows a type and a text for every family."""
    linted = subprocess.run(
        ["promtool", "check", "metrics"], input=scraped.text, capture_output=True, text=True
    )
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, "", "")
    told = scraped.get("targets/metadata")
    ours = [row for row in told if row["metric"].startswith("layerzero_")]
    assert len(ours) > 15 and all(row["help"] and row["type"] != "unknown" for row in ours)


@real
def test_every_query_of_the_dashboard_has_data(scraped: Scraped) -> None:
    """Under load each panel shows numbers, of holds as well: kinds are there before they are counted."""

    def empty() -> list[str]:
        return [query for query in QUERIES if not scraped.get("query", query=query)["result"]]

    scraped.until(lambda: not empty(), lambda: f"queries stay empty: {empty()}")
    by_reason = "sum(layerzero_batcher_batches_total) == sum(layerzero_batcher_batch_size_count) > 0"
    scraped.until(
        lambda: scraped.get("query", query=by_reason)["result"], "no batch, or one without a reason"
    )
    (share,) = scraped.get("query", query="max(op:layerzero_calls_remembered:ratio_rate5m)")["result"]
    assert 0.5 < float(share["value"][1]) <= 1.0


@real
@pytest.mark.parametrize(("query", "legend", "unit"), TARGETS, ids=QUERIES)
def test_a_query_has_numbers_of_its_panels_kind(scraped: Scraped, query: str, legend: str, unit: str) -> None:
    """At an instant and, as Grafana asks, over a range: numbers in the unit, under what the legend names."""

    def numbers(kind: str, samples: Any, **more: str) -> list[float]:
        data = scraped.get(kind, query=query, **more)
        for series in data["result"]:
            assert set(re.findall(r"{{(\w+)}}", legend)) <= series["metric"].keys()
        return [float(number) for series in data["result"] for _, number in samples(series)]

    def finite() -> list[float]:
        found = numbers("query", lambda series: [series["value"]])
        if NEVER_HELD in query:
            return [0.0] if found and all(map(math.isnan, found)) else []
        return [number for number in found if math.isfinite(number)]

    shown = scraped.until(finite, f"no number: {query}")
    now = time.time()
    over = {"start": str(now - 60), "end": str(now), "step": "1"}
    shown += [n for n in numbers("query_range", lambda s: s["values"], **over) if not math.isnan(n)]
    assert len(shown) > 1 or NEVER_HELD in query
    assert min(shown) >= 0.0 and (unit != "percentunit" or max(shown) <= 1.0)


@real
def test_rates_are_of_counters_and_all_else_is_a_gauge(scraped: Scraped) -> None:
    """By the types that Prometheus has read; a rate of a gauge has numbers as well, and wrong ones."""
    told = {row["metric"]: row["type"] for row in scraped.get("targets/metadata")}
    rules = [rule["query"] for group in scraped.get("rules")["groups"] for rule in group["rules"]]
    for query in (*QUERIES, *rules):
        for rate, metric in re.findall(r"(rate\()?(layerzero_\w+)", query):
            kind = told.get(metric) or told[re.sub("_(bucket|count|sum)$", "", metric)]
            assert (kind in {"counter", "histogram", "summary"}) == bool(rate), (metric, kind)


@real
def test_every_rule_is_evaluated(scraped: Scraped) -> None:
    """The files are valid, and no rule fails."""
    for words in (["rules", "alerts.yml"], ["config", "prometheus.yml"]):
        checked = subprocess.run(["promtool", "check", *words], cwd=OURS, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr

    def rules() -> list[dict[str, Any]]:
        return [rule for group in scraped.get("rules")["groups"] for rule in group["rules"]]

    scraped.until(lambda: all(rule["health"] == "ok" for rule in rules()), "a rule is not evaluated")
    firing = scraped.until(
        lambda: [r for r in rules() if r.get("state") in ("pending", "firing")], "none fires"
    )
    assert {rule["name"] for rule in firing} == {"LayerZeroFallsBack"}


HEALTHY = {
    'layerzero_batcher_calls_total{instance="a", device="cpu", outcome="rejected"}': "3x60",
    'layerzero_fallbacks_total{instance="a", kernel="k", reason="RuntimeError"}': "2x60",
    'layerzero_kernels_out{instance="a", device="cpu", state="quarantined"}': "0x60",
    'layerzero_kv_pages{instance="a", device="cpu", state="used"}': "95x60",
    'layerzero_kv_pages{instance="a", device="cpu", state="free"}': "5x60",
}
ILL = dict(zip(HEALTHY, ("3+1x60", "2+1x60", "2x60", "96x60", "4x60"), strict=True))
FIRING = {
    "LayerZeroRejectsCalls": ({"device": "cpu"}, "The queue of cpu is full."),
    "LayerZeroFallsBack": (
        {"kernel": "k", "reason": "RuntimeError"}, "k fails (RuntimeError) and others answer for it.",
    ),
    "LayerZeroKernelOut": ({"device": "cpu", "state": "quarantined"}, "2 kernels of cpu are quarantined."),
    "LayerZeroPagesFull": ({"device": "cpu"}, "Requests wait for pages of cpu."),
}  # fmt: skip


@real
@pytest.mark.parametrize("series", [HEALTHY, ILL], ids=["healthy", "ill"])
def test_each_alert_fires_where_it_should(tmp_path: Path, series: dict[str, str]) -> None:
    """By promtool's own clock: nothing at a standing process's numbers, all four at an ill one's."""
    assert {rule["alert"] for rule in RULES if "alert" in rule} == FIRING.keys()

    def fires(name: str) -> list[Any]:
        labels, summary = FIRING[name]
        found = {"severity": "warning", "instance": "a", **labels}
        return [{"exp_labels": found, "exp_annotations": {"summary": summary}}] if series is ILL else []

    (tmp_path / "tests.yml").write_text(yaml.safe_dump({
        "rule_files": [str(OURS / "alerts.yml")],
        "evaluation_interval": "5s",
        "tests": [{
            "interval": "5s",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "alert_rule_test": [
                {"eval_time": "4m", "alertname": name, "exp_alerts": fires(name)} for name in FIRING
            ],
        }],
    }))  # fmt: skip
    told = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr

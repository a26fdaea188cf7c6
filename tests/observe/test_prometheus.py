"""What a real Prometheus makes of the example server under load: its scrape, our rules, every query of ours.

Runs where `prometheus` and `promtool` are on PATH (Debian's package `prometheus`).
"""

from __future__ import annotations

import json
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

OURS = Path(__file__).resolve().parents[2] / "examples" / "observability"
DASHBOARD = json.loads((OURS / "dashboard.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
LACKING = [tool for tool in ("prometheus", "promtool") if shutil.which(tool) is None]
real = pytest.mark.skipif(
    bool(LACKING), reason=f"needs {' and '.join(LACKING)} on PATH: apt-get install prometheus"
)
UP_TO_S = 20.0


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

    def until(self, found: Any, why: str) -> Any:
        """What `found` returns, once it is something."""
        end = time.monotonic() + UP_TO_S
        while not (result := found()):
            assert time.monotonic() < end, why
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
            made.until(lambda: _answers(made.url), (folder / "log").read_text())
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

    scraped.until(lambda: not empty(), "queries stay empty")
    by_reason = "sum(layerzero_batcher_batches_total) == sum(layerzero_batcher_batch_size_count) > 0"
    scraped.until(
        lambda: scraped.get("query", query=by_reason)["result"], "no batch, or one without a reason"
    )
    (share,) = scraped.get("query", query="max(op:layerzero_calls_remembered:ratio_rate5m)")["result"]
    assert 0.5 < float(share["value"][1]) <= 1.0


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

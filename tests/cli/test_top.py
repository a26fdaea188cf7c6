"""`lz top` against real processes: in a pseudo terminal, away from one, and where nobody answers."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from layerzero.cli.top import DeviceCounts, rows_of
from tests import children, popen
from tests.cli.command import Lz

pytest.importorskip("prometheus_client", reason="it is not installed: pip install 'layerzero-runtime[serve]'")

PROGRAM = """
import asyncio, sys, torch, layerzero as lz
from prometheus_client import CollectorRegistry, start_http_server
from layerzero.api import metrics
from layerzero.kvcache import KVCacheSpec, PagedCache

async def main():
    async with lz.start(lz.Settings(device="cpu")) as runtime:
        registry = CollectorRegistry()
        registry.register(metrics.collector(runtime))
        cache = PagedCache(KVCacheSpec(num_kv_heads=1, head_dim=4), pages=8, page_size=4)
        cache.sequence(9)
        runtime.device("cpu").health.quarantine("acme.norm", "a test")
        async def caller():
            while True:
                await lz.rms_norm(torch.ones(1, 8))
                await asyncio.sleep(0.005)
        callers = [asyncio.ensure_future(caller()) for _ in range(4)]
        await asyncio.sleep(0.2)
        server, _ = start_http_server(0, addr="127.0.0.1", registry=registry)
        print(server.server_port, flush=True)
        await asyncio.gather(*callers)

asyncio.run(main())
"""
# As `lz top`; whoever began the tests may have interrupts ignored, as `nohup make test &` does.
TOP = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from layerzero.cli import main
main()
"""
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the metrics of a process that works."""
    child = children.Child(PROGRAM, folder=tmp_path_factory.mktemp("top"))
    try:
        end = time.monotonic() + LIMIT_S
        while not child.out.read_text().endswith("\n"):
            assert child.is_alive() and time.monotonic() < end, child.err.read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{child.out.read_text().strip()}/metrics"
    finally:
        child.process.kill()
        child.process.wait()


def test_once_prints_what_was_counted(served: str, lz: Lz) -> None:
    """One table for a script: the device, its calls, the kernel in quarantine, the pages in use."""
    shown = lz("top", served, "--once")
    assert shown.exit_code == 0, shown.output
    (row,) = (line for line in shown.output.splitlines() if line.strip().startswith("cpu"))
    assert "in all" in row and "quarantined 1" in row and "3 of 8" in row
    assert lz("top", served).output.splitlines()[1].split() == shown.output.splitlines()[1].split()


def test_json_has_the_counts(served: str, lz: Lz) -> None:
    """As numbers, by device."""
    counts = json.loads(lz("top", served, "--json").output)["cpu"]
    assert counts["calls"] >= counts["batched_calls"] > 0 and counts["batches"] > 0
    assert counts["kernels_out"] == {"open": 0.0, "half_open": 0.0, "quarantined": 1.0}
    assert counts["kv_pages"] == {"used": 3.0, "free": 5.0}


def test_a_terminal_shows_it_live(served: str) -> None:
    """In a pseudo terminal the table is drawn again with rates, and Ctrl-C leaves it with status 0."""
    master, slave = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    command = [sys.executable, "-c", TOP, "top", served, "--interval", "0.2"]
    process = popen.Fork(
        command, stdin=slave, stdout=slave, stderr=slave, env=variables, start_new_session=True
    )
    os.close(slave)
    try:
        seen = read_until(master, rb"cpu(?s:.*)cpu\s+\S+\s+\d+\.\d+\s")
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0, seen
        assert b"3 of 8" in seen and b"Traceback" not in seen
    finally:
        process.kill()
        process.wait()
        os.close(master)


def read_until(master: int, pattern: bytes) -> bytes:
    """What a terminal got until it matches."""
    seen, end = b"", time.monotonic() + LIMIT_S
    while not re.search(pattern, seen):
        assert time.monotonic() < end, seen
        if select.select([master], [], [], 1.0)[0]:
            seen += os.read(master, 65536)
    return seen


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """A server that answers everything alike."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_what_is_wrong_is_said_by_name(lz: Lz, tmp_path: Path) -> None:
    """Nobody there, a file, somebody else's metrics, no metrics at all: an error and its status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = lz("top", f"http://127.0.0.1:{free.getsockname()[1]}/metrics", "--once")
    assert nobody.exit_code == 1 and "refused" in nobody.output
    assert lz("top", f"file://{tmp_path}/metrics").exit_code == 2
    with answering(b"other_total 1.0\n") as url:
        other = lz("top", url, "--once")
    assert other.exit_code == 1 and "no metrics that begin with layerzero_batcher_" in other.output
    with answering(b"\xff\xfe\x00") as url:
        assert lz("top", url, "--once").exit_code == 1
    assert lz("top", "--interval", "0").exit_code == 2


def test_a_rate_is_what_was_added_over_the_time_between() -> None:
    """A process that began anew counts from zero: its rates are none below that."""
    now, before = ({"cpu": DeviceCounts(calls=calls, tokens=tokens)} for calls, tokens in ((30, 5), (10, 9)))
    ((_, calls, _, tokens, *_),) = rows_of(now, before, 4.0)
    assert (calls, tokens) == ("5.0", "0.0")

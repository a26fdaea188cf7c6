"""Connections of a real server: many that say nothing, noise, and the health check beside them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

for package in ("starlette", "uvicorn", "httpx"):
    pytest.importorskip(package, reason=f"needs {package}: pip install 'layerzero-runtime[test]'")

import httpx  # noqa: E402  the skips come first
import uvicorn  # noqa: E402
from starlette.applications import Starlette  # noqa: E402

from layerzero.integrations import uvicorn as bounded  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from layerzero.integrations import uvicorn as bounded

app = Starlette()
app.add_route("/health", lambda request: JSONResponse({"status": "ok"}))
options = dict(host="127.0.0.1", port=0, log_level="warning")
config = uvicorn.Config(app, **options) if sys.argv[1] == "plain" else bounded.config(
    app, header_timeout_s=float(sys.argv[1]), **options
)
server = uvicorn.Server(config)
startup = server.startup

async def started(sockets=None):
    await startup(sockets)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)

server.startup = started
server.run()
"""


def serve(header_timeout: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """The port of a server with 300 descriptors, and its process."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, header_timeout], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr is not None else ""
        yield int(line), process
    finally:
        process.kill()
        process.communicate()


def connect(port: int) -> socket.socket:
    """A connection that says half a request; where the queue is full it knocks again at once.

    The system would wait a second before it did.
    """
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            opened = socket.create_connection(("127.0.0.1", port), timeout=0.02)
            break
        except TimeoutError:
            assert time.monotonic() < until, "the server takes no connection"
    opened.settimeout(LIMIT_S)
    opened.sendall(b"GET /health HTT")
    return opened


def test_health_is_answered_beside_more_silent_connections_than_descriptors() -> None:
    """400 that never finish their headers take no descriptor from who does, and nothing is logged of them.

    Who has been silent longest makes room.
    """
    for port, process in serve("60"):
        silent = [connect(port) for _ in range(400)]
        for _ in range(20):
            assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=LIMIT_S).status_code == 200
        assert silent[0].recv(1) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
        for one in silent:
            one.close()
        process.terminate()
        _, said = process.communicate(timeout=LIMIT_S)
        assert "Too many open files" not in said and len(said) < 2000


def test_headers_that_do_not_come_close_the_connection() -> None:
    """After their time; a connection that asks again and again is kept."""
    for port, _ in serve("0.5"):
        silent = connect(port)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            until = time.monotonic() + LIMIT_S
            silent.settimeout(0.1)
            closed = False
            while not closed and time.monotonic() < until:
                assert client.get("/health").status_code == 200
                try:
                    closed = silent.recv(1) == b""
                except TimeoutError:
                    continue
        silent.close()
        assert closed


NOISE = [b"\x16\x03\x01\x02\x00" * 50, b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", bytes(range(256))]


def test_noise_gets_an_answer_or_a_close() -> None:
    """Within the time that headers have."""
    for port, _ in serve("1"):
        for noise in NOISE:
            with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as opened:
                opened.sendall(noise)
                answer = opened.recv(4096)
                assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), noise
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=LIMIT_S).status_code == 200


def test_a_bound_fits_the_descriptors() -> None:
    """More connections than descriptors is a mistake of the configuration, by name."""
    with pytest.raises(ValueError, match="max_connections"):
        bounded.config(Starlette(), max_connections=10**9)
    config = bounded.config(Starlette(), max_connections=3, port=0)
    assert isinstance(config, uvicorn.Config) and 8 <= config.backlog <= bounded.BACKLOG

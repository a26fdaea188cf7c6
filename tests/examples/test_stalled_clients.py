"""Clients that take no event of their streams; a file of its own, for a process holds one open runtime."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from tests.waiting import LIMIT_S

for package in ("openai", "starlette", "uvicorn", "prometheus_client", "tokenizers", "safetensors"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")

from server import app as server_app  # noqa: E402  the skips come first

from tests.examples import loopback  # noqa: E402
from tests.examples.serving import NOTHING, Running, asked, serving  # noqa: E402


def test_clients_that_do_not_read_hold_nobody_up() -> None:
    """Streams whose clients take no event hold no page that another request needs."""
    stalled = threading.Semaphore(0)
    body = json.dumps(asked(stream=True, max_tokens=200, ignore_eos=True)).encode()

    async def client(running: Running) -> None:
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])
        sent = 0

        async def receive() -> Any:
            for message in messages:
                return message
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            nonlocal sent
            sent += 1
            if sent > 80:
                stalled.release()
                await asyncio.Event().wait()

        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        scope |= {"query_string": b"", "root_path": "", "client": None, "server": None}
        await running.app(scope, receive, send)

    with serving(server_app.Options(pages=16)) as running:
        assert running.loop is not None
        clients = [asyncio.run_coroutine_threadsafe(client(running), running.loop) for _ in range(2)]
        try:
            assert all(stalled.acquire(timeout=LIMIT_S) for _ in clients)
            assert running.service.model.cache.allocator.free_pages < 16 - 2 * 80 // 16
            fields = asked(max_tokens=200, ignore_eos=True)
            given = loopback.post(f"{running.url}/v1/completions", json=fields, timeout=LIMIT_S)
            assert given.json()["usage"]["completion_tokens"] == 200
            assert running.service.active == 2
        finally:
            for one in clients:
                one.cancel()
        assert running.settled() == NOTHING

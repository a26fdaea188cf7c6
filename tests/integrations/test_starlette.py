"""A service around a runtime: probes, metrics, a full queue, and what is refused before it is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

for package in ("starlette", "httpx", "prometheus_client"):
    pytest.importorskip(package, reason=f"needs {package}: pip install 'layerzero-runtime[test]'")

import anyio  # noqa: E402  the skips come first
import httpx  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import JSONResponse, Response  # noqa: E402
from starlette.types import Message  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.integrations.starlette import AdmissionMiddleware, install, lifespan  # noqa: E402
from layerzero.spec.errors import OverloadedError  # noqa: E402

pytestmark = pytest.mark.asyncio


async def echo(request: Request) -> Response:
    """The size of the body."""
    return JSONResponse(len(await request.body()))


async def full(request: Request) -> Response:
    """What an op raises where its queue is full."""
    raise OverloadedError("the lane holds 4096 calls", retry_after=1.2)


def service(**bounds: Any) -> Starlette:
    """An application with an echo, a handler whose queue is full, and what `install` adds."""
    app = Starlette(lifespan=lifespan(lz.Settings(warm="off")))
    app.add_route("/echo", echo, methods=["POST"])
    app.add_route("/full", full)
    install(app, **bounds)
    return app


@asynccontextmanager
async def client(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, inside its lifespan."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as opened:
            yield opened


async def test_probes_and_metrics() -> None:
    """Alive from the start, ready once nothing is missing, and what the batchers counted for Prometheus."""
    missing = ["the model is not loaded"]
    app = service(ready=lambda: missing, health=lambda: {"pages": 3})
    async with client(app) as http:
        assert (await http.get("/health")).json() == {"status": "ok", "pages": 3}
        waiting = await http.get("/ready")
        assert waiting.status_code == 503 and waiting.json()["problems"] == missing
        missing.clear()
        assert (await http.get("/ready")).status_code == 200
        assert "layerzero_" in (await http.get("/metrics")).text
        assert isinstance(app.state.runtime, lz.Runtime) and not app.state.runtime.closed
    assert app.state.runtime.closed


async def test_readiness_is_that_of_the_runtime() -> None:
    """Without a question of the service's own it is `layerzero.readiness_check`."""
    async with client(service()) as http:
        said = await http.get("/ready")
        assert said.status_code == 503 and "nothing was warmed" in said.json()["problems"][0]


async def test_a_full_queue_is_503_with_retry_after() -> None:
    """The seconds are whole ones, at least those that the batcher names."""
    async with client(service()) as http:
        said = await http.get("/full")
        assert (said.status_code, said.headers["Retry-After"]) == (503, "2")
        assert "4096" in said.json()["error"]


async def test_bodies_are_bounded_before_they_are_read() -> None:
    """By their announced length, and by what arrives where none was announced."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * 100

    async with client(service(max_body=1000)) as http:
        for content in (b"x" * 2000, pieces()):
            said = await http.post("/echo", content=content)
            assert said.status_code == 413 and "1000 bytes" in said.json()["error"]
        assert (await http.post("/echo", content=b"x" * 1000)).json() == 1000
        assert (await http.get("/health")).status_code == 200


class Slow:
    """An ASGI call whose body arrives piece by piece, as it is told."""

    def __init__(self, app: Any, path: str = "/echo", announced: int | None = None) -> None:
        headers = [] if announced is None else [(b"content-length", str(announced).encode())]
        self.scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": headers, "http_version": "1.1", "scheme": "http", "server": ("test", 80),
            "client": ("test", 1), "root_path": "",
        }  # fmt: skip
        self.app = app
        self.pieces: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.task = asyncio.ensure_future(self.run())

    async def run(self) -> int:
        """The status of the answer."""

        async def send(message: Message) -> None:
            self.sent.append(message)

        await self.app(self.scope, self.pieces.get, send)
        return int(self.sent[0]["status"])

    async def give(self, data: bytes, more: bool = True) -> None:
        """One piece of the body."""
        self.pieces.put_nowait({"type": "http.request", "body": data, "more_body": more})
        for _ in range(5):
            await asyncio.sleep(0)


async def test_unfinished_bodies_share_a_bound() -> None:
    """What all hold together is bounded; the one that passes it is refused, its share is given back."""
    bounds = {"max_requests": 10, "max_body": 1000, "max_unread": 1500, "body_timeout_s": 60.0}
    app = Starlette()
    app.add_route("/echo", echo, methods=["POST"])
    admission = AdmissionMiddleware(app.router, **bounds)  # type: ignore[arg-type]
    first, second = Slow(admission), Slow(admission)
    await first.give(b"x" * 900)
    await second.give(b"x" * 500)
    assert (admission.requests, admission.unread) == (2, 1400)
    await second.give(b"x" * 200)
    assert await second.task == 503
    assert (admission.requests, admission.unread) == (1, 900)
    third = Slow(admission, announced=700)
    assert await third.task == 503  # refused by its length, before a byte of it
    await first.give(b"x" * 100, more=False)
    assert await first.task == 200
    assert (admission.requests, admission.unread) == (0, 0)


async def test_requests_are_bounded_and_probes_pass() -> None:
    """One too many is refused with Retry-After, whatever the others do; health is answered."""
    bounds = {"max_requests": 1, "max_body": 1000, "max_unread": 1500, "body_timeout_s": 60.0}
    app = Starlette()
    app.add_route("/echo", echo, methods=["POST"])
    install(app)
    admission = AdmissionMiddleware(app.router, **bounds)  # type: ignore[arg-type]
    first = Slow(admission)
    await first.give(b"x")
    second = Slow(admission)
    assert await second.task == 503
    assert (b"retry-after", b"1") in second.sent[0]["headers"]
    probe = Slow(admission, "/health")
    probe.scope["method"] = "GET"
    assert await probe.task == 200
    await first.give(b"", more=False)
    assert await first.task == 200 and admission.requests == 0


async def test_a_body_that_does_not_come_is_408() -> None:
    """It is given a bounded time, and leaves nothing behind; time spent in the handler does not count."""
    app = Starlette()
    app.add_route("/echo", echo, methods=["POST"])

    async def late(request: Request) -> Response:
        await anyio.sleep(0.3)
        whole = {"type": "http.request", "body": b"x", "more_body": False}
        asyncio.get_running_loop().call_later(0.02, patient.pieces.put_nowait, whole)
        return JSONResponse(len(await request.body()))

    app.add_route("/late", late, methods=["POST"])
    bounds = {"max_requests": 9, "max_body": 1000, "max_unread": 1500, "body_timeout_s": 0.1}
    admission = AdmissionMiddleware(app.router, **bounds)  # type: ignore[arg-type]
    slow = Slow(admission)
    await slow.give(b"x")
    assert await slow.task == 408
    assert (b"connection", b"close") in slow.sent[0]["headers"]
    assert (admission.requests, admission.unread) == (0, 0)
    patient = Slow(admission, "/late")
    assert await patient.task == 200


async def test_a_bound_that_is_none_is_named() -> None:
    """Zero requests serve nobody."""
    for name in ("max_requests", "max_body", "max_unread"):
        none: dict[str, Any] = {name: 0}
        with pytest.raises(ValueError, match=name):
            install(Starlette(), **none)

"""A runtime inside a Starlette or FastAPI application: lifespan, health, readiness, metrics, admission, 503.

    app = Starlette(routes=..., lifespan=lifespan(lz.Settings(...)))
    install(app)

`install` adds `/health`, `/ready` and `/metrics`, answers a full queue with 503 and Retry-After, and bounds
the requests and the unfinished bodies that the application holds.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layerzero.api.start import start
from layerzero.api.warmup import readiness_check
from layerzero.ops.checks import need_int, need_number
from layerzero.runtime import Runtime
from layerzero.spec.errors import OverloadedError
from layerzero.spec.settings import Settings

PROBES = ("/health", "/ready", "/metrics")
MIB = 1 << 20


def lifespan(
    settings: Settings | None = None,
    *,
    inside: Callable[[Any, Runtime], AbstractAsyncContextManager[None]] | None = None,
) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """A lifespan that opens a runtime as `app.state.runtime` and drains it at the end.

    Args: settings of the runtime; `inside(app, runtime)` is entered within it, for what the service opens.
    """

    @asynccontextmanager
    async def opened(app: Any) -> AsyncIterator[None]:
        async with start(settings) as runtime:
            app.state.runtime = runtime
            if inside is None:
                yield
            else:
                async with inside(app, runtime):
                    yield

    return opened


def install(
    app: Starlette,
    *,
    registry: Callable[[], Any | Awaitable[Any]] | None = None,
    ready: Callable[[], Sequence[str]] | None = None,
    health: Callable[[], dict[str, Any] | Awaitable[dict[str, Any]]] | None = None,
    max_requests: int = 512,
    max_body: int = 4 * MIB,
    max_unread: int = 64 * MIB,
    body_timeout_s: float = 30.0,
    refuse: Callable[[int, str, float | None], Response] | None = None,
) -> None:
    """Add `/health`, `/ready`, `/metrics`, the answer to a full queue, and admission to an application.

    Args: `registry()` returns a prometheus_client CollectorRegistry that has the runtime's collector already,
        awaited where it has to be; one is made where it is None. `ready()` returns what is still missing, by
        default the problems of `layerzero.readiness_check`. `health()` returns what `/health` says beside
        its status, awaited where it has to be.
        max_requests at once, bytes of one body (max_body), bytes of all bodies that are not complete
        (max_unread), and the seconds that a body may take: what is beyond them is refused before it is read
        (503, 413, 503, 408).
        `refuse(status, message, retry_after_s)` makes the response of a refusal.
    Raises: ValueError, TypeError: a bound is no positive number.
    """
    bounds = {"max_requests": max_requests, "max_body": max_body, "max_unread": max_unread}
    for name, value in bounds.items():
        need_int(name, value, low=1)
    need_number("body_timeout_s", body_timeout_s, low=0.0)
    answer = refuse or _refusal
    app.add_route("/health", _health(health))
    app.add_route("/ready", _ready(ready))
    app.add_route("/metrics", _metrics(registry))

    async def overloaded(request: Request, error: Exception) -> Response:
        assert isinstance(error, OverloadedError)
        return answer(503, str(error), error.retry_after)

    app.add_exception_handler(OverloadedError, overloaded)
    app.add_middleware(AdmissionMiddleware, **bounds, body_timeout_s=body_timeout_s, refuse=answer)


def _refusal(status: int, message: str, retry_after_s: float | None) -> Response:
    headers = {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    return JSONResponse({"error": message}, status_code=status, headers=headers)


def _health(details: Callable[[], dict[str, Any] | Awaitable[dict[str, Any]]] | None) -> Any:
    async def health(request: Request) -> Response:
        """GET /health: 200 while the process answers."""
        described = {} if details is None else details()
        return JSONResponse(
            {"status": "ok", **(described if isinstance(described, dict) else await described)}
        )

    return health


def _ready(missing: Callable[[], Sequence[str]] | None) -> Any:
    async def ready(request: Request) -> Response:
        """GET /ready: 200 where traffic would meet nothing cold, else 503 with what is missing."""
        problems = list(readiness_check().problems if missing is None else missing())
        return JSONResponse(
            {"ready": not problems, "problems": problems}, status_code=503 if problems else 200
        )

    return ready


def _metrics(registry: Callable[[], Any | Awaitable[Any]] | None) -> Any:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    from layerzero.api import metrics

    registries: dict[Runtime, Any] = {}

    async def exposition(request: Request) -> Response:
        """GET /metrics: what the runtime has counted."""
        runtime = request.app.state.runtime
        if registry is None and runtime not in registries:
            registries.clear()
            registries[runtime] = CollectorRegistry()
            registries[runtime].register(metrics.collector(runtime))
        exposed = registries[runtime] if registry is None else registry()
        if isinstance(exposed, Awaitable):
            exposed = await exposed
        return Response(generate_latest(exposed), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return exposition


@dataclass(eq=False)
class AdmissionMiddleware:
    """ASGI middleware: refuses what the application has no room for before it reads a body.

    What is bounded: requests under way, bytes of one body, bytes of all bodies that are being read, seconds
    until a body is complete. Health, readiness and metrics always pass.
    """

    app: ASGIApp
    _: KW_ONLY
    max_requests: int
    max_body: int
    max_unread: int
    body_timeout_s: float
    refuse: Callable[[int, str, float | None], Response] = _refusal
    requests: int = field(default=0, init=False)
    unread: int = field(default=0, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self.app(scope, receive, send)
            return
        if self.requests >= self.max_requests:
            refusal = self.refuse(503, f"{self.requests} requests are under way, which is the most", 1.0)
            await refusal(scope, receive, send)
            return
        self.requests += 1
        try:
            await _AdmittedRequest(self, scope, receive, send).run()
        finally:
            self.requests -= 1


class _BodyRefused(Exception):
    """A body that may not be read on: its response, and nothing of the application's."""

    def __init__(self, status: int, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s


class _AdmittedRequest:
    """One request that has been let in, while its body is read."""

    def __init__(self, bounds: AdmissionMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        self._bounds, self._scope, self._receive, self._send = bounds, scope, receive, send
        self._read = 0
        self._whole = self._begun = False
        self._deadline: float | None = None

    async def run(self) -> None:
        """The application's answer, or the refusal of its body."""
        bounds = self._bounds
        try:
            self._announced()
            await bounds.app(self._scope, self.receive, self.send)
        except _BodyRefused as refused:
            if not self._begun:
                # What was announced will not be read: the connection ends with the answer.
                response = bounds.refuse(refused.status, str(refused), refused.retry_after_s)
                response.headers["Connection"] = "close"
                await response(self._scope, self._receive, self._send)
        finally:
            self._release()

    def _announced(self) -> None:
        """Refuse by the announced length, before a byte has been read."""
        for name, value in self._scope["headers"]:
            if name == b"content-length" and value.isdigit():
                self._need_room(int(value))

    def _need_room(self, size: int) -> None:
        bounds = self._bounds
        if size > bounds.max_body:
            raise _BodyRefused(413, f"the body needs at most {bounds.max_body} bytes, got {size} or more")
        if bounds.unread - self._read + size > bounds.max_unread:
            raise _BodyRefused(503, f"bodies of {bounds.unread} bytes are being read, which is the most", 1.0)

    async def receive(self) -> Message:
        """The next message; a body that is too large, too slow or one too many ends the request."""
        if self._whole:
            return await self._receive()
        if self._deadline is None:
            self._deadline = anyio.current_time() + self._bounds.body_timeout_s
        message: Message | None = None
        with anyio.CancelScope(deadline=self._deadline):
            message = await self._receive()
        if message is None:
            raise _BodyRefused(408, f"the body needs to arrive within {self._bounds.body_timeout_s:g} s")
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self._need_room(self._read + size)
            self._read += size
            self._bounds.unread += size
            if not message.get("more_body", False):
                self._whole = True
                self._release()
        return message

    async def send(self, message: Message) -> None:
        """The application's message; after it a refusal has no place."""
        self._begun = True
        await self._send(message)

    def _release(self) -> None:
        self._bounds.unread -= self._read
        self._read = 0

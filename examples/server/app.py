"""The application: routes, answers over HTTP, and the command."""

from __future__ import annotations

import argparse
import json
import math
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import layerzero as lz
from layerzero.integrations import uvicorn as bounded
from layerzero.integrations.starlette import install, lifespan
from server import processes
from server.answers import ChatFormat, CompletionFormat, Format, Piece, error_body
from server.counts import Counts
from server.fields import BadRequest, UnknownModel
from server.front import KV_FORMATS, LOAD_FORMATS, Front, Full
from server.front import Options as Options
from server.protocol import Ask, read
from server.service import open_service, settings_of
from server.split import SplitService, engine_process, linked

# Requests beyond those being answered that may be on their way in or out.
WAITING = 64
MAX_FRONTS = 64
SHARED = (socket.SO_REUSEADDR, getattr(socket, "SO_REUSEPORT", socket.SO_REUSEADDR))
STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
}


class Answer:
    """The answer to one request: an ASGI response that ends when its client goes."""

    def __init__(self, service: Front, ask: Ask) -> None:
        self.service, self.ask = service, ask
        form = ChatFormat if ask.is_chat else CompletionFormat
        self.format: Format = form(service.name, service.tokenizer, ask.include_usage)
        if ask.service_tier is not None:
            self.format.head["service_tier"] = ask.service_tier
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    continue
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            await self.respond_or_refuse(scope, receive, send)
            tasks.cancel_scope.cancel()

    async def respond_or_refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond, or say in the words of the API why not."""
        try:
            await (self.stream(send) if self.ask.stream else self.whole(scope, receive, send))
        except Full as full:
            again = {"Retry-After": str(full.retry_after)}
            await failure(429, str(full), kind="rate_limit_error", headers=again)(scope, receive, send)
        except BadRequest as bad:
            await refusal(bad)(scope, receive, send)
        except lz.GrammarLimitError as limit:
            assert self.ask.constraint is not None
            await refusal(BadRequest(str(limit), self.ask.constraint.param))(scope, receive, send)
        except lz.DeviceLostError as lost:  # before anything was sent; no replica is left to answer
            again = {"Retry-After": "1"}
            gone = failure(503, str(lost), kind="server_error", code=code_of(lost), headers=again)
            await gone(scope, receive, send)

    async def whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """All choices in one answer."""
        choices: list[list[Piece]] = [[] for _ in range(self.ask.answers)]

        async def collect(piece: Piece) -> None:
            choices[piece.index].append(piece)

        usage = await self.service.answer(self.ask, collect)
        await JSONResponse(self.format.whole(choices, usage))(scope, receive, send)

    async def stream(self, send: Send) -> None:
        """Server-sent events, one a piece of text; the status is sent with the first piece."""
        begun: set[int] = set()

        async def event(piece: Piece) -> None:
            if not begun:
                await send(STREAM_START)
            if piece.index not in begun:
                begun.add(piece.index)
                opening = self.format.begin(piece.index)
                if opening is not None:
                    await self._event(send, opening)
            if piece.text or piece.reason or piece.tokens:
                await self._event(send, self.format.event(piece))

        try:
            usage = await self.service.answer(self.ask, event)
        except (Full, lz.LayerZeroError) as error:
            if not begun:
                raise
            await self._event(send, error_body(str(error), "server_error", code=code_of(error)))
            await send({"type": "http.response.body", "body": b""})
            return
        if self.ask.include_usage:
            await self._event(send, self.format.usage(usage))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _event(self, send: Send, data: dict[str, Any]) -> None:
        await send({"type": "http.response.body", "body": _event_body(data), "more_body": True})


def _event_body(data: dict[str, Any]) -> bytes:
    text = msgspec.json.encode(data)
    if not text.isascii():  # some readers end a line also at characters that JSON need not escape
        text = json.dumps(data).encode()
    return b"data: " + text + b"\n\n"


def code_of(error: Exception) -> str | None:
    """The reason code of an error that has one."""
    reason = getattr(error, "context", {}).get("reason")
    return None if reason is None else str(reason)


def failure(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """An error as a response."""
    return JSONResponse(error_body(message, kind, param, code), status_code=status, headers=headers)


def refusal(bad: BadRequest) -> JSONResponse:
    """What is wrong with a request, as a response."""
    return failure(bad.status, str(bad), param=bad.param, code=bad.code)


async def completions(request: Request) -> Any:
    """POST /v1/completions and /v1/chat/completions."""
    service: Front = request.app.state.service
    try:
        ask = read(await request.body(), service.name, chat=request.url.path == "/v1/chat/completions")
    except ClientDisconnect:
        return Response(status_code=400)  # for no client
    except BadRequest as bad:
        return refusal(bad)
    return Answer(service, ask)


async def models(request: Request) -> JSONResponse:
    """GET /v1/models."""
    return JSONResponse({"object": "list", "data": [_served(request.app.state.service)]})


async def model(request: Request) -> JSONResponse:
    """GET /v1/models/NAME."""
    service: Front = request.app.state.service
    name = request.path_params["name"]
    if name != service.name:
        return refusal(UnknownModel(f"model needs {service.name!r}, got {name!r}", "model"))
    return JSONResponse(_served(service))


def _served(service: Front) -> dict[str, Any]:
    return {
        "id": service.name, "object": "model", "created": service.started, "owned_by": "layerzero",
        "tokenizer": service.tokenizer.identity.digest,
    }  # fmt: skip


async def http_failure(request: Request, error: Exception) -> JSONResponse:
    """An unknown path or method, in the words of the API."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})  # the methods that a path allows
    return failure(error.status_code, f"{error.detail}: {request.method} {request.url.path}", headers=headers)


async def server_failure(request: Request, error: Exception) -> JSONResponse:
    """An unforeseen error; the log has it, the client gets no word of the inside."""
    closes = {"Connection": "close"}  # which the server does when an error has come through
    return failure(500, "the server failed to answer this request", kind="server_error", headers=closes)


def application(options: Options, counts: Counts | None = None, line: Any = None) -> Starlette:
    """The server as an ASGI application; its lifespan opens the runtime, and drains it at the end.

    One of several fronts has the `counts` of all, and a `line` that brings its connections.
    """
    counts = counts or Counts()

    # Where tokens are drawn elsewhere, this process has no use for the device.
    settings = lz.Settings.load(device="cpu", freeze_gc=True) if options.is_split else settings_of(options)

    @asynccontextmanager
    async def served(app: Starlette, runtime: lz.Runtime) -> AsyncIterator[None]:
        if options.is_split:
            joined = engine_process(options, counts) if line is None else linked(line, counts)
            async with joined as engine:
                app.state.service = SplitService(options, engine, counts)
                yield
            return
        app.state.service = await open_service(options, runtime)
        yield

    def service() -> Any:
        return app.state.service

    def refuse(status: int, message: str, retry_after_s: float | None) -> JSONResponse:
        if retry_after_s is None:
            return failure(status, message)
        again = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
        return failure(429, message, kind="rate_limit_error", headers=again)

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]
    handlers = {HTTPException: http_failure, Exception: server_failure}
    app = Starlette(routes=routes, lifespan=lifespan(settings, inside=served), exception_handlers=handlers)
    install(
        app,
        registry=lambda: service().exposed(),
        ready=lambda: service().missing(),
        health=lambda: service().state(),
        max_requests=options.max_requests + WAITING,
        max_body=options.max_body,
        refuse=refuse,
    )
    return app


_COUNTS = {
    "pages": "pages of keys and values",
    "page_size": "tokens of a page",
    "max_requests": "requests answered at once",
    "max_waiting_tokens": "tokens of requests that wait for pages",
    "max_num_batched_tokens": "rows of one step, of next tokens and pieces of prompts",
    "max_body": "bytes of one request's body",
    "prompt_cache": "bytes of prompts that are kept tokenized",
    "drain_s": "seconds SIGTERM leaves to answers",
}


def parse(arguments: list[str] | None) -> Options:
    """Read the command line."""
    defaults = Options()
    parser = argparse.ArgumentParser(description="Serve completions and chats of a Llama.")
    parser.add_argument("--model", type=Path, default=defaults.model, help="a Hugging Face Llama folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=defaults.device)
    parser.add_argument(
        "--per", choices=("op", "layer", "step"), default=defaults.per, help="what one await covers"
    )
    parser.add_argument(
        "--kv-format",
        choices=sorted(KV_FORMATS),
        default=defaults.kv_format,
        help="keys and values in 8 bits",
    )
    parser.add_argument(
        "--load-format",
        choices=LOAD_FORMATS,
        default=defaults.load_format,
        help="dummy: random weights of the folder's shape, for measurements",
    )
    for name, what in _COUNTS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(defaults, name), help=what)
    parser.add_argument(
        "--bundle", type=Path, help="a warm-up bundle of a machine like this; its code runs here"
    )
    parser.add_argument("--bundle-sha256", help="the digest that the bundle needs to have")
    parser.add_argument("--cluster", help="replicas on devices of a Ray cluster: auto, local, or its address")
    parser.add_argument("--replicas", type=int, help="how many; without it one for each GPU of the cluster")
    parser.add_argument(
        "--fronts", type=int, help="processes that answer HTTP on one port (Options says more)"
    )
    parser.add_argument(
        "--engine-process",
        action=argparse.BooleanOptionalAction,
        default=defaults.engine_process,
        help="draw tokens in a process of their own, so that HTTP takes none of its time; by default on CUDA",
    )
    parser.add_argument("--strict", action="store_true", help="only kernels whose rows ignore other requests")
    parser.add_argument("--host", default=defaults.host)
    parser.add_argument("--port", type=int, default=defaults.port)
    options = parser.parse_args(arguments)
    for name in _COUNTS:
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} needs to be at least 1, got {getattr(options, name)}")
    if options.bundle_sha256 is not None and options.bundle is None:
        parser.error("--bundle-sha256 needs --bundle")
    if options.fronts is not None:
        _need_fronts(parser, options)
    return Options(**vars(options))


def _need_fronts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse a number of fronts that cannot be."""
    if not 1 <= options.fronts <= MAX_FRONTS:
        parser.error(f"--fronts needs to be in [1, {MAX_FRONTS}], got {options.fronts}")
    if options.fronts == 1:
        return
    if options.engine_process is False and options.cluster is None:
        parser.error(f"--fronts {options.fronts} needs an engine process, got --no-engine-process")
    if not hasattr(socket, "SO_REUSEPORT"):
        parser.error(f"--fronts {options.fronts} needs a system with SO_REUSEPORT, got {sys.platform}")


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, and return 0 after a drain."""
    options = parse(arguments)
    if options.front_count > 1:
        return processes.serve(options, run_front)
    return _answer_http(options, application(options))


def run_front(options: Options, port: int, numbers: Any, row: int, line: socket.socket) -> None:
    """Serve as one of several fronts, in a process of its own."""
    app = application(options, Counts(numbers, row), line)
    sys.exit(_answer_http(options, app, [processes.bound(options.host, port, *SHARED)]))


def _answer_http(options: Options, app: Starlette, sockets: list[socket.socket] | None = None) -> int:
    config = bounded.config(
        app,
        host=options.host,
        port=options.port,
        log_level="warning",
        timeout_graceful_shutdown=options.drain_s,
    )
    # uvicorn raises the signal again when it has drained: that would turn a clean end into a killed process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server = uvicorn.Server(config)
    server.run(sockets)
    return 0 if server.started else 3  # uvicorn has said why

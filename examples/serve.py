"""A generation server: every request is one coroutine, and requests meet in batches.

    python examples/serve.py [--model FOLDER] [--device cpu|cuda] [--per op|layer|step] [--port N]

It speaks the completion API of OpenAI's clients: /v1/completions (streamed or not) and /v1/models, beside
/health and /metrics. A client that goes away takes its request with it; a full server answers 429 with
Retry-After; SIGTERM ends what has begun and takes nothing new.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import torch
import uvicorn
from completion import BadRequest, CompletionRequest, UnknownModel, read
from generate import IncrementalDetokenizer, generate, load_tokenizer
from models.llama import FOLDER, Llama, Per, load
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

import layerzero as lz
from layerzero.api import metrics
from layerzero.integrations import uvicorn as bounded
from layerzero.integrations.starlette import install, lifespan
from layerzero.kvcache import PagesExhaustedError


@dataclass(frozen=True, slots=True)
class Options:
    """How the server runs."""

    model: Path = FOLDER
    device: str = "cpu"
    per: Per = "step"
    pages: int = 1024
    page_size: int = 16
    max_requests: int = 256
    max_body: int = 4 << 20
    strict: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: int = 30


class Full(Exception):
    """The server takes no further request now; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = max(1, math.ceil(retry_after))


class Service:
    """The model, its tokenizer, and what is counted about requests."""

    def __init__(self, options: Options, runtime: lz.Runtime) -> None:
        self.options = options
        self.name = options.model.resolve().name
        self.model: Llama = load(
            options.model,
            device=options.device,
            dtype=torch.float32 if options.device == "cpu" else torch.bfloat16,
            pages=options.pages,
            page_size=options.page_size,
            per=options.per,
        )
        self.tokenizer: Tokenizer = load_tokenizer(options.model)
        # No prompt of more characters can fit, so none is taken apart.
        self.max_prompt_characters = self.max_model_len * max(map(len, self.tokenizer.get_vocab()))
        self.active = 0
        self.started = int(time.time())
        self.registry = CollectorRegistry()
        self.registry.register(metrics.collector(runtime))
        self.requests = Counter("requests", "requests by how they ended", ["outcome"], registry=self.registry)
        self.tokens = Counter("generated_tokens", "tokens drawn", registry=self.registry)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "requests_in_flight": ("requests being answered", lambda: self.active),
            "kv_pages_free": ("pages that no request holds", lambda: self.model.cache.allocator.free_pages),
        }
        for name, (what, value) in gauges.items():
            Gauge(name, what, registry=self.registry).set_function(value)

    def state(self) -> dict[str, int]:
        """What is going on, for /health."""
        pages = self.model.cache.allocator
        return {"requests": self.active, "pages": pages.total, "pages_free": pages.free_pages}

    @property
    def max_model_len(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        cache = self.model.cache
        return min(self.model.config.max_position_embeddings, cache.allocator.total * cache.page_size)

    async def answer(self, request: CompletionRequest) -> AsyncGenerator[Piece, None]:
        """Yield the answer's text as it comes; the last piece says why it ended.

        Raises: Full: too many requests, no pages, or a full lane. BadRequest: the prompt does not fit.
        """
        if self.active >= self.options.max_requests:
            self.requests.labels("rejected").inc()
            raise Full(f"{self.active} requests are being answered, and no more at once")
        self.active += 1
        outcome = "cancelled"
        try:
            async with aclosing(self._pieces(request)) as pieces:
                async for piece in pieces:
                    yield piece
            outcome = "done"
        except (PagesExhaustedError, lz.OverloadedError) as error:
            outcome = "rejected"
            raise Full(str(error), getattr(error, "retry_after", 1.0)) from error
        except Exception:
            outcome = "failed"
            raise
        finally:
            self.active -= 1
            self.requests.labels(outcome).inc()

    async def _pieces(self, request: CompletionRequest) -> AsyncGenerator[Piece, None]:
        ids = request.ids if request.ids is not None else await self._ids(request.text)
        self._check(ids, request)
        detokenizer, count, reason = (
            IncrementalDetokenizer(self.tokenizer, request.sampling.stop),
            0,
            "length",
        )
        async with aclosing(generate(self.model, ids, request.sampling)) as tokens:
            async for token in tokens:
                count += 1
                self.tokens.inc()
                if token in self.model.config.eos_token_ids:
                    reason = "stop"
                    break
                text = detokenizer.feed(token)
                if detokenizer.stopped:
                    reason = "stop"
                    yield Piece(text, count, len(ids), reason)
                    return
                yield Piece(text, count, len(ids))
        yield Piece(detokenizer.end(), count, len(ids), reason)

    async def _ids(self, text: str) -> list[int]:
        """The tokens of a prompt, encoded beside the loop: the library's batches give the interpreter up."""
        if len(text) > self.max_prompt_characters:
            raise BadRequest(
                f"prompt needs at most {self.max_prompt_characters} characters, got {len(text)}", "prompt"
            )
        encoded = await anyio.to_thread.run_sync(self.tokenizer.encode_batch_fast, [text])
        ids: list[int] = encoded[0].ids
        return ids

    def _check(self, ids: list[int], request: CompletionRequest) -> None:
        limit = self.max_model_len
        if not ids:
            raise BadRequest("prompt needs at least one token", "prompt")
        if len(ids) + request.sampling.max_tokens > limit:
            raise BadRequest(
                f"prompt and max_tokens need at most {limit} tokens together, got {len(ids)} and "
                f"{request.sampling.max_tokens}",
                "max_tokens",
            )
        if request.ids is not None and not all(0 <= token < self.model.config.vocab_size for token in ids):
            raise BadRequest(f"prompt needs token ids in [0, {self.model.config.vocab_size})", "prompt")


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer: text, tokens drawn and given so far, and why it ended, if it did."""

    text: str
    drawn: int
    prompt: int
    reason: str | None = None

    @property
    def usage(self) -> dict[str, int]:
        """The counts in the words of the API."""
        return {
            "prompt_tokens": self.prompt, "completion_tokens": self.drawn,
            "total_tokens": self.prompt + self.drawn,
        }  # fmt: skip


# -- answers over HTTP ----------------------------------------------------------------------------------


class Completion:
    """The answer to one completion request: an ASGI response that ends when its client goes."""

    def __init__(self, service: Service, completion_request: CompletionRequest) -> None:
        self.service, self.completion_request = service, completion_request
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()),
            "model": service.name,
        }  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self.stream if self.completion_request.stream else self.whole
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                while (await receive())["type"] != "http.disconnect":
                    continue
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            await self.respond_or_refuse(respond, scope, receive, send)
            tasks.cancel_scope.cancel()

    async def respond_or_refuse(
        self,
        respond: Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Respond, or say in the words of the API why not."""
        try:
            await respond(scope, receive, send)
        except Full as full:
            again = {"Retry-After": str(full.retry_after)}
            await failure(429, str(full), kind="rate_limit_error", headers=again)(scope, receive, send)
        except BadRequest as bad:
            await refusal(bad)(scope, receive, send)

    async def whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The whole text in one answer."""
        async with aclosing(self.service.answer(self.completion_request)) as answer:
            pieces = [piece async for piece in answer]
        text, last = "".join(piece.text for piece in pieces), pieces[-1]
        body = {**self.head, "choices": [choice(text, last.reason)], "usage": last.usage}
        await JSONResponse(body)(scope, receive, send)

    async def stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Server-sent events, one a piece of text; the status is sent with the first piece."""
        begun, usage = False, {}
        async with aclosing(self.service.answer(self.completion_request)) as pieces:
            try:
                async for piece in pieces:
                    if not begun:
                        begun = True
                        await send(STREAM_START)
                    usage = piece.usage
                    if piece.text or piece.reason:
                        await self._event(send, {**self.head, "choices": [choice(piece.text, piece.reason)]})
            except (Full, lz.LayerZeroError) as error:
                if not begun:
                    raise
                await self._event(send, error_body(str(error), "server_error"))
                await send({"type": "http.response.body", "body": b""})
                return
        if self.completion_request.include_usage:
            await self._event(send, {**self.head, "choices": [], "usage": usage})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _event(self, send: Send, data: dict[str, Any]) -> None:
        # ASCII: some readers end a line also at characters that JSON need not escape.
        body = f"data: {json.dumps(data)}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})


STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
}


def choice(text: str, reason: str | None) -> dict[str, Any]:
    """One choice of an answer."""
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def error_body(
    message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in the words of the API."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


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


# -- the application ------------------------------------------------------------------------------------


async def completions(request: Request) -> Any:
    """POST /v1/completions."""
    service: Service = request.app.state.service
    try:
        completion_request = read(await request.body(), service.name)
    except ClientDisconnect:
        return Response(status_code=400)  # for nobody
    except BadRequest as bad:
        return refusal(bad)
    return Completion(service, completion_request)


async def models(request: Request) -> JSONResponse:
    """GET /v1/models."""
    return JSONResponse({"object": "list", "data": [_served(request.app.state.service)]})


async def model(request: Request) -> JSONResponse:
    """GET /v1/models/NAME."""
    service: Service = request.app.state.service
    name = request.path_params["name"]
    if name != service.name:
        return refusal(UnknownModel(f"model needs {service.name!r}, got {name!r}", "model"))
    return JSONResponse(_served(service))


def _served(service: Service) -> dict[str, Any]:
    return {"id": service.name, "object": "model", "created": service.started, "owned_by": "layerzero"}


async def http_failure(request: Request, error: Exception) -> JSONResponse:
    """An unknown path or method, in the words of the API."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})  # the methods that a path allows
    return failure(error.status_code, f"{error.detail}: {request.method} {request.url.path}", headers=headers)


async def server_failure(request: Request, error: Exception) -> JSONResponse:
    """What nobody foresaw; the log has it, the client gets no word of the inside."""
    return failure(500, "the server failed to answer this request", kind="server_error")


def application(options: Options) -> Starlette:
    """The server as an ASGI application; its lifespan opens the runtime, and drains it at the end."""

    determinism = "strict" if options.strict else "default"
    settings = lz.Settings.load(
        device=options.device, inference=True, freeze_gc=True, determinism=determinism
    )

    @asynccontextmanager
    async def served(app: Starlette, runtime: lz.Runtime) -> AsyncIterator[None]:
        app.state.service = Service(options, runtime)
        yield

    def service() -> Service:
        opened: Service = app.state.service
        return opened

    def refuse(status: int, message: str, retry_after_s: float | None) -> JSONResponse:
        if retry_after_s is None:
            return failure(status, message)
        again = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
        return failure(429, message, kind="rate_limit_error", headers=again)

    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
    ]
    handlers = {HTTPException: http_failure, Exception: server_failure}
    app = Starlette(routes=routes, lifespan=lifespan(settings, inside=served), exception_handlers=handlers)
    install(
        app,
        registry=lambda: service().registry,
        ready=lambda: (),  # its model is loaded before anything is served
        health=lambda: service().state(),
        max_requests=options.max_requests + WAITING,
        max_body=options.max_body,
        refuse=refuse,
    )
    return app


# Requests beyond those being answered that may be on their way in or out.
WAITING = 64


def parse(arguments: list[str] | None) -> Options:
    """Read the command line."""
    defaults = Options()
    parser = argparse.ArgumentParser(description="Serve completions of a Llama.")
    parser.add_argument("--model", type=Path, default=defaults.model, help="a Hugging Face Llama folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=defaults.device)
    parser.add_argument(
        "--per", choices=("op", "layer", "step"), default=defaults.per, help="what one await covers"
    )
    parser.add_argument("--pages", type=int, default=defaults.pages)
    parser.add_argument("--page-size", type=int, default=defaults.page_size)
    parser.add_argument("--max-requests", type=int, default=defaults.max_requests)
    parser.add_argument("--max-body", type=int, default=defaults.max_body, help="bytes of one request's body")
    parser.add_argument("--strict", action="store_true", help="only kernels whose rows ignore their batch")
    parser.add_argument("--host", default=defaults.host)
    parser.add_argument("--port", type=int, default=defaults.port)
    parser.add_argument(
        "--drain-s", type=int, default=defaults.drain_s, help="seconds SIGTERM leaves to answers"
    )
    options = parser.parse_args(arguments)
    for name in ("pages", "page_size", "max_requests", "max_body", "drain_s"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} needs to be at least 1, got {getattr(options, name)}")
    return Options(**vars(options))


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, and return 0 after a drain."""
    options = parse(arguments)
    config = bounded.config(
        application(options),
        host=options.host,
        port=options.port,
        log_level="warning",
        timeout_graceful_shutdown=options.drain_s,
    )
    # uvicorn raises the signal again when it has drained: that would turn a clean end into a killed process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    uvicorn.Server(config).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

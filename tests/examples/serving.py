"""A generation server that runs for tests: in a thread of this process, on loopback."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import uvicorn

from tests.examples import loopback
from tests.waiting import LIMIT_S

PROMPT = "And Jesus said unto them,"
NOTHING = {"pages": 0, "requests": 0, "waiting": 0, "calls": 0, "callers": 0, "tasks": 0}


def asked(**more: Any) -> dict[str, Any]:
    """The fields of a request."""
    return {"model": "generate", "prompt": PROMPT, "max_tokens": 12, "temperature": 0.9, "seed": 3} | more


class Running:
    """A served application: its address, and what is left behind when requests have ended."""

    def __init__(self, server: uvicorn.Server, app: Any) -> None:
        self.server, self.app = server, app
        self.loop: asyncio.AbstractEventLoop | None = None
        self.idle_tasks = 0

    @property
    def url(self) -> str:
        """The address without a path."""
        host, port = self.server.servers[0].sockets[0].getsockname()
        return f"http://{host}:{port}"

    @property
    def service(self) -> Any:
        """The service behind the application."""
        return self.app.state.service

    def left(self) -> dict[str, int]:
        """What no request should leave: pages, requests, calls in the batcher, callers the batcher still
        knows."""
        pages = self.service.model.cache.allocator
        stats = self.lanes()
        return {
            "pages": pages.total - pages.free_pages,
            "requests": self.service.active,
            "waiting": self.service.engine.requests.waiting,
            "calls": stats.submitted - stats.ended,
            "callers": self.inside(lambda: self.device().loop_drivers.current().callers),
            "tasks": max(0, self.inside(lambda: len(asyncio.all_tasks())) - self.idle_tasks),
        }

    def settled(self, seconds: float = 20.0) -> dict[str, int]:
        """`left`, once nothing is, or after `seconds`."""
        until = time.monotonic() + seconds
        while any((left := self.left()).values()) and time.monotonic() < until:
            time.sleep(0.05)
        return left

    def lanes(self) -> Any:
        """What the batchers have counted."""
        return self.inside(lambda: self.device().loop_drivers.stats())

    def device(self) -> Any:
        """The device that serves."""
        return self.app.state.runtime.device("cpu")

    def inside(self, call: Any) -> Any:
        """The result of `call`, made on the server's loop."""

        async def run() -> Any:
            return call()

        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """Every sample of /metrics, by its name and labels."""
        from prometheus_client.parser import text_string_to_metric_families

        text = loopback.get(f"{self.url}/metrics").text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def client_of(server: Running) -> openai.OpenAI:
    """OpenAI's own client."""
    http: Any = loopback.Client(timeout=LIMIT_S)  # typed as another release's
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http)


@contextmanager
def serving(options: Any, host: str = "127.0.0.1") -> Iterator[Running]:
    """A real uvicorn on a free port of an address, until the block ends."""
    from server import app as server_app

    app = server_app.application(options)
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=0, log_level="warning"))
    running = Running(server, app)

    async def run() -> None:
        running.loop = asyncio.get_running_loop()
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="server")
    thread.start()
    try:
        until = time.monotonic() + LIMIT_S
        while not server.started:
            assert thread.is_alive() and time.monotonic() < until, "the server did not start"
            time.sleep(0.02)
        # The one that counts is itself a task.
        running.idle_tasks = running.inside(lambda: len(asyncio.all_tasks()))
        yield running
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


async def check_texts_in_company(server: Running, count: int, tokens: int) -> None:
    """`count` streams at once give each the text that it gives alone, and they meet in batches."""
    url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:

        async def text(seed: int) -> str:
            request = asked(seed=seed, max_tokens=tokens, prompt=PROMPT[: 5 + seed % 20], top_p=0.95)
            events = await client.completions.create(**request, stream=True)
            return "".join([event.choices[0].text async for event in events])

        alone = [await text(seed) for seed in range(8)]
        before = server.lanes()
        together = await asyncio.gather(*(text(seed) for seed in range(count)))
        after = server.lanes()
    assert together[:8] == alone
    assert len(set(together)) > count / 2
    calls = sum(size * n for size, n in after.sizes.items()) - sum(s * n for s, n in before.sizes.items())
    assert calls / (after.batches - before.batches) > count / 4
    assert server.settled() == NOTHING

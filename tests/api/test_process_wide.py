"""One runtime for the process: handlers, pool threads, a second loop and a loop after a closed one see it."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import layerzero as lz
import layerzero.sync
from layerzero.kvcache import KVCacheSpec, PagedCache
from layerzero.runtime import ACTIVE, current
from tests.waiting import LIMIT_S

WEIGHT = torch.arange(12.0).view(3, 4)


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    """No runtime before a test, none left after it."""
    if ACTIVE.runtime is not None:
        ACTIVE.runtime.close()
        ACTIVE.put(None)
    yield
    if ACTIVE.runtime is not None:
        ACTIVE.runtime.close()
        ACTIVE.put(None)


async def project(value: float) -> float:
    out = await lz.linear(torch.full((2, 4), value), WEIGHT)
    return float(out.sum())


EXPECTED = float(torch.nn.functional.linear(torch.ones(2, 4), WEIGHT).sum())


def test_a_loop_after_a_closed_one_works() -> None:
    """Two asyncio.run in a row use one runtime and two fronts."""
    assert asyncio.run(project(1.0)) == EXPECTED
    first = ACTIVE.runtime
    assert asyncio.run(project(1.0)) == EXPECTED
    assert ACTIVE.runtime is first


def test_loops_in_two_threads_work_at_once() -> None:
    """Each loop has a loop driver of its own; the runtime is shared."""
    barrier = threading.Barrier(2)
    out: list[float] = []
    seen: list[Any] = []

    def run() -> None:
        async def main() -> None:
            barrier.wait()
            out.extend(await asyncio.gather(*[project(1.0) for _ in range(20)]))
            seen.append(ACTIVE.runtime)

        asyncio.run(main())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert out == [EXPECTED] * 40
    assert seen[0] is seen[1] is not None


def test_pool_threads_use_the_blocking_ops() -> None:
    """CS-034: threads and coroutines on one runtime at the same time."""

    here = current()

    def blocking() -> float:
        assert current() is here
        return float(layerzero.sync.linear(torch.ones(2, 4), WEIGHT).sum())

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(4) as pool:
            threads = [loop.run_in_executor(pool, blocking) for _ in range(16)]
            return [
                *await asyncio.gather(*[project(1.0) for _ in range(16)]),
                *await asyncio.gather(*threads),
            ]

    assert asyncio.run(main()) == [EXPECTED] * 32


def test_a_runtime_opened_in_an_asgi_lifespan_serves_the_handlers() -> None:
    """Handlers run in other contexts than the lifespan, and see its runtime all the same."""
    opened: list[Any] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with lz.start(lz.Settings(inference=True)) as runtime:
            opened.append(runtime)
            yield

    async def handler(request: Request) -> JSONResponse:
        value = await project(float(request.query_params["x"]))
        return JSONResponse({"value": value, "same": ACTIVE.runtime is opened[0]})

    app = Starlette(routes=[Route("/", handler)], lifespan=lifespan)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # a request waits for the server rather than be refused
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client:
            answers = [client.get("/", params={"x": 1.0}).json() for _ in range(4)]
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
    assert answers == [{"value": EXPECTED, "same": True}] * 4
    assert opened[0].closed
    assert ACTIVE.runtime is None


@pytest.mark.asyncio
async def test_a_second_runtime_is_an_error_unless_scoped() -> None:
    """The process has one runtime; a scoped one is its context's alone."""
    async with lz.start() as outer:
        with pytest.raises(lz.ConfigurationError, match="scoped=True"):
            async with lz.start():
                pass
        async with lz.start(scoped=True) as inner:
            assert inner is not outer
            assert await project(1.0) == EXPECTED
            assert list(inner.devices) == [torch.device("cpu")]
            assert not outer.devices
        assert await project(1.0) == EXPECTED
        assert outer.devices


@pytest.mark.asyncio
async def test_a_closed_runtime_leaves_nothing_and_the_next_use_opens_another() -> None:
    """I9: threads of a closed runtime are gone; a later call works."""
    before = threading.active_count()
    async with lz.start(lz.Settings(inline_limit_us=1)) as runtime:
        await asyncio.gather(*[project(1.0) for _ in range(8)])
        assert runtime.device("cpu").worker.running
    assert threading.active_count() <= before
    assert await project(1.0) == EXPECTED
    assert ACTIVE.runtime is not runtime


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which this platform does not have")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_works_with_threads_in_the_parent() -> None:
    """Locks, threads and loop drivers are made anew in the child, from the first thread on."""
    asyncio.run(_threaded())
    assert current().device("cpu").worker.running
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            total = asyncio.run(_threaded())
            total += float(layerzero.sync.linear(torch.ones(2, 4), WEIGHT).sum())
            os.write(writer, repr(total).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as answers:
        text = answers.read()
    assert os.waitpid(child, 0)[1] == 0
    assert float(text) == EXPECTED * 9
    assert asyncio.run(_threaded()) == EXPECTED * 8


async def _threaded() -> float:
    lz.configure(inline_limit_us=1.0)
    return sum(await asyncio.gather(*[project(1.0) for _ in range(8)]))


def test_importing_and_configuring_need_no_loop() -> None:
    """Blocking use never touches asyncio."""
    assert float(layerzero.sync.linear(torch.ones(2, 4), WEIGHT).sum()) == EXPECTED
    assert lz.get_config().device == "auto"


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """The collector as a process finds it, without what the suite keeps out of its way."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def is_collected(sought: object) -> bool:
    """Whether the collector looks at `sought`; a count of the frozen falls by itself as some of them die."""
    return any(present is sought for present in gc.get_objects())


@pytest.mark.usefixtures("nothing_frozen")
def test_freeze_gc_holds_while_the_runtime_is_open() -> None:
    """What is alive when a server starts is out of the collector's way until it stops; not by default."""
    assert gc.get_freeze_count() == 0
    with lz.start():
        assert gc.get_freeze_count() == 0
    with lz.start(lz.Settings(freeze_gc=True)) as runtime:
        assert gc.get_freeze_count() > 100_000
        device = runtime.device("cpu")
        assert not is_collected(device), "what a device brings with it is alive as long"
    assert is_collected(device)
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_what_is_loaded_and_captured_later_is_frozen_too() -> None:
    """Kernels that load behind calls, and captured steps, are alive as long as the server."""
    with lz.start(lz.Settings(freeze_gc=True)) as runtime:
        loader, loaded, captured = runtime.device("cpu").loader, [object], [object]
        assert is_collected(loaded) and is_collected(captured)
        loader.load_now("torch.rms_norm.native")
        assert not is_collected(loaded)
        cache = PagedCache(KVCacheSpec(1, 4, dtype=torch.float32, device="cpu"), pages=8, page_size=4)
        steps = lz.StepRunner(
            lambda metadata, ids: ids[:, None].float(), cache, max_model_len=8, max_num_seqs=1, graphs=True
        )
        later = [object]
        steps.capture(buckets=[1])
        assert not is_collected(later)
        steps.close()
    assert is_collected(later)


@pytest.mark.usefixtures("nothing_frozen")
def test_what_the_interpreter_froze_itself_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 begins with 375 frozen objects; a server froze nothing there."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    seen = [object]
    with lz.start(lz.Settings(freeze_gc=True)):
        assert not is_collected(seen)
    assert is_collected(seen)


def test_nothing_is_frozen_unless_asked_for() -> None:
    """A load, or a capture, freezes nothing by itself."""
    before = gc.get_freeze_count()
    with lz.start() as runtime:
        runtime.device("cpu").loader.load_now("torch.rms_norm.native")
        assert gc.get_freeze_count() <= before


@pytest.mark.usefixtures("nothing_frozen")
def test_what_somebody_else_froze_stays_frozen() -> None:
    """A process that froze its objects before keeps them so, and no others join them."""
    frozen: list[object] = []
    gc.freeze()
    later: list[object] = []
    try:
        with lz.start(lz.Settings(freeze_gc=True)) as runtime:
            assert runtime.device() is not None
            assert is_collected(later) and not is_collected(frozen)
        assert is_collected(later) and not is_collected(frozen)
    finally:
        gc.unfreeze()
    assert is_collected(frozen)

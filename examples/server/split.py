"""A front whose tokens are drawn in a process of their own: HTTP and texts here, the model's steps there.

The interpreter of one process runs one thread at a time. With hundreds of streams, writing events takes as
long as launching steps, and each would wait for the other.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from models.llama import LlamaConfig
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import layerzero as lz
from layerzero._util import log
from server import engine_process as worker
from server.engine import Drawn
from server.front import Choice, Front, Options
from server.pipe import End, Pipe, Query, Ready, Reply, Start, Stop, ToFront, Token

# A request that was under way at so many deaths of the process may be what ends it.
MAX_LOSSES = 2
RETURN_S = 120.0  # that a request waits for the next process
QUERY_S = 5.0
CLOSE_S = 10.0
_BACKOFF_S = (0.0, 1.0, 5.0, 30.0)


class _Stream:
    """The messages about one choice that have come, and who waits for the next one."""

    def __init__(self) -> None:
        self.messages: list[Token | End] = []
        self.waiter: asyncio.Future[None] | None = None

    def put(self, message: Token | End) -> None:
        self.messages.append(message)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def get(self) -> list[Token | End]:
        """All messages that have come since the last call, at least one."""
        if not self.messages:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        messages, self.messages = self.messages, []
        return messages


@asynccontextmanager
async def engine_process(options: Options) -> AsyncIterator[EngineProcess]:
    """An engine in a process of its own, whose model is loaded; it ends with the context."""
    engine = EngineProcess(options)
    try:
        await engine.open()
        yield engine
    finally:
        await engine.close()


class EngineProcess:
    """The process, started again when it ends; requests under way continue in the next one.

    A stream that no client reads keeps its tokens here, at most as many as its answer may have.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pipe: Pipe | None = None
        self._process: Any = None
        self._streams: dict[int, _Stream] = {}
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._serving = asyncio.Event()
        self._ready = asyncio.Event()  # the first start has come to an end, good or bad
        self._gone = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._closing = False
        self.capacity = 0
        self.restarts = 0

    # -- the process -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start it, and wait until its model is loaded. Raises: RuntimeError: it ended before that."""
        await self._start()
        await self._ready.wait()
        if not self.serves:
            raise RuntimeError(f"the engine's process ended while it loaded the model: {self._exit()}")
        self._keeper = asyncio.ensure_future(self._keep())

    async def _start(self) -> None:
        here, there = socket.socketpair()
        spawn = multiprocessing.get_context("spawn")
        arguments = (self._options, there)
        self._process = spawn.Process(target=worker.run, args=arguments, name="engine", daemon=True)
        self._gone.clear()
        await asyncio.to_thread(self._process.start)
        there.close()
        here.setblocking(False)
        loop = asyncio.get_running_loop()
        _, self._pipe = await loop.connect_accepted_socket(
            lambda: Pipe(ToFront, self._receive, self._lost), here
        )

    async def _keep(self) -> None:
        """Start it again whenever it has ended."""
        for delay_s in itertools.chain(_BACKOFF_S, itertools.repeat(_BACKOFF_S[-1])):
            await self._gone.wait()
            log.error("server.engine_lost", status=self._exit(), restarts=self.restarts)
            await asyncio.sleep(delay_s)
            self.restarts += 1
            await self._start()

    def _exit(self) -> str:
        self._process.join(CLOSE_S)
        return f"exit status {self._process.exitcode}"

    async def close(self) -> None:
        """End the process: what is under way there is cancelled."""
        self._closing = True
        if self._keeper is not None:
            self._keeper.cancel()
        if self._pipe is not None:
            self._pipe.close()
        await asyncio.to_thread(self._process.join, CLOSE_S)
        if self._process.is_alive():
            self._process.kill()

    @property
    def serves(self) -> bool:
        """Whether the process takes requests."""
        return self._serving.is_set()

    # -- messages --------------------------------------------------------------------------------------

    def _receive(self, message: Ready | Token | End | Reply) -> None:
        if isinstance(message, Token | End):
            stream = self._streams.get(message.number)
            if stream is not None:  # else its client has gone
                stream.put(message)
        elif isinstance(message, Ready):
            self.capacity = message.capacity
            self._serving.set()
            self._ready.set()
        elif (waiting := self._queries.pop(message.number, None)) is not None and not waiting.done():
            waiting.set_result(message.body)

    def _lost(self) -> None:
        self._serving.clear()
        self._gone.set()
        self._ready.set()
        streams, self._streams = self._streams, {}
        for number, stream in streams.items():
            stream.put(End(number, (lz.DeviceLostError.__name__, "the engine's process has ended", 0.0)))
        queries, self._queries = self._queries, {}
        for waiting in queries.values():
            waiting.cancel()

    async def query(self, what: str) -> Any:
        """The state or the metrics of the process; None where it does not say in time."""
        if self._pipe is None or not self.serves:
            return None
        number = next(self._numbers)
        waiting = self._queries[number] = asyncio.get_running_loop().create_future()
        self._pipe.send(Query(number, what))
        try:
            with anyio.move_on_after(QUERY_S):
                await asyncio.wait([waiting])
            return waiting.result() if waiting.done() and not waiting.cancelled() else None
        finally:
            self._queries.pop(number, None)

    async def generate(self, choice: Choice) -> AsyncGenerator[Drawn, None]:
        """The tokens of one choice, in order.

        Raises: OverloadedError. RuntimeError: the request failed there. DeviceLostError: the process ended
            twice meanwhile, does not serve again in time, or is closed.
        """
        so_far: list[int] = []
        for _ in range(MAX_LOSSES):
            with anyio.move_on_after(RETURN_S):
                await self._serving.wait()
            if self._pipe is None or not self.serves:
                raise lz.DeviceLostError(
                    f"the engine's process did not serve again within {RETURN_S:g} s", retryable=False
                )
            number, pipe, stream = next(self._numbers), self._pipe, _Stream()
            self._streams[number] = stream
            pipe.send(_start(number, choice, so_far))
            try:
                while number >= 0:
                    for message in await stream.get():
                        if isinstance(message, End):
                            if message.error is None:
                                return
                            number = -1
                            if message.error[0] != lz.DeviceLostError.__name__ or self._closing:
                                raise _error(*message.error)
                        else:
                            so_far.append(message.token)
                            is_last = message.ends or len(so_far) == choice.max_tokens
                            if is_last:  # its end is on its way, and needs no answer
                                del self._streams[number]
                            yield Drawn(
                                message.token, message.logprob, message.likeliest, message.ends,
                                message.is_text,
                            )  # fmt: skip
                            if is_last:
                                return
            finally:
                if self._streams.pop(number, None) is not None:
                    pipe.send(Stop(number))
        raise lz.DeviceLostError(
            f"the engine's process ended {MAX_LOSSES} times under this request", retryable=False
        )


def _start(number: int, choice: Choice, so_far: list[int]) -> Start:
    ask = choice.ask
    return Start(
        number, choice.prompt, choice.sampling, choice.max_tokens, ask.user, ask.constraint, ask.ignore_eos,
        choice.patient or bool(so_far), list(so_far),
    )  # fmt: skip


def _error(kind: str, message: str, retry_after: float) -> Exception:
    if kind == lz.OverloadedError.__name__:
        return lz.OverloadedError(message, retry_after=retry_after)
    if kind == lz.DeviceLostError.__name__:
        return lz.DeviceLostError(message, retryable=False)
    return RuntimeError(f"{kind}: {message}")


class SplitService(Front):
    """A front over one engine in a process of its own."""

    def __init__(self, options: Options, engine: EngineProcess) -> None:
        self.engine = engine
        self._families: list[Metric] = []
        super().__init__(options, None, LlamaConfig.read(options.model), engine.capacity)

    def gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        return {
            **super().gauges(),
            "engine_serves": ("1 while the engine's process takes requests", lambda: self.engine.serves),
        }

    def counted(self) -> Iterable[tuple[str, str, float]]:
        yield "engine_restarts", "times that the engine's process was started again", self.engine.restarts

    def collect(self) -> Iterator[Any]:
        yield from super().collect()
        yield from self._families

    async def exposed(self) -> CollectorRegistry:
        """The registry, with what the engine's process has counted."""
        text = await self.engine.query("metrics")
        self._families = []
        ours = {f"{family.name}{end}" for family in self.registry.collect() for end in ("", "_created")}
        said = text_string_to_metric_families(text or "")
        self._families = [family for family in said if family.name not in ours]
        return self.registry

    def missing(self) -> list[str]:
        return [] if self.engine.serves else ["the engine's process is starting"]

    async def state(self) -> dict[str, Any]:
        """What is going on, for /health."""
        said = await self.engine.query("state") or {"engine": "starting"}
        return {**said, "requests": self.active, "engine_restarts": self.engine.restarts}

    def generate(self, choice: Choice) -> AsyncGenerator[Drawn, None]:
        return self.engine.generate(choice)

"""A front whose tokens come from another process: HTTP and texts here, the model's steps or replicas there.

The interpreter of one process runs one thread at a time. With hundreds of streams, writing events takes as
long as launching steps, and each would wait for the other.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
from models.llama import LlamaConfig
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import layerzero as lz
from server import engine_process as worker
from server.counts import Counts
from server.engine import Drawn
from server.front import Choice, Front, Options
from server.pipe import End, Pipe, Query, Ready, Reply, Start, Stop, ToFront, Token, connections, hand
from server.processes import KeptProcess

# A request that was under way at so many deaths of the process may be what ends it.
MAX_LOSSES = 2
RETURN_S = 300.0  # that a request waits for the next process, which loads a model or places replicas
QUERY_S = 5.0
_AGAIN_S = 0.1
_LOST = End(-1, (lz.DeviceLostError.__name__, "the engine's process has ended", 0.0))


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
async def engine_process(options: Options, counts: Counts) -> AsyncIterator[EngineLink]:
    """The link to an engine in a process of its own, which ends with the context.

    Raises: RuntimeError: it ended before its model was loaded.
    """
    link = EngineLink()

    async def join() -> None:
        here, there = socket.socketpair()
        with there:
            assert process.line is not None
            hand(process.line, there)
        here.setblocking(False)
        await link.attach(here)

    process = KeptProcess("engine", worker.run, (options,), join, lambda: counts.add("engine_restarts"))
    keeper: asyncio.Task[None] | None = None
    try:
        await process.start()
        if not await link.opened():
            raise RuntimeError(f"the engine's process ended while it loaded the model: {process.exit()}")
        keeper = asyncio.ensure_future(process.keep())
        yield link
    finally:
        if keeper is not None:
            keeper.cancel()
        link.shut()
        await process.close()


@asynccontextmanager
async def linked(line: socket.socket, counts: Counts) -> AsyncIterator[EngineLink]:
    """The link of one of several fronts: its connections come over `line`, whose end is this process's."""
    link = EngineLink()

    async def follow() -> None:
        async for connection in connections(line):
            await link.attach(connection)
        link.shut()
        os.kill(os.getpid(), signal.SIGTERM)

    following = asyncio.ensure_future(follow())
    try:
        while not link.serves:
            if not await link.opened():
                if link.closing:
                    raise RuntimeError("the server ended before this front was ready")
                await asyncio.sleep(_AGAIN_S)
        counts.add("ready")
        yield link
    finally:
        following.cancel()
        link.shut()


class EngineLink:
    """This end of the connection to the process that draws; requests under way continue in the next one.

    A stream that no client reads keeps its tokens here, at most as many as its answer may have.
    """

    def __init__(self) -> None:
        self._pipe: Pipe | None = None
        self._streams: dict[int, _Stream] = {}
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._serving = asyncio.Event()
        self._opened = asyncio.Event()  # the first connection has come to an end, or to its use
        self._gone = asyncio.Event()
        self._gone.set()
        self.closing = False
        self.capacity = 0

    async def attach(self, connection: socket.socket) -> None:
        """Use a connection, once the one before has ended."""
        await self._gone.wait()
        self._gone.clear()
        self._opened.clear()
        _, self._pipe = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: Pipe(ToFront, self._receive, self._lost), connection
        )

    async def opened(self) -> bool:
        """Wait until a process serves, or has ended; whether it serves."""
        await self._opened.wait()
        return self.serves

    def shut(self) -> None:
        """Want nothing more of it: requests under way end."""
        self.closing = True
        self._opened.set()
        if self._pipe is not None:
            self._pipe.close()

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
            self._opened.set()
        elif (waiting := self._queries.pop(message.number, None)) is not None and not waiting.done():
            waiting.set_result(message.body)

    def _lost(self) -> None:
        self._serving.clear()
        self._gone.set()
        self._opened.set()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(_LOST)
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

    async def generate(self, choice: Choice, before: Sequence[int] = ()) -> AsyncGenerator[Drawn, None]:
        """The tokens of one choice, in order, behind those drawn `before`.

        Raises: OverloadedError. RuntimeError: the request failed there. DeviceLostError: the process ended
            twice meanwhile, does not serve again in time, or is closed.
        """
        so_far = list(before)
        for _ in range(MAX_LOSSES):
            with anyio.move_on_after(RETURN_S):
                await self._serving.wait()
            if self._pipe is None or not self.serves:
                raise lz.DeviceLostError(
                    f"the engine's process did not serve again within {RETURN_S:g} s", retryable=False
                )
            number, pipe, stream = next(self._numbers), self._pipe, _Stream()
            self._streams[number] = stream
            try:
                pipe.send(_start(number, choice, so_far))
                while number >= 0:
                    for message in await stream.get():
                        if isinstance(message, End):  # nothing is left to stop
                            self._streams.pop(number, None)
                            if message.error is None:
                                return
                            if message is not _LOST or self.closing:
                                raise _error(*message.error)
                            number = -1
                        else:
                            so_far.append(message.token)
                            is_last = message.ends or len(so_far) == choice.max_tokens
                            if is_last:  # its end is on its way, and needs no answer
                                self._streams.pop(number, None)
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
    return Start(
        number, choice.prompt, choice.sampling, choice.max_tokens, choice.user, choice.constraint,
        choice.ignore_eos, choice.patient or bool(so_far), list(so_far),
    )  # fmt: skip


def _error(kind: str, message: str, retry_after: float) -> Exception:
    if kind == lz.OverloadedError.__name__:
        return lz.OverloadedError(message, retry_after=retry_after)
    if kind == lz.DeviceLostError.__name__:
        return lz.DeviceLostError(message, retryable=False)
    if kind == lz.GrammarLimitError.__name__:
        return lz.GrammarLimitError(message)
    return RuntimeError(f"{kind}: {message}")


class SplitService(Front):
    """A front over one engine in a process of its own, of which there may be several."""

    def __init__(self, options: Options, engine: EngineLink, counts: Counts) -> None:
        self.engine = engine
        self._families: list[Metric] = []
        super().__init__(options, None, LlamaConfig.read(options.model), engine.capacity, counts)

    def gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        return {
            **super().gauges(),
            "engine_serves": ("1 while the engine's process takes requests", lambda: self.engine.serves),
        }

    def counted(self) -> Iterable[tuple[str, str, float]]:
        for process in ("engine", "front"):
            name = f"{process}_restarts"
            yield name, f"times that a process was started again: {process}", self.counts.total(name)

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
        said |= {name: self.counts.total(name) for name in ("engine_restarts", "front_restarts")}
        return {**said, "requests": self.active, "fronts": self.options.front_count}

    def generate(self, choice: Choice, so_far: Sequence[int] = ()) -> AsyncGenerator[Drawn, None]:
        return self.engine.generate(choice, so_far)

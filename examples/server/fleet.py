"""A front over replicas in Ray actors: a request goes where its prompt is known, and on after a loss."""

from __future__ import annotations

import site
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from models.llama import LlamaConfig
from prometheus_client import Counter

import layerzero as lz
from layerzero.kvcache import PrefixRouter, RoutedRequest
from server import replica
from server.engine import Drawn
from server.front import Choice, Front, Options

HERE = Path(__file__).resolve().parents[1]
SERVING = "running"
STATE_S = 5.0  # that a replica may take to say how it is


class FleetService(Front):
    """A front whose tokens are drawn by replicas, one on each device of the pool.

    A token depends on the prompt, its seed and its place, so the request of a lost replica continues on
    another one with the token that would have come; where none serves in time its error says so.
    """

    def __init__(self, options: Options, runtime: lz.Runtime, config: LlamaConfig, capacity: int) -> None:
        self.pool = runtime.device_pool
        self.router = PrefixRouter(options.page_size)
        self.moved = self.found = 0
        self._processes: dict[str, str] = {}
        super().__init__(options, runtime, config, capacity)
        self.routed = Counter("routed", "choices by the replica that they went to", ["replica"],
                              registry=self.registry)  # fmt: skip

    @classmethod
    async def open(cls, options: Options, runtime: lz.Runtime) -> FleetService:
        """Open a replica on every device. Raises: what a replica raises that does not open."""
        pool = runtime.device_pool
        await pool.prepare(site.addsitedir, str(HERE))  # where a device finds this code
        capacities = await pool.prepare(replica.open_replica, options)
        return cls(options, runtime, LlamaConfig.read(options.model), min(capacities.values()))

    def gauges(self) -> dict[str, tuple[str, Callable[[], float]]]:
        return {
            **super().gauges(),
            "routed_pages": ("pages that the router knows of", lambda: len(self.router)),
            "replicas": (
                "replicas that serve",
                lambda: sum(device.state.value == SERVING for device in self.pool.devices.values()),
            ),
        }

    def counted(self) -> Iterable[tuple[str, str, float]]:
        yield "requests_moved", "choices that went on at another replica", self.moved
        yield "routed_tokens", "tokens of prompts that the replica was sent for", self.found

    async def state(self) -> dict[str, Any]:
        """What is going on, for /health."""
        said = {name: {"state": each.state.value} for name, each in self.pool.devices.items()}

        async def ask(name: str) -> None:
            try:
                said[name] |= await self.pool.run(replica.state, on=name, timeout_s=STATE_S)
            except lz.LayerZeroError as error:
                said[name] |= {"error": str(error)}

        async with anyio.create_task_group() as tasks:
            for name, device in self.pool.devices.items():
                if device.state.value == SERVING:
                    tasks.start_soon(ask, name)
        return {"requests": self.active, "tokenizer": self.tokenizer.identity.digest, "replicas": said}

    async def generate(self, choice: Choice, so_far: Sequence[int] = ()) -> AsyncGenerator[Drawn, None]:
        """The tokens of one choice, wherever they are drawn; a replica compiles the grammar anew.

        Raises: DeviceLostError: no replica serves. What a replica raises.
        """
        with self._routed(choice, so_far) as (call, where, drew):
            items = self.pool.stream(*call, **where)
            async with aclosing(items):  # type: ignore[type-var]
                async for item in items:
                    yield drew(item)

    async def forward(self, choice: Choice, so_far: Sequence[int], to: Callable[[Drawn], None]) -> None:
        """The same tokens, as they come."""
        with self._routed(choice, so_far) as (call, where, drew):
            await self.pool.forward(lambda item: to(drew(item)), *call, **where)

    @contextmanager
    def _routed(
        self, choice: Choice, so_far: Sequence[int]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Callable[[Any], Drawn]]]:
        """What to ask of the pool, where, and what makes of an item what was drawn."""
        tokens = [*choice.prompt, *so_far]
        before = [(token, None, (), False, True) for token in so_far]

        def drew(item: Any) -> Drawn:
            token, logprob, likeliest, ends, is_text = item
            placed.drew()
            tokens.append(token)
            return Drawn(token, logprob, tuple(map(tuple, likeliest)), ends, is_text)

        with self.router.open(choice.prompt) as placed:
            where = {"on": partial(self._place, placed), "resume": True, "so_far": before}
            try:
                yield (replica.generate, replace(choice, grammar=None)), where, drew
            finally:
                placed.publish(tokens)

    def _place(self, placed: RoutedRequest, serving: Sequence[Any]) -> Any:
        """One of the devices that serve; asked again where the one before was lost."""
        if placed.replica is not None:
            self.moved += 1
            self.router.forget(placed.replica)
        for device in serving:
            process = device.facts.incarnation
            if self._processes.setdefault(device.name, process) != process:
                self._processes[device.name] = process
                self.router.forget(device.name)  # a new process has no pages
        name = placed.place([device.name for device in serving])
        self.found += placed.cached_tokens
        self.routed.labels(name).inc()
        return next(device for device in serving if device.name == name)

"""One client against several servers of the same model: saturation, then Poisson loads below it.

A latency counts from the moment a request was due, not from when the client got to it. Two servers are up
at a time and take turns; who has no turn is stopped, since an idle server polls, and a client beside it on
two cores feels that.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from harness import percentile

ROOT = Path(__file__).resolve().parents[2]
OURS = "LayerZero"
# Server -> (what it needs to be installed, its script).
PEERS = {
    "Ray Serve": ("ray.serve", "behind_ray.py"),
    "LitServe": ("litserve", "behind_litserve.py"),
}
LOADS = (0.25, 0.5, 0.75, 0.9)
CLIENTS = 64
TURNS = 2  # in which the seconds of one load are taken, so that a disturbance seldom meets one side alone
START_S, END_S = 120.0, 10.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """What requests look like, how long each measurement lasts, and the servers' torch threads."""

    seconds: float = 10.0
    prompt: tuple[int, int] = (32, 128)
    tokens: tuple[int, int] = (8, 64)
    vocab: int = 1024
    pages: int = 1536
    threads: int = 1

    def requests(self, seed: int) -> Iterator[dict[str, Any]]:
        """An endless stream of request bodies, the same for the same seed."""
        draw = random.Random(seed)
        while True:
            ids = [draw.randrange(2, self.vocab) for _ in range(draw.randint(*self.prompt))]
            count = draw.randint(*self.tokens)
            yield {"model": "generate", "prompt": ids, "max_tokens": count, "temperature": 0}


@dataclass(slots=True)
class Seen:
    """What the client saw of one measurement."""

    seconds: float
    latencies_s: list[float]
    tokens: int
    mean_batch: float
    failed: int = 0

    def __add__(self, other: Seen) -> Seen:
        """Both measurements as one."""
        tokens, batch = self.tokens + other.tokens, self.mean_batch * self.tokens
        return Seen(
            self.seconds + other.seconds,
            self.latencies_s + other.latencies_s,
            tokens,
            (batch + other.mean_batch * other.tokens) / max(1, tokens),
            self.failed + other.failed,
        )

    @property
    def per_s(self) -> float:
        return len(self.latencies_s) / self.seconds

    def row(self) -> dict[str, float]:
        """The numbers of a table."""
        ordered = sorted(self.latencies_s) or [0.0]
        return {
            "requests_per_s": round(self.per_s, 2),
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "p50_ms": round(percentile(ordered, 50) * 1e3, 1),
            "p99_ms": round(percentile(ordered, 99) * 1e3, 1),
            "mean_batch": round(self.mean_batch, 2),
            "requests": len(self.latencies_s),
            "failed": self.failed,
        }


def missing(name: str) -> str | None:
    """Why a server cannot be measured here; None where it can."""
    if name == OURS:
        return None
    module = PEERS[name][0]
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        found = None
    return None if found is not None else f"{module} is not installed"


@dataclass(frozen=True, slots=True)
class Served:
    """A server that runs: the address of its endpoint, and the session of its processes."""

    url: str
    session: int

    def signal(self, number: int) -> None:
        """Send a signal to each of its processes."""
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended meanwhile
                # Behind the name in brackets: state, parent, group, session.
                if int(entry.read_text().rpartition(")")[2].split()[3]) == self.session:
                    os.kill(int(entry.parent.name), number)

    @contextmanager
    def alone(self, others: list[Served]) -> Iterator[None]:
        """Everybody else is stopped."""
        for other in others:
            other.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for other in others:
                other.signal(signal.SIGCONT)


@contextmanager
def serving(name: str, traffic: Traffic) -> Iterator[Served]:
    """The server `name` on a free port of loopback, warm.

    Raises: RuntimeError: it ended or did not answer in time; with the end of what it printed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if name == OURS:
        command = ["examples/serve.py", "--port", str(port), "--pages", str(traffic.pages)]
    else:
        script = f"benchmarks/generating/{PEERS[name][1]}"
        command = [script, str(port), str(traffic.pages), str(traffic.threads)]
    env = os.environ | {"OMP_NUM_THREADS": str(traffic.threads), "RAY_USAGE_STATS_ENABLED": "0"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with tempfile.TemporaryFile("w+") as printed:
        server = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=env,
            start_new_session=True,
            stdout=printed,
            stderr=printed,
        )
        try:
            why = _why_not(server, url, next(traffic.requests(0)))
            if why is not None:
                printed.seek(0)
                raise RuntimeError(f"{why}: {printed.read()[-600:]}")
            yield Served(url, server.pid)
        finally:
            _end(server)


def _why_not(server: subprocess.Popen[bytes], url: str, body: dict[str, Any]) -> str | None:
    """None once the server answers `body`, else why it did not."""
    until, why = time.monotonic() + START_S, "it did not listen"
    while time.monotonic() < until:
        if server.poll() is not None:
            return f"the server ended with {server.returncode}"
        try:
            answer = httpx.post(url, json=body, timeout=60)
        except httpx.HTTPError as error:
            why = repr(error)
        else:
            if answer.status_code == 200:
                return None
            why = f"it answered {answer.status_code}: {answer.text[:200]}"
        time.sleep(0.2)
    return f"the server was not ready after {START_S:.0f} s, {why}"


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ask the server to end; after a while end its whole group, since workers may outlive it."""
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


class Client:
    """Sends requests and keeps what came back."""

    def __init__(self, served: Served, traffic: Traffic) -> None:
        self.served, self.url, self.traffic = served, served.url, traffic
        self.ours = False
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=1024)
        self.http = httpx.AsyncClient(timeout=120, limits=limits)
        self._begin(0.0)

    def _begin(self, at: float) -> None:
        self.begin = at
        self.latencies: list[float] = []
        self.tokens, self.failed, self.batches = 0, 0, 0.0

    async def one(self, body: dict[str, Any], due: float) -> None:
        """One request, due at `due`."""
        answer = await self.http.post(self.url, json=body)
        now = time.perf_counter()
        if answer.status_code != 200:
            self.failed += 1
            return
        given = answer.json()
        if now < self.begin:
            return
        self.latencies.append(now - due)
        self.ours = "usage" in given
        self.tokens += given["usage"]["completion_tokens"] if self.ours else given["tokens"]
        self.batches += 0.0 if self.ours else 1.0 / given["batch"]

    async def saturated(self, warm_s: float) -> Seen:
        """Sixty-four clients that ask again at once."""
        bodies = self.traffic.requests(1)
        until = time.perf_counter() + warm_s + self.traffic.seconds
        self._begin(until - self.traffic.seconds)

        async def client() -> None:
            while (now := time.perf_counter()) < until:
                await self.one(next(bodies), now)

        clients = [asyncio.ensure_future(client()) for _ in range(CLIENTS)]
        await asyncio.sleep(warm_s)
        before = await self._lanes()
        await asyncio.sleep(self.traffic.seconds)
        seen = self._seen(time.perf_counter() - self.begin, before, await self._lanes())
        await asyncio.gather(*clients)
        return seen

    async def offered(self, rate: float, seed: int) -> Seen:
        """Poisson arrivals of `rate` a second for its share of the seconds; all of them are waited for."""
        draw, bodies = random.Random(seed), self.traffic.requests(seed)
        self._begin(0.0)
        before = await self._lanes()
        start = due = time.perf_counter()
        until, tasks = start + self.traffic.seconds / TURNS, []
        while (due := due + draw.expovariate(rate)) < until:
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.ensure_future(self.one(next(bodies), due)))
        await asyncio.gather(*tasks)
        return self._seen(time.perf_counter() - start, before, await self._lanes())

    def _seen(self, seconds: float, before: tuple[float, float], after: tuple[float, float]) -> Seen:
        batches, calls = after[0] - before[0], after[1] - before[1]
        if not batches:
            batches, calls = self.batches, float(len(self.latencies))
        return Seen(seconds, list(self.latencies), self.tokens, calls / max(batches, 1e-9), self.failed)

    async def _lanes(self) -> tuple[float, float]:
        """Batches and calls that LayerZero's batchers have counted so far; nothing for the others."""
        answer = await self.http.get(self.url.replace("/v1/completions", "/metrics"))
        if answer.status_code != 200:
            return 0.0, 0.0
        found = dict(
            re.findall(r"^(layerzero_batcher_batch_size_(?:count|sum))(?:{[^}]*})? (\S+)", answer.text, re.M)
        )
        return (
            float(found.get("layerzero_batcher_batch_size_count", 0)),
            float(found.get("layerzero_batcher_batch_size_sum", 0)),
        )


def compare(traffic: Traffic) -> dict[str, Any]:
    """Each peer beside LayerZero at shares of what the slower of the two can do, by the same arrivals."""
    return {name: beside(name, traffic) for name in PEERS}


def beside(name: str, traffic: Traffic) -> dict[str, Any]:
    """Both servers are up; they take turns, so that a disturbance meets neither alone."""
    if (why := missing(name)) is not None:
        return {"refused": why}
    try:
        with serving(OURS, traffic) as ours, serving(name, traffic) as theirs:
            return asyncio.run(_turns({OURS: ours, name: theirs}, traffic))
    except RuntimeError as error:
        return {"refused": str(error)}


async def _turns(servers: dict[str, Served], traffic: Traffic) -> dict[str, Any]:
    async with AsyncExitStack() as opened:
        clients = {side: Client(served, traffic) for side, served in servers.items()}
        for client in clients.values():
            await opened.enter_async_context(client.http)
        saturation: dict[str, dict[str, float]] = {}
        for side, client in clients.items():
            with client.served.alone([other for name, other in servers.items() if name != side]):
                saturation[side] = (await client.saturated(min(2.0, traffic.seconds))).row()
        slower = min(row["requests_per_s"] for row in saturation.values())
        if not slower:
            raise RuntimeError(f"no request ended within {traffic.seconds:g} s: {saturation}")
        loads: dict[str, dict[str, Any]] = {}
        for number, share in enumerate(LOADS):
            seen: dict[str, Seen] = {}
            for turn in range(TURNS):
                for side, client in clients.items():
                    with client.served.alone([other for name, other in servers.items() if name != side]):
                        part = await client.offered(share * slower, 10 + number + len(LOADS) * turn)
                    seen[side] = seen[side] + part if side in seen else part
            loads[f"{share:.0%}"] = {side: whole.row() for side, whole in seen.items()}
    ahead = all(
        rows[OURS][key] < row[key]
        for rows in loads.values()
        for side, row in rows.items()
        if side != OURS
        for key in ("p50_ms", "p99_ms")
    )
    return {"saturation": saturation, "of": round(slower, 2), "loads": loads, "ahead_at_each": ahead}

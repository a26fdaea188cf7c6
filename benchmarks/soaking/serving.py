"""The example server as a process that dies, and streaming clients that come and go."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.soaking.ends import ANSWERED, CANCELLED, Ends

ROOT = Path(__file__).resolve().parents[2]
PAGES, MOST = 96, 5  # of the server; MOST requests at once, so that some are refused
LULL_S = 20.0  # between two times at which the clients hold, and the server's books are compared with theirs
PROMPT = "And Jesus said unto them,"
SEEDS = 12
TOKENS = 24
PROGRESS = 4
PATIENCE_S = 120.0  # of a client: the first text of a cold server waits for its kernels to be compiled
LEAVES = 0.2  # of the clients go in the middle of their answer
REFUSED, BAD = "refused: 429", "refused: 400"
COUNTED = ("done", "cancelled", "failed", "rejected")


class ServerError(httpx.TransportError):
    """An answer that ended with an error in its own words, or without its end."""


@dataclass
class Life:
    """One process of the server, and what this side knows of the requests that it took."""

    process: subprocess.Popen[bytes]
    url: str
    took: int = 0  # requests that it has answered with a status
    unsure: int = 0  # requests that ended before that
    done: int = 0
    rejected: int = 0
    open: int = 0
    files: list[int] = field(default_factory=list)


class Serving:
    """Streaming clients of one server after another."""

    weight = 1.0

    def __init__(self, folder: Path, began_s: float) -> None:
        self.ends = Ends("server", began_s)
        self.running = True
        self.life: Life | None = None
        self.lives = self.books = 0
        self.wrong: list[str] = []
        self.left: Counter[str] = Counter()
        self._folder = folder
        self._wanted: dict[int, str] = {}
        self._serves, self._holding = asyncio.Event(), False
        self._answers = 0

    async def run(self) -> None:
        """Clients until `running` is taken back; the last server ends by SIGTERM."""
        supervisor = asyncio.ensure_future(self._supervise())
        clients = asyncio.ensure_future(self._clients())
        try:
            await asyncio.wait({supervisor, clients}, return_when=asyncio.FIRST_COMPLETED)
            if supervisor.done():  # it has no end but an error, and without it clients wait for ever
                supervisor.result()
            clients.result()
        finally:
            supervisor.cancel()
            clients.cancel()
        if self.life is not None:
            self.life.process.send_signal(signal.SIGTERM)
            self.left["exit status of the last"] = await asyncio.to_thread(self.life.process.wait, 60)

    async def _clients(self) -> None:
        await asyncio.gather(self._bookkeeper(), *(self._client(c) for c in range(MOST + 1)))
        await self._compare_books()

    # -- the server -------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        while True:
            life = await asyncio.to_thread(self._start)
            self.lives += 1
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                while not await _serves(client, life):  # noqa: ASYNC110  another process
                    await asyncio.sleep(0.2)
                if not self._wanted:
                    for seed in range(SEEDS):
                        self._wanted[seed] = await self._text(client, life, seed)
            self.life, self._answers = life, 0
            self._serves.set()
            await asyncio.to_thread(life.process.wait)
            self._serves.clear()
            self.life = None

    def _start(self) -> Life:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            sys.executable, str(ROOT / "examples" / "serve.py"), "--port", str(port), "--pages", str(PAGES),
            "--max-requests", str(MOST), "--strict",
        ]  # fmt: skip
        with (self._folder / f"server-{self.lives}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        return Life(process, f"http://127.0.0.1:{port}")

    # -- clients ----------------------------------------------------------------------------------------

    async def _client(self, number: int) -> None:
        draw = random.Random(200 + number)
        while self.running:
            await self._serves.wait()
            life = self.life
            if life is None or self._holding:
                await asyncio.sleep(0.05)
                continue
            await self._request(life, draw)
            await asyncio.sleep(draw.uniform(0, 0.1))

    async def _request(self, life: Life, draw: random.Random) -> None:
        seed = draw.randrange(SEEDS)
        leaves = draw.randrange(1, TOKENS // 2) if draw.random() < LEAVES else None
        bad = draw.random() < 0.02

        async def text() -> str:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                return await self._text(client, life, seed, leaves, "none" if bad else "generate")

        life.open += 1
        how = await self.ends.call(text(), lambda got: got in (self._wanted[seed], REFUSED, BAD))
        life.open -= 1
        if how == ANSWERED:
            self._answers += 1

    async def _text(
        self,
        client: httpx.AsyncClient,
        life: Life,
        seed: int,
        leaves: int | None = None,
        model: str = "generate",
    ) -> str:
        """The text of a stream; after `leaves` pieces its client goes.

        Raises: ServerError: it has no end. httpx.TransportError. CancelledError: the client has gone.
        """
        asked = {
            "model": model, "prompt": PROMPT[: 8 + seed], "max_tokens": TOKENS, "temperature": 0.9,
            "seed": seed, "stream": True,
        }  # fmt: skip
        pieces: list[str] = []
        status = 0
        try:
            async with client.stream("POST", f"{life.url}/v1/completions", json=asked) as response:
                status = response.status_code
                if status in (400, 404):
                    return BAD
                life.took += 1
                if status == 429:
                    life.rejected += 1
                    return REFUSED
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        life.done += 1
                        return "".join(pieces)
                    if line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise ServerError(event["error"]["message"])
                        pieces.append(event["choices"][0]["text"])
                        if leaves is not None and len(pieces) >= leaves:
                            raise asyncio.CancelledError
        except BaseException:
            life.unsure += not status
            raise
        raise ServerError("the stream has no end")

    # -- books ------------------------------------------------------------------------------------------

    async def _bookkeeper(self) -> None:
        while self.running:
            await asyncio.sleep(LULL_S)
            await self._compare_books()

    async def _compare_books(self) -> None:
        """Hold the clients until nothing is under way, and compare the server's counters with theirs."""
        life = self.life
        if life is None:
            return
        self._holding = True
        try:
            async with httpx.AsyncClient(timeout=60) as client:
                for _ in range(200):
                    await asyncio.sleep(0.1)
                    health = (await client.get(f"{life.url}/health")).json()
                    if not life.open and not health["requests"] and health["pages_free"] == health["pages"]:
                        break
                counted = _metrics((await client.get(f"{life.url}/metrics")).text)
        except (httpx.TransportError, KeyError, ValueError):
            return  # it was killed in the middle: its books have gone with it
        finally:
            self._holding = False
        self.books += 1
        self.wrong += [f"life {self.lives}: {each}" for each in differences(life, health, counted)]
        proc = Path(f"/proc/{life.process.pid}")
        life.files.append(len(os.listdir(proc / "fd")))
        self.left["files of a server grew"] = max(
            self.left["files of a server grew"], life.files[-1] - life.files[0]
        )

    # -- faults -----------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether this server has answered."""
        return self.life is not None and self._answers >= PROGRESS and not self._holding

    def strike(self, draw: random.Random) -> str:
        """SIGKILL of the server."""
        assert self.life is not None
        self._serves.clear()
        self.life.process.kill()
        return "server killed"

    def checks(self) -> dict[str, bool]:
        """What has to hold once nothing is under way."""
        return {
            **self.ends.checks(),
            "server: its books are those of its clients": not self.wrong and self.books > 0,
            "server: the last one ended by itself with status 0": self.left["exit status of the last"] == 0,
            "server: open files do not grow": self.left["files of a server grew"] <= 2,
            "server: clients went": self.ends.ended[CANCELLED] > 0,
        }

    def record(self) -> dict[str, Any]:
        """What is written down."""
        return {
            **self.ends.record(), "lives": self.lives, "books compared": self.books,
            "books that differ": self.wrong, **self.left,
        }  # fmt: skip


def differences(life: Life, health: Mapping[str, Any], counted: Mapping[str, float]) -> list[str]:
    """Where an idle server's /health and /metrics are not what its clients know of it."""
    ended = Counter({how: int(counted.get(f'requests_total{{outcome="{how}"}}', 0)) for how in COUNTED})
    problems = {
        "pages are held": health["pages"] - health["pages_free"],
        "requests are under way": health["requests"],
        "clients wait": life.open,
        "rejected, and no client knows": abs(ended["rejected"] - life.rejected),
        "done, fewer than its clients know": max(0, life.done - ended["done"]),
        "failed": ended["failed"],
        "requests are missing": max(0, life.took - ended.total()),
        "requests are too many": max(0, ended.total() - life.took - life.unsure),
        "batched calls have no end": int(sum(n for k, n in counted.items() if "batcher_in_flight{" in k)),
    }
    return [f"{count} {what}" for what, count in problems.items() if count]


async def _serves(client: httpx.AsyncClient, life: Life) -> bool:
    """Whether a server takes requests.

    Raises: RuntimeError: its process has ended.
    """
    if life.process.poll() is not None:
        raise RuntimeError(f"the server ended with status {life.process.returncode} before it served")
    try:
        return (await client.get(f"{life.url}/ready")).status_code == 200
    except httpx.TransportError:
        return False


def _metrics(text: str) -> dict[str, float]:
    """Every sample of /metrics by its line's name and labels."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}

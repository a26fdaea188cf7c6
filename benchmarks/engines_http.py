"""A server behind HTTP beside vLLM's on one GPU: the same client, the same requests, equal loads.

    python benchmarks/engines_http.py --vllm-python PYTHONPATH --out FOLDER [--budget-s 560]
    python benchmarks/engines_http.py --rehearse    # tiny models on the CPU; our server is its own peer

Llama 3 8B's shape, bfloat16, random weights, greedy, texts streamed. Both servers are processes of their own
and hold pages for as many tokens; ours runs as a user starts it, vLLM's is its OpenAI server with its
defaults. Only one gets requests at a time. One asyncio client sends Poisson arrivals: prompts of 32 to 1,024
token ids, answers of 16 to 256 tokens, the same for both, at shares of what vLLM answers in a closed loop.
The sides take turns in rounds, and rounds are put together. A time to the first token counts from when the
request was due; a time between tokens is between two events of a request that brought any. Tokens/s are those
that came while requests arrived, but for the first `--warm-s`. The record is written after each load; what
fails is named in it, and nothing waits longer than it says.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "engines_http_h200.json"
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from generating.folder import LLAMA_8B, TINY, write_folder  # noqa: E402
from generating.servers import MODEL, Server, free_port, our_command, peer_command  # noqa: E402
from generating.streams import Client, Reply, Shape  # noqa: E402
from harness import environment, percentile, write  # noqa: E402

OURS, PEER = "LayerZero", "vLLM"
NEEDS = {"tokens_per_s": 0.95, "first_token_p99": 1.1, "between_p99": 1.1}


def described(replies: list[Reply], warm_s: float, seconds: float, start: float) -> dict[str, Any]:
    """What one measurement saw, with its samples."""
    begin, end = start + warm_s, start + seconds
    errors: dict[str, int] = {}
    for reply in replies:
        if reply.error:
            errors[reply.error] = errors.get(reply.error, 0) + 1
    good = [reply for reply in replies if reply.times]
    counted = [reply for reply in good if reply.due >= begin]
    tokens = sum(
        n for reply in good for at, n in zip(reply.times, reply.counts, strict=True) if begin <= at < end
    )
    between = [b - a for reply in counted for a, b in zip(reply.times, reply.times[1:], strict=False)]
    return {
        "seconds": seconds - warm_s, "tokens": tokens, "requests": len(replies), "errors": errors,
        "ended": sum(begin <= r.times[-1] < end for r in good if not r.error),
        "asked_tokens": sum(reply.asked for reply in replies if reply.due >= begin),
        "first": [reply.times[0] - reply.due for reply in counted], "between": between,
        "whole": [reply.times[-1] - reply.due for reply in counted if not reply.error],
    }  # fmt: skip


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Rounds of one side at one load as one row."""
    seconds = sum(part["seconds"] for part in parts)

    def ms(name: str) -> dict[str, float]:
        ordered = sorted(value for part in parts for value in part[name])
        return {f"p{p}_ms": round(1e3 * percentile(ordered, p), 2) for p in (50, 99)} if ordered else {}

    errors: dict[str, int] = {}
    for part in parts:
        for error, count in part["errors"].items():
            errors[error] = errors.get(error, 0) + count
    return {
        "tokens_per_s": round(sum(part["tokens"] for part in parts) / seconds, 1),
        "offered_tokens_per_s": round(sum(part["asked_tokens"] for part in parts) / seconds, 1),
        "requests_per_s": round(sum(part["ended"] for part in parts) / seconds, 2),
        "first_token": ms("first"), "between": ms("between"), "whole": ms("whole"),
        "requests": sum(part["requests"] for part in parts), "errors": errors,
        "rounds": [round(part["tokens"] / part["seconds"], 1) for part in parts],
    }  # fmt: skip


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Ours over the peer's, and whether that is what is needed."""
    if not theirs["tokens_per_s"] or not theirs["between"] or not ours["between"]:
        return {}
    found = {"tokens_per_s": round(ours["tokens_per_s"] / theirs["tokens_per_s"], 3)}
    for name in ("first_token", "between"):
        for p in ("p50", "p99"):
            found[f"{name}_{p}"] = round(ours[name][f"{p}_ms"] / theirs[name][f"{p}_ms"], 3)
    met = found["tokens_per_s"] >= NEEDS["tokens_per_s"] and all(
        found[name] <= most for name, most in NEEDS.items() if name != "tokens_per_s"
    )
    return found | {"met": met and not ours["errors"]}


class Run:
    """One run: its servers, its clients, its record."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.until = time.monotonic() + options.budget_s
        out: Path | None = options.out or (None if options.rehearse else RESULTS)
        self.out = out / RESULTS.name if out is not None and out.suffix != ".json" else out
        self.shape = Shape(
            options.prompts, options.answers, (TINY if options.rehearse else LLAMA_8B)["vocab_size"]
        )
        packages = ("layerzero-runtime", "torch", "uvicorn", "uvloop", "httptools", "flashinfer-python")
        self.found: dict[str, Any] = {
            "environment": environment(packages), "peer": options.peer_name, "needs": NEEDS,
            "settings": {
                name: getattr(options, name)
                for name in ("tokens", "clients", "seconds", "warm_s", "rounds", "prompts", "answers", "seed")
            },
            "commands": {}, "start_s": {}, "closed": {}, "loads": {}, "errors": {}, "left_out": [],
        }  # fmt: skip
        self.servers: dict[str, Server] = {}

    def save(self) -> None:
        """Write what was found so far."""
        self.found["took_s"] = round(self.options.budget_s - (self.until - time.monotonic()), 1)
        if self.out is not None:
            write(self.out, self.found)

    def lose(self, side: str, error: Exception) -> None:
        """A side is out of the run: its error by name."""
        self.found["errors"][side] = f"{type(error).__name__}: {error}"[:2000]
        print(f"{side}: {self.found['errors'][side]}", file=sys.stderr, flush=True)
        self.servers.pop(side).end()
        self.save()

    # -- the start -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """One server after the other, each with all cores; a side that is not ready in time is out."""
        write_folder(self.folder / MODEL, TINY if self.options.rehearse else LLAMA_8B)
        for side, make in ((OURS, our_command), (PEER, peer_command)):
            if side == PEER and self.options.no_peer:
                continue
            port = free_port()
            command = make(self.options, self.folder, port)
            self.found["commands"][side] = [word.replace(str(ROOT), ".") for word in command[0]]
            self.servers[side] = Server(side, command, port, self.folder / f"{side}.log")
            await self._ready(side)
        self.save()

    async def _ready(self, side: str) -> None:
        server = self.servers[side]
        try:
            await self._answering(server)
            self.found["start_s"][side] = {"answers": round(time.monotonic() - server.began, 1)}
            print(f"{side} answers after {self.found['start_s'][side]['answers']} s", flush=True)
            await self._settled(server)
            self.found["start_s"][side]["quiet"] = round(time.monotonic() - server.began, 1)
        except (RuntimeError, TimeoutError) as error:
            self.lose(side, error)

    async def _answering(self, server: Server) -> None:
        """Wait until it answers a request."""
        client = Client(server.port, MODEL, self.shape)
        while True:
            server.check()
            if await asyncio.to_thread(server.get, "/health") is not None:
                replies = await client.closed(1, 0.01, 1, 60.0)
                if replies and not replies[0].error:
                    return
                if replies and not replies[0].error.startswith("not answered"):
                    raise RuntimeError(f"{server.name} answered {replies[0].error}: {server.tail()}")
            if time.monotonic() - server.began > self.options.start_s:
                raise TimeoutError(f"no answer after {self.options.start_s:g} s: {server.tail()}")
            await asyncio.sleep(0.3)

    async def _settled(self, server: Server) -> None:
        """Small requests until no kernel was on its way for two seconds, or the start's time is over."""
        client, quiet_since = Client(server.port, MODEL, self.shape), time.monotonic()
        while time.monotonic() - quiet_since < 2.0 and time.monotonic() - server.began < self.options.start_s:
            server.check()
            await client.closed(4, 0.3, 2, 30.0)
            if await asyncio.to_thread(lambda: server.busy):
                quiet_since = time.monotonic()

    # -- the loads -------------------------------------------------------------------------------------------

    def fits(self, name: str, seconds: float) -> bool:
        """Whether the budget has time for a measurement; what it has none for is named."""
        if time.monotonic() + seconds <= self.until:
            return True
        self.found["left_out"].append(name)
        return False

    async def measured(self, side: str, name: str, rate: float, seed: int) -> dict[str, Any] | None:
        """One side at one load, once: by arrivals, or by a closed loop where `rate` is 0."""
        options, server = self.options, self.servers[side]
        client = Client(server.port, MODEL, self.shape)
        warm_s, seconds = options.warm_s, options.warm_s + options.seconds
        if not self.fits(f"{side}, {name}", seconds + options.drain_s):
            return None
        gc.collect()
        gc.disable()  # the client's own collections stamp answers late
        start, cpu = time.perf_counter(), time.process_time()
        if rate:
            replies = await client.poisson(rate, seconds, seed, options.drain_s)
        else:
            replies = await client.closed(options.clients, seconds, seed, options.drain_s)
        took = time.perf_counter() - start
        gc.enable()
        part = described(replies, warm_s, seconds, start)
        part["client_cpu"] = round((time.process_time() - cpu) / took, 3)
        try:
            server.check()
        except RuntimeError as error:
            self.lose(side, error)
        return part

    async def saturations(self) -> float:
        """Each side in a closed loop, twice, of which the first warms up; requests/s of the peer's."""
        for side in list(self.servers):
            for turn, seed in enumerate((3, 4)):
                if side in self.servers:
                    part = await self.measured(side, f"closed {turn}", 0.0, self.options.seed + seed)
                    if part is not None and turn:
                        self.found["closed"][side] = joined([part]) | {"client_cpu": part["client_cpu"]}
            print(
                f"{side}, closed loop of {self.options.clients}: {self.found['closed'].get(side)}", flush=True
            )
            self.save()
        closed = self.found["closed"]
        row = closed.get(PEER) or closed.get(OURS) or {}
        self.found["saturation"] = {
            "of": PEER if PEER in closed else OURS,
            "tokens_per_s": row.get("tokens_per_s"),
        }
        mean = sum(self.options.answers) / 2
        return float(row.get("tokens_per_s", 0.0)) / mean

    async def loads(self, saturation: float) -> None:
        """Every share of the saturation, round by round, the sides in turns."""
        if not saturation:
            self.found["errors"]["loads"] = "no saturation was measured"
            return
        for share in self.options.shares:
            name, rate = f"{share:.0%}", share * saturation
            parts: dict[str, list[dict[str, Any]]] = {}
            for turn in range(self.options.rounds):
                sides = list(self.servers)
                for side in sides if turn % 2 else reversed(sides):
                    seed = self.options.seed + 100 * turn + round(1000 * share)
                    part = await self.measured(side, f"{name}, round {turn}", rate, seed)
                    if part is not None:
                        parts.setdefault(side, []).append(part)
                        row: dict[str, Any] = self.found["loads"].setdefault(
                            name, {"requests_per_s": round(rate, 3)}
                        )
                        row[side] = joined(parts[side]) | {"client_cpu": part["client_cpu"]}
                        if OURS in row and PEER in row:
                            row["over_peer"] = compared(row[OURS], row[PEER])
                        self.save()
            row = self.found["loads"].get(name, {})
            for side in (OURS, PEER):
                print(f"{name}, {side}: {row.get(side)}", flush=True)
            print(f"{name}, over the peer: {row.get('over_peer')}", flush=True)

    async def everything(self) -> None:
        """Start, saturate, load; the servers end with it."""
        try:
            await self.start()
            if OURS in self.servers or PEER in self.servers:
                await self.loads(await self.saturations())
        finally:
            for side, server in self.servers.items():
                self.found.setdefault("printed", {})[side] = server.tail()[-400:]
                server.end()
            self.save()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""

    def span(text: str) -> tuple[int, int]:
        low, high = text.split("-")
        return int(low), int(high)

    def shares(text: str) -> tuple[float, ...]:
        return tuple(float(share) for share in text.split(","))

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vllm-python", default=None, help="PYTHONPATH of an environment that has vLLM")
    parser.add_argument("--vllm-flags", default="", help="more flags of vLLM's server")
    parser.add_argument("--our-flags", default="", help="more flags of our server")
    parser.add_argument("--peer-command", default="", help="another peer's command; PORT is its port")
    parser.add_argument("--tokens", type=int, default=160_000, help="that each side has pages for")
    parser.add_argument("--clients", type=int, default=256, help="of the closed loop")
    parser.add_argument("--prompts", type=span, default=(32, 1024))
    parser.add_argument("--answers", type=span, default=(16, 256))
    parser.add_argument("--seconds", type=float, default=7.0, help="of each measurement")
    parser.add_argument("--warm-s", type=float, default=1.5, help="at its begin that do not count")
    parser.add_argument("--drain-s", type=float, default=8.0, help="for answers after the last arrival")
    parser.add_argument("--start-s", type=float, default=150.0, help="the most that a start may take")
    parser.add_argument("--shares", type=shares, default=(0.25, 0.5, 0.75, 0.9), help="of the saturation")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget-s", type=float, default=480.0, help="after which no measurement begins")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU, our server twice")
    parser.add_argument("--out", type=Path, default=None, help="a folder, or a JSON file")
    given = parser.parse_args(arguments)
    given.device = "cpu" if given.rehearse else "cuda"
    given.no_peer = not (given.rehearse or given.vllm_python or given.peer_command)
    given.peer_name = given.peer_command or ("our own server" if given.rehearse else "vLLM's OpenAI server")
    if given.rehearse:
        given.tokens, given.clients, given.prompts, given.answers = 16_384, 4, (4, 24), (4, 12)
        given.seconds, given.warm_s, given.drain_s, given.rounds = 0.5, 0.2, 5.0, 2
    return given


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write after each load; 1 where a side failed or a load was left out."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        run = Run(options, Path(folder))
        try:
            import uvloop
        except ImportError:
            asyncio.run(run.everything())
        else:
            uvloop.run(run.everything())
    print(
        "took",
        run.found["took_s"],
        "start",
        run.found["start_s"],
        "left out",
        run.found["left_out"],
        flush=True,
    )
    print("errors", run.found["errors"], flush=True)
    return int(bool(run.found["errors"] or run.found["left_out"]))


if __name__ == "__main__":
    sys.exit(main())

"""Devices of a Ray cluster on this machine: what a call, a control message and a failure cost.

    python benchmarks/cluster.py                       everything, about a minute
    python benchmarks/cluster.py channel ops           only these parts; the others' numbers stay in the file

The parts: `channel` a control message against a call of the same actor through Ray; `ops` ops inside
fleet.run-hosted code against the same ops here; `kill` SIGKILL of a device's process under 64 generations;
`node` the loss of a node of two. Failures for minutes: `benchmarks/chaos.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection as PipeConnection
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "token")  # before ray is imported
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
# Ray's workers yield to every other process; what runs here runs at its own priority, on both sides alike.
os.environ.setdefault("RAY_worker_niceness", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import layerzero as lz
from benchmarks.harness import environment, percentile, summary, write
from layerzero.actors.remote.pool import DevicePool

RESULTS = Path(__file__).parent / "results"
CALLERS = 64
TOKENS = 40
PARTS = ("channel", "ops", "kill", "node")


async def tokens(seed: int, n: int, pause: float, so_far: list[int] | None = None) -> AsyncIterator[int]:
    """A seeded generation of small ops; each token depends on all before it."""
    state = list(so_far or ())
    while len(state) < n:
        x = torch.full((1, 64), float(seed % 7 + sum(state) % 11 + 1))
        y = await lz.rms_norm(x)
        state.append(int((seed * 31 + sum(state) * 7 + len(state) + round(float(y.sum()))) % 997))
        yield state[-1]
        await asyncio.sleep(pause)


async def one_op(rounds: int, awaited: bool) -> list[float]:
    """Nanoseconds a call of a small op, one number a round of 200 calls."""
    x = torch.ones(4, 64)
    call = lz.rms_norm if awaited else lz.sync.rms_norm
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        for _ in range(200):
            if awaited:
                await call(x)
            else:
                call(x)
        taken.append((time.perf_counter_ns() - begin) / 200)
        await asyncio.sleep(0)
    return taken


async def mark(path: str, key: int) -> int:
    """Write the key down, in a file that outlives the process: one line is one execution."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, b"%d\n" % key)
    os.close(file)
    await asyncio.sleep(0.01)
    return key


class _Echo(asyncio.Protocol):
    """Bytes sent back as they come: the least that any message between two asyncio processes costs."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class _Waiting(asyncio.Protocol):
    """The other end of an echo."""

    answer: asyncio.Future[bytes]

    def data_received(self, data: bytes) -> None:
        self.answer.set_result(data)


def echo_server(path: str, ready: PipeConnection) -> None:
    """Serve echoes until killed; say through `ready` when that begins."""

    async def serve() -> None:
        await asyncio.get_running_loop().create_unix_server(_Echo, path)
        ready.send(path)
        await asyncio.Event().wait()

    asyncio.run(serve())


async def nothing() -> None:
    """What is left of a hosted call when it does nothing."""


async def channel(fleet: DevicePool, quick: bool) -> dict[str, Any]:
    """Round trips, interleaved: a frame on the side channel, a hosted call, a bare call of the actor."""
    device: Any = fleet.device()
    arms: dict[str, list[float]] = {
        name: [] for name in ("plain asyncio echo", "side channel", "fleet.run", "bare Ray call")
    }
    rounds = 20 if quick else 200
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as folder:
        spawning = multiprocessing.get_context("spawn")
        ours, theirs = spawning.Pipe(duplex=False)
        child = spawning.Process(target=echo_server, args=(f"{folder}/echo", theirs), daemon=True)
        child.start()
        theirs.close()  # so that a child that dies first is an EOFError here, not a wait without end
        path = await asyncio.to_thread(ours.recv)
        transport, echo = await loop.create_unix_connection(_Waiting, path)
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        for _ in range(20):
            echo.answer = loop.create_future()
            transport.write(b"x" * 20)
            await echo.answer
        arms["plain asyncio echo"].append((time.perf_counter_ns() - begin) / 20)
        begin = time.perf_counter_ns()
        for i in range(20):
            await device.control("ping", i)
        arms["side channel"].append((time.perf_counter_ns() - begin) / 20)
        begin = time.perf_counter_ns()
        await fleet.run(nothing)
        arms["fleet.run"].append(time.perf_counter_ns() - begin)
        begin = time.perf_counter_ns()
        await device.actor.heartbeat.remote()
        arms["bare Ray call"].append(time.perf_counter_ns() - begin)
    transport.close()
    child.terminate()
    result: dict[str, Any] = {
        f"{name} us": {"min": round(min(values) * 1e-3, 4), **summary(values, 1e-3)}
        for name, values in arms.items()
    }
    ratios = [
        ours / plain for ours, plain in zip(arms["side channel"], arms["plain asyncio echo"], strict=True)
    ]
    result["side channel over echo"] = summary(ratios)
    return result


async def ops(fleet: DevicePool, quick: bool) -> dict[str, Any]:
    """The same loop over an op, hosted in an actor and here, in turns."""
    result: dict[str, Any] = {}
    for awaited in (False, True):
        here: list[float] = []
        there: list[float] = []
        for _ in range(3 if quick else 15):
            here += await one_op(20, awaited)
            there += await fleet.run(one_op, 20, awaited)
        name = "awaited" if awaited else "sync"
        result[f"{name}, here us"] = summary(here, 1e-3)
        result[f"{name}, hosted us"] = summary(there, 1e-3)
        result[f"{name}, hosted over here"] = round(
            summary(there)["median"] / max(summary(here)["median"], 1e-9), 3
        )
    return result


async def under_load(
    fleet: DevicePool, strike: Callable[[], None], pause: float = 0.02, on: str | None = None
) -> dict[str, Any]:
    """64 seeded generations, one strike in the middle: failures, wrong tokens, gaps between tokens."""
    gaps: list[tuple[float, float]] = []
    failures: Counter[str] = Counter()
    halfway = asyncio.Event()

    async def caller(seed: int) -> list[int]:
        got: list[int] = []
        last = time.perf_counter()
        try:
            async for token in fleet.stream(tokens, seed, TOKENS, pause, resume=True, on=on):
                now = time.perf_counter()
                gaps.append((now, now - last))
                last = now
                got.append(token)
                if len(got) == TOKENS // 2:
                    halfway.set()
        except Exception as error:
            failures[type(error).__name__] += 1
        return got

    callers = [asyncio.ensure_future(caller(seed)) for seed in range(CALLERS)]
    await halfway.wait()
    struck = time.perf_counter()
    strike()
    results = await asyncio.gather(*callers)
    wrong = 0
    for seed, got in enumerate(results):
        wrong += got != [t async for t in tokens(seed, TOKENS, 0.0)]
    before = sorted(gap for at, gap in gaps if at < struck)
    after = sorted(gap for at, gap in gaps if at >= struck)
    # The first token that was made after the strike is the first after the longest silence.
    times = sorted(at for at, _ in gaps if at >= struck)
    silence = max(zip([struck, *times], times, strict=False), key=lambda pair: pair[1] - pair[0])
    return {
        "callers": CALLERS,
        "tokens each": TOKENS,
        "failures seen by clients": dict(failures),
        "generations with wrong tokens": wrong,
        "seconds until serving again": round(silence[1] - struck, 3),
        "gap between tokens before, p50 p99 ms": [round(percentile(before, p) * 1e3, 2) for p in (50, 99)],
        "gap between tokens after the strike, p50 p99 worst ms": [
            *(round(percentile(after, p) * 1e3, 2) for p in (50, 99)),
            round(after[-1] * 1e3, 2),
        ],
    }


async def kill(fleet: DevicePool, quick: bool) -> dict[str, Any]:
    """SIGKILL of a device's process."""
    return await under_load(fleet, lambda: os.kill(fleet.facts[0].pid, signal.SIGKILL))


async def node(quick: bool) -> dict[str, Any]:
    """SIGKILL of a node of two, with a device on each: its generations move to the other."""
    import ray
    from ray.cluster_utils import Cluster

    settings = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "num_gpus": 1, "_system_config": settings, "include_dashboard": False},
    )
    lost = cluster.add_node(num_cpus=2, num_gpus=1)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    try:
        async with lz.start(
            lz.Settings(cluster="auto", device="cpu", placement_timeout_s=20.0), scoped=True
        ) as runtime:
            fleet = runtime.device_pool
            away = [facts.name for facts in fleet.facts if facts.node == lost.node_id]
            result = await under_load(fleet, lambda: cluster.remove_node(lost, allow_graceful=False))
            return {"devices on the lost node": away, **result}
    finally:
        ray.shutdown()
        cluster.shutdown()


async def one_node(parts: list[str], quick: bool, keep: Callable[[str, dict[str, Any]], None]) -> None:
    """The parts that one node suffices for; `keep(name, part)` as soon as each is known."""
    import ray

    started = {"num_cpus": 2, "num_gpus": 1, "include_dashboard": False}
    ray.init("local", **started, log_to_driver=False, configure_logging=False)
    try:
        settings = lz.Settings(cluster="auto", device="cpu", max_restarts=1000)
        async with lz.start(settings) as runtime:
            for name, part in (("channel", channel), ("ops", ops), ("kill", kill)):
                if name in parts:
                    keep(name, await part(runtime.device_pool, quick))
    finally:
        ray.shutdown()


def main() -> int:
    """Run the parts that were asked for and write them, each with its environment, into one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--quick", action="store_true", help="just enough to see that everything runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "cluster_cpu.json")
    asked = parser.parse_args()
    parts = asked.parts or list(PARTS)
    record = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    where = environment(("ray", "msgspec", "layerzero-runtime"))

    def keep(name: str, part: dict[str, Any]) -> None:
        record[name] = {"environment": where, **part}
        write(asked.out, record)
        print(name, json.dumps(part, indent=1), flush=True)

    if set(parts) - {"node"}:
        asyncio.run(one_node(parts, asked.quick, keep))
    if "node" in parts:
        keep("node", asyncio.run(node(asked.quick)))
    print(asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The example server over a fleet, behind HTTP: tokens a second of all replicas over those of one.

The clients are processes of their own, several of them, so that none of them is what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from generating.folder import LLAMA_8B, TINY, write_folder
from generating.servers import MODEL, Server, free_port, our_command
from generating.streams import Client, Shape

SHAPE = Shape((32, 1024), (128, 256))
TINY_SHAPE = Shape((8, 16), (16, 32), 64)
READY_S = 150.0
CLIENTS = 128  # at once, for each replica
PROCESSES = 2  # of clients, for each replica
WARM_S, SECONDS, ROUNDS = 3.0, 10.0, 3


def ask(port: int, tiny: bool, clients: int, seconds: float, seed: int) -> dict[str, Any]:
    """In a process of its own: what so many clients got, each of which asks again at once."""
    client = Client(port, MODEL, TINY_SHAPE if tiny else SHAPE)
    begin = time.perf_counter()
    replies = asyncio.run(client.closed(clients, seconds, seed, 30.0))
    end = begin + seconds
    inside = [
        count
        for reply in replies
        for at, count in zip(reply.times, reply.counts, strict=True)
        if begin + WARM_S <= at < end
    ]
    gaps = [(b - a) * 1e3 for r in replies for a, b in zip(r.times, r.times[1:], strict=False)]
    return {
        "tokens": sum(inside), "requests": len(replies),
        "errors": sorted({reply.error for reply in replies if reply.error}),
        "between_ms": sorted(gaps),
    }  # fmt: skip


@contextmanager
def server(part: Any, replicas: int, folder: Path) -> Iterator[tuple[Server, float]]:
    """The example server with so many replicas, ready; and the seconds that this took.

    Raises: RuntimeError: it ended, or was not ready in time.
    """
    tiny = part.load.device == "cpu"
    tokens = CLIENTS * (16 if tiny else 1400)
    flags = f"--cluster local --replicas {replicas} {os.environ.get('SERVED_FLAGS', '')}"
    asked = argparse.Namespace(device=part.load.device, tokens=tokens, rehearse=tiny, our_flags=flags)
    port = free_port()
    one = Server(
        f"server of {replicas}",
        our_command(asked, folder, port),
        port,
        part.options.out / f"served.{replicas}.log",
    )
    try:
        while one.get("/ready") is None:
            one.check()
            if time.monotonic() - one.began > READY_S:
                raise RuntimeError(f"not ready after {READY_S} s: {one.tail()}")
            time.sleep(0.5)
        yield one, round(time.monotonic() - one.began, 1)
    finally:
        one.end()


async def served(part: Any) -> None:
    """One replica, then one on each GPU, with as many clients for each."""
    tiny = part.load.device == "cpu"
    seconds, rounds = (6.0, 1) if tiny else (SECONDS, ROUNDS)
    speeds: dict[int, float] = {}
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(PROCESSES * part.gpus, context) as processes,
    ):
        folder = Path(name)
        write_folder(folder / MODEL, TINY if tiny else LLAMA_8B)
        for replicas in (1, part.gpus):
            with server(part, replicas, folder) as (one, ready_s):
                found: list[float] = []
                said: list[dict[str, Any]] = []
                for turn in range(rounds + 1):  # one warms up
                    if turn > 1 and part.left_s < seconds + 10:
                        break
                    loop = asyncio.get_running_loop()
                    count = PROCESSES * replicas
                    clients = (4 if tiny else CLIENTS) * replicas // count
                    said = await asyncio.gather(
                        *(
                            loop.run_in_executor(
                                processes, ask, one.port, tiny, clients, seconds, turn * 100 + number
                            )
                            for number in range(count)
                        )
                    )
                    found += [sum(each["tokens"] for each in said) / (seconds - WARM_S)] if turn else []
                between = sorted(gap for each in said for gap in each["between_ms"])
                speeds[replicas] = statistics.median(found)
                part.row(
                    what="served", replicas=replicas, ready_s=ready_s,
                    tokens_per_s=round(speeds[replicas], 1), rounds=[round(each, 1) for each in found],
                    requests=sum(each["requests"] for each in said),
                    errors=sorted({error for each in said for error in each["errors"]}),
                    between_p50_ms=round(between[len(between) // 2], 2) if between else None,
                    between_p99_ms=round(between[len(between) * 99 // 100], 2) if between else None,
                )  # fmt: skip
    part.row(
        what="served over one", replicas=part.gpus, wanted={2: 1.9, 4: 3.7}.get(part.gpus),
        over_one=round(speeds[part.gpus] / speeds[1], 4),
    )  # fmt: skip

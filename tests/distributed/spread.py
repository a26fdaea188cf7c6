"""One rank of two, in a process on a host of its own, for `test_hosts.py`.

    spread.py NAMESPACE FOLDER RANK HOST PORT MOMENT

Rank 1's host booted a day before the other one, and its time of day is an hour ahead. A rank prints one JSON
line an epoch. In the first one rank 0 runs steps until the network fails: at any moment, or, where MOMENT is
"in a step", while rank 1 is in one. What the test tells the ranks is a file.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.hosting.cable import inside

NAMESPACE, FOLDER, RANK = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
STORE = (sys.argv[4], int(sys.argv[5]))
IN_A_STEP = sys.argv[6:] == ["in a step"]
DAY_S, HOUR_S = 86_400, 3600.0
TIMEOUT_S = 2.0
WIDE, OUT = 16, 4
_NEWTIME = 0x80


def other_clocks() -> None:
    """Go on in a child whose clocks differ: the system's since its start, and Python's time of day."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEWTIME):
        raise OSError(ctypes.get_errno(), "a time namespace cannot be made")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {DAY_S} 0\nboottime {DAY_S} 0\n")
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    real = time.time
    time.time = lambda: real() + HOUR_S
    time.time_ns = lambda: int(time.time() * 1e9)


async def epoch(number: int, enough: int) -> dict[str, Any]:
    """Join, and run steps: how many of rank 0's were right, wrong, and what ended them."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    import layerzero as lz

    whole = torch.linspace(-1, 1, OUT * WIDE).view(OUT, WIDE)
    own = whole.chunk(2, dim=1)[RANK].contiguous()
    said: dict[str, Any] = {"rank": RANK, "epoch": number, "right": 0, "wrong": 0, "error": ""}

    def step(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = lz.sync.linear(x.chunk(2, dim=1)[RANK].contiguous(), own)
        if RANK and IN_A_STEP and not number and float(x[0, 0]) == 4.0:
            (FOLDER / "stepping").touch()
            while not (FOLDER / "cut").exists():
                time.sleep(0.01)
        dist.all_reduce(out)
        return out

    store = TCPStore(*STORE, None, False, timedelta(seconds=30))
    # gloo has no end of its own for a peer that is cut off, but this time limit.
    group_store = PrefixStore(f"group-{number}", store)
    dist.init_process_group(
        "gloo", store=group_store, rank=RANK, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )
    try:
        async with lz.rank_group(
            2, rank=RANK, store=store, epoch=number, host=STORE[0], timeout_s=TIMEOUT_S
        ) as group:
            called = group.batched(step, name="step")
            if RANK:
                await group.follow()
            while not RANK and said["right"] < enough:
                x = torch.full((1, WIDE), float(said["right"] + 1))
                out = await called(said["right"], x)
                said["right" if torch.allclose(out, x @ whole.T, atol=1e-4) else "wrong"] += 1
                if said["right"] == 3 and not IN_A_STEP:
                    (FOLDER / "stepping").touch()
                await asyncio.sleep(0.005)
    except lz.LayerZeroError as error:
        said["error"] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return said


async def rejoin(number: int) -> dict[str, Any]:
    """What a process is told that joins an epoch in which a process was this rank."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    import layerzero as lz

    store = TCPStore(*STORE, None, False, timedelta(seconds=30))
    try:
        async with lz.rank_group(2, rank=RANK, store=store, epoch=number, host=STORE[0], timeout_s=TIMEOUT_S):
            return {"rank": RANK, "again": "joined"}
    except lz.LayerZeroError as error:
        return {"rank": RANK, "again": f"{type(error).__name__}: {error}"}


async def main() -> None:
    """Both epochs."""
    import layerzero as lz

    async with lz.start(lz.Settings(inference=True, perfdb=None, state_dir=None)):
        print(json.dumps(await epoch(0, 1_000_000)), flush=True)
        (FOLDER / f"ended-{RANK}").touch()
        while not (FOLDER / "mended").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if RANK:
            print(json.dumps(await rejoin(0)), flush=True)
        print(json.dumps(await epoch(1, 5)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if RANK:
        other_clocks()
    with inside(NAMESPACE):
        asyncio.run(main())

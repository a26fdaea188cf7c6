"""Print the files and functions of this library that an awaited call and a rank's step run through.

    python -m scripts.trace_path

Both are real runs on a CPU, warm, without the compiled path: 64 callers of `lz.attention` that meet in one
launch, and a step of a rank group of two on rank 1. The compiled path touches less.
"""

from __future__ import annotations

import os

os.environ["LAYERZERO_NATIVE"] = "off"  # before anything reads it

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

import layerzero as lz
from layerzero.actors.group.config import GroupConfig
from layerzero.actors.group.join import join_with
from layerzero.runtime import Runtime

ROOT = Path(__file__).resolve().parents[1]
CALLERS = 64
WARM_ROUNDS = 8
SETTINGS = lz.Settings(device="cpu", perfdb=None, warm="off")


class Trace:
    """The calls of this library's functions on every thread while it is `on`, by file and function."""

    def __init__(self) -> None:
        self.on = False
        self.calls = Counter[CodeType]()

    def install(self, *, new_threads: bool) -> None:
        """Watch this thread, and with `new_threads` every one that starts from now on."""
        if new_threads:
            threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def uninstall(self) -> None:
        """Watch no longer."""
        threading.setprofile(None)
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call":
            self.calls[frame.f_code] += 1

    def table(self) -> dict[str, list[str]]:
        """The functions by file."""
        files: dict[str, list[str]] = {}
        for code, count in self.calls.items():
            path = Path(os.path.realpath(code.co_filename))
            ours = any(path.is_relative_to(ROOT / folder) for folder in ("layerzero", "actors", "scheduler"))
            if ours and "<" not in code.co_name:  # no comprehension, which newer Pythons run in place
                files.setdefault(str(path.relative_to(ROOT)), []).append(f"{code.co_qualname} x{count}")
        return dict(sorted(files.items()))


def awaited_call() -> dict[str, list[str]]:
    """One round of 64 callers of `lz.attention`, after several."""
    trace = Trace()
    q, k, v = (torch.randn(1, 8, 32, 64) for _ in range(3))

    async def caller(barrier: asyncio.Barrier) -> None:
        for turn in range(WARM_ROUNDS + 2):  # in the last one, which is not watched, tasks end
            await barrier.wait()
            trace.on = turn == WARM_ROUNDS
            await lz.attention(q, k, v)

    async def main() -> None:
        async with lz.start(SETTINGS):
            barrier = asyncio.Barrier(CALLERS)
            await asyncio.gather(*(caller(barrier) for _ in range(CALLERS)))

    trace.install(new_threads=True)
    try:
        asyncio.run(main())
    finally:
        trace.uninstall()
    return trace.table()


def follower_step() -> dict[str, list[str]]:
    """Two steps of a rank group on rank 1, after several."""
    trace, store = Trace(), HashStore()
    weight = torch.randn(64, 64)

    def double(rows: Any) -> Any:
        return lz.sync.linear(rows, weight)

    async def rank(number: int, use: Callable[[Any, Any], Any]) -> None:
        with Runtime(SETTINGS) as runtime:
            async with join_with(runtime, GroupConfig(rank=number, ranks=2), store) as handle:
                await use(handle, handle.batched(double, name="step"))

    async def lead(_: Any, step: Any) -> None:
        for turn in range(WARM_ROUNDS + 2):
            trace.on = turn >= WARM_ROUNDS  # two, with the wait for the second
            await step("request", torch.randn(2, 64))
        trace.on = False

    async def follow(handle: Any, _: Any) -> None:
        handle._follow()  # on this thread: `follow` runs it on one of its own

    leader = threading.Thread(target=lambda: asyncio.run(rank(0, lead)))
    leader.start()
    trace.install(new_threads=False)
    try:
        asyncio.run(rank(1, follow))
    finally:
        trace.uninstall()
        leader.join()
    return trace.table()


def main() -> None:
    """Print both paths."""
    for title, path in (
        (f"await lz.attention among {CALLERS} callers", awaited_call()),
        ("a step on rank 1", follower_step()),
    ):
        functions = sum(map(len, path.values()))
        print(f"{title}: {len(path)} files, {functions} functions")
        for file, names in path.items():
            print(f"    {file}")
            for name in names:
                print(f"        {name}")


if __name__ == "__main__":
    main()

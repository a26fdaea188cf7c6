"""The rows of a comparison of two trees, measured with the package of one; for `scripts/compare_trees.py`.

    PYTHONPATH=TREE python benchmarks/tree_rows.py hot_path|demo

Only the public surface is used, so that one script measures trees of different ages. Each number is
microseconds of the process's CPU, which neighbours disturb less than wall time, a call or a request; the
lowest of several short runs. It prints JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero import native

RUNS, CALLERS, STEPS = 15, 64, 20
TREE = Path(lz.__file__).resolve().parents[1]
FRESH = """
import json, time, torch
begin = time.process_time()
import layerzero as lz
imported = time.process_time()
lz.sync.rms_norm(torch.ones(1, 64), torch.ones(64))
print(json.dumps([(imported - begin) * 1e6, (time.process_time() - imported) * 1e6]))
"""


def lowest(call: Callable[[], Any], count: int, runs: int = RUNS) -> float:
    """Microseconds a call of the best of several runs of `count` calls."""
    best = float("inf")
    for _ in range(runs):
        begin = time.process_time_ns()
        for _ in repeat(None, count):
            call()
        best = min(best, (time.process_time_ns() - begin) / count)
    return best * 1e-3


async def lowest_awaited(run: Callable[[], Awaitable[Any]], count: int, runs: int = RUNS) -> float:
    """The same of something to await."""
    best = float("inf")
    for _ in range(runs):
        begin = time.process_time_ns()
        await run()
        best = min(best, (time.process_time_ns() - begin) / count)
    return best * 1e-3


def blocking() -> dict[str, float]:
    """Rows b, c and f, and of a what stands before a kernel: a bound call without its guard."""
    q, k, v = (torch.randn(1, 8, 16, 64) for _ in range(3))
    x, weight, square = torch.randn(1, 64), torch.randn(64), torch.randn(64, 64)
    calls: dict[str, Callable[[], Any]] = {
        "b attention": lambda: lz.sync.attention(q, k, v),
        "b linear": lambda: lz.sync.linear(x, square),
        "b rms_norm": lambda: lz.sync.rms_norm(x, weight),
    }
    rows: dict[str, float] = {}
    for name, call in calls.items():
        lowest(call, 50)
        rows[name] = lowest(call, 500)
    bare = lz.bind("rms_norm", x, weight, guard=False)
    rows["a bound, unguarded"] = lowest(lambda: bare(x, weight), 1000)
    guarded = lz.bind("rms_norm", x, weight)
    rows["f bound, guarded"] = lowest(lambda: guarded(x, weight), 1000)
    fresh = iter(range(2, 10**6))
    rows["c a shape never seen"] = lowest(
        lambda: lz.sync.rms_norm(torch.empty(next(fresh), 8), weight[:8]), 50
    )
    return rows


async def awaited(runtime: lz.Runtime) -> dict[str, float]:
    """Row e: a lone caller, and one of 64 with rows of its own and with those of the last batch."""
    x, weight, square = torch.randn(1, 64), torch.randn(64), torch.randn(64, 64)

    async def caller(call: Callable[..., Any], row: Tensor, operand: Tensor, steps: int, again: bool) -> None:
        for _ in repeat(None, steps):
            out = await call(row, operand)
            if again:
                row = out

    rows: dict[str, float] = {}
    lone = lambda: caller(lz.rms_norm, x, weight, 300, False)  # noqa: E731
    await lone()
    rows["e lone"] = await lowest_awaited(lone, 300)
    starts: dict[str, Callable[..., Any]] = {"": asyncio.ensure_future, ", spawned": runtime.spawn}
    for how, start in starts.items():
        for name, call, operand, again in (
            ("rms_norm", lz.rms_norm, weight, True), ("linear", lz.linear, square, False),
        ):  # fmt: skip
            own = [torch.randn(1, 64) for _ in range(CALLERS)]

            async def crowd(start: Any = start, call: Any = call, operand: Any = operand, again: bool = again,
                            own: list[Tensor] = own) -> None:  # fmt: skip
                await asyncio.gather(*[start(caller(call, row, operand, STEPS, again)) for row in own])

            for _ in range(5):
                await crowd()
            rows[f"e one of 64, {name}{how}"] = await lowest_awaited(crowd, CALLERS * STEPS)
    return rows


def fresh_processes() -> dict[str, float]:
    """Row d: importing the package after torch, and the first call."""
    found = [
        json.loads(subprocess.run([sys.executable, "-c", FRESH], capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    return {"d import": min(one[0] for one in found), "d first call": min(one[1] for one in found)}


async def demo() -> dict[str, float]:
    """Rows b and d of `make demo`: every sentence its own request, all together; and batched by hand."""
    sys.path.insert(0, str(TREE / "examples"))
    from models.minilm import MiniLM, read_sentences

    texts, model = read_sentences(), MiniLM("cpu")

    async def request(text: str) -> Tensor:
        return await lz.to_host(await model.embed(text))

    async def together() -> None:
        await asyncio.gather(*map(request, texts))

    async def by_hand() -> None:
        model.embed_batch(texts, 32)

    for _ in range(2):
        await together()
    return {
        "(b) all together": await lowest_awaited(together, len(texts), 4),
        "(d) batched by hand": await lowest_awaited(by_hand, len(texts), 2),
    }


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    (native.HOT if hasattr(native, "HOT") else native.FAST_PATH).load()  # its name before and after
    rows: dict[str, float]
    if sys.argv[1] == "demo":
        with lz.start(lz.Settings(device="cpu", inference=True, freeze_gc=True, perfdb=None)):
            rows = asyncio.run(demo())
    else:
        rows = fresh_processes()
        with lz.start(lz.Settings(device="cpu", perfdb=None)) as runtime, torch.no_grad():
            gc.collect()
            gc.disable()
            rows |= blocking() | asyncio.run(awaited(runtime))
    print(json.dumps({"tree": str(TREE), "us": {name: round(us, 3) for name, us in sorted(rows.items())}}))


if __name__ == "__main__":
    main()

"""What a timeline costs: 64 callers with it on and off, in turns; and what a batch asks where it is off.

    python benchmarks/timeline.py [--quick] [--json PATH]

Times are of the process's CPU, which neighbours disturb less than wall time. Each round begins with steps
that are not counted: plans are made anew when a timeline begins and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from harness import environment, write
from torch import Tensor

import layerzero as lz

CALLERS = 64
WARM, STEPS = 5, 60
Call = Callable[[Tensor], Coroutine[Any, Any, Tensor]]


def layers(x: Tensor) -> Tensor:
    """A step of a small model."""
    for _ in range(4):
        x = lz.sync.rms_norm(x @ WEIGHT)
    return x


WEIGHT = torch.randn(256, 256)
STEP = lz.batched(layers)
CALLS: dict[str, Call] = {
    "rms_norm": lambda x: lz.rms_norm(x),
    "linear": lambda x: lz.linear(x, WEIGHT),
    "a function of four layers": lambda x: STEP(x),  # type: ignore[dict-item, return-value]
}


async def crowd(call: Call, rows: list[Tensor], steps: int) -> None:
    """So many steps of every caller."""

    async def caller(x: Tensor) -> None:
        for _ in itertools.repeat(None, steps):
            await call(x)

    await asyncio.gather(*map(caller, rows))


async def price(call: Call, rounds: int, path: Path) -> dict[str, Any]:
    """Microseconds a call with the timeline on and off, and the ratio, round by round."""
    rows = [torch.randn(1, 256) for _ in range(CALLERS)]
    await crowd(call, rows, 5 * WARM)
    times: dict[str, list[float]] = {"off": [], "on": []}
    for index in range(rounds):
        for arm in ("on", "off") if index % 2 else ("off", "on"):
            timeline = lz.timeline(path)
            if arm == "on":
                timeline.start()
            await crowd(call, rows, WARM)
            began_s = time.process_time()
            await crowd(call, rows, STEPS)
            times[arm].append((time.process_time() - began_s) / STEPS / CALLERS * 1e6)
            timeline.stop()
    ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "off_us": round(statistics.median(times["off"]), 3),
        "on_us": round(statistics.median(times["on"]), 3),
        "ratio": {
            name: round(value, 3) for name, value in zip(("q1", "median", "q3"), quartiles, strict=True)
        },
        "rounds": rounds,
    }


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = 4 if options.quick else 40
    record: dict[str, Any] = {"environment": environment(), "callers": CALLERS, "rows": {}}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), lz.start(lz.Settings(device="cpu")):
        for name, call in CALLS.items():
            record["rows"][name] = asyncio.run(price(call, rounds, Path(folder) / "trace.json"))
            print(name, record["rows"][name], flush=True)
    if options.json is not None:
        write(options.json, record)


if __name__ == "__main__":
    main()

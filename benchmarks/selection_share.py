"""What part of generating is choosing kernels, by samples of the processor time of a whole generation.

    python benchmarks/selection_share.py [--json benchmarks/results/selection_share.json] [--seconds S]

One request and sixteen at once, awaited per op and per step, all on one thread. A timer of processor time
interrupts the process, and a sample counts as choosing where the table of plans, selection, policy or health
is anywhere on the stack: look-ups as well as decisions, but not the kernel's first run, which the table looks
over. The first round of each row, whose calls are new and need decisions, stands apart.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))  # the model is an example

from generate import SamplingParams, generate  # noqa: E402
from generating.models import build  # noqa: E402
from harness import environment, show, write  # noqa: E402
from models.llama import Llama, Per  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.selection.plan import CheckedCall  # noqa: E402

PROMPT, TOKENS, PAGE = 32, 96, 16
EVERY_S = 0.001
FIRST_RUN = CheckedCall.__call__.__code__
LIBRARY = Path(lz.__file__).resolve().parent
CHOOSING = tuple(str(LIBRARY / part) for part in ("selection/", "policy/", "health/", "dispatch.py"))
ROWS: tuple[tuple[str, int, Per], ...] = (
    ("shipped", 1, "step"), ("shipped", 16, "step"), ("shipped", 1, "op"), ("shipped", 16, "op"),
    ("mid", 1, "step"), ("mid", 16, "op"),
)  # fmt: skip


def chooses(frame: FrameType | None) -> bool:
    """Whether a sample with this stack is one of choosing."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(CHOOSING):
            return frame.f_code is not FIRST_RUN
        frame = frame.f_back
    return False


@contextmanager
def sampled() -> Iterator[Counter[bool]]:
    """Count samples while the block runs, by whether they choose."""
    found: Counter[bool] = Counter()

    def sample(number: int, frame: FrameType | None) -> None:
        found[chooses(frame)] += 1

    before = signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
    try:
        yield found
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


async def crowd(model: Llama, requests: int) -> None:
    """So many requests at once; each has a prompt of its own."""

    async def one(seed: int) -> None:
        prompt = [(seed * 31 + place) % model.config.vocab_size for place in range(PROMPT)]
        async for _ in generate(model, prompt, SamplingParams(max_tokens=TOKENS, seed=seed)):
            pass

    await asyncio.gather(*(one(seed) for seed in range(requests)))


def measured(name: str, requests: int, per: Per, seconds: float) -> dict[str, Any]:
    """The first round of one row, and as many more as `seconds` of processor time hold."""
    model = build(name, pages=(requests + 1) * -(-(PROMPT + TOKENS) // PAGE), page_size=PAGE, per=per)
    with sampled() as first:
        asyncio.run(crowd(model, requests))
    end = time.process_time() + seconds
    with sampled() as later:
        while time.process_time() < end:
            asyncio.run(crowd(model, requests))
    return {"first": _share(first), "later": _share(later)}


def _share(found: Counter[bool]) -> dict[str, float]:
    return {"samples": found.total(), "choosing": found[True] / max(found.total(), 1)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What part of generating is choosing kernels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0, help="of processor time, each row")
    given = parser.parse_args(argv)
    record: dict[str, Any] = {"environment": environment(), "rows": {}}
    # One thread: what a worker computes would be sampled on a loop's thread that waits for it.
    with lz.start(lz.Settings(inline_limit_us=1e9)):
        for name, requests, per in ROWS:
            row = measured(name, requests, per, given.seconds)
            record["rows"][f"{name}, {requests} at once, per {per}"] = row
    show(
        "Choosing, part of the processor time of generating",
        ("model and requests", "first round", "later", "samples"),
        [
            (name, f"{row['first']['choosing']:.2%}", f"{row['later']['choosing']:.2%}",
             f"{row['later']['samples']:,}")
            for name, row in record["rows"].items()
        ],
    )  # fmt: skip
    if given.json is not None:
        write(given.json, record)


if __name__ == "__main__":
    main()

"""Compare flex attention with this CPU's other kernels where it leaves blocks out, and time its compiler.

Run `OMP_NUM_THREADS=1 python -m benchmarks.flex_cpu --json benchmarks/results/flex_cpu.json`. Each case runs
every kernel that takes it in interleaved rounds; `compile_seconds` is the first program of a shape with an
empty cache, the first of all with what torch compiles once for itself.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Arm, environment, us, write
from layerzero.backends import availability, load_builtin
from layerzero.ops import table
from layerzero.spec.hardware import probe
from layerzero.spec.kernel import rejections

HEADS, WIDTH = 8, 64
ROUNDS = 5


def cases() -> dict[str, tuple[int, dict[str, Any]]]:
    """Lengths and flags by name: what other kernels of the CPU write a bias for, and a plain call."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.rand(8, 8, generator=generator) < 0.25
    blocks |= torch.eye(8, dtype=torch.bool)
    sparse = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    slopes = torch.arange(1, HEADS + 1) / HEADS
    return {
        "causal 1024": (1024, {"is_causal": True}),
        "window 128 of 1024": (1024, {"is_causal": True, "window": (128, 0)}),
        "soft cap, causal 1024": (1024, {"is_causal": True, "softcap": 20.0}),
        "soft cap, window 128 of 1024": (1024, {"is_causal": True, "window": (128, 0), "softcap": 20.0}),
        "ALiBi, causal 1024": (1024, {"is_causal": True, "alibi_slopes": slopes}),
        "block-sparse mask, a quarter of 1024": (1024, {"attn_mask": sparse, "rows_nonempty": True}),
    }


def compare(length: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Median microseconds by kernel, and what compiling took."""
    op, here = table.get("attention"), probe("cpu")
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, generator=generator) for _ in range(3))
    args = op.build(q, k, v, **flags)[1]
    request = op.check(args)
    calls: dict[str, Callable[[], Any]] = {}
    compiled = 0.0
    for kernel in load_builtin(op="attention", platform="cpu"):
        if availability(kernel) or rejections(kernel, request, here):
            continue
        run = kernel.load()
        if kernel.compile is not None:
            started = time.perf_counter()
            kernel.compile(request)
            compiled = time.perf_counter() - started
        calls[kernel.id] = partial(run, *args)
    arms = [Arm(name, call) for name, call in calls.items()]
    for arm in arms:
        arm.call()
    for turn in range(ROUNDS):
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            arm.run()
    medians = {arm.name: us(arm)["wall_us"]["median"] for arm in arms}
    return {"compile_seconds": round(compiled, 1), "median_us": medians}


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        found = {name: compare(*case) for name, case in cases().items()}
    for name, result in found.items():
        print(f"{name}: compiled in {result['compile_seconds']} s")
        for kernel, median in sorted(result["median_us"].items(), key=lambda item: item[1]):
            print(f"  {median:12.0f} us  {kernel}")
    if options.json is not None:
        write(
            options.json, {"environment": environment(), "heads": HEADS, "head_size": WIDTH, "cases": found}
        )


if __name__ == "__main__":
    main()

"""Measure what each kernel that runs here reaches of this CPU's roofs, and print it as a table.

Usage: OMP_NUM_THREADS=1 python scripts/measure_efficiency.py [--op rms_norm] [--repeats 30]
The smallest call gives the launch cost; the best of the larger ones the fractions of the peak FLOP/s and of
the bandwidth that `layerzero.spec.hardware.probe` states. The backends' `Efficiency` values are these,
rounded.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from layerzero.backends import availability, load_builtin
from layerzero.ops import table as ops
from layerzero.ops.op import Args
from layerzero.spec.hardware import Hardware, probe
from layerzero.spec.kernel import Kernel, rejections

Shapes = tuple[tuple[int, ...], ...]
SHAPES: dict[str, Shapes] = {
    "attention": ((1, 1, 1, 16), (8, 12, 128, 32), (1, 8, 512, 64)),
    "rms_norm": ((1, 64), (1024, 384), (512, 4096)),
    "add_rms_norm": ((1, 64), (1024, 384), (512, 4096)),
    "add_layer_norm": ((1, 64), (1024, 384), (512, 4096)),
    "layer_norm": ((1, 64), (1024, 384), (512, 4096)),
    "linear": ((1, 32, 32), (64, 384, 1536), (256, 1024, 1024)),
    "mlp": ((1, 32, 32), (64, 384, 1536), (256, 384, 1536)),
    "embedding": ((1, 64, 100), (1024, 384, 30000)),
    "cross_entropy": ((1, 64), (128, 30000)),
}


def call(op: str, shape: tuple[int, ...], dtype: torch.dtype) -> Args:
    """The arguments of one call of `op` at `shape`."""

    def rand(*size: int) -> Tensor:
        return torch.randn(size).to(dtype)

    built: dict[str, Callable[[], list[Any]]] = {
        "attention": lambda: [rand(*shape), rand(*shape), rand(*shape)],
        "rms_norm": lambda: [rand(*shape), rand(shape[-1])],
        "add_rms_norm": lambda: [rand(*shape), rand(*shape), rand(shape[-1])],
        "add_layer_norm": lambda: [rand(*shape), rand(*shape), rand(shape[-1]), rand(shape[-1])],
        "layer_norm": lambda: [rand(*shape), rand(shape[-1]), rand(shape[-1])],
        "linear": lambda: [rand(shape[0], shape[1]), rand(shape[2], shape[1])],
        "mlp": lambda: [rand(shape[0], shape[1]), rand(shape[2], shape[1]), rand(shape[1], shape[2])],
        "embedding": lambda: [torch.randint(0, shape[2], (shape[0],)), rand(shape[2], shape[1])],
        "cross_entropy": lambda: [rand(*shape), torch.randint(0, shape[1], (shape[0],))],
    }
    named = {"activation": "gelu"} if op == "mlp" else {}
    args: Args = ops.get(op).build(*built[op](), **named)[1]
    return args


def median_us(run: Callable[..., Any], args: Args, repeats: int) -> float:
    """Median microseconds of one call, after three that do not count."""
    times = []
    for index in range(repeats + 3):
        start = time.perf_counter_ns()
        run(*args)
        if index >= 3:
            times.append(time.perf_counter_ns() - start)
    return sorted(times)[len(times) // 2] / 1e3


def measure(kernel: Kernel, hardware: Hardware, dtype: torch.dtype, repeats: int) -> tuple[str, ...] | None:
    """One row of the table; None where the kernel takes none of the shapes."""
    op, run, name = ops.get(kernel.op), kernel.load(), str(dtype).removeprefix("torch.")
    launch = flops = bandwidth = 0.0
    cells = []
    for index, shape in enumerate(SHAPES[kernel.op]):
        args = call(kernel.op, shape, dtype)
        request = op.check(args)
        if rejections(kernel, request, hardware):
            return None
        took = median_us(run, args, repeats)
        cells.append(f"{took:.0f}" if took >= 10 else f"{took:.1f}")
        if index == 0:
            launch = took
            continue
        work, busy = op.work(request), max(took - launch, 0.1) * 1e-6
        flops = max(flops, work.flops / busy / hardware.peak_flops[name])
        bandwidth = max(bandwidth, work.bytes / busy / hardware.bandwidth)
    return kernel.id, name, " / ".join(cells), f"{flops:.3f}", f"{bandwidth:.3f}", f"{launch:.1f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--op", choices=sorted(SHAPES))
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    hardware = probe("cpu")
    shown = Table(title=f"{hardware.name}, {hardware.threads} thread(s), torch {hardware.torch}")
    for column in ("kernel", "dtype", "microseconds per shape", "flops", "bandwidth", "launch us"):
        shown.add_column(column)
    with torch.no_grad():
        for kernel in load_builtin():
            wanted = kernel.op in SHAPES and options.op in (None, kernel.op)
            if not wanted or "cpu" not in kernel.capability.platforms or availability(kernel):
                continue
            for dtype in (torch.float32, torch.bfloat16):
                row = measure(kernel, hardware, dtype, options.repeats)
                if row is not None:
                    shown.add_row(*row)
    Console(width=140).print(shown)


if __name__ == "__main__":
    main()

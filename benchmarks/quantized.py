"""Products with quantized weights beside the products of today with the same weight unquantized.

    python -m benchmarks.quantized [--out PATH] [--threads N] [--rows 1,2,...] [--only FORMATS]

One weight of 14,336 x 4,096, rows of bfloat16, on the CPU (quantized_cuda.py is for GPUs). The baseline is
the product with float32 weights in kept panels, `native.linear.packed`. Every kernel that takes a format runs
beside it in turns; the record has medians in microseconds, the median of the rounds' ratios to the baseline,
and the largest error against float64 of the dequantized weight, over the largest output.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import environment, write
from layerzero.backends import availability, load_builtin
from layerzero.formats import FORMATS, QuantizedTensor
from layerzero.ops import table
from layerzero.spec.hardware import probe
from layerzero.spec.kernel import Kernel, rejections

WIDTH, INNER = 14336, 4096
ROWS = (1, 2, 4, 8, 16, 64, 256)
BASELINE = "native.linear.packed"
NAMED = frozenset({"int8", "fp8_e4m3", "fp8_e5m2"})  # formats that the dtype of codes says
SLOW = ("reference", "widened")


def rounds_of(arms: Sequence[Callable[[], Any]], seconds: float) -> list[list[float]]:
    """Each arm's microseconds, round by round; the arms take turns, five times at least."""
    times: list[list[float]] = [[] for _ in arms]
    until, turn = time.perf_counter() + seconds, 0
    while turn < 6 or (time.perf_counter() < until and turn < 200):
        for own, arm in zip(times, arms, strict=True):
            started = time.perf_counter()
            arm()
            own.append((time.perf_counter() - started) * 1e6)
        turn += 1
    return [own[1:] for own in times]


def taking(args: tuple[Any, ...]) -> list[Kernel]:
    """The kernels that take a call here, the slow ones aside."""
    request, hardware = table.get("quantized_linear").check(args), probe("cpu")
    return [
        kernel
        for kernel in load_builtin(op="quantized_linear", platform="cpu")
        if not kernel.descriptor
        and not any(word in kernel.id for word in SLOW)
        and not availability(kernel)
        and not rejections(kernel, request, hardware)
    ]


def error_of(out: Tensor, truth: Tensor) -> float:
    """The largest error over the largest output."""
    return float((out.double() - truth).abs().max() / truth.abs().max())


def measure(rows: int, weights: dict[str, QuantizedTensor], plain: Tensor, seconds: float) -> list[Any]:
    """A row for each format, way of the inputs and kernel."""
    x = torch.randn(rows, INNER, generator=torch.Generator().manual_seed(rows)).bfloat16()
    linear = next(k for k in load_builtin(op="linear", platform="cpu") if k.id == BASELINE).load()
    dense = x.to(plain.dtype)
    named: list[tuple[str, str, str]] = []
    arms: list[Callable[[], Any]] = [lambda: linear(dense, plain, None)]
    op = table.get("quantized_linear")
    for form, weight in weights.items():
        given = {**weight.arguments(), "format": None if form in NAMED else form}
        for inputs in ("float", "int8") if form in ("int4", "int8") else ("float", "dynamic"):
            if inputs == "dynamic" and form == "nf4":
                continue
            args = op.build(x, **given, inputs=inputs)[1]
            for kernel in taking(args):
                run = kernel.load()
                named.append((form, inputs, kernel.id))
                arms.append(lambda run=run, args=args: run(*args))
    base, *times = rounds_of(arms, seconds)
    found = []
    for (form, inputs, kernel_id), own, arm in zip(named, times, arms[1:], strict=True):
        us, ratio = statistics.median(own), statistics.median(map(operator.truediv, base, own))
        row = {"rows": rows, "format": form, "inputs": inputs, "kernel": kernel_id, "us": round(us, 1),
               "baseline_us": round(statistics.median(base), 1), "ratio": round(ratio, 2)}  # fmt: skip
        if inputs == "float" and rows <= 16:
            wide = x.double() @ weights[form].dequantize(torch.float64).t()
            row["error"] = float(f"{error_of(arm(), wide):.2e}")
        found.append(row)
        print(f"{rows:5} {form:9} {inputs:8} {kernel_id:42} {us:10.1f} us  {ratio:6.2f} x", flush=True)
    return found


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "quantized_cpu.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--only", default="int4,int8,nf4,mxfp4,nvfp4,fp8_e4m3")
    parser.add_argument("--seconds", type=float, default=1.5, help="for the kernels of one number of rows")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    forms = [form for form in FORMATS if form in options.only.split(",")]
    numbers = torch.randn(WIDTH, INNER, generator=torch.Generator().manual_seed(0)) * INNER**-0.5
    weights = {form: QuantizedTensor.quantize(numbers, form) for form in forms}
    record = {"environment": environment(), "weight": [WIDTH, INNER], "baseline": BASELINE,
              "threads": options.threads, "table": []}  # fmt: skip
    for rows in map(int, options.rows.split(",")):
        record["table"] += measure(rows, weights, numbers, options.seconds)
        write(options.out, record)


if __name__ == "__main__":
    main()

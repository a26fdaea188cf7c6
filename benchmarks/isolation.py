"""What a process of its own costs a kernel: the same callable here and in a worker, call by call in turn.

    python benchmarks/isolation.py [--device cpu|cuda] [--json benchmarks/results/isolation_cpu.json]

Each row is one op at one size; its first operand is another from call to call, the others are the same, as
weights are. `copies` takes turns with both: this process moves the same bytes by memmove, operands once and
outputs twice, as a call in another process does at most. What is left of `beyond` is `fixed`. On a card the
time is that of the host for one call, with the device idle before it and waited for behind it, so that all
end where their result can be read.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import environment, show, write

import layerzero as lz

LIMIT_US = {"cpu": 60.0, "cuda": 30.0}
Case = tuple[str, str, tuple[Any, ...]]


def cases(device: str) -> list[Case]:
    """(what, kernel, arguments): decoding rows and a prompt's, of a norm and a product."""
    kind = "native" if device == "cpu" else "cuda"
    found: list[Case] = []
    for rows in (1, 4, 16, 64, 512):
        x = torch.randn(rows, 1024, device=device)
        found.append((f"rms_norm {rows} x 1024", f"torch.rms_norm.{kind}", (x, x[0].clone(), 1e-6)))
    for rows in (1, 16):
        x, weight = torch.randn(rows, 256, device=device), torch.randn(256, 256, device=device)
        found.append((f"linear {rows} x 256 x 256", f"torch.linear.{kind}", (x, weight, None)))
    return found


def timed(
    runs: list[Callable[[tuple[Any, ...]], Any]], calls: list[tuple[Any, ...]], seconds: float, device: str
) -> list[list[float]]:
    """Microseconds of each run's calls, taken in turn."""
    took: list[list[float]] = [[] for _ in runs]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    end = time.perf_counter() + seconds
    gc.disable()
    while time.perf_counter() < end:
        for run, times in zip(runs, took, strict=True):
            for turn in range(20):  # in a row, as one caller makes them
                args = calls[turn % len(calls)]
                began = time.perf_counter()
                run(args)
                wait()
                times.append((time.perf_counter() - began) * 1e6)
    gc.enable()
    return [sorted(times[len(times) // 10 :]) for times in took]


def copies(args: tuple[Any, ...], output: torch.Tensor) -> Callable[[], None]:
    """Move every operand's bytes once, and an output's twice, to where something else was."""
    tensors = [each for each in args if isinstance(each, torch.Tensor)] + [output, output]
    places = [torch.empty_like(each) for each in tensors]
    if output.is_cuda:
        return lambda: [place.copy_(each) for place, each in zip(places, tensors, strict=True)] and None
    moves = [(to.data_ptr(), each.data_ptr(), each.nbytes) for to, each in zip(places, tensors, strict=True)]

    def move(keep: Any = (places, tensors)) -> None:
        for to, source, count in moves:
            ctypes.memmove(to, source, count)

    return move


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a process of its own costs a kernel")
    parser.add_argument("--device", choices=tuple(LIMIT_US), default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=3.0, help="each row")
    given = parser.parse_args(argv)
    plain = lz.Runtime(lz.Settings(device=given.device, warm="off", perfdb=None))
    apart = lz.Runtime(
        lz.Settings(device=given.device, warm="off", perfdb=None, isolate={"torch": "process"})
    )
    rows: dict[str, Any] = {}
    with torch.inference_mode():
        for what, kernel, args in cases(given.device):
            here, there = (r.device().registry.callable_of(kernel) for r in (plain, apart))
            torch.testing.assert_close(there(*args), here(*args))
            moves = copies(args, here(*args))
            one, other, moved = timed(
                [
                    lambda args, here=here: here(*args),
                    lambda args, there=there: there(*args),
                    lambda args, moves=moves: moves(),
                ],
                [args, *((torch.randn_like(args[0]), *args[1:]) for _ in range(3))],
                given.seconds,
                given.device,
            )  # type: ignore[misc]
            inside, outside, moving = (times[len(times) // 2] for times in (one, other, moved))
            rows[what] = {
                "in_process_us": inside, "isolated_us": outside, "beyond_us": outside - inside,
                "copies_us": moving, "fixed_us": outside - inside - moving,
                "isolated_p90_us": other[9 * len(other) // 10], "calls": len(other),
                "bytes": sum(a.nbytes for a in args if isinstance(a, torch.Tensor)),
            }  # fmt: skip
    apart.close()
    plain.close()
    limit = LIMIT_US[given.device]
    least = min(row["beyond_us"] for row in rows.values())
    names = ("in_process", "isolated", "beyond", "copies", "fixed", "isolated_p90")
    show(
        f"A call in a process of its own, microseconds (limit {limit:g})",
        ("call", *names),
        [(what, *(f"{row[f'{name}_us']:.1f}" for name in names)) for what, row in rows.items()],
    )
    record = {"environment": environment(), "limit_us": limit, "least_beyond_us": least, "rows": rows}
    if given.json is not None:
        write(given.json, record)


if __name__ == "__main__":
    main()

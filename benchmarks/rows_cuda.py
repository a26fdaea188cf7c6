"""Microseconds of every kernel that serves a call of rows on a GPU: norms, gates, losses, sampling, codes.

    python -m benchmarks.rows_cuda --out benchmarks/results/rows_h200.json

Time between CUDA events over `--calls` calls back to back, kernels interleaved round by round, medians of the
rounds; `forward` alone, and `backward` with it where the kernel has one. What computes faster than the host
launches it has the time of its launch: rows of a few tokens mostly. The L2 cache stays warm.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import device_seconds, environment, medians
from layerzero.backends import availability, load_builtin
from layerzero.ops import table
from layerzero.ops.op import Args
from layerzero.spec.hardware import probe
from layerzero.spec.kernel import Kernel, rejections

DISTRIBUTIONS = ("torch", "triton", "liger-kernel", "flashinfer-python")
ROUNDS = 7


def shapes() -> Iterator[tuple[str, str, list[Any], dict[str, Any]]]:
    """(op, label, positional, named): decode and prefill of a model with 4096 features."""

    def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    for rows in (1, 64, 8192):
        x, weight = rand(rows, 4096), rand(4096)
        yield "rms_norm", f"{rows} x 4096", [x, weight], {}
        yield "layer_norm", f"{rows} x 4096", [x, weight, rand(4096)], {}
        yield "add_rms_norm", f"{rows} x 4096", [x, rand(rows, 4096), weight], {}
        for form in ("int8", "fp8_e4m3"):
            yield "quantize", f"{rows} x 4096 {form} row", [x], {"format": form}
            group = {"format": form, "granularity": "group", "group_size": 128}
            yield "quantize", f"{rows} x 4096 {form} group 128", [x], group
        call = [x, rand(rows, 4096), weight]
        yield "add_rms_norm_quantize", f"{rows} x 4096 fp8_e4m3 row", call, {}
        group = {"granularity": "group", "group_size": 128}
        yield "add_rms_norm_quantize", f"{rows} x 4096 fp8_e4m3 group 128", call, group
        angles = torch.rand(8192, 64, device="cuda")
        positions = torch.randint(0, 8192, (rows,), device="cuda")
        heads = [rand(rows, 32, 128), rand(rows, 8, 128)]
        turn = [positions, angles.cos(), angles.sin()]
        yield "rope", f"{rows} x 32/8 x 128", [*heads, *turn], {}
        values, slots = rand(rows, 8, 128), torch.randperm(8192, device="cuda")[:rows]
        place = [rand(512, 16, 8, 128), rand(512, 16, 8, 128), slots]
        yield "append_kv", f"{rows} x 8 x 128", [heads[1], values, *place], {}
        yield "rope_append_kv", f"{rows} x 32/8 x 128", [*heads, values, *turn, *place], {}
        up, down = rand(2 * 14336, 4096) / 64, rand(4096, 14336) / 120
        yield "mlp", f"{rows} x 4096 x 14336 swiglu", [x, up, down], {"activation": "swiglu"}
        codes = torch.randint(-127, 128, (4096, 4096), device="cuda").char()
        scale = torch.rand(4096, 1, device="cuda")
        for inputs in ("float", "dynamic"):
            call = [x, codes, scale], {"inputs": inputs}
            yield "quantized_linear", f"{rows} x 4096 x 4096 int8 {inputs}", *call
        eight = [x, codes.to(torch.float8_e4m3fn), scale]
        yield "quantized_linear", f"{rows} x 4096 x 4096 fp8 dynamic", eight, {"inputs": "dynamic"}
        experts = rand(8, 2 * 3584, 4096) / 64, rand(8, 4096, 3584) / 60
        yield "moe", f"{rows} x 4096, 2 of 8 x 3584", [x, rand(rows, 8), *experts], {}
    for rows, vocab in ((1, 128_256), (64, 128_256), (64, 32_000)):
        logits = rand(rows, vocab)
        seeds = torch.arange(rows, device="cuda")
        yield "sample", f"{rows} x {vocab} plain", [logits], {"seed": seeds}
        both = {"seed": seeds, "top_k": 50, "top_p": 0.9, "temperature": 0.7}
        yield "sample", f"{rows} x {vocab} k 50 p 0.9", [logits], both
        yield "sample_topp", f"{rows} x {vocab} p 0.9", [logits, 0.9], {"seed": seeds}
        draft, target = rand(rows, 4, vocab).softmax(-1), rand(rows, 5, vocab).softmax(-1)
        drafted = torch.randint(0, vocab, (rows, 4), device="cuda")
        yield "verify_chain", f"{rows} x 4 x {vocab}", [draft, drafted, target], {"seed": seeds}
    for rows, vocab in ((4096, 32_000), (4096, 128_256)):
        target = torch.randint(0, vocab, (rows,), device="cuda")
        yield "cross_entropy", f"{rows} x {vocab}", [rand(rows, vocab), target], {}
        call = [rand(rows, 4096), rand(vocab, 4096) / 64, target]
        yield "linear_cross_entropy", f"{rows} x 4096 x {vocab}", call, {}


def candidates(op: str, args: Args, modes: frozenset[str]) -> Iterator[tuple[Kernel, Callable[..., Any]]]:
    """The kernels that take the call, loaded."""
    request, hardware = table.get(op).check(args).replace(modes=modes), probe("cuda:0")
    for kernel in load_builtin(op=op):
        if not availability(kernel) and not rejections(kernel, request, hardware):
            yield kernel, kernel.load()


def compared(runs: dict[str, Callable[..., Any]], calls: int) -> dict[str, Any]:
    """Medians of interleaved rounds; what fails says why."""
    arms: dict[str, Callable[[], float]] = {}
    failed: dict[str, str] = {}
    for name, run in runs.items():
        try:
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            arms[name] = partial(device_seconds, run, calls)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    return medians(arms, ROUNDS) | failed


def backward(run: Callable[..., Any], args: Args) -> Callable[[], Any]:
    """One call and the gradients of its floating operands."""
    learned = {at for at, a in enumerate(args) if isinstance(a, Tensor) and a.dtype == torch.bfloat16}
    own = tuple(a.detach().requires_grad_() if at in learned else a for at, a in enumerate(args))
    leaves = [a for a in own if isinstance(a, Tensor) and a.requires_grad]

    def both() -> Any:
        outs = run(*own)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return torch.autograd.grad([o.float().sum() for o in outs], leaves)

    return both


def main() -> None:
    """Compare on every shape; the file is written after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--ops", nargs="*", choices=table.names(), help="only these")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    document = {"environment": environment(DISTRIBUTIONS), "unit": "microseconds", "rows": rows}
    torch.manual_seed(0)
    for op, label, positional, named in shapes():
        if options.ops and op not in options.ops:
            continue
        args = table.get(op).build(*positional, **named)[1]
        with torch.no_grad():
            found = {k.id: run for k, run in candidates(op, args, frozenset())}
            runs = {name: (lambda run=run, args=args: run(*args)) for name, run in found.items()}
            row = {"op": op, "shape": label, "forward": compared(runs, options.calls)}
        if op in ("rms_norm", "layer_norm", "add_rms_norm", "cross_entropy", "linear_cross_entropy", "mlp"):
            learn = {k.id: backward(run, args) for k, run in candidates(op, args, frozenset({"grad"}))}
            row["backward"] = compared(learn, max(1, options.calls // 4))
        rows.append(row)
        options.out.write_text(json.dumps(document, indent=1))
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

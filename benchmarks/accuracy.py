"""How near every kernel comes to the truth: its error against float64 beside torch's own in that dtype.

    LAYERZERO_TEST_DEVICE=cuda python -m benchmarks.accuracy --out FILE.json

The calls are those of the contract tests (`tests/backends/cases.py`): every feature, pair of features, size
that a kernel claims. Errors are relative to the truth's root mean square; `torch` is plain torch in the
operands' own dtype, every step rounded, on the same call. `--only` keeps to the ids that begin so.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import environment
from layerzero import tolerances
from layerzero.kernel import Kernel, judge
from layerzero.ops import table
from tests.backends import cases

DISTRIBUTIONS = (
    "torch",
    "triton",
    "flashinfer-python",
    "flash-attn-4",
    "vllm",
    "flash-attn",
    "xformers",
    "liger-kernel",
)


def measure(kernel: Kernel, run: Any, dtype: torch.dtype) -> dict[str, Any] | None:
    """The kernel's worst error over its calls, the same call's plain torch, and every disagreement."""
    op = table.get(kernel.op)
    worst: dict[str, Any] = {"calls": 0, "error": 0.0, "torch": 0.0, "call": "", "disagreements": []}
    for case in cases.cases_of(kernel):
        args = cases.call(case, dtype)
        if judge(kernel, op.check(args), cases.HERE):
            continue
        with torch.no_grad():
            outs = cases.results(op, run, args)
        truths, bases = cases.expected(case, args)
        worst["calls"] += 1
        for index, out in enumerate(outs):
            if not out.is_floating_point() or out.itemsize == 1:  # tokens and codes are equal or wrong
                continue
            here, base = out.cpu(), bases[index].to(out.dtype)
            found = tolerances.disagreements(here, truths[index], base, softcap="softcap" in case.asks)
            worst["disagreements"] += [f"{case} output {index}: {text}" for text in found]
            error, own = (relative(t, truths[index]) for t in (here, base))
            if error >= worst["error"]:
                worst |= {"error": error, "torch": own, "call": f"{case} output {index}"}
    return worst if worst["calls"] else None


def relative(out: torch.Tensor, truth: torch.Tensor) -> float:
    """The root mean square error over the truth's root mean square, where both are finite."""
    finite = torch.isfinite(truth) & torch.isfinite(out)
    exact = truth.double()[finite]
    size = exact.square().mean().sqrt().item() if exact.numel() else 0.0
    if not size:
        return 0.0
    return float((out.double()[finite] - exact).square().mean().sqrt().item() / size)


def main() -> None:
    """Measure every kernel that runs here and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="starts of kernel ids, all by default")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {"environment": environment(DISTRIBUTIONS), "kernels": rows}
    for kernel in cases.KERNELS:
        missing = cases.why_not_here(kernel)
        if missing or not kernel.id.startswith(tuple(options.only or ("",))):
            continue
        try:
            run = kernel.load()
        except Exception as error:
            rows.append(
                {"kernel": kernel.id, "op": kernel.op, "failed": f"{type(error).__name__}: {error}"[:300]}
            )
            continue
        for dtype in cases.dtypes(kernel):
            started = time.perf_counter()
            name = str(dtype).removeprefix("torch.")
            row: dict[str, Any] = {"kernel": kernel.id, "op": kernel.op, "dtype": name}
            try:
                row |= measure(kernel, run, dtype) or {"calls": 0}
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
            row["seconds"] = round(time.perf_counter() - started, 1)
            rows.append(row)
            options.out.write_text(json.dumps(document, indent=1))
            worst = f"{row.get('error', 0):.2e} / {row.get('torch', 0):.2e}"
            print(
                f"{kernel.id:45} {name:9} {row.get('calls', 0):4} calls  {worst}  {row.get('failed', '')}",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""How near every kernel comes to the truth: its error against float64 beside torch's own in that dtype.

    LAYERZERO_TEST_DEVICE=cuda python -m benchmarks.accuracy --out FILE.json

The calls are those of the contract tests (`tests/backends/cases.py`): every feature, pair of features, size
that a kernel claims. Errors are relative to the truth's root mean square; `torch` is plain torch in the
operands' own dtype, every step rounded, on the same call. `--only` keeps to the ids that begin so.
On a GPU a kernel with float32 products has a second row, `"products": "tf32"`, with their factors rounded to
TF32; its bound is `tolerances.TF32` alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import environment, write
from layerzero.ops import table
from layerzero.spec import tolerances
from layerzero.spec.kernel import Kernel, rejections
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


# Ops whose float32 products torch may round to TF32, and the backends that leave their products to torch.
PRODUCTS = frozenset({"attention", "linear", "linear_cross_entropy", "mlp", "moe"})
TORCHS = frozenset({"reference", "torch"})


@contextmanager
def products_in_tf32() -> Iterator[None]:
    """Let torch round the factors of float32 products to TF32."""
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def measure(kernel: Kernel, run: Any, dtype: torch.dtype, *, tf32: bool = False) -> dict[str, Any] | None:
    """The kernel's worst error over its calls, the same call's plain torch, and every disagreement."""
    op = table.get(kernel.op)
    worst: dict[str, Any] = {"calls": 0, "error": 0.0, "torch": 0.0, "call": "", "disagreements": []}
    for case in cases.cases_of(kernel):
        args = cases.call(case, dtype)
        if rejections(kernel, op.check(args), cases.HERE):
            continue
        with torch.no_grad():
            outs = cases.results(op, run, args)
        truths, bases = cases.expected(case, args)
        worst["calls"] += 1
        for index, out in enumerate(outs):
            if not out.is_floating_point() or out.itemsize == 1:  # tokens and codes are equal or wrong
                continue
            here, base = out.cpu(), bases[index].to(out.dtype)
            error, own = (relative(t, truths[index]) for t in (here, base))
            if tf32:
                found = [f"error {error:.3g} above {tolerances.TF32}"] if error > tolerances.TF32 else []
            else:
                found = tolerances.mismatches(here, truths[index], base, softcap="softcap" in case.asks)
            worst["disagreements"] += [f"{case} output {index}: {text}" for text in found]
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


def rows_of(kernel: Kernel) -> Iterator[dict[str, Any]]:
    """A row for each dtype of a kernel, and one more with TF32 where that makes a difference."""
    row: dict[str, Any] = {"kernel": kernel.id, "op": kernel.op}
    try:
        run = kernel.load()
    except Exception as error:
        yield row | {"failed": _short(error)}
        return
    for dtype in cases.dtypes(kernel):
        named = row | {"dtype": str(dtype).removeprefix("torch.")}
        yield named | _timed(partial(measure, kernel, run, dtype))
        on_card = cases.DEVICE == "cuda" and dtype == torch.float32
        if on_card and kernel.op in PRODUCTS and kernel.backend in TORCHS:
            with products_in_tf32():
                yield named | {"products": "tf32"} | _timed(partial(measure, kernel, run, dtype, tf32=True))


def _timed(measured: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        found = measured() or {"calls": 0}
    except Exception as error:
        found = {"failed": _short(error)}
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def table_of(kernels: Iterable[Kernel], out: Path) -> None:
    """Measure kernels and write the table, anew after each row."""
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {"environment": environment(DISTRIBUTIONS), "kernels": rows}
    write(out, document)
    for kernel in kernels:
        for row in rows_of(kernel):
            rows.append(row)
            write(out, document)
            worst = f"{row.get('error', 0):.2e} / {row.get('torch', 0):.2e}"
            name = f"{row.get('dtype', '')} {row.get('products', '')}"
            print(
                f"{kernel.id:45} {name:14} {row.get('calls', 0):4} calls  {worst}  {row.get('failed', '')}",
                flush=True,
            )


def main() -> None:
    """Measure every kernel that runs here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", help="starts of kernel ids, all by default")
    options = parser.parse_args()
    starts = tuple(options.only or ("",))
    table_of((k for k in cases.RUNNABLE if k.id.startswith(starts)), options.out)


if __name__ == "__main__":
    main()

"""Products of int4 codes on a GPU by every kernel that takes them, and by other tiles than the chosen ones.

    python benchmarks/quantized_tiles.py --out FOLDER [--rows 256,512,...]
    python benchmarks/quantized_tiles.py --rehearse     # the same arms in small, those that a CPU has

For each number of rows the arms take turns in one run, each as a graph over several weights, as in
`quantized_cuda.py`: torch's product in bfloat16; each kernel as it is; our CUDA C++ with other turns
of rows and of codes on their way, chunks in a turn and parts of K; our Triton with other tiles and parts. A
number is the median of the rounds after the first; `ratio` is bfloat16's time over the arm's. An arm that
fails has its error in place of a number. What is before the kernel as it is belongs into `tile_of` and
`parts_of` (cuda_kernels/products.py), `tiles_of` and `splits_of` (triton_kernels/products.py).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import torch  # noqa: E402
from harness import environment, medians, write  # noqa: E402
from quantized_cuda import timed  # noqa: E402
from torch import Tensor  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.backends import availability, load_builtin  # noqa: E402
from layerzero.formats import QuantizedTensor  # noqa: E402
from layerzero.ops import table  # noqa: E402
from layerzero.spec.hardware import probe  # noqa: E402
from layerzero.spec.kernel import rejections  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "quantized_tiles_h200.json"
WIDTH, INNER, COPIES = 14336, 4096, 8
ROWS = (64, 128, 256, 512, 1024, 4096)
CUDA = "layerzero.backends.cuda_kernels.products"
TRITON = "layerzero.backends.triton_kernels.products"
# Rows of a tile, turns of rows and of codes on their way, chunks in a turn: at most 227 KiB together.
CUDA_TILES = (
    (256, 3, 3, 1), (256, 3, 2, 1), (256, 2, 3, 1), (256, 2, 6, 1), (256, 2, 8, 1), (128, 4, 3, 1),
    (128, 5, 3, 1), (128, 6, 2, 1), (128, 4, 8, 1), (128, 2, 3, 2), (128, 3, 2, 2), (64, 3, 3, 2),
)  # fmt: skip
# Columns, rows and K of a tile, warps, stages.
TRITON_TILES = (
    (128, 128, 128, 8, 3), (128, 256, 128, 8, 3), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4),
    (256, 128, 128, 8, 3), (256, 128, 64, 8, 3), (64, 256, 128, 4, 3), (64, 128, 128, 4, 4),
    (64, 64, 128, 4, 4),
)  # fmt: skip
PARTS = (1, 2, 4)


@contextmanager
def patched(module: str, values: dict[str, Any]) -> Iterator[None]:
    """The module's functions replaced by constants."""
    with ExitStack() as stack:
        for name, value in values.items():
            held = importlib.import_module(module)
            stack.enter_context(mock.patch.object(held, name, functools.partial(_constant, value)))
        yield


def _constant(value: Any, *_: Any, **__: Any) -> Any:
    return value


def own_tiles(kernels: Sequence[str], rows: int) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(an arm's name, its kernel, the module and what is replaced there) for our own kernels."""
    for kernel, module, tiles, make, split in (
        ("cuda.quantized_linear.four_bits", CUDA, CUDA_TILES, ("plan_of", "Tile"), "parts_of"),
        ("triton.quantized_linear.codes", TRITON, TRITON_TILES, ("tiles_of", "Tiles"), "splits_of"),
    ):
        if kernel not in kernels:
            continue
        for tile in tiles:
            if tile[0 if module == CUDA else 1] > 2 * rows:
                continue
            for parts in PARTS:
                made = getattr(importlib.import_module(module), make[1])(*tile)
                name = f"{kernel.split('.')[0]} {'x'.join(map(str, tile))} in {parts}"
                yield name, kernel, module, {make[0]: made, split: parts}


def takers(args: tuple[Any, ...], device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """The kernels that take the call here, loaded."""
    request, hardware = table.get("quantized_linear").check(args), probe(str(device))
    return {
        kernel.id: kernel.load()
        for kernel in load_builtin(op="quantized_linear", platform=device.type)
        if not kernel.descriptor
        and not availability(kernel)
        and not rejections(kernel, request, hardware)
        and not kernel.id.startswith("reference.")
    }


def measure(
    rows: int, weights: list[QuantizedTensor], dense: list[Tensor], rounds: int
) -> dict[str, dict[str, Any]]:
    """Every arm's time, ratio and error, the fastest first."""
    op, device = table.get("quantized_linear"), dense[0].device
    x = torch.randn(rows, dense[0].shape[1], device=device).to(dense[0].dtype)
    calls = [op.build(x, **weight.arguments())[1] for weight in weights]
    kernels = takers(calls[0], device)
    named: list[tuple[str, str, str, dict[str, Any]]]
    named = [(name, name, CUDA, {}) for name in kernels] + list(own_tiles(tuple(kernels), rows))
    truth = x.double() @ weights[0].dequantize(torch.float64).t()
    found: dict[str, dict[str, Any]] = {}
    arms = {"bfloat16": timed(device, lambda: [torch.nn.functional.linear(x, each) for each in dense])}
    for name, kernel, module, values in named:
        run = functools.partial(_all, kernels[kernel], calls)
        try:
            with patched(module, values):
                out = kernels[kernel](*calls[0])
                arms[name] = timed(device, run)
        except Exception as error:  # a tile that does not compile or fit is a finding
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:200]}
            continue
        found[name] = {"error": float(f"{float((out.double() - truth).abs().max() / truth.abs().max()):.2e}")}
    us = medians(arms, rounds)
    plain = us["bfloat16"] / len(dense)
    for name in arms.keys() - {"bfloat16"}:
        own = us[name] / len(weights)
        found[name] |= {"us": round(own, 2), "ratio": round(plain / own, 3)}
    order = sorted(found, key=lambda name: -found[name].get("ratio", 0.0))
    return {"bfloat16": {"us": round(plain, 2)}, **{name: found[name] for name in order}}


def _all(product: Callable[..., Tensor], calls: list[tuple[Any, ...]]) -> None:
    for args in calls:
        product(*args)


def main() -> int:
    """Measure, print the fastest, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="a folder")
    given = parser.parse_args()
    device = torch.device("cpu" if given.rehearse else "cuda")
    width, inner, copies = (64, 256, 2) if given.rehearse else (WIDTH, INNER, COPIES)
    numbers = torch.randn(width, inner, device=device) * inner**-0.5
    weight = QuantizedTensor.quantize(numbers, "int4", group_size=128)
    weights = [weight.clone() for _ in range(copies)]
    dense = [numbers.bfloat16().clone() for _ in range(max(2, copies // 2))]
    versions = ("layerzero-runtime", "torch", "triton", "vllm")
    record: dict[str, Any] = {"environment": environment(versions), "rows": {}}
    out = given.out / RESULTS.name if given.out else RESULTS
    # Not in inference mode: weights whose changes torch does not count are laid out anew at every call.
    with lz.start(lz.Settings(device=device.type, perfdb=None)), torch.no_grad():
        for rows in (2,) if given.rehearse else map(int, given.rows.split(",")):
            record["rows"][rows] = measure(rows, weights, dense, 1 if given.rehearse else given.rounds)
            if not given.rehearse:
                write(out, record)
            for name, row in list(record["rows"][rows].items())[:12]:
                print(rows, name, row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

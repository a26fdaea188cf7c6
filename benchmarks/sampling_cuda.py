"""Microseconds of every kernel that draws tokens on a GPU, by filter, batch and vocabulary.

    python -m benchmarks.sampling_cuda --out benchmarks/results/sampling_h200.json

Rounds and medians as in `benchmarks.rows_cuda`. Beside the times stand how many of the rows got the token of
the reference (`agrees`), and in how many FlashInfer's own top-p filter keeps other tokens than the op does
(`filter_differs`, of so many `rows`), which is why its cut is proved before it is used.
"""

from __future__ import annotations

import argparse
import importlib
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import environment, write
from benchmarks.rows_cuda import candidates, compared
from layerzero.ops import table
from layerzero.ops.op import Args
from layerzero.ops.sampling.draw import token_weights

DISTRIBUTIONS = ("torch", "triton", "flashinfer-python")
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "k 50": {"top_k": 50},
    "p 0.9": {"top_p": 0.9},
    "k 50 p 0.9": {"top_k": 50, "top_p": 0.9},
    "k and p by row": {"top_k": torch.tensor(50), "top_p": torch.tensor(0.9)},
}
CALLS = 5


def call(rows: int, vocab: int, named: dict[str, Any], dtype: torch.dtype) -> Args:
    """The arguments of `sample`: a tensor among the named ones is one number for each row."""
    source = torch.Generator("cuda").manual_seed(rows + vocab)
    logits = (torch.randn(rows, vocab, generator=source, device="cuda") * 3).to(dtype)
    spread = {n: v.cuda().expand(rows).contiguous() if isinstance(v, Tensor) else v for n, v in named.items()}
    seeds = torch.arange(rows, device="cuda")
    return table.get("sample").build(logits, temperature=0.7, seed=seeds, **spread)[1]


def differing(args: Args) -> int | None:
    """In how many rows FlashInfer's top-p filter keeps other tokens than the op; None without it."""
    try:
        filtered = importlib.import_module("flashinfer.sampling").top_p_renorm_probs
    except ImportError:
        return None
    logits, heat, _, share = args[:4]
    kept = filtered(torch.softmax(logits.float() / heat, -1), share) > 0
    wanted = token_weights(logits, heat, 0, share) > 0
    return int((kept != wanted).any(-1).sum())


def row_of(rows: int, vocab: int, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """One shape: times, agreement, the filter's own cut."""
    args = call(rows, vocab, FILTERS[name], dtype)
    found = {kernel.id: run for kernel, run in candidates("sample", args, frozenset())}
    right = table.get("sample").reference(*args)
    agrees: dict[str, Any] = {}
    for kernel, run in found.items():
        try:
            agrees[kernel] = int((run(*args) == right).sum())
        except Exception as error:
            agrees[kernel] = f"{type(error).__name__}: {error}"[:200]
    return {
        "shape": f"{rows} x {vocab}",
        "dtype": str(dtype).removeprefix("torch."),
        "filter": name,
        "rows": rows,
        "agrees": agrees,
        "filter_differs": differing(args) if name == "p 0.9" else None,
        "microseconds": compared({k: partial(run, *args) for k, run in found.items()}, CALLS),
    }


def main() -> None:
    """Compare on every shape while the budget lasts; the file is written after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=60.0)
    options = parser.parse_args()
    until = time.monotonic() + options.budget_s
    rows: list[dict[str, Any]] = []
    document = {"environment": environment(DISTRIBUTIONS), "unit": "microseconds", "rows": rows}
    write(options.out, document)
    shapes = [(1, 128_256), (64, 128_256), (64, 32_000), (256, 128_256), (1, 32_000), (256, 32_000)]
    cases = [(*s, name, torch.bfloat16) for s, name in product(shapes, FILTERS)]
    cases += [(*s, name, torch.float32) for s, name in product(shapes[:2], FILTERS)]
    for rows_, vocab, name, dtype in cases:
        if time.monotonic() > until:
            break
        with torch.no_grad():
            try:
                rows.append(row_of(rows_, vocab, name, dtype))
            except Exception as error:
                shape = f"{rows_} x {vocab}"
                rows.append(
                    {"shape": shape, "filter": name, "failed": f"{type(error).__name__}: {error}"[:300]}
                )
        print(rows[-1], flush=True)
        write(options.out, document)


if __name__ == "__main__":
    main()

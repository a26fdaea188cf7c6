"""Decode over sequences that begin with the same pages: read once, and read by each sequence, on a GPU.

    python -m benchmarks.prefix_cuda --out FILE.json

FlashInfer's FA2 template over pages of 16 keys in bfloat16, 32 query and 8 key heads of 128. Microseconds of
device time, medians of rounds in which both ways take turns; plans are made before. The file is written after
each shape.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import device_seconds, environment, medians
from layerzero.backends import load_builtin
from layerzero.ops import host_copies, table

PAGE, QUERY_HEADS, HEADS, WIDTH = 16, 32, 8, 128
# Sequences, shared keys, keys of each sequence's own.
SHAPES = [(2, 4096, 256), (8, 512, 256), (8, 4096, 256), (32, 1024, 256), (32, 8192, 256), (128, 2048, 512)]
ROUNDS, CALLS = 9, 20


def operands(batch: int, shared: int, own: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of one decode step, and both pools."""
    pages = shared // PAGE + batch * own // PAGE
    pools = torch.randn(2, pages, PAGE, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    return torch.randn(batch, QUERY_HEADS, WIDTH, device="cuda", dtype=torch.bfloat16), pools


def indices(batch: int, shared: int, own: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables and lengths with host copies: new tensors, for which a plan is made anew."""
    common, each = shared // PAGE, own // PAGE
    behind = common + torch.arange(batch * each).view(batch, each)
    tables = torch.cat([torch.arange(common).expand(batch, common), behind], 1).int().contiguous()
    lengths = torch.full((batch,), shared + own, dtype=torch.int32)
    return host_copies.to_device_with_host_copy(tables, "cuda"), host_copies.to_device_with_host_copy(
        lengths, "cuda"
    )


def measure(run: Any, batch: int, shared: int, own: int) -> dict[str, Any]:
    """One row: both ways on the same pools, and how far their results are apart."""
    from layerzero.backends.flashinfer import cascade as prefix
    from layerzero.backends.flashinfer import planning

    usual, arms, outs = prefix.WORTH_BYTES, dict[str, Any](), dict[str, torch.Tensor]()
    q, pools = operands(batch, shared, own)
    for name, worth in (("once", 0), ("each", 1 << 60)):
        prefix.WORTH_BYTES = worth
        built = table.get("paged_attention").build(q, *pools, *indices(batch, shared, own))
        arms[name] = functools.partial(run, *built[1])
        outs[name] = arms[name]()
    prefix.WORTH_BYTES = usual
    timed = {name: functools.partial(device_seconds, arm, CALLS) for name, arm in arms.items()}
    median = medians(timed, ROUNDS)
    planning.release()
    apart = (outs["once"].float() - outs["each"].float()).abs().max()
    page_bytes = 2 * PAGE * HEADS * WIDTH * 2
    return {
        "batch": batch, "shared": shared, "own": own, **median, "apart": float(apart),
        "saved_bytes": prefix.saved_bytes(shared // PAGE, batch, page_bytes),
        "speedup": round(median["each"] / median["once"], 3),
    }  # fmt: skip


def main() -> None:
    """Measure every shape; one that fails says why and stops no other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.prefix_cuda needs a CUDA device, got none")
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    document = {"environment": environment(("torch", "flashinfer-python")), "unit": "us", "rows": rows}
    run = next(
        k for k in load_builtin(op="paged_attention") if k.id == "flashinfer.paged_attention.fa2"
    ).load()
    for shape in SHAPES:
        try:
            rows.append(measure(run, *shape))
        except Exception as error:
            rows.append({"shape": shape, "failed": f"{type(error).__name__}: {error}"[:300]})
        options.out.write_text(json.dumps(document, indent=1) + "\n")
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

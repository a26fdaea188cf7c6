"""Paged decode beside attention over contiguous keys, and beside gathering pages for it.

    python -m benchmarks.paged [--out PATH] [--budget-s S] [--threads N]

It prints, for each shape, page size, layout and dtype, the best of several interleaved rounds in microseconds
and two ratios: how many times the native kernel is as fast as contiguous SDPA (1.0 is equal), and as gather +
SDPA. Shapes with as many key heads as query heads stand beside those that share them. Before that it measures
what `PagedCache` costs a decoding step of 64 sequences: growing by a token each, and saying where their rows
stand. The record, by default `benchmarks/results/paged_cpu.json`, is written after every row; rows that there
was no time for are named.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.harness import environment, write
from layerzero.backends.native import KERNELS
from layerzero.kvcache import KVCacheSpec, PagedCache, PagedSequence
from layerzero.ops.paged.attention import PAGED_ATTENTION

RESULTS = Path(__file__).parent / "results" / "paged_cpu.json"
# Sequences, query heads, key heads, head size, context.
SHAPES = [(1, 32, 8, 128, 2048), (16, 32, 8, 128, 512), (64, 8, 8, 64, 128), (8, 12, 12, 64, 1024)]
PAGES = [(1, "NHD"), (16, "NHD"), (16, "HND"), (64, "HND")]


def best(arms: Sequence[Callable[[], Any]], rounds: int, seconds: float) -> list[float]:
    """Each arm's fastest round in microseconds; the arms take turns, three times at least."""
    times: list[list[float]] = [[] for _ in arms]
    until = time.perf_counter() + seconds
    for turn in range(rounds + 1):
        if turn > 3 and time.perf_counter() > until:
            break
        for own, arm in zip(times, arms, strict=True):
            started = time.perf_counter()
            arm()
            own.append(time.perf_counter() - started)
    return [min(own[1:]) * 1e6 for own in times]


def measure(
    shape: tuple[int, ...], page_size: int, layout: str, dtype: torch.dtype, rounds: int, seconds: float
) -> dict[str, Any]:
    """One row: pages in random order, every sequence with its full context."""
    batch, heads, groups, width, context = shape
    entries = -(-context // page_size)
    tables = torch.randperm(batch * entries).view(batch, entries).int()
    inner = (page_size, groups) if layout == "NHD" else (groups, page_size)
    k_cache, v_cache = (torch.randn(batch * entries, *inner, width).to(dtype) for _ in range(2))
    q = torch.randn(batch, heads, width).to(dtype)
    args = PAGED_ATTENTION.build(q, k_cache, v_cache, tables, torch.full((batch,), context), layout=layout)[1]
    native = next(k for k in KERNELS if k.op == "paged_attention").load()
    keys, values = (torch.randn(batch, groups, context, width).to(dtype) for _ in range(2))
    flat, query = tables.flatten().long(), q.unsqueeze(2)

    def sdpa(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, k, v, enable_gqa=heads != groups)

    def gathered() -> torch.Tensor:
        dense = []
        for pool in (k_cache, v_cache):
            taken = pool.index_select(0, flat)
            taken = taken if layout == "NHD" else taken.transpose(1, 2)
            dense.append(taken.reshape(batch, -1, groups, width)[:, :context].transpose(1, 2))
        return sdpa(*dense)

    arms = (lambda: native(*args), lambda: sdpa(keys, values), gathered)
    ours, contiguous, gather = best(arms, rounds, seconds)
    return {
        "shape": shape, "page_size": page_size, "layout": layout, "dtype": str(dtype).removeprefix("torch."),
        "shared_key_heads": heads != groups,
        "native_us": round(ours, 1), "sdpa_us": round(contiguous, 1), "gather_sdpa_us": round(gather, 1),
        "of_sdpa": round(contiguous / ours, 3), "of_gather": round(gather / ours, 3),
    }  # fmt: skip


def steps(callers: int = 64, context: int = 128, tokens: int = 48, page_size: int = 16) -> dict[str, Any]:
    """Microseconds of a step, median and best: each row grows its own way, tables are made where they change.

    "objects": a call of each sequence, one for all rows. "numbers": one call for both. "changing": as
    objects, and a sequence of the crowd ends and another begins in every step. "reserved" sequences have
    their pages from the start, "page by page" they take them as they grow.
    """
    pages = (callers + 1) * -(-(context + tokens) // page_size)
    cache = PagedCache(KVCacheSpec(num_kv_heads=1, head_dim=8), pages=pages, page_size=page_size)

    def opened(reserved: bool) -> PagedSequence:
        sequence = cache.sequence(context + tokens if reserved else context)
        sequence.extend(context - page_size + 1 + cache.version % page_size)
        return sequence

    def timed(step: Callable[[list[PagedSequence]], object], reserved: bool) -> dict[str, float]:
        taken: list[float] = []
        for turn in range(20):
            crowd = [opened(reserved) for _ in range(callers)]
            for _ in range(tokens):
                started = time.perf_counter()
                step(crowd)
                taken.append(time.perf_counter() - started)
            for sequence in crowd:
                sequence.close()
            if not turn:
                taken.clear()
        return {"median_us": round(statistics.median(taken) * 1e6, 1), "best_us": round(min(taken) * 1e6, 1)}

    def objects(crowd: list[PagedSequence]) -> object:
        return cache.attention_metadata([sequence.extend() for sequence in crowd])

    def numbers(crowd: list[PagedSequence]) -> object:
        return cache.prepare_batch([sequence.number for sequence in crowd], [1] * callers)

    def changing(crowd: list[PagedSequence]) -> object:
        crowd.pop(0).close()
        crowd.append(opened(True))
        return objects(crowd)

    ways = {"objects": objects, "numbers": numbers}
    found: dict[str, Any] = {"callers": callers, "context": context, "page_size": page_size}
    for name, way in ways.items():
        found[f"{name}, reserved"] = timed(way, True)
        found[f"{name}, page by page"] = timed(way, False)
    found["changing, reserved"] = timed(changing, True)
    found["pages_leaked"] = pages - cache.allocator.free_pages
    return found


def main() -> None:
    """Measure every row, print it as it comes and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--budget-s", type=float, default=55.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    items = [
        (dtype, shape, page_size, layout)
        for dtype in (torch.float32, torch.bfloat16)
        for shape in SHAPES
        for page_size, layout in PAGES
    ]
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    record: dict[str, Any] = {
        "environment": environment(),
        "steps": steps(),
        "rows": rows,
        "left_out": left_out,
    }
    for name, found in record["steps"].items():
        print(f"step, {name}: {found}")
    until = time.perf_counter() + options.budget_s
    print("B, Hq, Hk, D, context   page layout dtype     native us  x SDPA  x gather + SDPA")
    with torch.inference_mode():
        for done, (dtype, shape, page_size, layout) in enumerate(items):
            share = (until - time.perf_counter()) / (len(items) - done)
            if share < 0.1:
                left_out.append(f"{shape}, {page_size}, {layout}, {dtype}")
                continue
            row = measure(shape, page_size, layout, dtype, options.rounds, 0.7 * share)
            rows.append(row)
            write(options.out, record)
            print(
                f"{shape!s:24}{page_size:4} {layout:6} {row['dtype']:9} {row['native_us']:9.0f} "
                f"{row['of_sdpa']:7.2f} {row['of_gather']:8.2f}", flush=True,
            )  # fmt: skip
    write(options.out, record)


if __name__ == "__main__":
    main()

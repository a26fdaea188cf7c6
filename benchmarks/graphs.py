"""Which kernels may be captured on this GPU, and what replaying a step saves; writes JSON.

    python -m benchmarks.graphs OUT.json

For each op it tries every kernel that takes the call (`layerzero.validate_graph_capture`) and keeps what was
found. Then one decoder block of Llama-3-8B's shape runs eagerly through blocking ops and as a compiled step,
in interleaved rounds: medians of host-to-finish time, microseconds.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from benchmarks.provenance import provenance
from layerzero.spec.hardware import probe

ROUNDS, CALLS = 15, 20
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
BUCKETS = (1, 4, 16, 64)
CONTEXT, PAGE = 1024, 16


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers of unit variance over the last axis but for vectors."""
    scale = shape[-1] ** -0.5 if len(shape) > 1 and shape[-1] > 256 else 1.0
    return torch.randn(shape, device="cuda", dtype=dtype) * scale


def cases() -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Calls whose kernels are tried, one or more an op."""
    q, k, v = rand(2, 8, 128, 64), rand(2, 8, 128, 64), rand(2, 8, 128, 64)
    wide = rand(64, HIDDEN)
    ids = torch.randint(0, 1000, (64,), device="cuda")
    angles = torch.rand(256, HEAD_DIM // 2, device="cuda")
    tables = torch.arange(8 * 4, device="cuda").view(8, 4)
    lens = torch.full((8,), 50, device="cuda")
    pages = [rand(32, PAGE, KV_HEADS, HEAD_DIM) for _ in range(2)]
    offsets = torch.tensor([0, 30, 64], device="cuda")
    return [
        ("attention", (q, k, v), {}),
        ("attention", (q, k, v), {"is_causal": True}),
        ("attention", tuple(t.float() for t in (q, k, v)), {"is_causal": True}),
        ("rms_norm", (wide, rand(HIDDEN)), {}),
        ("add_rms_norm", (wide, rand(64, HIDDEN), rand(HIDDEN)), {}),
        ("layer_norm", (wide, rand(HIDDEN), rand(HIDDEN)), {}),
        ("add_layer_norm", (wide, rand(64, HIDDEN), rand(HIDDEN), rand(HIDDEN)), {}),
        ("linear", (wide, rand(HIDDEN, HIDDEN)), {}),
        ("mlp", (wide, rand(2 * INNER, HIDDEN), rand(HIDDEN, INNER)), {"activation": "swiglu"}),
        ("embedding", (ids, rand(1000, HIDDEN)), {}),
        ("rope", (rand(64, HEADS, HEAD_DIM), rand(64, KV_HEADS, HEAD_DIM), ids % 256,
                  angles.cos(), angles.sin()), {}),
        # Logits that are nearly equal have one loss in 16 bits, whichever comes first.
        ("cross_entropy", (30 * rand(64, 1000), ids), {}),
        ("paged_attention", (rand(8, HEADS, HEAD_DIM), *pages, tables, lens), {}),
        ("ragged_attention", (rand(64, HEADS, HEAD_DIM), rand(64, KV_HEADS, HEAD_DIM),
                              rand(64, KV_HEADS, HEAD_DIM), offsets, offsets), {"is_causal": True}),
        ("append_kv", (rand(8, KV_HEADS, HEAD_DIM), rand(8, KV_HEADS, HEAD_DIM), *pages,
                       torch.arange(8, device="cuda") * 7), {}),
    ]  # fmt: skip


def tried() -> list[dict[str, Any]]:
    """One row a case: every kernel tried, whether it was safe, and what was found."""
    rows = []
    for op, args, kwargs in cases():
        row: dict[str, Any] = {"op": op, "flags": sorted(kwargs), "dtype": str(args[0].dtype), "kernels": {}}
        for name in [c.kernel for c in lz.select(op, *args, **kwargs).trace if c.eligible]:
            started = time.perf_counter()
            try:
                (proof,) = lz.validate_graph_capture(op, *args, kernel=name, **kwargs)
            except Exception as error:  # one kernel must not take the others' results with it
                row["kernels"][name] = {"safe": False, "found": [f"{type(error).__name__}: {error}"[:300]]}
                continue
            case = list(proof.cases)[-1]
            row["kernels"][name] = {
                "safe": not proof.cases[case],
                "found": [str(f) for f in proof.cases[case]],
                "case": case,
                "seconds": round(time.perf_counter() - started, 3),
            }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def block() -> Callable[..., Any]:
    """One decoder block over paged keys and values; rows are one token of one sequence each."""
    norms = [rand(HIDDEN) for _ in range(2)]
    w_q, w_o = rand(HEADS * HEAD_DIM, HIDDEN), rand(HIDDEN, HEADS * HEAD_DIM)
    up, down = rand(2 * INNER, HIDDEN), rand(HIDDEN, INNER)
    count = BUCKETS[-1] * CONTEXT // PAGE
    k_cache, v_cache = (rand(count, PAGE, KV_HEADS, HEAD_DIM) for _ in range(2))
    angles = torch.rand(CONTEXT + 1, HEAD_DIM // 2, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    ops = lz.sync

    def decode(x: Tensor, positions: Tensor, tables: Tensor, lens: Tensor) -> Tensor:
        normed = ops.rms_norm(x, norms[0])
        q = ops.linear(normed, w_q).unflatten(-1, (HEADS, HEAD_DIM))
        q, _ = ops.rope(q, q[:, :KV_HEADS], positions, cos, sin)
        keys = k_cache[tables].flatten(1, 2).transpose(1, 2)
        values = v_cache[tables].flatten(1, 2).transpose(1, 2)
        mixed = ops.attention(q.unsqueeze(2), keys, values)
        normed, x = ops.add_rms_norm(ops.linear(mixed.flatten(1), w_o), x, norms[1])
        return x + ops.mlp(normed, up, down, activation="swiglu")

    return decode


def replayed() -> list[dict[str, Any]]:
    """Eager against replay for each number of rows, one block."""
    decode = block()
    step = lz.compile(decode, buckets=BUCKETS)
    made = []
    for rows in (1, 3, 16, 64):
        args = (
            rand(rows, HIDDEN),
            torch.full((rows,), CONTEXT, device="cuda"),
            torch.arange(rows * CONTEXT // PAGE, device="cuda").view(rows, -1),
            torch.full((rows,), CONTEXT, device="cuda"),
        )
        ways: dict[str, Callable[[], Any]] = {
            "eager": lambda a=args: decode(*a),
            "replay": lambda a=args: step(*a),
        }
        got, want = ways["replay"](), ways["eager"]()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(CALLS):
                    way()
                torch.cuda.synchronize()
                times[name].append((time.perf_counter() - started) / CALLS * 1e6)
        medians = {name: round(statistics.median(each), 2) for name, each in times.items()}
        made.append(
            {
                "rows": rows,
                "bucket": next(b for b in BUCKETS if b >= rows),
                "largest_difference": (got.float() - want.float()).abs().max().item(),
                "median_us": medians,
                "ratio": round(medians["eager"] / medians["replay"], 3),
            }
        )
        print(json.dumps(made[-1]), flush=True)
    return made


def main(path: str) -> int:
    """Write what was found; 1 where an op has no kernel that may be captured."""
    hardware = probe(torch.device("cuda:0"))
    found: dict[str, Any] = {
        "environment": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **provenance(),
            "device": hardware.name,
            "torch": hardware.torch,
            "cuda": hardware.cuda,
            "driver": hardware.driver,
            "python": platform.python_version(),
        },
        "method": f"validate_graph_capture on two side streams; medians of {ROUNDS} rounds of {CALLS} calls",
    }
    with lz.start(lz.Settings.load(warm="off", device="cuda", perfdb=None, inference=True)):
        found["kernels"] = tried()
        Path(path).write_text(json.dumps(found, indent=2) + "\n")
        found["step"] = replayed()
    Path(path).write_text(json.dumps(found, indent=2) + "\n")
    return int(not all(any(k["safe"] for k in row["kernels"].values()) for row in found["kernels"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

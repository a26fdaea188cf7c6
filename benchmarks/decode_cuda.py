"""Attention of one token a sequence over pages on a GPU: every ready kernel, by sequences and context.

    python benchmarks/decode_cuda.py --out FOLDER
    python benchmarks/decode_cuda.py --rehearse    # on the CPU: shows that everything runs

Llama 3 8B's heads (32 of queries, 8 of keys, 128 wide), pages of 16 tokens, bfloat16. Each sample runs a
kernel over several pools in turn, so that no keys come from a cache: captured in one graph, the device's time
of a call; and call by call, the host's. Rounds take turns; a row is the median of the rounds after the first.
A kernel that no graph may hold has no captured time. The roof is the keys and values read once at the
bandwidth of a large copy.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

import torch  # noqa: E402
from engines import bandwidth  # noqa: E402
from harness import device_seconds, environment, medians, show, write  # noqa: E402
from torch import Tensor  # noqa: E402

import layerzero as lz  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "decode_h200.json"
HEADS, KEY_HEADS, WIDTH, PAGE = 32, 8, 128, 16
SHAPES = ((1, 128), (1, 2048), (1, 8192), (8, 2048), (64, 128), (64, 2048), (256, 128), (256, 1024))
BYTES_READ = 2 << 30  # by one sample, so that no cache holds it
Pool = tuple[Tensor, Tensor]


def operands(sequences: int, context: int, device: torch.device) -> tuple[Tensor, list[Pool], Tensor, Tensor]:
    """Queries out of one projection, pools, block tables and lengths."""
    pages = -(-context // PAGE)
    shape = (sequences * pages, PAGE, KEY_HEADS, WIDTH)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    count = 2 if device.type == "cpu" else max(2, min(32, BYTES_READ // (2 * 2 * sequences * context * 1024)))
    pools = [
        (torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype))
        for _ in range(count)
    ]
    tables = torch.randperm(sequences * pages, device=device).view(sequences, pages).int()
    lengths = torch.full((sequences,), context, device=device, dtype=torch.int32)
    qkv = torch.randn(sequences, HEADS + 2 * KEY_HEADS, WIDTH, device=device, dtype=dtype)
    return qkv[:, :HEADS], pools, tables, lengths


def captured(run: Callable[[], object]) -> Callable[[], float]:
    """The device's seconds for `run` as a graph.

    Raises: CudaGraphUnsafeError: no graph may hold the kernel.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), lz.rehearse_capture():
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return partial(device_seconds, graph.replay)


def on_host(run: Callable[[], object]) -> Callable[[], float]:
    """The host's seconds until `run` has launched."""

    def seconds() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    return seconds


def measure(shape: tuple[int, int], rounds: int, device: torch.device) -> dict[str, Any]:
    """Microseconds a call of each kernel, captured and by the host."""
    q, pools, tables, lengths = operands(*shape, device)
    found: dict[str, Any] = {}
    samples: dict[str, Callable[[], float]] = {}
    for name in lz.explain("paged_attention", q, *pools[0], tables, lengths).selection.order:
        if name.startswith("reference."):
            continue

        def run(name: str = name) -> None:
            for k, v in pools:
                lz.sync.paged_attention(q, k, v, tables, lengths, backend=name)

        try:
            run()
            samples[f"{name} host_us"] = on_host(run)
            if device.type == "cuda":
                samples[f"{name} captured_us"] = captured(run)
        except Exception as error:  # one kernel that fails is a row of its own
            found[name] = {"error": f"{type(error).__name__}: {error}"[:200]}
    for name, took_us in medians(samples, rounds, 1e6 / len(pools)).items():
        kernel_id, _, kind = name.partition(" ")
        found.setdefault(kernel_id, {})[kind] = took_us
    return found


def main() -> int:
    """Measure every shape, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rehearse", action="store_true", help="two small shapes on the CPU")
    parser.add_argument("--out", type=Path, default=None, help="a folder")
    given = parser.parse_args()
    device = torch.device("cpu" if given.rehearse else "cuda")
    shapes = ((1, 32), (4, 64)) if given.rehearse else SHAPES
    record: dict[str, Any] = {
        "environment": environment(("layerzero-runtime", "torch", "triton", "flashinfer-python", "vllm")),
        "bandwidth": bandwidth(), "rows": {},
    }  # fmt: skip
    with lz.start(lz.Settings(device=device.type, inference=True, warm="eager", perfdb=None)):
        for shape in shapes:
            sequences, context = shape
            rows = measure(shape, given.rounds, device)
            read = 2 * sequences * context * KEY_HEADS * WIDTH * 2
            roof_us = round(read / record["bandwidth"] * 1e6, 2)
            record["rows"][f"{sequences} x {context}"] = {"roof_us": roof_us, "kernels": rows}
            show(
                f"{sequences} sequences of {context}, keys and values once {roof_us} us",
                ("kernel", "captured us", "host us"),
                [
                    (name, str(row.get("captured_us", row.get("error", "-"))), str(row.get("host_us", "-")))
                    for name, row in sorted(rows.items())
                ],
            )
    if not given.rehearse:
        write(given.out / RESULTS.name if given.out else RESULTS, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

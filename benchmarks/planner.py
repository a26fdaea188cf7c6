"""Planned layers over the same layers with each op chosen by itself, in interleaved rounds; writes JSON.

    python -m benchmarks.planner --device cuda --out benchmarks/results/planner_h200.json

Three layers as users write them, out of blocking ops with torch between: a decoder layer of Llama-3-8B and a
layer with a mixture of experts (DeepSeekMoE-16B) that decode one token of each sequence over pages, and a
layer of DeepSeek-V3 with latent attention that reads one prompt. `eager` launches every op from Python,
`compiled` runs both through `layerzero.compile`: on CUDA a graph that is replayed. A plan is the fastest of
those that are timed when it is made (`measure`); each arm runs in each round, in an order that rotates, and a
ratio is taken round by round. On the CPU the layers are small.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import layerzero as lz
from benchmarks.harness import environment, show, summary, write
from layerzero.runtime import current

DISTRIBUTIONS = ("torch", "triton", "liger-kernel", "flashinfer-python", "flash-attn-3")
Layer = Callable[..., Tensor]
PAGE = 16


@dataclass(frozen=True)
class Sizes:
    """The sizes of a layer: its width, heads and inner widths, on one device."""

    device: str
    dtype: torch.dtype
    width: int
    heads: int
    key_heads: int
    head: int
    inner: int
    experts: int = 0
    chosen: int = 0
    shared: int = 0
    context: int = 1024

    def weight(self, *shape: int) -> Tensor:
        """Weights at which rows keep their variance."""
        numbers = torch.randn(shape, device=self.device, dtype=self.dtype)
        return numbers * shape[-1] ** -0.5

    def rows(self, count: int) -> Tensor:
        """Rows of unit variance."""
        return torch.randn(count, self.width, device=self.device, dtype=self.dtype)


def attention_part(sizes: Sizes, rows: int) -> tuple[Layer, tuple[Tensor, ...]]:
    """The attention of a decoder layer over pages: rows are one token of one sequence each."""
    heads, key_heads, head = sizes.heads, sizes.key_heads, sizes.head
    scale = torch.ones(sizes.width, device=sizes.device, dtype=sizes.dtype)
    w_q, w_k, w_v = (sizes.weight(count * head, sizes.width) for count in (heads, key_heads, key_heads))
    w_out = sizes.weight(sizes.width, heads * head)
    pages = sizes.context // PAGE
    pool = (rows * pages, PAGE, key_heads, head)
    k_cache, v_cache = (torch.randn(pool, device=sizes.device, dtype=sizes.dtype) for _ in range(2))
    cos, sin = (table.to(sizes.device) for table in lz.rope_tables(head, sizes.context))

    def attend(x: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        normed = lz.sync.rms_norm(x, scale)
        q = lz.sync.linear(normed, w_q).view(-1, heads, head)
        k = lz.sync.linear(normed, w_k).view(-1, key_heads, head)
        v = lz.sync.linear(normed, w_v).view(-1, key_heads, head)
        q, k = lz.sync.rope(q, k, positions, cos, sin)
        lz.sync.append_kv(k, v, k_cache, v_cache, slots)
        mixed = lz.sync.paged_attention(q, k_cache, v_cache, tables, lengths)
        return lz.sync.linear(mixed.reshape(-1, heads * head), w_out)

    positions = torch.full((rows,), sizes.context - 1, device=sizes.device)
    tables = torch.arange(rows * pages, device=sizes.device, dtype=torch.int32).view(rows, pages)
    slots = tables[:, -1].long() * PAGE + PAGE - 1
    return attend, (sizes.rows(rows), positions, slots, tables, (positions + 1).int())


def gated_part(sizes: Sizes, inner: int) -> Layer:
    """A gated feed-forward block of three products, written out."""
    gate, up = sizes.weight(inner, sizes.width), sizes.weight(inner, sizes.width)
    down = sizes.weight(sizes.width, inner)

    def feed_forward(x: Tensor) -> Tensor:
        return lz.sync.linear(F.silu(lz.sync.linear(x, gate)) * lz.sync.linear(x, up), down)

    return feed_forward


def llama(sizes: Sizes, rows: int) -> tuple[Layer, tuple[Tensor, ...]]:
    """A decoder layer: attention over pages, residual sums, a gated block."""
    attend, args = attention_part(sizes, rows)
    feed_forward = gated_part(sizes, sizes.inner)
    scale = torch.ones(sizes.width, device=sizes.device, dtype=sizes.dtype)

    def layer(x: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        total = attend(x, positions, slots, tables, lengths) + x
        return feed_forward(lz.sync.rms_norm(total, scale)) + total

    return layer, args


def mixture(sizes: Sizes, rows: int) -> tuple[Layer, tuple[Tensor, ...]]:
    """A decoder layer whose feed-forward block is a mixture of experts beside a shared expert."""
    attend, args = attention_part(sizes, rows)
    shared = gated_part(sizes, sizes.shared)
    router = sizes.weight(sizes.experts, sizes.width)
    up = sizes.weight(sizes.experts, 2 * sizes.inner, sizes.width)
    down = sizes.weight(sizes.experts, sizes.width, sizes.inner)
    scale = torch.ones(sizes.width, device=sizes.device, dtype=sizes.dtype)
    if sizes.device != "cpu":
        x = sizes.rows(rows)
        grouped = "torch.moe.grouped"  # a graph may hold it where that was proved
        lz.validate_graph_capture("moe", x, x @ router.T, up, down, top_k=sizes.chosen, kernel=grouped)

    def layer(x: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        total = attend(x, positions, slots, tables, lengths) + x
        normed = lz.sync.rms_norm(total, scale)
        routed = lz.sync.moe(normed, lz.sync.linear(normed, router), up, down, top_k=sizes.chosen)
        return routed + shared(normed) + total

    return layer, args


def latent(sizes: Sizes, rows: int) -> tuple[Layer, tuple[Tensor, ...]]:
    """A layer with latent attention over one prompt: low-rank queries, keys and values, and a gated block."""
    heads, head, rotary, rank = sizes.heads, sizes.head, sizes.head // 2, 4 * sizes.head
    query_rank = 3 * rank
    scale, q_scale, kv_scale = (
        torch.ones(width, device=sizes.device, dtype=sizes.dtype) for width in (sizes.width, query_rank, rank)
    )
    w_q_down, w_kv_down = sizes.weight(query_rank, sizes.width), sizes.weight(rank, sizes.width)
    w_rotary = sizes.weight(rotary, sizes.width)
    w_q_up = sizes.weight(heads * (head + rotary), query_rank)
    w_k_up, w_v_up = sizes.weight(heads * head, rank), sizes.weight(heads * head, rank)
    w_out = sizes.weight(sizes.width, heads * head)
    cos, sin = (table.to(sizes.device) for table in lz.rope_tables(rotary, 4096))
    feed_forward = gated_part(sizes, sizes.inner)
    factor = (head + rotary) ** -0.5

    def layer(x: Tensor, positions: Tensor) -> Tensor:
        normed = lz.sync.rms_norm(x, scale)
        q_low = lz.sync.rms_norm(lz.sync.linear(normed, w_q_down), q_scale)
        kv_low = lz.sync.rms_norm(lz.sync.linear(normed, w_kv_down), kv_scale)
        q = lz.sync.linear(q_low, w_q_up).view(-1, heads, head + rotary)
        k = lz.sync.linear(kv_low, w_k_up).view(-1, heads, head)
        v = lz.sync.linear(kv_low, w_v_up).view(-1, heads, head)
        rotated = lz.sync.linear(normed, w_rotary).view(-1, 1, rotary)
        q_rotated, rotated = lz.sync.rope(q[..., head:].contiguous(), rotated, positions, cos, sin)
        queries = torch.cat([q[..., :head], q_rotated], -1)
        keys = torch.cat([k, rotated.expand(-1, heads, -1)], -1)
        q4, k4, v4 = (part.unsqueeze(0).transpose(1, 2) for part in (queries, keys, v))
        mixed = lz.sync.attention(q4, k4, v4, is_causal=True, scale=factor)
        mixed = mixed.transpose(1, 2).reshape(-1, heads * head)
        total = lz.sync.linear(mixed, w_out) + x
        return feed_forward(lz.sync.rms_norm(total, scale)) + total

    return layer, (sizes.rows(rows), torch.arange(rows, device=sizes.device))


def layers(device: str) -> Iterator[tuple[str, int, Callable[[], tuple[Layer, tuple[Tensor, ...]]]]]:
    """(name, rows, what makes the layer with its arguments): in bfloat16 on a GPU, small on the CPU."""
    if device == "cpu":
        small = Sizes("cpu", torch.float32, 256, 8, 2, 32, 512, context=128)
        experts = Sizes("cpu", torch.float32, 256, 8, 8, 32, 128, 8, 2, 256, context=128)
        tiny = Sizes("cpu", torch.float32, 256, 4, 4, 32, 512)
        sized, counts, prompts = (small, experts, tiny), (1, 8), (8, 32)
    else:
        wide = Sizes(device, torch.bfloat16, 4096, 32, 8, 128, 14336)
        experts = Sizes(device, torch.bfloat16, 2048, 16, 16, 128, 1408, 64, 6, 2816)
        deep = Sizes(device, torch.bfloat16, 7168, 128, 128, 128, 18432)
        sized, counts, prompts = (wide, experts, deep), (1, 64), (64, 512)
    for rows in counts:
        yield "llama", rows, lambda rows=rows: llama(sized[0], rows)
        yield "moe", rows, lambda rows=rows: mixture(sized[1], rows)
    for rows in prompts:
        yield "mla", rows, lambda rows=rows: latent(sized[2], rows)


def settle(device: Any, run: Callable[[], Any], wait_s: float) -> None:
    """Run until nothing is loaded or compiled behind the calls any more."""
    end = time.perf_counter() + wait_s
    while True:
        before = device.dispatch_version
        for _ in range(3):
            run()
        device.loader.run_later(lambda: None).wait(max(end - time.perf_counter(), 0.0))
        if device.dispatch_version == before or time.perf_counter() > end:
            return


def timed(run: Callable[[], Any], calls: int, cuda: bool) -> float:
    """Microseconds a call, from the first launch to the end of the last one's work."""
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls * 1e6


def compare(arms: dict[str, Callable[..., Any]], rounds: int, calls: int, cuda: bool) -> dict[str, Any]:
    """Microseconds of both arms, and how many times as fast the planned one is, round by round."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    for run in arms.values():
        timed(run, calls, cuda)
    for number in range(rounds):
        for name in order if number % 2 else reversed(order):
            samples[name].append(timed(arms[name], calls, cuda))
    ratios = [a / b for a, b in zip(samples["op by op"], samples["planned"], strict=True)]
    return {
        "op_by_op_us": summary(samples["op by op"]),
        "planned_us": summary(samples["planned"]),
        "speedup": round(statistics.median(ratios), 3),
        "speedup_p25": round(sorted(ratios)[len(ratios) // 4], 3),
    }


def row_of(layer: Layer, args: tuple[Tensor, ...], rounds: int, calls: int, wait_s: float) -> dict[str, Any]:
    """One layer, launched from Python and compiled: the numbers, the plans, and how far results are apart."""
    cuda = args[0].device.type == "cuda"
    device: Any = current().device(args[0].device)
    settle(device, lambda: layer(*args), wait_s)
    planned = lz.plan(layer, *args, measure="eager")
    settle(device, lambda: planned(*args), wait_s)
    expected, result = layer(*args).float(), planned(*args).float()
    eager = {"op by op": lambda: layer(*args), "planned": lambda: planned(*args)}
    row = {
        "largest_difference": round(float((result - expected).abs().max()), 5),
        "largest_value": round(float(expected.abs().max()), 3),
        "eager": compare(eager, rounds, calls, cuda),
        "plan": planned.record.as_plain(),
    }
    captured = lz.plan(layer, *args, measure="graph")
    steps = {
        name: lz.compile(fn, buckets=(len(args[0]),))
        for name, fn in (("op by op", layer), ("planned", captured))
    }
    try:
        for step in steps.values():
            settle(device, lambda step=step: step(*args), wait_s)
    except lz.CudaGraphUnsafeError as error:  # an op has no kernel that a graph may hold
        return row | {"compiled": {"error": str(error).splitlines()[0]}}
    compiled = {name: (lambda step=step: step(*args)) for name, step in steps.items()}
    return row | {
        "compiled": compare(compiled, rounds, calls, cuda),
        "captured_plan": captured.record.as_plain(),
    }


def main() -> None:
    """Compare every layer at every number of rows; the file is written after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--wait", type=float, default=3.0, help="seconds for kernels that load behind calls")
    parser.add_argument("--seconds", type=float, default=50.0, help="no further layer is begun after these")
    parser.add_argument(
        "--without", default="flashinfer", help="a backend whose kernels take long to compile"
    )
    parser.add_argument("--only", default="", help="layers, by comma: llama, moe, mla")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    document = {"environment": environment(DISTRIBUTIONS), "without": options.without, "rows": rows}
    device = "cuda:0" if options.device == "cuda" else "cpu"
    only = set(options.only.split(",")) - {""}
    with lz.start(lz.Settings(device=device)), torch.no_grad():
        if options.without:
            lz.add_policy(deny=options.without)
        begin = time.perf_counter()
        for name, count, make in layers(device):
            if only and name not in only:
                continue
            if time.perf_counter() - begin > options.seconds:
                rows.append({"layer": name, "rows": count, "left_out": "the time was up"})
                continue
            layer, args = make()
            rows.append(
                {"layer": name, "rows": count}
                | row_of(layer, args, options.rounds, options.calls, options.wait)
            )
            write(options.out, document)
            del layer, args
    columns = ["layer", "rows", "eager", "planned", "times", "compiled", "planned", "times", "fused"]
    show("Planned over op by op, microseconds", columns, [_cells(row) for row in rows if "eager" in row])


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["layer"], str(row["rows"])]
    for mode in ("eager", "compiled"):
        if "error" in row[mode]:
            cells += ["-", "-", "-"]
            continue
        for arm in ("op_by_op_us", "planned_us"):
            cells.append(f"{row[mode][arm]['median']:.0f}")
        cells.append(f"{row[mode]['speedup']:.2f}")
    fusions = [step["fusion"] for step in row["plan"]["steps"] if step["fusion"]]
    return [*cells, ", ".join(fusions)]


if __name__ == "__main__":
    main()

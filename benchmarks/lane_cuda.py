"""Generation on one GPU: a Llama of 8B's width with random weights, awaited per op, per layer and per step.

    python benchmarks/lane_cuda.py [--layers 8,32] [--contexts 128,2048] [--requests 64] [--out FILE]
    python benchmarks/lane_cuda.py --rehearse      # a tiny model on the CPU: shows that everything runs

Beside it stands a batched loop written by hand over the same pages and the same attention kernel; both read
each step's tokens before the next. The crowd is closed and out of step, as in benchmarks/lane.py.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))  # the model is an example

import torch  # noqa: E402
from generating import by_hand, crowd, models  # noqa: E402
from generating.where import Where  # noqa: E402
from harness import environment, show, write  # noqa: E402
from torch import Tensor  # noqa: E402

import layerzero as lz  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "lane_h200.json"
HAND = "by hand"
BARS = {("per step", 128): 0.9, ("per step", 2048): 0.9, ("per layer", 2048): 0.9}
# Awaits of one token: those of a layer, and those around the layers.
AWAITS = {"per op": (8, 4), "per layer": (1, 4), "per step": (0, 1)}


def gathered(q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, lengths: Tensor, *_: Any) -> Tensor:
    """Paged decode out of torch's parts, for a GPU without a library: gather the pages, mask, SDPA."""
    size, groups = k_pages.shape[1], q.shape[1] != k_pages.shape[2]
    dense = [pool[tables.long()].flatten(1, 2).transpose(1, 2) for pool in (k_pages, v_pages)]
    seen = torch.arange(tables.shape[1] * size, device=q.device) < lengths[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.unsqueeze(2), *dense, attn_mask=seen[:, None, None], enable_gqa=groups
    )
    return out.squeeze(2)


def attention(runtime: lz.Runtime, model: Any, here: crowd.Crowd) -> tuple[str, Any]:
    """The kernel that both sides run, and itself; torch's parts where only the reference is there."""
    bound: Any = by_hand.chosen_attention(model, here.requests, here.limit)
    kernel: str = bound.binding.plan.kernel
    if model.pages.device.type == "cuda" and kernel.startswith("reference."):
        mine = lz.Kernel(
            id="bench.paged_attention.gathered", op="paged_attention", backend="bench",
            capability=lz.Capability(
                source="whatever this benchmark asks", platforms=frozenset({"cuda"}),
                features=frozenset({"causal", "gqa", "scale"}), layouts=frozenset({"NHD"}),
            ),
            load=lambda: gathered, efficiency=lz.Efficiency(0.5, 0.5, 1.0, "so that it is taken"),
        )  # fmt: skip
        runtime.add_kernel(mine)
        bound = by_hand.chosen_attention(model, here.requests, here.limit)
        kernel = bound.binding.plan.kernel
    return kernel, bound


def measure(options: argparse.Namespace, layers: int, context: int) -> dict[str, Any]:
    """Every side at one depth and one context."""
    name = "tiny" if options.rehearse else "8b-8"
    models.SHAPES[name] = replace(models.SHAPES[name], layers=layers)
    here = crowd.Crowd(options.requests, context, options.seconds)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    settings = lz.Settings(device=options.device, inference=True, warm="eager")
    with lz.start(settings) as runtime, torch.inference_mode():
        model = models.build(name, pages=here.pages(16), device=options.device, dtype=dtype)
        kernel, bound = attention(runtime, model, here)
        print(lz.explain("paged_attention", *bound.binding.full[:5]), flush=True)
        hand = by_hand.Paged(model, bound)
        spans: dict[str, list[crowd.Span]] = {HAND: [], **{side: [] for side in AWAITS}}
        refused: dict[str, str] = {}
        alone: dict[str, list[crowd.Span]] = {HAND: [], "per step": []}
        for turn in range(options.rounds):
            now = replace(here, seed=turn)
            spans[HAND].append(crowd.looped(hand, now))
            for side in [side for side in AWAITS if side not in refused]:
                per: Any = side.removeprefix("per ")
                try:
                    spans[side].append(asyncio.run(crowd.awaited(runtime, model, now, per)))
                except Exception as error:
                    traceback.print_exc()
                    refused[side] = repr(error)
            one = replace(now, requests=1)
            alone[HAND].append(crowd.looped(hand, one))
            alone["per step"].append(asyncio.run(crowd.awaited(runtime, model, one, "step")))
        for side in refused:
            del spans[side]
        where = {
            side: _where(runtime, model, replace(here, seconds=1.0), side)
            for side in AWAITS
            if side not in refused
        }
        with Where() as look:
            crowd.looped(hand, replace(here, seconds=1.0))
        where[HAND] = look.shares()
        linear = _linear(model, options.requests)
        del hand, model, bound
    if options.device == "cuda":
        torch.cuda.empty_cache()
    rows = _rows(spans, options.requests, layers)
    rows_alone = _rows(alone, 1, layers)
    for row in rows.values():
        best = max(r["tokens_per_s"] for r in rows_alone.values())
        row["over_one_by_one"] = round(row["tokens_per_s"] / best, 2)
    return {
        "attention": kernel, "shape": models.described(models.SHAPES[name]), "sides": rows,
        "refused": refused,
        "one_by_one": rows_alone, "where": where, "linear": linear,
    }  # fmt: skip


def _where(runtime: lz.Runtime, model: Any, here: crowd.Crowd, side: str) -> dict[str, float]:
    per: Any = side.removeprefix("per ")
    with Where() as look:
        asyncio.run(crowd.awaited(runtime, model, here, per))
    return look.shares()


def _rows(spans: dict[str, list[crowd.Span]], requests: int, layers: int) -> dict[str, Any]:
    rounds = {
        side: [(round(span.tokens_per_s, 1), round(span.mean_batch, 2)) for span in own]
        for side, own in spans.items()
    }
    return counted(rounds, requests, layers)


def counted(
    rounds: dict[str, list[tuple[float, float]]], requests: int, layers: int
) -> dict[str, dict[str, Any]]:
    """Medians of each side's rounds (tokens/s, mean batch); the first one warms up and does not count.

    Libraries compile kernels when a shape first comes, which may take longer than a whole round.
    """
    floor = [speed for speed, _ in rounds[HAND][1:]]
    rows: dict[str, Any] = {}
    for side, own in rounds.items():
        speeds = [speed for speed, _ in own[1:]]
        speed = statistics.median(speeds)
        rows[side] = {
            "tokens_per_s": round(speed, 1),
            "step_ms": round(requests / speed * 1e3, 3),
            "of_by_hand": round(statistics.median([s / f for s, f in zip(speeds, floor, strict=True)]), 3),
            "mean_batch": round(statistics.median([batch for _, batch in own[1:]]), 2),
            "rounds": [speed for speed, _ in own],
        }
        if side in AWAITS:
            of_layer, around = AWAITS[side]
            beyond = rows[side]["step_ms"] - rows[HAND]["step_ms"]
            awaits = requests * (of_layer * layers + around)
            rows[side]["us_an_await_beyond_by_hand"] = round(beyond * 1e3 / awaits, 2)
    return rows


def _linear(model: Any, callers: int, steps: int = 200) -> dict[str, Any]:
    """Microseconds of one of `callers` awaits of one linear layer, and what the same costs without them."""
    layer, width = model.layers[0], model.config.channels
    rows = torch.zeros(callers, width, dtype=layer.w_out.dtype, device=layer.w_out.device)

    async def caller(row: Tensor) -> None:
        for _ in range(steps):
            row = await lz.linear(row, layer.w_out)

    async def crowded() -> float:
        begin = time.perf_counter()
        await asyncio.gather(*(caller(rows[i : i + 1]) for i in range(callers)))
        return time.perf_counter() - begin

    def done() -> None:
        if rows.is_cuda:
            torch.cuda.synchronize()

    found: dict[str, Any] = {}
    for _ in range(2):  # the first one warms up
        done()
        with Where() as look:
            launched = asyncio.run(crowded())
        done()
        begin = time.perf_counter()
        for _ in range(steps):
            lz.sync.linear(rows, layer.w_out)
        done()
        blocking = time.perf_counter() - begin
        found = {
            "awaited_us": round(launched / steps / callers * 1e6, 2),
            "batch_us": round(launched / steps * 1e6, 1),
            "one_blocking_call_us": round(blocking / steps * 1e6, 1),
            "where": look.shares(),
        }
    return found


def verdicts(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised beside what was measured."""
    rows = []
    for depth, contexts in found.items():
        for context, here in contexts.items():
            for (side, at), needs in BARS.items():
                if int(context) != at:
                    continue
                got = here["sides"].get(side, {}).get("of_by_hand", 0.0)
                what = f"{side}, {depth} layers, context {context}"
                rows.append({"what": what, "needs": needs, "got": got, "met": got >= needs})
    return rows


def parse() -> argparse.Namespace:
    """Read the command line."""

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=numbers, default=[8, 32])
    parser.add_argument("--contexts", type=numbers, default=[128, 2048])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4, help="of which the first one warms up")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each side in each round")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    given = parser.parse_args()
    given.device = "cpu" if given.rehearse else "cuda"
    if given.rehearse:
        given.layers, given.contexts, given.requests, given.rounds, given.seconds = [2], [16], 4, 2, 0.2
    elif not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --rehearse runs a tiny model on the CPU")
    return given


def main() -> int:
    """Measure, print, write after each context."""
    options = parse()
    out = options.out or (None if options.rehearse else RESULTS)
    found: dict[str, Any] = {}
    for layers in options.layers:
        for context in options.contexts:
            here = measure(options, layers, context)
            found.setdefault(str(layers), {})[str(context)] = here
            show(
                f"{layers} layers, context {context}, {options.requests} requests, {here['attention']}",
                ("side", "tokens/s", "step ms", "of by hand", "mean batch", "us an await"),
                [
                    (side, f"{v['tokens_per_s']:.0f}", f"{v['step_ms']:.2f}", f"{v['of_by_hand']:.2f}",
                     f"{v['mean_batch']:.1f}", str(v.get("us_an_await_beyond_by_hand", "")))
                    for side, v in here["sides"].items()
                ],
            )  # fmt: skip
            print(here["one_by_one"], here["where"], here["linear"], sep="\n", flush=True)
            if out is not None:
                names = ("layerzero-runtime", "torch", "flashinfer-python")
                record = {"environment": environment(names), "requests": options.requests, "rows": found}
                write(out, record | {"verdicts": verdicts(found)})
    return 0


if __name__ == "__main__":
    sys.exit(main())

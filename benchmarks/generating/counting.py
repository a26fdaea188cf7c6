"""The rows of the GPU's generation benchmark: medians beside the loop by hand, and what was promised."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import torch
from harness import show
from torch import Tensor

import layerzero as lz

HAND = "by hand"
STEP_GRAPH, LAYER_GRAPH = "per step, captured", "per layer, captured"
GRAPHS = (STEP_GRAPH, LAYER_GRAPH)
PROMISED = 0.9
BARS = tuple((f"per step{how}", at) for how in ("", ", captured") for at in (128, 2048)) + tuple(
    (f"per layer{how}", 2048) for how in ("", ", captured")
)
# Awaits of one token: those of a layer, and those around the layers.
AWAITS = {"per step": (0, 1), "per layer": (1, 0), "per op": (8, 4), STEP_GRAPH: (0, 1), LAYER_GRAPH: (1, 0)}


def counted(
    rounds: dict[str, list[tuple[float, float]]], requests: int, layers: int
) -> dict[str, dict[str, Any]]:
    """Medians of each side's rounds (tokens/s, mean batch); the first one warms up and does not count.

    Libraries compile kernels when a shape first comes, which may take longer than a whole round.
    """
    floor = [speed for speed, _ in rounds.get(HAND, [])][1:]
    rows: dict[str, Any] = {}
    for side, own in rounds.items():
        counts = own[1:]
        if not counts or not floor:
            continue
        speeds = [speed for speed, _ in counts]
        speed = statistics.median(speeds)
        rows[side] = {
            "tokens_per_s": round(speed, 1),
            "step_ms": round(requests / speed * 1e3, 3),
            "of_by_hand": round(statistics.median([s / f for s, f in zip(speeds, floor, strict=False)]), 3),
            "mean_batch": round(statistics.median([batch for _, batch in counts]), 2),
            "rounds": [speed for speed, _ in own],
        }
        if side in AWAITS:
            of_layer, around = AWAITS[side]
            beyond = rows[side]["step_ms"] - rows[HAND]["step_ms"]
            awaits = requests * (of_layer * layers + around)
            rows[side]["us_an_await_beyond_by_hand"] = round(beyond * 1e3 / awaits, 2)
    return rows


def linear(model: Any, callers: int, steps: int = 200) -> dict[str, Any]:
    """Microseconds of one of `callers` awaits of one linear layer, and what the same costs without them."""
    layer, width = model.layers[0], model.config.hidden_size
    rows = torch.zeros(callers, width, dtype=layer.w_o.dtype, device=layer.w_o.device)

    async def caller(row: Tensor) -> None:
        for _ in range(steps):
            row = await lz.linear(row, layer.w_o)

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
        launched = asyncio.run(crowded())
        done()
        begin = time.perf_counter()
        for _ in range(steps):
            lz.sync.linear(rows, layer.w_o)
        done()
        blocking = time.perf_counter() - begin
        found = {
            "awaited_us": round(launched / steps / callers * 1e6, 2),
            "batch_us": round(launched / steps * 1e6, 1),
            "one_blocking_call_us": round(blocking / steps * 1e6, 1),
        }
    return found


def verdicts(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised beside what was measured."""
    rows = []
    for depth, contexts in found.items():
        for context, here in contexts.items():
            for side, at in BARS:
                if int(context) != at:
                    continue
                got = here.get("sides", {}).get(side, {}).get("of_by_hand", 0.0)
                what = f"{side}, {depth} layers, context {context}"
                rows.append({"what": what, "needs": PROMISED, "got": got, "met": got >= PROMISED})
    return rows


def printed(depth: int, context: int, here: dict[str, Any]) -> None:
    """What one place found, on the terminal."""
    show(
        f"{depth} layers, context {context}, {here.get('attention')}",
        ("side", "tokens/s", "step ms", "of by hand", "mean batch", "us an await"),
        [
            (side, f"{v['tokens_per_s']:.0f}", f"{v['step_ms']:.2f}", f"{v['of_by_hand']:.2f}",
             f"{v['mean_batch']:.1f}", str(v.get("us_an_await_beyond_by_hand", "")))
            for side, v in here.get("sides", {}).items()
        ],
    )  # fmt: skip
    print(here.get("one_by_one"), *here.get("where", {}).items(), here.get("kernels"), sep="\n", flush=True)

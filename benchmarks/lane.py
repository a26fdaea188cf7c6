"""Generation by continuous batching: LayerZero per op, per layer and per step, beside what it competes with.

    python benchmarks/lane.py [--sections NAMES] [--models NAMES] [--contexts N,N] [--requests N,N] [--quick]

Each section is written under its name into one JSON, with the environment it ran in, so that sections can be
run one by one; within a section all sides take turns in one process. The runtime first measures its kernels
for the batches to come (`--tune-s`); attention over pages is one kernel on every side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))  # the model and its server are examples

import torch  # noqa: E402
from generating import bursts, by_hand, crowd, models, offered, transformers_side  # noqa: E402
from harness import environment, show, write  # noqa: E402

import layerzero as lz  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "lane.json"
AWAITED = ("op", "layer", "step")
SERVED = ("p50_ms", "p99_ms", "tokens_per_s", "mean_batch", "failed")
HAND, CONTIGUOUS = "by hand, paged", "by hand, contiguous"


def generation(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of every side, by model, context and requests under way."""
    found: dict[str, Any] = {}
    for name in options.models:
        found[name] = {"shape": models.described(models.SHAPES[name]), "contexts": {}}
        for context in options.contexts:
            found[name]["contexts"][str(context)] = _at(options, name, context)
    return found


def _at(options: argparse.Namespace, name: str, context: int) -> dict[str, Any]:
    largest = crowd.Crowd(max(options.requests), context, options.seconds)
    model = models.build(name, pages=largest.pages(16))
    rows: dict[str, Any] = {}
    # Nothing is read from this user's measurements, nor written to them.
    settings = lz.Settings(device="cpu", inference=True, warm="eager", freeze_gc=True, perfdb=None)
    with lz.start(settings) as runtime, torch.inference_mode():
        _tuned(runtime, model, replace(largest, seconds=0.3), options.tune_s)
        paged = by_hand.Paged(model, by_hand.chosen_attention(model, largest.requests, largest.limit))
        contiguous = by_hand.Contiguous(model, max(options.requests), largest.limit)
        for count in options.requests:
            spans: dict[str, list[crowd.Span]] = {}
            for turn in range(options.rounds):
                here = crowd.Crowd(count, context, options.seconds, seed=turn)
                for per in AWAITED:
                    span = asyncio.run(crowd.awaited(runtime, model, here, per))
                    spans.setdefault(f"per {per}", []).append(span)
                spans.setdefault(HAND, []).append(crowd.looped(paged, here))
                spans.setdefault(CONTIGUOUS, []).append(crowd.looped(contiguous, here))
            rows[str(count)] = _summed(spans)
            _print(name, context, count, rows[str(count)])
    return rows


def _tuned(runtime: lz.Runtime, model: Any, here: crowd.Crowd, budget_s: float) -> None:
    """Let the runtime measure its kernels for the batches of this crowd, as `lz tune` does before serving."""
    if not budget_s:
        return
    with lz.record() as seen:
        for per in AWAITED:
            asyncio.run(crowd.awaited(runtime, model, here, per))
    lz.tune_blocking(seen.workload(), launches=("eager",), quick=True, budget_s=budget_s)


def _summed(spans: dict[str, list[crowd.Span]]) -> dict[str, Any]:
    """Medians over the rounds; ratios to the loop by hand are taken round by round."""
    floor = [span.tokens_per_s for span in spans[HAND]]
    return {
        side: {
            "tokens_per_s": round(statistics.median([s.tokens_per_s for s in own]), 1),
            "of_by_hand": round(
                statistics.median([s.tokens_per_s / f for s, f in zip(own, floor, strict=True)]), 3
            ),
            "mean_batch": round(statistics.median([s.mean_batch for s in own]), 2),
            "rounds": [round(s.tokens_per_s, 1) for s in own],
        }
        for side, own in spans.items()
    }


def _print(name: str, context: int, count: int, row: dict[str, Any]) -> None:
    show(
        f"{name}, context {context}, {count} requests",
        ("side", "tokens/s", "of by hand", "mean batch"),
        [
            (side, f"{v['tokens_per_s']:.0f}", f"{v['of_by_hand']:.2f}", f"{v['mean_batch']:.1f}")
            for side, v in row.items()
        ],
    )


def servers(options: argparse.Namespace) -> dict[str, Any]:
    """Latency of the shipped model behind each server, at shares of what the slower of two can do."""
    found = offered.compare(offered.Traffic(seconds=options.server_seconds))
    for peer, rows in found.items():
        if "refused" in rows:
            print(f"{peer} was not measured: {rows['refused']}")
            continue
        show(
            f"{peer} and LayerZero at shares of {rows['of']} requests/s",
            ("load", "server", "p50 ms", "p99 ms", "tokens/s", "mean batch", "failed"),
            [
                (load, side, *(f"{row[name]:g}" for name in SERVED))
                for load, sides in (rows["loads"] | {"saturated": rows["saturation"]}).items()
                for side, row in sides.items()
            ],
        )
    return found


def transformers(options: argparse.Namespace) -> dict[str, Any]:
    """transformers' `generate` over whole batches, and its continuous batching."""
    if (why := transformers_side.missing()) is not None:
        print(f"transformers was not measured: {why}")
        return {"refused": why}
    found: dict[str, Any] = {}
    for name in options.models:
        model = transformers_side.build(name)
        for context in options.contexts:
            for count in options.requests:
                row = {
                    "generate": transformers_side.generate(model, count, context, options.rounds),
                    "continuous": transformers_side.continuous(model, count, context),
                }
                found.setdefault(name, {}).setdefault(str(context), {})[str(count)] = row
                print(f"transformers, {name}, context {context}, {count} requests: {row}", flush=True)
    return found


def queues(options: argparse.Namespace) -> dict[str, Any]:
    """A burst of a thousand, an open load near saturation, queues of several depths."""
    found = bursts.measure(options.seconds, options.rounds)
    for name, row in found.items():
        print(f"{name}: {row}")
    return found


SECTIONS = {"generation": generation, "servers": servers, "transformers": transformers, "queues": queues}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sections", type=names, default=list(SECTIONS))
    parser.add_argument("--models", type=names, default=["shipped", "mid"])
    parser.add_argument("--contexts", type=numbers, default=[128, 2048])
    parser.add_argument("--requests", type=numbers, default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each side in each round")
    parser.add_argument("--server-seconds", type=float, default=10.0, help="of each load on each server")
    parser.add_argument("--tune-s", type=float, default=20.0, help="for measuring kernels before; 0: none")
    parser.add_argument("--quick", action="store_true", help="a tiny model: shows that everything runs")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    given = parser.parse_args(arguments)
    for section in given.sections:
        if section not in SECTIONS:
            parser.error(f"--sections needs some of {', '.join(SECTIONS)}, got {section}")
    if given.quick:
        given.models, given.contexts, given.requests = ["tiny"], [16], [1, 4]
        given.rounds, given.seconds, given.server_seconds, given.tune_s = 1, 0.2, 1.0, 1.0
    return given


def merged(old: Any, new: Any) -> Any:
    """`new` over `old`: what another run measured of other models, contexts or requests stays."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return {**old, **{name: merged(old.get(name), value) for name, value in new.items()}}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse(arguments)
    out = options.out or (None if options.quick else RESULTS)
    record: dict[str, Any] = json.loads(out.read_text()) if out is not None and out.exists() else {}
    for name in options.sections:
        found = SECTIONS[name](options)
        record[name] = {
            "environment": environment(("layerzero-runtime", "torch", "zentorch")),
            "quick": options.quick,
            "tuned_s": options.tune_s,
            "rows": merged(record.get(name, {}).get("rows"), found),
        }
        if out is not None:
            write(out, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Generation by continuous batching: LayerZero per op, per layer and per step, beside what it competes with.

    python benchmarks/lane.py [--budget-s S] [--sections NAMES] [--models NAMES] [--contexts N,N] [--quick]

Without arguments it writes `benchmarks/results/lane.json` within `--budget-s`: queues, generation, servers,
transformers. The record is written after every item. An item that fails stands under `failed` with its error,
one that the budget had no time for under `left_out`. A section that runs takes the place of its old record.

Within a section all sides take turns in one process. Before generation the runtime measures its kernels for
the batches to come (`--tune-s`, shared among models and contexts), as `lz tune` does before serving; what it
found is in `tuned`. The loop by hand takes torch's own kernels, and LayerZero's for attention over pages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))  # the model and its server are examples

import torch  # noqa: E402
from generating import bursts, by_hand, crowd, models, offered, transformers_side  # noqa: E402
from generating.where import Where  # noqa: E402
from harness import environment, show, write  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.native import FAST_PATH  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "lane.json"
AWAITED = ("op", "layer", "step")
SERVED = ("p50_ms", "p99_ms", "tokens_per_s", "mean_batch", "failed")
HAND, CONTIGUOUS = "by hand, paged", "by hand, contiguous"


RAMP_S = 0.15
# What part of the budget is gone when each section has to end; what one does not need the next ones have.
ENDS = {"queues": 0.08, "generation": 0.62, "servers": 0.88, "transformers": 1.0}


@dataclass
class Section:
    """A section of the record while it is measured: rows, what failed, what there was no time for."""

    until: float
    save: Callable[[], None]
    rows: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def has(self, name: str, seconds: float) -> bool:
        """Whether there is time for an item of so many seconds; one that there is none for is noted."""
        if time.monotonic() + seconds <= self.until:
            return True
        self.left_out.append(name)
        self.save()
        return False

    def item(self, name: str, run: Callable[[], Any], *where: str) -> Any:
        """Put what `run` gives at `where` in the rows and write the record; None where it fails."""
        try:
            found = run()
            rows = self.rows
            for key in where[:-1]:
                rows = rows.setdefault(key, {})
            if where:
                rows[where[-1]] = found
        except Exception as error:  # one item must not cost the others
            self.failed[name] = repr(error)[:300]
            print(f"{name} failed: {error!r}", flush=True)
            return None
        finally:
            self.save()
        return found


def generation(options: argparse.Namespace, section: Section) -> None:
    """Tokens a second of every side, by model, context and requests under way."""
    for name in options.models:
        section.rows[name] = {"shape": models.described(models.SHAPES[name]), "contexts": {}}
        for context in options.contexts:
            section.item(f"{name}, {context}", lambda n=name, c=context: _at(options, section, n, c))


def _at(options: argparse.Namespace, section: Section, name: str, context: int) -> None:
    largest = crowd.Crowd(max(options.requests), context, options.seconds, RAMP_S)
    model = models.build(name, pages=largest.pages(16))
    tune_s = options.tune_s / len(options.models) / len(options.contexts)
    # Nothing is read from this user's measurements, nor written to them.
    settings = lz.Settings(device="cpu", inference=True, warm="eager", freeze_gc=True, perfdb=None)
    with lz.start(settings) as runtime, torch.inference_mode():
        tuned = section.item(
            f"{name}, {context}, tuning",
            lambda: _tuned(runtime, model, replace(largest, seconds=0.3), tune_s),
        )
        section.rows[name].setdefault("tuned", {})[str(context)] = tuned
        paged = by_hand.Paged(model, by_hand.chosen_attention(model, largest.requests, largest.limit))
        contiguous = by_hand.Contiguous(model, max(options.requests), largest.limit)

        def sides(count: int) -> dict[str, Any]:
            spans: dict[str, list[crowd.Span]] = {}
            for turn in range(options.rounds):
                here = crowd.Crowd(count, context, options.seconds, RAMP_S, seed=turn)
                for per in AWAITED:
                    span = asyncio.run(crowd.awaited(runtime, model, here, per))
                    spans.setdefault(f"per {per}", []).append(span)
                spans.setdefault(HAND, []).append(crowd.looped(paged, here))
                spans.setdefault(CONTIGUOUS, []).append(crowd.looped(contiguous, here))
            row = _summed(spans)
            _print(name, context, count, row)
            return row

        # The most requests and a single one first: what they say is promised, the rest lies between.
        order = sorted(options.requests, key=lambda count: (count not in (1, max(options.requests)), -count))
        seconds = options.rounds * (len(AWAITED) + 2) * (options.seconds + 2 * RAMP_S + 0.3)
        for count in order:
            title = f"{name}, {context}, {count}"
            if section.has(title, seconds):
                section.item(title, lambda n=count: sides(n), name, "contexts", str(context), str(count))
        for per in AWAITED if name == options.models[0] else ():
            title = f"{name}, {context}, per {per}, where"
            if section.has(title, options.seconds + 2 * RAMP_S + 0.3):
                run = partial(_where, runtime, model, replace(largest, seed=1), per)
                section.item(title, run, name, "where", str(context), f"per {per}")


def _where(runtime: lz.Runtime, model: Any, here: crowd.Crowd, per: Any) -> dict[str, float]:
    """What the loop's thread does while the crowd is under way; where batches run on the worker, it waits."""
    with Where() as seen:
        asyncio.run(crowd.awaited(runtime, model, here, per))
    return seen.shares()


def _tuned(
    runtime: lz.Runtime, model: Any, here: crowd.Crowd, budget_s: float
) -> dict[str, dict[str, int]] | None:
    """Let the runtime measure its kernels for the batches of this crowd; how often each won, by op."""
    if not budget_s:
        return None
    with lz.record() as seen:
        for per in AWAITED:
            asyncio.run(crowd.awaited(runtime, model, here, per))
    report = lz.tune_blocking(seen.workload(), launches=("eager",), quick=True, budget_s=budget_s)
    won: dict[str, dict[str, int]] = {}
    for tuned in report.tuned:
        kernels = won.setdefault(tuned.op, {})
        kernels[tuned.winner] = kernels.get(tuned.winner, 0) + 1
    return won


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


def servers(options: argparse.Namespace, section: Section) -> None:
    """Latency of the shipped model behind each server, at shares of what the slower of two can do."""
    traffic = offered.Traffic(seconds=options.server_seconds)
    seconds = 2 * (2.0 + traffic.seconds) + 2 * len(offered.LOADS) * traffic.seconds + 25
    for peer in offered.PEERS:
        if not section.has(peer, seconds):
            continue
        found = section.item(peer, lambda name=peer: offered.beside(name, traffic), peer)
        if found is None or "refused" in found:
            print(f"{peer} was not measured: {(found or section.failed)}", flush=True)
            continue
        show(
            f"{peer} and LayerZero at shares of {found['of']} requests/s",
            ("load", "server", "p50 ms", "p99 ms", "tokens/s", "mean batch", "failed"),
            [
                (load, side, *(f"{row[name]:g}" for name in SERVED))
                for load, sides in (found["loads"] | {"saturated": found["saturation"]}).items()
                for side, row in sides.items()
            ],
        )


SIDES = {"generate": transformers_side.generate, "continuous": transformers_side.continuous}


def transformers(options: argparse.Namespace, section: Section) -> None:
    """transformers' `generate` over whole batches, and its continuous batching."""
    if (why := transformers_side.missing()) is not None:
        section.rows["refused"] = why
        print(f"transformers was not measured: {why}", flush=True)
        return
    for name in options.models:
        if (model := section.item(name, lambda shape=name: transformers_side.build(shape))) is None:
            continue
        for context in options.contexts:
            # Longer than the batch before it by the tokens that there are more: a guess, on the safe side.
            guess, before = 1.0, 0
            for count in sorted(set(options.requests) & {1, 8, max(options.requests)}):
                guess *= 1.0 if not before else 1.5 * count / before if context > 512 else 2.0
                before = count
                title = f"{name}, {context}, {count}"
                if not section.has(title, guess):
                    continue
                begun = time.monotonic()
                at = (name, str(context), str(count))
                for kind, side in SIDES.items():
                    run = partial(side, model, count, context)
                    found = section.item(f"{title}, {kind}", run, *at, kind)
                    print(f"transformers, {title}, {kind}: {found}", flush=True)
                guess = time.monotonic() - begun


def queues(options: argparse.Namespace, section: Section) -> None:
    """A burst of a thousand, an open load near saturation, queues of several depths."""
    found = section.item("queues", lambda: bursts.measure(options.seconds, options.rounds))
    for name, row in (found or {}).items():
        section.rows[name] = row
        print(f"{name}: {row}", flush=True)


SECTIONS = {"queues": queues, "generation": generation, "servers": servers, "transformers": transformers}


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
    parser.add_argument("--seconds", type=float, default=0.7, help="of each side in each round")
    parser.add_argument("--server-seconds", type=float, default=4.0, help="of each load on each server")
    parser.add_argument("--tune-s", type=float, default=20.0, help="for measuring kernels before; 0: none")
    parser.add_argument("--budget-s", type=float, default=520.0, help="for everything")
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


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; 1 where an item failed."""
    options = parse(arguments)
    begun = time.monotonic()
    out = options.out or (None if options.quick else RESULTS)
    record: dict[str, Any] = json.loads(out.read_text()) if out is not None and out.exists() else {}
    record.pop("tables", None)  # of the old numbers; `python -m scripts.result_tables` writes them anew
    where = environment(("layerzero-runtime", "torch", "zentorch", "transformers", "ray", "litserve"))
    failed = False
    FAST_PATH.try_load()  # or the first section would be Python's alone, beside a compiler
    for name in options.sections:
        ends = 1.0 if len(options.sections) < len(SECTIONS) else ENDS[name]
        part = Section(begun + ends * options.budget_s, lambda: None)
        written = record[name] = {
            "environment": where,
            "quick": options.quick,
            "tuned_s": options.tune_s,
            "awaited_path": FAST_PATH.describe(),
            "rows": part.rows,
            "failed": part.failed,
            "left_out": part.left_out,
        }
        if out is not None:
            part.save = partial(write, out, record)
        started = time.monotonic()
        SECTIONS[name](options, part)
        written["seconds"] = round(time.monotonic() - started, 1)
        part.save()
        failed = failed or bool(part.failed)
        for why, items in (("failed", list(part.failed)), ("left out, no time", part.left_out)):
            if items:
                print(f"{name}: {why}: {', '.join(items)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Generation on one GPU: a Llama of 8B's width with random weights, awaited per op, per layer and per step.

    python benchmarks/lane_cuda.py --out FOLDER [--layers 8,32] [--contexts 128,2048] [--budget-s 230]
    python benchmarks/lane_cuda.py --rehearse      # a tiny model on the CPU: shows that everything runs

Beside it stand a batched loop written by hand over the same pages and the same attention kernel, a step and
each layer as captured graphs, and one request alone; all read each step's tokens before the next. The crowd
is closed and out of step, as in benchmarks/lane.py. Eight layers are a quarter of Llama 3 8B, 32 are all of
it. The record is written after every item; an item that fails is an error in it, one that the budget leaves
no time for is named there.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]  # the model is an example, the streams' bugs are tests

import torch  # noqa: E402
from generating import agreeing, by_hand, crowd, device_side, models  # noqa: E402
from generating.captured import Layered, Whole  # noqa: E402
from generating.counting import (  # noqa: E402
    AWAITS,
    GRAPHS,
    HAND,
    LAYER_GRAPH,
    STEP_GRAPH,
    counted,
    linear,
    printed,
    verdicts,
)
from harness import environment, write  # noqa: E402
from torch import Tensor  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.native import FAST_PATH  # noqa: E402
from layerzero.selection.plan import load_until_best  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "lane_h200.json"
PAGE_SIZE = 16
SHALLOW = 8  # layers up to which awaiting every op is measured: it is slow, and no layer unlike another


class Record:
    """What was found so far, on disk after every item."""

    def __init__(self, out: Path | None, requests: int, budget_s: float) -> None:
        self.out, self.until = out, time.monotonic() + budget_s
        self.found: dict[str, Any] = {
            "environment": environment(
                ("layerzero-runtime", "torch", "triton", "flash-attn-4", "flashinfer-python")
            ),
            "requests": requests, "rows": {}, "streams": {}, "linear": {}, "errors": {}, "left_out": [],
            "took_s": {}, "awaited_path": "",
        }  # fmt: skip

    def item(self, name: str, run: Callable[[], Any]) -> Any:
        """What `run` gives; None where it fails or no time is left."""
        begin = time.monotonic()
        if begin > self.until:
            self.found["left_out"].append(name)
            return None
        if name in self.found["errors"]:
            return None
        try:
            return run()
        except Exception as error:
            traceback.print_exc()
            self.found["errors"][name] = f"{type(error).__name__}: {error}"[:500]
            return None
        finally:
            took = self.found["took_s"]
            took[name] = round(took.get(name, 0.0) + time.monotonic() - begin, 2)
            self.write()

    def write(self) -> None:
        """Write the record with its verdicts."""
        self.found["verdicts"] = verdicts(self.found["rows"])
        if self.out is not None:
            write(self.out, self.found)


class PlainRecord(Record):
    """A record without verdicts: what was found so far, on disk after every item."""

    def __init__(self, out: Path | None, options: argparse.Namespace, **sections: Any) -> None:
        super().__init__(out, options.requests, options.budget_s)
        packages = ("layerzero-runtime", "torch", "triton", "flash-attn-4", "flashinfer-python")
        self.found = {
            "environment": environment(packages), "requests": options.requests, "rows": {}, **sections,
            "errors": {}, "left_out": [], "took_s": {}, "awaited_path": "",
        }  # fmt: skip

    def write(self) -> None:
        """Write the record."""
        if self.out is not None:
            write(self.out, self.found)


def settings_of(options: argparse.Namespace) -> lz.Settings:
    """The runtime of a run; a rehearsal runs nothing at once, since its CPU stands for a GPU."""
    more: dict[str, Any] = {"max_inline_us": 0.0} if options.rehearse else {}
    return lz.Settings(device=options.device, inference=True, warm="eager", freeze_gc=True, **more)


def begin(options: argparse.Namespace, results: Path, **sections: Any) -> PlainRecord:
    """The record of a run, with the compiled path of awaits in the making (`options.compiling`)."""
    out = options.out or (None if options.rehearse else results)
    if out is not None and out.suffix != ".json":
        out = out / results.name
    record = PlainRecord(out, options, **sections)
    options.compiling = threading.Thread(target=compiled, args=(record,), name="awaited path")
    options.compiling.start()
    return record


def gathered(q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lengths: Tensor, *_: Any) -> Tensor:
    """Paged decode out of torch's parts, for a GPU without a library: gather the pages, mask, SDPA."""
    size, groups = k_cache.shape[1], q.shape[1] != k_cache.shape[2]
    keys, values = (pool[tables.long()].flatten(1, 2).transpose(1, 2) for pool in (k_cache, v_cache))
    seen = torch.arange(tables.shape[1] * size, device=q.device) < lengths[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.unsqueeze(2), keys, values, attn_mask=seen[:, None, None], enable_gqa=groups
    )
    return out.squeeze(2)


GATHERED = lz.Kernel(
    id="bench.paged_attention.gathered", op="paged_attention", backend="bench",
    capability=lz.Capability(
        source="whatever this benchmark asks", platforms=frozenset({"cuda"}),
        features=frozenset({"causal", "gqa", "scale"}), layouts=frozenset({"NHD"}), graph_safe=True,
    ),
    load=lambda: gathered, efficiency=lz.Efficiency(0.5, 0.5, 1.0, "so that it is taken"),
)  # fmt: skip


def attention(runtime: lz.Runtime, model: Any, here: crowd.Crowd) -> tuple[str, Any]:
    """The kernel that both sides run, and itself; torch's parts where only the reference is there."""

    def chosen() -> tuple[str, Any]:
        bound: Any = by_hand.chosen_attention(model, here.requests, here.limit)
        return bound.binding.plan.kernel, bound

    device = runtime.device(model.cache.device)
    # Loaded now, not in the background of a round.
    load_until_best(lambda: chosen()[1].binding.plan.selection, device.warm)
    kernel, bound = chosen()
    if model.cache.device.type == "cuda" and kernel.startswith("reference."):
        runtime.add_kernel(GATHERED)
        kernel, bound = chosen()
    return kernel, bound


class Place:
    """Every side at one depth and one context; what it finds goes into `into`."""

    def __init__(
        self, options: argparse.Namespace, record: Record, runtime: lz.Runtime, model: Any, context: int,
        into: dict[str, Any],
    ) -> None:  # fmt: skip
        self.options, self.record, self.runtime, self.model, self.into = options, record, runtime, model, into
        self.name = f"{options.depth} layers, context {context}"
        self.crowd = crowd.Crowd(options.requests, context, options.seconds, ramp_s=0.1)
        kernel, bound = attention(runtime, model, self.crowd)
        print(lz.explain("paged_attention", *bound.binding.full[:5]), flush=True)
        into |= {"attention": kernel, "shape": models.described(model.config), "sides": {}}
        into |= {"one_by_one": {}, "where": {}}
        self.hand = by_hand.Paged(model, bound)
        self.graphs: dict[str, Any] = {
            STEP_GRAPH: Whole(model, self.crowd.limit, options.requests),
            LAYER_GRAPH: Layered(model, self.crowd.limit, options.requests),
        }
        self.sides = [side for side in (HAND, *AWAITS) if side != "per op" or options.depth <= SHALLOW]

    def warm(self) -> None:
        """A short crowd a side: libraries load and compile what a shape first needs."""
        short = replace(self.crowd, seconds=0.2)
        for side in self.sides:
            self.record.item(f"{self.name}, {side}, warm-up", lambda side=side: self.span(side, short))

    def agree(self) -> None:
        """The next tokens of one crowd by each graph, beside those of the loop by hand."""

        def compared(graph: Any) -> dict[str, Any]:
            return agreeing.agreement(self.hand, graph, self.crowd.context, self.options.requests)

        found = self.into.setdefault("agreement", {})
        for side, graph in self.graphs.items():
            found[side] = self.record.item(f"{self.name}, {side}, agreement", lambda g=graph: compared(g))

    def rounds(self) -> None:
        """Rounds in which all sides take turns."""
        spans: dict[str, list[crowd.Span]] = {}
        for turn in range(self.options.rounds):
            for side in self.sides:
                now = replace(self.crowd, seed=turn)
                what = f"{self.name}, {side}"
                span = self.record.item(what, lambda side=side, now=now: self.span(side, now))
                if span is not None:
                    spans.setdefault(side, []).append(span)
                self.into["sides"] = self.rows(spans, self.options.requests)
            self.record.write()

    def alone(self) -> None:
        """One request at a time, at the first depth."""
        if self.options.depth != self.options.layers[0]:
            return
        one = replace(self.crowd, requests=1, seconds=self.options.seconds / 2)
        spans: dict[str, list[crowd.Span]] = {}
        for _ in range(2):
            for side in (HAND, "per step", STEP_GRAPH):
                span = self.record.item(f"{self.name}, {side}, alone", lambda side=side: self.span(side, one))
                if span is not None:
                    spans.setdefault(side, []).append(span)
        self.into["one_by_one"] = self.rows(spans, 1)
        fastest = max((row["tokens_per_s"] for row in self.into["one_by_one"].values()), default=None)
        for row in self.into["sides"].values():
            row["over_one_by_one"] = fastest and round(row["tokens_per_s"] / fastest, 2)
        self.record.write()

    def look(self) -> None:
        """Where the time of each side goes, at the longest context; and which kernels ran."""
        for side in self.sides if self.crowd.context == max(self.options.contexts) else ():
            seen = self.record.item(f"{self.name}, {side}, where", lambda side=side: self.where(side))
            if seen is not None:
                self.into["where"][side] = seen
        self.into["kernels"] = device_side.kernels_of(self.runtime, self.model.cache.device)
        for graph in self.graphs.values():
            graph.close()
        self.record.write()

    def span(self, side: str, here: crowd.Crowd) -> crowd.Span:
        """One round of one side."""
        if side == HAND:
            return crowd.looped(self.hand, here)
        if side in GRAPHS:
            return asyncio.run(crowd.awaited(self.runtime, self.graphs[side], here, "step"))
        per: Any = side.removeprefix("per ")
        return asyncio.run(crowd.awaited(self.runtime, self.model, here, per))

    def where(self, side: str) -> dict[str, Any]:
        """Launches, device time and host time of a step, and the parts of the host's."""
        short = replace(self.crowd, seconds=self.options.seconds / 2)
        return device_side.look(lambda: self.span(side, short), self.options.requests)

    def rows(self, spans: dict[str, list[crowd.Span]], requests: int) -> dict[str, Any]:
        """A row a side."""
        rounds = {
            side: [(round(span.tokens_per_s, 1), round(span.mean_batch, 2)) for span in own]
            for side, own in spans.items()
        }
        return counted(rounds, requests, self.options.depth)


def measure(options: argparse.Namespace, record: Record) -> None:
    """Every depth and context, one linear layer, the streams' planted bugs; what was promised comes first."""
    settings = settings_of(options)
    compiling = threading.Thread(target=compiled, args=(record,), name="awaited path")
    compiling.start()  # beside the kernels' own compilers, in a process of its own
    options.compiling = compiling
    for depth in options.layers:
        options.depth = depth
        with lz.start(settings) as runtime:
            if options.device == "cuda" and not device_side.flashinfer_is_built():
                record.found["denied"] = "flashinfer.*: its modules are not built ahead, and take minutes"
                lz.add_policy(deny="flashinfer.*")
            at_depth(options, record, runtime)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.device == "cuda":
        for bug, caught in device_side.planted().items():
            record.found["streams"][bug] = record.item(bug, caught)
    record.write()


def compiled(record: Record) -> None:
    """Have the compiled twin of the awaited path ready, where a compiler is; the record says what runs."""
    try:
        FAST_PATH.load()
    except Exception as error:
        print(f"the awaited path stays Python's: {error}", flush=True)
    record.found["awaited_path"] = FAST_PATH.describe()


def at_depth(options: argparse.Namespace, record: Record, runtime: lz.Runtime) -> None:
    """Every context of one depth, part by part."""
    depth = options.depth
    model = record.item(f"{depth} layers, model", lambda: built(options))
    contexts = record.found["rows"].setdefault(str(depth), {})
    with torch.inference_mode():
        opening = [opened(options, record, runtime, model, context, contexts) for context in options.contexts]
        places = [place for place in opening if place is not None]
        options.compiling.join()
        for part in (Place.warm, Place.agree, Place.rounds, Place.alone, Place.look):
            for place in places:
                part(place)
        found = record.item(f"{depth} layers, linear", lambda: linear(model, options.requests))
        record.found["linear"][str(depth)] = found
    for context, here in contexts.items():
        printed(depth, context, here)


def built(options: argparse.Namespace, cells: Iterable[tuple[int, int]] = ()) -> Any:
    """The model, outside of inference mode: kernels keep what they make of its tables.

    Its pool holds the largest of `cells`, (requests, context) each, one at a time.
    """
    name = "tiny" if options.rehearse else "8b-8"
    models.SHAPES[name] = replace(models.SHAPES[name], num_hidden_layers=options.depth)
    cells = list(cells) or [(options.requests, max(options.contexts))]
    largest = max(crowd.Crowd(n + 1, context, options.seconds).pages(PAGE_SIZE) for n, context in cells)
    pages = largest + options.requests * len(options.contexts)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with torch.no_grad():
        return models.build(name, pages=pages, device=options.device, dtype=dtype)


def opened(
    options: argparse.Namespace, record: Record, runtime: lz.Runtime, model: Any, context: int,
    contexts: dict[str, Any],
) -> Place | None:  # fmt: skip
    """One context, ready to be measured; None where that fails."""
    into = contexts.setdefault(str(context), {})
    name = f"{options.depth} layers, context {context}"
    place: Place | None = record.item(name, lambda: Place(options, record, runtime, model, context, into))
    return place


def parse() -> argparse.Namespace:
    """Read the command line."""

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=numbers, default=[8, 32])
    parser.add_argument("--contexts", type=numbers, default=[128, 2048])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="of which the first one warms up")
    parser.add_argument("--seconds", type=float, default=0.8, help="of each side in each round")
    parser.add_argument("--budget-s", type=float, default=230.0, help="after which no item begins")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", type=Path, default=None, help="a folder, or a JSON file")
    given = parser.parse_args()
    given.device = "cpu" if given.rehearse else "cuda"
    if given.rehearse:
        given.layers, given.contexts, given.requests, given.rounds, given.seconds = [2], [16], 4, 2, 0.2
    elif not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; --rehearse runs a tiny model on the CPU")
    return given


def main() -> int:
    """Measure, print, write after each item; 1 where an item failed."""
    options = parse()
    out = options.out or (None if options.rehearse else RESULTS)
    if out is not None and out.suffix != ".json":
        out = out / RESULTS.name
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    record = Record(out, options.requests, options.budget_s)
    measure(options, record)
    found = record.found
    for title in ("verdicts", "streams", "linear", "errors", "left_out"):
        print(title, found[title], flush=True)
    return int(bool(found["errors"]))


if __name__ == "__main__":
    sys.exit(main())

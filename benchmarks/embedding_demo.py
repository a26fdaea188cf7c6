"""An embedding service in one process: every request is its own coroutine, and requests meet in batches.

    python benchmarks/embedding_demo.py [--device cpu|cuda] [--quick] [--json FILE]

It embeds a few hundred sentences of old books with all-MiniLM-L6-v2 in five ways, checks every result
against sentence-transformers, compares throughput, latency and how free the event loop stayed, and says which
kernel served each op and why. The exit code is 1 when a result is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # the model is an example

from embedding.choices import explanation, kernels, launches
from embedding.load import (
    BatchingServer,
    Run,
    all_together,
    arriving,
    hand_batched,
    one_after_another,
    poisson_arrivals,
)
from embedding.report import (
    ARRIVALS,
    ARRIVALS_BY_HAND,
    BY_HAND,
    ONE,
    TOGETHER,
    WAYS,
    Session,
    mean_batch,
    summary,
)
from embedding.tables import show
from models.minilm import MiniLM, read_sentences, reference_embeddings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

import layerzero as lz

QUERY = "living alone in the woods"
QUICK_SENTENCES = 40
# Batch sizes that the hand-batched rival may choose from; it gets the one that is fastest on this machine.
HAND_BATCHES = (8, 12, 16, 24, 32, 64)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for."""

    device: str
    quick: bool
    rounds: int
    load: float
    seed: int
    json: Path | None


class Service:
    """The service itself: what a request handler calls."""

    def __init__(self, model: MiniLM) -> None:
        self.model = model

    async def embed(self, text: str) -> Tensor:
        """Return the embedding of one text in host memory, (C,) float32."""
        return await lz.to_host(await self.model.embed(text))


class Rounds:
    """Runs every way once a round, so that a slow minute of the machine is slow for all of them."""

    def __init__(
        self, model: MiniLM, session: Session, runtime: lz.Runtime, worker: ThreadPoolExecutor
    ) -> None:
        self.model = model
        self.session = session
        self.runtime = runtime
        self.worker = worker
        self.embed = Service(model).embed

    async def warm_up(self) -> None:
        """Load what is compiled or imported late, answer the query, and choose the rival's batch size."""
        texts = self.session.texts
        self.session.answer = await self.embed(QUERY)
        with lz.record() as seen:
            await all_together(self.embed, texts[:64])
        # What is compiled or imported at first use is there before anything is timed, and so is memory:
        # the rival below has many whole runs before it is timed.
        await lz.warmup(seen.workload())
        await all_together(self.embed, texts)
        if not self.session.quick:
            self.session.hand_batch = await self.best_hand_batch()

    async def best_hand_batch(self) -> int:
        """Return the batch size with which the hand-batched forward is fastest here."""
        seconds = {size: float("inf") for size in HAND_BATCHES}
        for _ in range(2):
            for size in HAND_BATCHES:
                run = await hand_batched(self.model, self.session.texts, size, self.worker)
                seconds[size] = min(seconds[size], run.seconds)
        return min(HAND_BATCHES, key=lambda size: seconds[size])

    async def one_round(self, seed: int, step: Callable[[str], None]) -> None:
        """Run the five ways; the arrivals' rate is the best that (b) or (d) has done."""
        session, texts = self.session, self.session.texts
        step(BY_HAND)
        by_hand = await hand_batched(self.model, texts, session.hand_batch, self.worker)
        session.runs.setdefault(BY_HAND, []).append(by_hand)
        step(TOGETHER)
        await self.counted(TOGETHER, all_together(self.embed, texts))
        rate = session.load * max(run.throughput for way in (TOGETHER, BY_HAND) for run in session.runs[way])
        session.rates.append(rate)
        due = poisson_arrivals(len(texts), rate, seed)
        step(ARRIVALS)
        await self.counted(ARRIVALS, arriving(self.embed, texts, due))
        step(ARRIVALS_BY_HAND)
        server = BatchingServer(self.model, session.hand_batch, self.worker)
        served = await arriving(server.embed, texts, due)
        served.batches = server.sizes
        session.runs.setdefault(ARRIVALS_BY_HAND, []).append(served)
        step(ONE)
        await self.counted(ONE, one_after_another(self.embed, texts))

    async def counted(self, name: str, running: Awaitable[Run]) -> None:
        """Keep a run together with the batch sizes that the batcher counted meanwhile."""
        before = launches(self.runtime)
        run = await running
        run.batches = dict(launches(self.runtime) - before)
        self.session.runs.setdefault(name, []).append(run)


async def measure(options: Options, console: Console) -> Session:
    """Open a runtime, run every way, and ask which kernels served."""
    texts = read_sentences(limit=QUICK_SENTENCES if options.quick else None)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # The bar is drawn between phases only: a bar that redraws itself would disturb the loop it watches.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        bar = progress.add_task("sentence-transformers", total=2 + len(WAYS) * options.rounds)

        def step(what: str) -> None:
            progress.update(bar, description=what, advance=1, refresh=True)

        progress.refresh()
        reference = reference_embeddings(texts)
        session = Session(texts, QUERY, reference, options.device, options.quick, options.load)
        model = MiniLM(options.device)
        settings = lz.Settings(device=options.device, inference=True, freeze_gc=True)
        with ThreadPoolExecutor(1, thread_name_prefix="by-hand") as worker:
            async with lz.start(settings) as runtime:
                rounds = Rounds(model, session, runtime, worker)
                step("warming up")
                await rounds.warm_up()
                for number in range(options.rounds):
                    await rounds.one_round(options.seed + number, step)
                met = texts[: round(mean_batch(session.runs[ARRIVALS]))]
                session.kernels = kernels(model, met)
                session.explanation = explanation(model, met)
        step("done")
    return session


def parse(arguments: list[str] | None) -> Options:
    """Read the command line; LZ_DEMO_QUICK=1 is the same as --quick."""
    parser = argparse.ArgumentParser(description="Embed real sentences through awaited, batched ops.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="few sentences, one round, same checks")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take medians of (default 5)")
    parser.add_argument("--load", type=float, default=1.0, help="arrivals over the best rate of (b) and (d)")
    parser.add_argument("--seed", type=int, default=7, help="seed of the arrival times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds needs to be at least 1, got {options.rounds}")
    if not options.load > 0:
        parser.error(f"--load needs to be above 0, got {options.load}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device and a torch built for it; this torch sees none")
    quick = options.quick or os.environ.get("LZ_DEMO_QUICK", "") not in ("", "0")
    return Options(
        options.device, quick, 1 if quick else options.rounds, options.load, options.seed, options.json
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the service, print what it measured, and return 0 when every result is right, else 1."""
    options = parse(arguments)
    console = Console()
    numbers = summary(asyncio.run(measure(options, console)))
    show(console, numbers)
    if options.json is not None:
        options.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    return 0 if numbers["parity"]["right"] else 1


if __name__ == "__main__":
    sys.exit(main())

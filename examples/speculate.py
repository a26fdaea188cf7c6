"""Speculative decoding of the shipped Llama: its own first layers draft, all of them verify.

    python examples/speculate.py --json benchmarks/results/speculation.json

For drafts of one, two and three of the four layers, and for the whole model as its own draft: how many drafts
stay, and tokens a second beside plain decoding of the same requests, in the same interleaved rounds. The
shipped model is so small that a forward of it costs little more than its Python; `--target-ms` adds to every
forward of the target, in both ways, what a large model's takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from generation import Sampling, generate, load_tokenizer
from llama import FOLDER, Config, Get, Llama, pool, weights_of
from rich.console import Console
from rich.table import Table
from torch import Tensor

import layerzero as lz

PROMPTS = (
    "In the beginning God created the heaven and the earth.",
    "And it came to pass in those days, that",
    "The king said unto them,",
    "Blessed are they that",
)


class Decoding:
    """One sequence of a Llama as `lz.speculative` drives it; a context manager that gives its pages back."""

    def __init__(self, model: Llama, limit: int, wait_s: float = 0.0) -> None:
        self.model = model
        self._wait_s = wait_s
        self._sequence = model.pages.sequence(limit)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._sequence.length

    async def forward(self, tokens: Tensor) -> Tensor:
        """The logits (T, V) after each of `tokens` (T,), which join the sequence."""
        if self._wait_s:
            await asyncio.sleep(self._wait_s)
        own = tokens.to(self.model.pages.device)
        return await self.model.every(own, self._sequence.extend(len(own)))

    def rollback(self, length: int) -> None:
        """Forget the tokens from `length` on; what comes next overwrites them."""
        self._sequence.length = length

    def __enter__(self) -> Decoding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sequence.__exit__(kind, error, trace)


async def speculated(
    draft: Llama, target: Llama, prompt: Sequence[int], sampling: Sampling, places: int, wait_s: float = 0.0
) -> tuple[list[int], lz.speculative.Speculation]:
    """The tokens of one request, and what they took."""
    # Drafts reach beyond the last token that is wanted: `places` of this round and of the one drafted ahead.
    limit = len(prompt) + sampling.max_tokens + 2 * places
    with Decoding(draft, limit) as small, Decoding(target, limit, wait_s) as large:
        generation = lz.speculative.generate(
            small,
            large,
            prompt,
            places=places,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            end=target.config.end,
        )
        return [token async for token in generation], generation.stats


def first_layers(config: Config, get: Get, layers: int, like: Tensor) -> Llama:
    """The model that ends after some of its layers, in a pool of its own."""
    own = replace(config, layers=layers)
    return Llama(own, get, pool(own, like.device, like.dtype, 256, 16))


Way = Callable[[int], Coroutine[Any, Any, int]]


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Every way in turn, round by round."""
    like = torch.empty(0, device=options.device)
    config, get = Config.read(options.folder), weights_of(options.folder, like.device, like.dtype)
    tokenizer = load_tokenizer(options.folder)
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    target = first_layers(config, get, config.layers, like)
    counted: dict[str, lz.speculative.Speculation] = {}
    wait_s = options.target_ms / 1000

    async def plain(number: int) -> int:
        sampling = Sampling(max_tokens=options.tokens, temperature=options.temperature, seed=number)
        made = 0
        async for _ in generate(target, prompts[number % len(prompts)], sampling):
            made += 1
            await asyncio.sleep(wait_s)
        return made

    def with_draft(name: str, draft: Llama) -> Way:
        async def way(number: int) -> int:
            sampling = Sampling(max_tokens=options.tokens, temperature=options.temperature, seed=number)
            prompt = prompts[number % len(prompts)]
            tokens, stats = await speculated(draft, target, prompt, sampling, options.places, wait_s)
            total = counted.setdefault(name, lz.speculative.Speculation())
            for field in ("rounds", "drafted", "accepted", "discarded"):
                setattr(total, field, getattr(total, field) + getattr(stats, field))
            return len(tokens)

        return way

    ways: dict[str, Way] = {"plain": plain}
    for layers in range(1, config.layers + 1):
        name = f"{layers} of {config.layers} layers draft"
        ways[name] = with_draft(name, first_layers(config, get, layers, like))
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(options.rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            made = sum([await way(number) for number in range(len(prompts))])
            if round_:
                speeds[name].append(made / (time.perf_counter() - started))
    leaked = target.pages.count - target.pages.free
    return {
        "places": options.places,
        "target_ms": options.target_ms,
        "temperature": options.temperature,
        "pages_leaked": leaked,
        "ways": {
            name: {
                "tokens_per_s": statistics.median(values),
                "over_plain": statistics.median(a / b for a, b in zip(values, speeds["plain"], strict=True)),
                "acceptance": counted[name].acceptance if name in counted else None,
                "tokens_a_round": (
                    (counted[name].accepted / counted[name].rounds + 1) if name in counted else None
                ),
            }
            for name, values in speeds.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--places", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--target-ms", type=float, default=0.0, help="added to every forward of the target")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)

    async def run() -> dict[str, Any]:
        async with lz.start(lz.Settings(device=options.device, inference=True, freeze_gc=True)):
            return await compare(options)

    said = asyncio.run(run())
    table = Table(title=f"{options.places} drafts a round, temperature {options.temperature:g}")
    for column in ("way", "tokens/s", "over plain", "drafts that stay", "tokens a round"):
        table.add_column(column)
    for name, way in said["ways"].items():
        shares = [way["acceptance"], way["tokens_a_round"]]
        cells = ["-" if share is None else f"{share:.2f}" for share in shares]
        table.add_row(name, f"{way['tokens_per_s']:.0f}", f"{way['over_plain']:.2f}", *cells)
    Console().print(table)
    if options.json:
        said["torch"], said["threads"] = torch.__version__, torch.get_num_threads()
        options.json.write_text(json.dumps(said, indent=1) + "\n")
    return 0 if not said["pages_leaked"] else 1


if __name__ == "__main__":
    sys.exit(main())

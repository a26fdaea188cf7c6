"""Speculative decoding of the shipped Llama: its own first layers draft, all of them verify.

    python examples/speculate.py --json benchmarks/results/speculation.json
    torchrun --nproc-per-node 2 examples/speculate.py      # the target's heads and columns over two ranks

For drafts of one, two and three of the four layers, and for the whole model as its own draft: how many drafts
stay, and tokens a second beside plain decoding of the same requests, in the same interleaved rounds. The
shipped model is so small that a forward of it costs little more than its Python; `--target-ms` adds to every
forward of the target, in both ways, what a large model's takes.

Under torchrun every rank verifies with its share of the target and rank 0 alone drafts; what is compared is
the tokens, on every rank and with one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from generation import Sampling, generate, load_tokenizer
from llama import FOLDER, Config, Get, Llama, pool, weights_of
from measuring.report import environment
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tp_generate import shard_of, sharded

import layerzero as lz
from layerzero.kvcache import PagedSequence
from layerzero.speculative.tensor_parallel import Coordinated

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
        self._sequence = model.sequence(limit)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._sequence.length

    async def forward(self, tokens: Tensor) -> Tensor:
        """The logits (T, V) after each of `tokens` (T,), which join the sequence."""
        if self._wait_s:
            await asyncio.sleep(self._wait_s)
        own = tokens.to(self.model.cache.device)
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


class Blurred(Decoding):
    """A sequence whose logits are blended with noise: of a draft that guesses as badly as one likes."""

    def __init__(self, model: Llama, limit: int, share: float) -> None:
        super().__init__(model, limit)
        self._share = share
        self._draws = torch.Generator().manual_seed(0)

    async def forward(self, tokens: Tensor) -> Tensor:
        """The logits (T, V), of which `share` are the model's."""
        logits = await super().forward(tokens)
        noise = torch.randn(logits.shape, generator=self._draws).to(logits.device)
        return self._share * logits + (1 - self._share) * logits.std() * noise


async def speculated(
    draft: Llama,
    target: Llama,
    prompt: Sequence[int],
    sampling: Sampling,
    places: int,
    wait_s: float = 0.0,
    share: float = 1.0,
) -> tuple[list[int], lz.speculative.Speculation]:
    """The tokens of one request, and what they took; `share` of the draft's logits are its own."""
    # Drafts reach beyond the last token that is wanted: `places` of this round and of the one drafted ahead.
    limit = len(prompt) + sampling.max_tokens + 2 * places
    own = Decoding(draft, limit) if share == 1.0 else Blurred(draft, limit, share)
    with own as small, Decoding(target, limit, wait_s) as large:
        generation = drafted(small, large, prompt, sampling, places)
        return [token async for token in generation], generation.stats


def drafted(
    small: Decoding, large: Any, prompt: Sequence[int], sampling: Sampling, places: int
) -> lz.speculative.Generation:
    """The generation of one request."""
    return lz.speculative.generate(
        small,
        large,
        prompt,
        places=places,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        end=small.model.config.end,
    )


def lost(model: Llama) -> int:
    """Pages that no sequence gave back."""
    return model.cache.allocator.total - model.cache.allocator.free_pages


def first_layers(config: Config, get: Get, layers: int, like: Tensor) -> Llama:
    """The model that ends after some of its layers, in a pool of its own."""
    own = replace(config, layers=layers)
    return Llama(own, get, pool(own, like.device, like.dtype, 256, 16))


# -- over the ranks of a gang ---------------------------------------------------------------------------


class Share:
    """One rank's heads and columns of the target, with pages of its own for every sequence."""

    def __init__(self, member: Any, config: Config, get: Get, like: Tensor) -> None:
        own = shard_of(config, member.ranks)
        cache = pool(own, like.device, like.dtype, 256, 16)
        self.model = Llama(own, sharded(get, member.rank, member.ranks), cache)
        for layer in self.model.layers:
            layer.reduce = self._summed
        self.texts: dict[int, list[int]] = {}
        self.target = Coordinated(
            member,
            open=cache.sequence,
            close=PagedSequence.close,
            forward=self._forward,
            spread=lambda rows: dist.broadcast(rows, 0),
            vocab=config.vocab,
            device=like.device,
            settled=lambda number, tokens: self.texts.setdefault(number, []).extend(tokens),
        )

    def _summed(self, partial: Tensor) -> Tensor:
        dist.all_reduce(partial)
        return partial

    def _forward(self, sequences: Sequence[Any], ids: Tensor, counts: Sequence[int]) -> Tensor:
        spans = [sequence.extend(count) for sequence, count in zip(sequences, counts, strict=True)]
        return self.model.everys(ids, spans)

    @property
    def leaked(self) -> int:
        """Pages that no sequence gave back."""
        return lost(self.model)


async def over_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Speculate on a gang; the tokens that every rank found, beside those of one process."""
    like = torch.empty(0, device=options.device)
    config, get = Config.read(options.folder), weights_of(options.folder, like.device, like.dtype)
    tokenizer = load_tokenizer(options.folder)
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    draft = first_layers(config, get, options.draft_layers, like)
    found: list[list[int]] = []
    numbers: dict[int, int] = {}
    stats: list[lz.speculative.Speculation] = []

    def sampling(number: int) -> Sampling:
        return Sampling(max_tokens=options.tokens, temperature=options.temperature, seed=number)

    async with lz.start(lz.Settings(device=options.device, inference=True)) as runtime:
        async with runtime.gang(timeout_s=120.0) as member:
            share = Share(member, config, get, like)

            async def one(number: int) -> list[int]:
                prompt = prompts[number]
                limit = len(prompt) + options.tokens + 2 * options.places
                with Decoding(draft, limit) as small:
                    async with share.target.sequence(limit) as shared:
                        generation = drafted(small, shared, prompt, sampling(number), options.places)
                        tokens = [token async for token in generation]
                stats.append(generation.stats)
                numbers[number] = shared.number
                return tokens

            if member.rank:
                await member.follow()
            else:
                found = list(await asyncio.gather(*map(one, range(len(prompts)))))
        alone: list[list[int]] = []
        if member.rank == 0:
            target = first_layers(config, get, config.layers, like)
            for number, prompt in enumerate(prompts):
                tokens, _ = await speculated(draft, target, prompt, sampling(number), options.places)
                alone.append(tokens)
    leaked = share.leaked + lost(draft)
    return {
        "rank": member.rank,
        "ranks": member.ranks,
        "plan": member.plan,
        "settled": {str(number): tokens for number, tokens in sorted(share.texts.items())},
        "tokens": {str(numbers[number]): tokens for number, tokens in enumerate(found)},
        "alone": {str(numbers[number]): tokens for number, tokens in enumerate(alone)},
        "acceptance": [each.acceptance for each in stats],
        "pages_leaked": leaked,
    }


def on_ranks(options: argparse.Namespace) -> int:
    """Run as one rank of torchrun's; rank 0 prints what all of them found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    said = asyncio.run(over_ranks(options))
    everybody: list[Any] = [None] * said["ranks"]
    dist.all_gather_object(everybody, said)
    dist.destroy_process_group()
    leaked = sum(each["pages_leaked"] for each in everybody)
    if said["rank"]:
        return 0
    tokens = said["tokens"]
    same = all(each["settled"][n][: len(text)] == text for each in everybody for n, text in tokens.items())
    right = sum(tokens[number] == text for number, text in said["alone"].items())
    print(
        f"{said['ranks']} ranks, plan {said['plan']}: every rank accepted {'alike' if same else 'otherwise'}"
    )
    print(f"{right} of {len(said['alone'])} texts are those of one process, {leaked} pages leaked")
    if options.json:
        options.json.write_text(json.dumps(everybody, indent=1) + "\n")
    return 0 if same and right == len(said["alone"]) and not leaked else 1


Way = Callable[[int], Coroutine[Any, Any, int]]


async def compare(options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Every way in turn, round by round; `keep` gets what is known after each."""
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

    def with_draft(name: str, draft: Llama, share: float = 1.0) -> Way:
        async def way(number: int) -> int:
            sampling = Sampling(max_tokens=options.tokens, temperature=options.temperature, seed=number)
            prompt = prompts[number % len(prompts)]
            tokens, stats = await speculated(draft, target, prompt, sampling, options.places, wait_s, share)
            total = counted.setdefault(name, lz.speculative.Speculation())
            for field in ("rounds", "drafted", "accepted", "discarded"):
                setattr(total, field, getattr(total, field) + getattr(stats, field))
            return len(tokens)

        return way

    ways: dict[str, Way] = {"plain": plain}
    for layers in range(1, config.layers + 1):
        name = f"{layers} of {config.layers} layers draft"
        ways[name] = with_draft(name, first_layers(config, get, layers, like))
    for share in options.shares:
        name = f"all layers, {1 - share:.0%} noise"
        ways[name] = with_draft(name, first_layers(config, get, config.layers, like), share)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    said: dict[str, Any] = {}
    for round_ in range(options.rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            made = sum([await way(number) for number in range(len(prompts))])
            if round_:
                speeds[name].append(made / (time.perf_counter() - started))
        if round_:
            said = _said(options, lost(target), speeds, counted)
            keep(said)
    return said


def _said(
    options: argparse.Namespace,
    leaked: int,
    speeds: dict[str, list[float]],
    counted: dict[str, lz.speculative.Speculation],
) -> dict[str, Any]:
    ways = {
        name: {
            "tokens_per_s": statistics.median(values),
            "over_plain": statistics.median(a / b for a, b in zip(values, speeds["plain"], strict=True)),
            "acceptance": counted[name].acceptance if name in counted else None,
            "tokens_a_round": counted[name].accepted / counted[name].rounds + 1 if name in counted else None,
        }
        for name, values in speeds.items()
    }
    columns = ["draft", "drafts that stay", "tokens a forward of the target", "speed over plain decoding"]
    found = [[n, w["acceptance"], w["tokens_a_round"], w["over_plain"]] for n, w in ways.items()]
    return {
        "rounds": len(speeds["plain"]),
        "places": options.places,
        "target_ms": options.target_ms,
        "temperature": options.temperature,
        "pages_leaked": leaked,
        "ways": ways,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "tables": {"ways": {"columns": columns, "rows": [row for row in found if row[1] is not None]}},
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
    parser.add_argument("--shares", type=float, nargs="*", default=[], help="of noisy drafts, 0 to 1")
    parser.add_argument("--draft-layers", type=int, default=2, help="of the draft, under torchrun")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        return on_ranks(options)

    def keep(said: dict[str, Any]) -> None:
        if options.json:
            record = {"environment": environment(options.device), **said}
            options.json.write_text(json.dumps(record, indent=1) + "\n")

    async def run() -> dict[str, Any]:
        async with lz.start(lz.Settings(device=options.device, inference=True, freeze_gc=True)):
            return await compare(options, keep)

    said = asyncio.run(run())
    table = Table(title=f"{options.places} drafts a round, temperature {options.temperature:g}")
    for column in ("way", "tokens/s", "over plain", "drafts that stay", "tokens a round"):
        table.add_column(column)
    for name, way in said["ways"].items():
        shares = [way["acceptance"], way["tokens_a_round"]]
        cells = ["-" if share is None else f"{share:.2f}" for share in shares]
        table.add_row(name, f"{way['tokens_per_s']:.0f}", f"{way['over_plain']:.2f}", *cells)
    Console().print(table)
    return 0 if not said["pages_leaked"] else 1


if __name__ == "__main__":
    sys.exit(main())

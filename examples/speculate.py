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
import runpy
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from generate import SamplingParams, generate, load_tokenizer
from models.llama import FOLDER, Llama, LlamaConfig, WeightSource, kv_pool, weights_of
from models.sampling import NO_DRAW
from rich.console import Console
from rich.table import Table
from tensor_parallel.llama import VOCABULARY, shard_of
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import PagedSequence
from layerzero.parallel import Layout, shard_weights
from layerzero.speculative.tensor_parallel import TensorParallelTarget

PROMPTS = (
    "In the beginning God created the heaven and the earth.",
    "And it came to pass in those days, that",
    "The king said unto them,",
    "Blessed are they that",
)
# Tokens of a prompt in one launch, and the last ones whose logits are computed: a round verifies fewer.
PREFILL_CHUNK, LOGIT_ROWS = 1024, 256


class SequenceDecoder:
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
        """The logits (T, V) after each of `tokens`, or the last LOGIT_ROWS of them; all join the sequence."""
        if self._wait_s:
            await asyncio.sleep(self._wait_s)
        token_ids = tokens.to(self.model.cache.device)
        prefill, rows = token_ids[:-LOGIT_ROWS], token_ids[-LOGIT_ROWS:]
        for start in range(0, len(prefill), PREFILL_CHUNK):
            piece = prefill[start : start + PREFILL_CHUNK]
            await self.model.sample_next(piece, self._sequence.extend(len(piece)), NO_DRAW)
        return await self.model.forward_all_positions(rows, self._sequence.extend(len(rows)))

    def rollback(self, length: int) -> None:
        """Forget the tokens from `length` on; what comes next overwrites them."""
        self._sequence.length = length

    def __enter__(self) -> SequenceDecoder:
        return self

    def __exit__(self, *raised: object) -> None:
        self._sequence.close()


class NoisyDecoder(SequenceDecoder):
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


async def speculate_request(
    draft: Llama,
    target: Llama,
    prompt: Sequence[int],
    sampling: SamplingParams,
    num_speculative_tokens: int,
    wait_s: float = 0.0,
    share: float = 1.0,
) -> tuple[list[int], lz.speculative.SpeculationStats]:
    """The tokens of one request, and what they took; `share` of the draft's logits are its own."""
    # Drafts reach beyond the last token that is wanted: `places` of this round and of the one drafted ahead.
    limit = len(prompt) + sampling.max_tokens + 2 * num_speculative_tokens
    decoder = SequenceDecoder(draft, limit) if share == 1.0 else NoisyDecoder(draft, limit, share)
    with decoder as small, SequenceDecoder(target, limit, wait_s) as large:
        generation = start_generation(small, large, prompt, sampling, num_speculative_tokens)
        return [token async for token in generation], generation.stats


def start_generation(
    small: SequenceDecoder,
    large: Any,
    prompt: Sequence[int],
    sampling: SamplingParams,
    num_speculative_tokens: int,
) -> lz.speculative.Generation:
    """The generation of one request."""
    return lz.speculative.generate(
        small,
        large,
        prompt,
        num_speculative_tokens=num_speculative_tokens,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop_token_ids=small.model.config.eos_token_ids,
    )


def leaked_pages(model: Llama) -> int:
    """Pages that no sequence gave back."""
    return model.cache.allocator.total - model.cache.allocator.free_pages


def first_layers(config: LlamaConfig, get: WeightSource, layers: int, like: Tensor) -> Llama:
    """The model that ends after some of its layers, in a pool of its own."""
    draft_config = replace(config, num_hidden_layers=layers)
    return Llama(draft_config, get, kv_pool(draft_config, like.device, like.dtype, 256, 16))


# -- over the ranks of a rank group ---------------------------------------------------------------------


class TargetShard:
    """One rank's heads and columns of the target, with pages of its own for every sequence."""

    def __init__(self, member: Any, config: LlamaConfig, get: WeightSource, like: Tensor) -> None:
        shares = Layout(member, tp=member.ranks).tensor
        shard_config = shard_of(config, shares)
        cache = kv_pool(shard_config, like.device, like.dtype, 256, 16)
        self.model = Llama(shard_config, shard_weights(get, shares, whole=VOCABULARY), cache)
        for layer in self.model.layers:
            layer.shares = shares
        self.texts: dict[int, list[int]] = {}
        self.target = TensorParallelTarget(
            member,
            open=cache.sequence,
            close=PagedSequence.close,
            forward=self._forward,
            broadcast=lambda rows: dist.broadcast(rows, 0),
            vocab_size=config.vocab_size,
            device=like.device,
            on_tokens=lambda number, tokens: self.texts.setdefault(number, []).extend(tokens),
        )

    def _forward(self, sequences: Sequence[Any], ids: Tensor, counts: Sequence[int]) -> Tensor:
        spans = [sequence.extend(count) for sequence, count in zip(sequences, counts, strict=True)]
        return self.model.forward_all_positions_batch(ids, spans)

    @property
    def leaked(self) -> int:
        """Pages that no sequence gave back."""
        return leaked_pages(self.model)


async def over_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Speculate on a rank group; the tokens that every rank found, beside those of one process."""
    like = torch.empty(0, device=options.device)
    config, get = LlamaConfig.read(options.folder), weights_of(options.folder, like.device, like.dtype)
    tokenizer = load_tokenizer(options.folder)
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    draft = first_layers(config, get, options.draft_layers, like)
    token_lists: list[list[int]] = []
    numbers: dict[int, int] = {}
    stats: list[lz.speculative.SpeculationStats] = []

    def sampling(number: int) -> SamplingParams:
        return SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=number)

    async with lz.start(lz.Settings(device=options.device, inference=True)):
        async with lz.rank_group(timeout_s=120.0) as member:
            share = TargetShard(member, config, get, like)

            async def one(number: int) -> list[int]:
                prompt = prompts[number]
                limit = len(prompt) + options.tokens + 2 * options.places
                with SequenceDecoder(draft, limit) as small:
                    async with share.target.sequence(limit) as shared:
                        generation = start_generation(small, shared, prompt, sampling(number), options.places)
                        tokens = [token async for token in generation]
                stats.append(generation.stats)
                numbers[number] = shared.number
                return tokens

            if member.rank:
                await member.follow()
            else:
                token_lists = list(await asyncio.gather(*map(one, range(len(prompts)))))
        alone: list[list[int]] = []
        if member.rank == 0:
            target = first_layers(config, get, config.num_hidden_layers, like)
            for number, prompt in enumerate(prompts):
                tokens, _ = await speculate_request(draft, target, prompt, sampling(number), options.places)
                alone.append(tokens)
    leaked = share.leaked + leaked_pages(draft)
    return {
        "rank": member.rank,
        "ranks": member.ranks,
        "plan": member.plan_digest,
        "settled": {str(number): tokens for number, tokens in sorted(share.texts.items())},
        "tokens": {str(numbers[number]): tokens for number, tokens in enumerate(token_lists)},
        "alone": {str(numbers[number]): tokens for number, tokens in enumerate(alone)},
        "acceptance": [each.acceptance_rate for each in stats],
        "pages_leaked": leaked,
    }


def on_ranks(options: argparse.Namespace) -> int:
    """Run as one rank of torchrun's; rank 0 prints what all of them found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    record = asyncio.run(over_ranks(options))
    everybody: list[Any] = [None] * record["ranks"]
    dist.all_gather_object(everybody, record)
    dist.destroy_process_group()
    leaked = sum(each["pages_leaked"] for each in everybody)
    if record["rank"]:
        return 0
    tokens = record["tokens"]
    same = all(each["settled"][n][: len(text)] == text for each in everybody for n, text in tokens.items())
    right = sum(tokens[number] == text for number, text in record["alone"].items())
    accepted = "alike" if same else "otherwise"
    print(f"{record['ranks']} ranks, plan {record['plan']}: every rank accepted {accepted}")
    print(f"{right} of {len(record['alone'])} texts are those of one process, {leaked} pages leaked")
    if options.json:
        options.json.write_text(json.dumps(everybody, indent=1) + "\n")
    return 0 if same and right == len(record["alone"]) and not leaked else 1


Way = Callable[[int], Coroutine[Any, Any, int]]


async def compare(options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Every way in turn, round by round; `keep` gets what is known after each."""
    like = torch.empty(0, device=options.device)
    config, get = LlamaConfig.read(options.folder), weights_of(options.folder, like.device, like.dtype)
    tokenizer = load_tokenizer(options.folder)
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    target = first_layers(config, get, config.num_hidden_layers, like)
    counted: dict[str, lz.speculative.SpeculationStats] = {}
    wait_s = options.target_ms / 1000

    async def plain(number: int) -> int:
        sampling = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=number)
        num_tokens = 0
        async for _ in generate(target, prompts[number % len(prompts)], sampling):
            num_tokens += 1
            await asyncio.sleep(wait_s)
        return num_tokens

    def with_draft(name: str, draft: Llama, share: float = 1.0) -> Way:
        async def way(number: int) -> int:
            sampling = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=number)
            prompt = prompts[number % len(prompts)]
            tokens, stats = await speculate_request(
                draft, target, prompt, sampling, options.places, wait_s, share
            )
            total = counted.setdefault(name, lz.speculative.SpeculationStats())
            for field in ("num_rounds", "num_draft_tokens", "num_accepted", "num_discarded"):
                setattr(total, field, getattr(total, field) + getattr(stats, field))
            return len(tokens)

        return way

    ways: dict[str, Way] = {"plain": plain}
    for layers in range(1, config.num_hidden_layers + 1):
        name = f"{layers} of {config.num_hidden_layers} layers draft"
        ways[name] = with_draft(name, first_layers(config, get, layers, like))
    for share in options.shares:
        name = f"all layers, {1 - share:.0%} noise"
        ways[name] = with_draft(name, first_layers(config, get, config.num_hidden_layers, like), share)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    record: dict[str, Any] = {}
    for round_ in range(options.rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            total_tokens = sum([await way(number) for number in range(len(prompts))])
            if round_:
                speeds[name].append(total_tokens / (time.perf_counter() - started))
        if round_:
            record = _record(options, leaked_pages(target), speeds, counted)
            keep(record)
    return record


def _record(
    options: argparse.Namespace,
    leaked: int,
    speeds: dict[str, list[float]],
    counted: dict[str, lz.speculative.SpeculationStats],
) -> dict[str, Any]:
    ways = {
        name: {
            "tokens_per_s": statistics.median(values),
            "over_plain": statistics.median(a / b for a, b in zip(values, speeds["plain"], strict=True)),
            "acceptance": counted[name].acceptance_rate if name in counted else None,
            "tokens_a_round": counted[name].num_accepted / counted[name].num_rounds + 1
            if name in counted
            else None,
        }
        for name, values in speeds.items()
    }
    columns = ["draft", "drafts that stay", "tokens a forward of the target", "speed over plain decoding"]
    rows = [[n, w["acceptance"], w["tokens_a_round"], w["over_plain"]] for n, w in ways.items()]
    return {
        "rounds": len(speeds["plain"]),
        "places": options.places,
        "target_ms": options.target_ms,
        "temperature": options.temperature,
        "pages_leaked": leaked,
        "ways": ways,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "tables": {"ways": {"columns": columns, "rows": [row for row in rows if row[1] is not None]}},
    }


def provenance() -> dict[str, Any]:
    """Script, commit and machine, as the benchmarks' records have them."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "provenance.py"
    record: dict[str, Any] = runpy.run_path(str(path))["provenance"]()
    return record


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

    def keep(results: dict[str, Any]) -> None:
        if options.json:
            date = datetime.now(UTC).isoformat(timespec="seconds")
            record = {"environment": {"date": date, **provenance()}, **results}
            options.json.write_text(json.dumps(record, indent=1) + "\n")

    async def run() -> dict[str, Any]:
        async with lz.start(lz.Settings(device=options.device, inference=True, freeze_gc=True)):
            return await compare(options, keep)

    results = asyncio.run(run())
    table = Table(title=f"{options.places} drafts a round, temperature {options.temperature:g}")
    for column in ("way", "tokens/s", "over plain", "drafts that stay", "tokens a round"):
        table.add_column(column)
    for name, way in results["ways"].items():
        shares = [way["acceptance"], way["tokens_a_round"]]
        cells = ["-" if share is None else f"{share:.2f}" for share in shares]
        table.add_row(name, f"{way['tokens_per_s']:.0f}", f"{way['over_plain']:.2f}", *cells)
    Console().print(table)
    return 0 if not results["pages_leaked"] else 1


if __name__ == "__main__":
    sys.exit(main())

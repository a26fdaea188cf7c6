"""Tensor-parallel generation: a Llama's heads and columns over several processes, coroutines on one of them.

    torchrun --nproc-per-node 2 examples/tp_generate.py --requests 8
    torchrun --nproc-per-node 2 examples/tp_generate.py --layers 16 --dtype bfloat16   # a GPU a rank: NCCL
    torchrun --nproc-per-node 2 examples/tp_generate.py --stages     # layers instead of heads and columns
    python examples/tp_generate.py --cluster auto --ranks 2     # devices of a Ray cluster

Rank 0 has the requests: each is a coroutine that runs `generation.generate`, as with one device. What meets
in rank 0's lane runs on every rank, announced by a manifest before the first collective. Under torchrun the
same shards run beside it in a loop written by hand over plain torch.distributed; with `--cluster` the ranks
are actors, and a text goes on from its tokens when one of them dies. Last the whole model runs on one device,
and the last line says whether the tokens are those of that. `--layers` takes random weights in the shape of
Llama 3 8B, so many layers of it, instead of the shipped model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from generation import Sampling, generate, load_tokenizer
from led import Led
from llama import BLOCKING, FOLDER, Config, Draw, Get, Llama, finished, pool, weights_of
from stages import Stage
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import Rows

# Which axis of a weight is shared out: rows of what makes heads and columns, columns of what takes them.
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMNS = ("o_proj", "down_proj")
PAGES = 1024
WIDE = 64
LLAMA_3_8B = Config(
    vocab=128_256, channels=4096, inner=14_336, layers=32, heads=32, kv_heads=8, head_dim=128, eps=1e-5,
    rope_base=500_000.0, positions=8192,
)  # fmt: skip
PROMPTS = (
    "In the beginning God created the heaven and the earth.",
    "And it came to pass in those days, that",
    "The king said unto them,",
    "Blessed are they that",
)


def shard_of(config: Config, ranks: int) -> Config:
    """The shape of one rank's share.

    Raises: ValueError: heads or inner channels do not divide.
    """
    for name in ("heads", "kv_heads", "inner"):
        if getattr(config, name) % ranks:
            count = getattr(config, name)
            raise ValueError(f"ranks needs a divisor of the model's {count} {name}, got {ranks}")
    heads, kv_heads, inner = config.heads // ranks, config.kv_heads // ranks, config.inner // ranks
    return replace(config, heads=heads, kv_heads=kv_heads, inner=inner)


def sharded(get: Get, rank: int, ranks: int) -> Get:
    """`get`, which gives this rank's piece of what is shared out and the whole of everything else."""

    def piece(name: str, shape: tuple[int, ...]) -> Tensor:
        part, kind = name.rsplit(".", 2)[-2:]
        axis = 0 if part in ROWS else 1 if part in COLUMNS else -1
        if axis < 0 or (kind == "bias" and part in COLUMNS):
            found = get(name, shape)
            # A bias is added once, whoever adds the partial sums up.
            return torch.zeros_like(found) if kind == "bias" and part in COLUMNS and rank else found
        whole = tuple(size * ranks if at == axis else size for at, size in enumerate(shape))
        return get(name, whole).chunk(ranks, axis)[rank].contiguous()

    return piece


class Shard(Led):
    """One rank's share of a Llama: some heads and some inner channels of each layer."""

    def __init__(
        self,
        config: Config,
        get: Get,
        member: Any,
        like: Tensor,
        pages: int = PAGES,
        captured: Sequence[int] = (),
    ) -> None:
        """`like` has the dtype and the device of the weights.

        `captured` are sizes of crowds: a step of sequences that all decode is a graph for the next size, made
        by the first step that needs it, and anew for tables that are `WIDE` pages wider.
        """
        own = shard_of(config, member.ranks)
        super().__init__(
            own, sharded(get, member.rank, member.ranks), pool(own, like.device, like.dtype, pages, 16)
        )
        for layer in self.layers:
            layer.reduce = self._summed
        self._graph: Any = None
        if captured:
            self.wide = WIDE
            spare = self.cache.sequence(1).pages[0]  # where rows of padding stand
            fill = {"slots": spare * self.cache.page_size, "tables": spare, "lengths": 1}
            self._graph = lz.compile(self._decoded, buckets=captured, fill=fill)
        self.lead(member, "share")

    def _summed(self, partial: Tensor) -> Tensor:
        dist.all_reduce(partial)
        return partial

    def logits(self, ids: Tensor, at: Rows) -> Tensor:
        """What every rank runs: the logits (B, V) of each sequence's last row."""
        graph = self._graph
        if graph is None or at.offsets is not None or len(ids) > graph.buckets[-1]:
            return super().logits(ids, at)
        found: Tensor = graph(ids, at.positions, at.slots, at.tables, at.lengths)
        return found

    def _decoded(
        self, ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor
    ) -> Tensor:
        return super().logits(ids, Rows(positions, slots, tables, lengths, None, slice(None)))


async def texts(model: Llama, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Each prompt's continuation; all are under way at once."""

    async def one(number: int, prompt: list[int]) -> list[int]:
        sampling = Sampling(max_tokens=tokens, seed=number)
        return [token async for token in generate(model, prompt, sampling)]

    return list(await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts))))


def by_hand(model: Shard, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """The same on every rank, all prompts in step: rank 0 draws, torch.distributed tells the others."""
    device = model.cache.device
    with ExitStack() as stack, torch.inference_mode():
        opened = [stack.enter_context(model.sequence(len(prompt) + tokens)) for prompt in prompts]
        spans = [own.extend(len(prompt)) for own, prompt in zip(opened, prompts, strict=True)]
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        found: list[list[int]] = [[] for _ in prompts]
        for drawn in range(tokens):
            at = model.cache.rows(spans)
            logits = finished(model.forward(BLOCKING, model._blocking, ids, at))
            seeds = torch.arange(len(prompts), device=device)
            ids = lz.sync.sample(logits, seed=seeds, offset=torch.full_like(seeds, drawn))
            dist.broadcast(ids, 0)
            for own, token in zip(found, ids.tolist(), strict=True):
                own.append(token)
            spans = [own.extend() for own in opened] if drawn < tokens - 1 else []
    return found


def config_and_weights(options: argparse.Namespace, like: Tensor) -> tuple[Config, Get]:
    """The model's whole shape, and how to get its whole weights."""
    if not options.layers:
        return Config.read(options.folder), weights_of(options.folder, like.device, like.dtype)
    config = replace(LLAMA_3_8B, layers=options.layers)

    def get(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return like.new_ones(shape)
        generator = torch.Generator(like.device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
        return drawn.mul_(shape[-1] ** -0.5)

    return config, get


async def serve(options: argparse.Namespace, device: torch.device) -> dict[str, Any] | None:
    """Run as one rank; on rank 0 what came out."""
    like = torch.empty(0, device=device, dtype=getattr(torch, options.dtype))
    config, get = config_and_weights(options, like)
    tokenizer = load_tokenizer(options.folder)
    prompts = [tokenizer.encode(PROMPTS[n % len(PROMPTS)]).ids for n in range(options.requests)]
    async with lz.start(lz.Settings(device=str(device), inference=True)) as runtime:
        async with runtime.gang(timeout_s=120.0) as member:
            model: Led = Stage(config, get, member, like) if options.stages else _shard(options, member, like)
            found: list[list[int]] = []
            speeds: dict[str, float] = {}
            if member.rank:
                await member.follow()
            else:
                await texts(model, prompts, 4)  # everything is loaded and chosen
                started = time.perf_counter()
                found = await texts(model, prompts, options.tokens)
                speeds["gang"] = _speed(found, started)
        if isinstance(model, Shard):
            by_hand(model, prompts, 4)
            started = time.perf_counter()
            hand = by_hand(model, prompts, options.tokens)
            speeds["by hand over torch.distributed"] = _speed(hand, started)
        if member.rank:
            return None
        alone = Llama(config, get, pool(config, device, like.dtype, PAGES, 16))
        await texts(alone, prompts, 4)
        started = time.perf_counter()
        wanted = await texts(alone, prompts, options.tokens)
        speeds["one device"] = _speed(wanted, started)
    said = {"ranks": member.ranks, "plan": member.plan, "layers": config.layers, "channels": config.channels}
    print(tokenizer.decode(found[0]))
    return compared(said, options, found, wanted, speeds)


def _shard(options: argparse.Namespace, member: Any, like: Tensor) -> Shard:
    crowds = sorted({1, options.requests}) if options.captured else ()
    return Shard(*config_and_weights(options, like), member, like, captured=crowds)


def compared(
    said: dict[str, Any],
    options: argparse.Namespace,
    found: list[list[int]],
    wanted: list[list[int]],
    speeds: dict[str, float],
) -> dict[str, Any]:
    """What is printed and written of a run."""
    same = sum(a == b for a, b in zip(found, wanted, strict=True))
    for name, speed in speeds.items():
        print(f"{name}: {speed:.0f} tokens/s")
    print(f"{said['ranks']} ranks, plan {said['plan']}: {same} of {len(found)} texts are those of one device")
    return {
        **said,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "collectives": options.collectives,
        "torch": torch.__version__,
        "requests": options.requests,
        "tokens": options.tokens,
        "tokens_per_s": speeds,
        "texts_as_one_device": same,
    }


# -- on the devices of a cluster ------------------------------------------------------------------------


def built(options: argparse.Namespace, member: Any) -> Shard:
    """One rank's model, in the process of its device."""
    if options.device == "cpu":
        torch.set_num_threads(1)
    like = torch.empty(0, device=options.device, dtype=getattr(torch, options.dtype))
    return _shard(options, member, like)


async def continued(
    model: Shard, prompt: list[int], tokens: int, seed: int, so_far: list[int] | None = None
) -> AsyncIterator[int]:
    """The tokens behind `prompt` and `so_far`, drawn by seed and place: a text can go on anywhere."""
    known = list(so_far or ())
    with model.sequence(len(prompt) + tokens) as sequence:
        ids = torch.tensor([*prompt, *known], device=model.cache.device)
        while len(known) < tokens and not (known and known[-1] in model.config.end):
            ids = await model.next(ids, sequence.extend(len(ids)), Draw(1.0, 1.0, seed, len(known)))
            known.append(int(await lz.to_host(ids)))
            yield known[-1]


async def lead(options: argparse.Namespace) -> dict[str, Any]:
    """Shard the model over devices of a cluster, and send every request there from here."""
    settings = lz.Settings(
        cluster=options.cluster, cluster_devices=options.ranks, device=options.device, inference=True
    )
    tokenizer = load_tokenizer(options.folder)
    prompts = [tokenizer.encode(PROMPTS[n % len(PROMPTS)]).ids for n in range(options.requests)]
    async with lz.start(settings) as runtime:
        build, over = partial(built, options), options.collectives
        async with runtime.gang(options.ranks, build=build, collectives=over, timeout_s=120.0) as gang:

            async def one(number: int, tokens: int) -> list[int]:
                text = gang.stream(continued, prompts[number], tokens, number, resume=True)
                return [token async for token in text]

            await asyncio.gather(*(one(number, 4) for number in range(len(prompts))))
            started = time.perf_counter()
            found = list(await asyncio.gather(*(one(n, options.tokens) for n in range(len(prompts)))))
            speeds = {"gang": _speed(found, started)}
            said = {"ranks": gang.ranks, "plan": gang.plan, "epoch": gang.epoch}
            said["nodes"] = len({device.facts.node for device in gang.devices})
        like = torch.empty(0, device=options.device, dtype=getattr(torch, options.dtype))
        config, get = config_and_weights(options, like)
        alone = Llama(config, get, pool(config, like.device, like.dtype, PAGES, 16))
        await texts(alone, prompts, 4)
        started = time.perf_counter()
        wanted = await texts(alone, prompts, options.tokens)
        speeds["one device"] = _speed(wanted, started)
    print(tokenizer.decode(found[0]))
    return compared(said, options, found, wanted, speeds)


def _speed(found: list[list[int]], started: float) -> float:
    return sum(map(len, found)) / (time.perf_counter() - started)


def main(arguments: Sequence[str] | None = None) -> int:
    """Set torch.distributed up, serve, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--stages", action="store_true", help="share the layers out, not each one's heads")
    parser.add_argument("--captured", action="store_true", help="replay decoding steps as captured graphs")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--layers", type=int, default=0, help="random weights, so many layers of Llama 3 8B")
    parser.add_argument("--cluster", help="auto, local, or the address of a Ray cluster; not under torchrun")
    parser.add_argument("--ranks", type=int, default=2, help="devices of the cluster")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    options.device, options.collectives = means(options.device, ranks_here)
    if options.cluster:
        return finish(options, asyncio.run(lead(options)))
    if "RANK" not in os.environ:
        parser.error(
            "run it under torchrun: torchrun --nproc-per-node 2 examples/tp_generate.py, or pass --cluster"
        )
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    own = device if options.collectives == "nccl" else None
    dist.init_process_group(options.collectives, timeout=timedelta(seconds=120), device_id=own)
    said = asyncio.run(serve(options, device))
    dist.barrier()
    dist.destroy_process_group()
    return finish(options, said)


def means(asked: str, ranks_here: int) -> tuple[str, str]:
    """(device, collectives) of `ranks_here` ranks on this host: NCCL where each has a GPU of its own."""
    gpus = torch.cuda.device_count() if asked != "cpu" else 0
    device = "cuda" if asked == "cuda" or gpus >= ranks_here else "cpu"
    return device, "nccl" if device == "cuda" and gpus >= ranks_here else "gloo"


def finish(options: argparse.Namespace, said: dict[str, Any] | None) -> int:
    """Write what came out; whether it is right."""
    if said is not None and options.json:
        options.json.write_text(json.dumps(said, indent=1) + "\n")
    # Sums of shards round otherwise than sums of the whole: in bfloat16 a text may take another way.
    wrong = said is not None and options.dtype == "float32" and said["texts_as_one_device"] < said["requests"]
    return 1 if wrong else 0


if __name__ == "__main__":
    import tp_generate  # what travels to a device is found there by the module's name

    sys.exit(tp_generate.main())

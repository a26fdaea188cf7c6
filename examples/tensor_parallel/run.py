"""Tensor-parallel generation: a Llama's heads and columns over several processes, coroutines on one of them.

    torchrun --nproc-per-node 2 examples/tensor_parallel/run.py --requests 8
    torchrun --nproc-per-node 2 examples/tensor_parallel/run.py --layers 16 --dtype bfloat16   # a GPU a
    rank: NCCL
    torchrun --nproc-per-node 2 examples/tensor_parallel/run.py --stages     # layers instead of heads and
    columns
    torchrun --nproc-per-node 4 examples/tensor_parallel/run.py --stages 2 --sequence     # both
    python examples/tensor_parallel/run.py --cluster auto --ranks 2     # devices of a Ray cluster

Rank 0 has the requests: each is a coroutine that runs `generation.generate`, as with one device. What meets
in rank 0's batcher runs on every rank, announced by a step message before the first collective. Under
torchrun the
same shards run beside it in a loop written by hand over plain torch.distributed; with `--cluster` the ranks
are actors, and a text continues from its tokens when one of them dies. Last the whole model runs on one
device, and the last line says whether the tokens are those of that. `--layers` takes random weights in the
shape of Llama 3 8B, so many layers of it, instead of the shipped model.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import os
import sys
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # under the name that travels to a device
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # its neighbours

import torch
import torch.distributed as dist
from generate import SamplingParams, generate, load_tokenizer
from models.llama import (
    BLOCKING,
    FOLDER,
    Llama,
    LlamaConfig,
    SampleArgs,
    WeightSource,
    kv_pool,
    run_sync,
    weights_of,
)
from torch import Tensor

import layerzero as lz
from tensor_parallel.llama import PAGES, TensorParallelLlama
from tensor_parallel.pipeline import PipelineLlama

LLAMA_3_8B = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
    rope_theta=500_000.0, max_position_embeddings=8192,
)  # fmt: skip
PROMPTS = (
    "In the beginning God created the heaven and the earth.",
    "And it came to pass in those days, that",
    "The king said unto them,",
    "Blessed are they that",
)


async def generate_all(model: Llama, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Each prompt's continuation; all are under way at once."""

    async def one(number: int, prompt: list[int]) -> list[int]:
        sampling = SamplingParams(max_tokens=tokens, seed=number)
        return [token async for token in generate(model, prompt, sampling)]

    return list(await asyncio.gather(*(one(n, prompt) for n, prompt in enumerate(prompts))))


def generate_by_hand(
    model: TensorParallelLlama, prompts: Sequence[list[int]], tokens: int
) -> list[list[int]]:
    """The same on every rank, all prompts in step: rank 0 draws, torch.distributed tells the others."""
    device = model.cache.device
    with ExitStack() as stack, torch.inference_mode():
        opened = [stack.enter_context(model.sequence(len(prompt) + tokens)) for prompt in prompts]
        spans = [sequence.extend(len(prompt)) for sequence, prompt in zip(opened, prompts, strict=True)]
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        token_lists: list[list[int]] = [[] for _ in prompts]
        for drawn in range(tokens):
            metadata = model.cache.attention_metadata(spans)
            logits = run_sync(model.forward(BLOCKING, model._blocking, ids, metadata))
            seeds = torch.arange(len(prompts), device=device)
            ids = lz.sync.sample(logits, seed=seeds, offset=torch.full_like(seeds, drawn))
            dist.broadcast(ids, 0)
            for text, token in zip(token_lists, ids.tolist(), strict=True):
                text.append(token)
            spans = [sequence.extend() for sequence in opened] if drawn < tokens - 1 else []
    return token_lists


def config_and_weights(options: argparse.Namespace, like: Tensor) -> tuple[LlamaConfig, WeightSource]:
    """The model's whole shape, and how to get its whole weights."""
    if not options.layers:
        return LlamaConfig.read(options.folder), weights_of(options.folder, like.device, like.dtype)
    config = replace(LLAMA_3_8B, num_hidden_layers=options.layers)

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
    async with lz.start(lz.Settings(device=str(device), inference=True)):
        async with lz.rank_group(timeout_s=120.0) as member:
            model = _part(options, member, like)
            token_lists: list[list[int]] = []
            speeds: dict[str, float] = {}
            if member.rank:
                await member.follow()
            else:
                await generate_all(model, prompts, 4)  # everything is loaded and chosen
                started = time.perf_counter()
                token_lists = await generate_all(model, prompts, options.tokens)
                speeds["rank_group"] = _speed(token_lists, started)
        if not options.stages:
            generate_by_hand(model, prompts, 4)
            started = time.perf_counter()
            hand = generate_by_hand(model, prompts, options.tokens)
            speeds["by hand over torch.distributed"] = _speed(hand, started)
        if member.rank:
            return None
        alone = Llama(config, get, kv_pool(config, device, like.dtype, PAGES, 16))
        await generate_all(alone, prompts, 4)
        started = time.perf_counter()
        expected = await generate_all(alone, prompts, options.tokens)
        speeds["one device"] = _speed(expected, started)
    record = {
        "ranks": member.ranks,
        "plan": member.plan_digest,
        "layers": config.num_hidden_layers,
        "channels": config.hidden_size,
        "captures": sum(runner.captures for runner in model.runners),
    }
    print(tokenizer.decode(token_lists[0]))
    return compare(record, options, token_lists, expected, speeds)


def _part(options: argparse.Namespace, member: Any, like: Tensor) -> TensorParallelLlama:
    """This rank's part of the model: layers, heads and columns, or both.

    Raises: ValueError: the stages do not divide the ranks. What the models raise.
    """
    captured = options.captured or options.collectives == "nccl"
    buckets = sorted({1, options.requests}) if captured else None
    weights = config_and_weights(options, like)
    if options.stages:
        stages = member.ranks if options.stages < 0 else options.stages
        if member.ranks % stages:
            raise ValueError(f"--stages needs a divisor of the {member.ranks} ranks, got {stages}")
        # Requests are spread over as many batches as there are stages.
        buckets = buckets and sorted({*buckets, -(-options.requests // stages)})
        return PipelineLlama(
            *weights, member, like, buckets=buckets, graphs=captured, tp=member.ranks // stages,
            sequence=options.sequence,
        )  # fmt: skip
    return TensorParallelLlama(
        *weights, member, like, buckets=buckets, graphs=captured, sequence=options.sequence
    )


def compare(
    record: dict[str, Any],
    options: argparse.Namespace,
    token_lists: list[list[int]],
    expected: list[list[int]],
    speeds: dict[str, float],
) -> dict[str, Any]:
    """What is printed and written of a run."""
    same = sum(a == b for a, b in zip(token_lists, expected, strict=True))
    for name, speed in speeds.items():
        print(f"{name}: {speed:.0f} tokens/s")
    print(
        f"{record['ranks']} ranks, plan {record['plan']}: {same} of {len(token_lists)} texts are "
        "those of one device"
    )
    return {
        **record,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "collectives": options.collectives,
        "torch": torch.__version__,
        "requests": options.requests,
        "tokens": options.tokens,
        "tokens_per_s": speeds,
        "texts_as_one_device": same,
    }


# -- on the devices of a cluster ------------------------------------------------------------------------


def build_shard(options: argparse.Namespace, member: Any) -> TensorParallelLlama:
    """One rank's model, in the process of its device."""
    if options.device == "cpu":
        torch.set_num_threads(1)
    like = torch.empty(0, device=options.device, dtype=getattr(torch, options.dtype))
    return _part(options, member, like)


async def continue_text(
    model: TensorParallelLlama, prompt: list[int], tokens: int, seed: int, so_far: list[int] | None = None
) -> AsyncIterator[int]:
    """The tokens behind `prompt` and `so_far`, drawn by seed and place: a text can continue on any device."""
    token_ids = list(so_far or ())
    if len(token_ids) >= tokens or (token_ids and token_ids[-1] in model.config.eos_token_ids):
        return
    with model.sequence(len(prompt) + tokens) as sequence:
        offsets = itertools.count(len(token_ids))

        async def step(ids: Tensor) -> Tensor:
            draw = SampleArgs(1.0, 1.0, seed, next(offsets))
            return await model.sample_next(ids, sequence.extend(len(ids)), draw)

        ids = torch.tensor([*prompt, *token_ids], device=model.cache.device)
        async with aclosing(lz.run_ahead(step, ids, max_steps=tokens - len(token_ids))) as drawn:
            async for token in drawn:
                yield int(token)
                if int(token) in model.config.eos_token_ids:
                    return


async def run_on_cluster(options: argparse.Namespace) -> dict[str, Any]:
    """Shard the model over devices of a cluster, and send every request there from here."""
    settings = lz.Settings(
        cluster=options.cluster, cluster_devices=options.ranks, device=options.device, inference=True
    )
    tokenizer = load_tokenizer(options.folder)
    prompts = [tokenizer.encode(PROMPTS[n % len(PROMPTS)]).ids for n in range(options.requests)]
    async with lz.start(settings):
        build, over = partial(build_shard, options), options.collectives
        async with lz.remote_rank_group(build, options.ranks, collectives=over, timeout_s=120.0) as group:

            async def one(number: int, tokens: int) -> list[int]:
                text = group.stream(continue_text, prompts[number], tokens, number, resume=True)
                return [token async for token in text]

            await asyncio.gather(*(one(number, 4) for number in range(len(prompts))))
            started = time.perf_counter()
            token_lists = list(await asyncio.gather(*(one(n, options.tokens) for n in range(len(prompts)))))
            speeds = {"rank_group": _speed(token_lists, started)}
            record = {"ranks": group.ranks, "plan": group.plan_digest, "epoch": group.epoch}
            record["nodes"] = len({device.facts.node for device in group.devices})
        like = torch.empty(0, device=options.device, dtype=getattr(torch, options.dtype))
        config, get = config_and_weights(options, like)
        alone = Llama(config, get, kv_pool(config, like.device, like.dtype, PAGES, 16))
        await generate_all(alone, prompts, 4)
        started = time.perf_counter()
        expected = await generate_all(alone, prompts, options.tokens)
        speeds["one device"] = _speed(expected, started)
    print(tokenizer.decode(token_lists[0]))
    return compare(record, options, token_lists, expected, speeds)


def _speed(token_lists: list[list[int]], started: float) -> float:
    return sum(map(len, token_lists)) / (time.perf_counter() - started)


def main(arguments: Sequence[str] | None = None) -> int:
    """Set torch.distributed up, serve, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--stages", type=int, nargs="?", const=-1, default=0,
        help="share the layers out: one stage a rank, or so many, whose ranks share heads and columns",
    )  # fmt: skip
    parser.add_argument(
        "--sequence", action="store_true", help="share out the rows of norms and the vocabulary, too"
    )
    parser.add_argument(
        "--captured", action="store_true", help="run decoding steps as graphs do, without a GPU too"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--layers", type=int, default=0, help="random weights, so many layers of Llama 3 8B")
    parser.add_argument("--cluster", help="auto, local, or the address of a Ray cluster; not under torchrun")
    parser.add_argument("--ranks", type=int, default=2, help="devices of the cluster")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    options.device, options.collectives = device_and_backend(options.device, ranks_here)
    if options.cluster:
        return finish(options, asyncio.run(run_on_cluster(options)))
    if "RANK" not in os.environ:
        parser.error(
            "run it under torchrun: torchrun --nproc-per-node 2 examples/tensor_parallel/run.py, "
            "or pass --cluster"
        )
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    device_id = device if options.collectives == "nccl" else None
    dist.init_process_group(options.collectives, timeout=timedelta(seconds=120), device_id=device_id)
    record = asyncio.run(serve(options, device))
    dist.barrier()
    dist.destroy_process_group()
    return finish(options, record)


def device_and_backend(device_option: str, ranks_here: int) -> tuple[str, str]:
    """(device, collectives) of `ranks_here` ranks on this host: NCCL where each has a GPU of its own."""
    gpus = torch.cuda.device_count() if device_option != "cpu" else 0
    device = "cuda" if device_option == "cuda" or gpus >= ranks_here else "cpu"
    return device, "nccl" if device == "cuda" and gpus >= ranks_here else "gloo"


def finish(options: argparse.Namespace, record: dict[str, Any] | None) -> int:
    """Write what came out; whether it is right."""
    if record is not None and options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    # Sums of shards round otherwise than sums of the whole: in bfloat16 a text may take another way.
    wrong = (
        record is not None
        and options.dtype == "float32"
        and record["texts_as_one_device"] < record["requests"]
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    # What travels to a device is found there by the name of its module, not as __main__.
    sys.exit(importlib.import_module("run").main())

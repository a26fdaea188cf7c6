"""One model and what is asked of it: the same functions in this process and in a Ray actor.

A model keeps its captured steps in the process that built it; `build` is what `DevicePool.prepare` runs again
in a restarted actor.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from generating import models
from generating.captured import Whole
from models.llama import LlamaConfig, SampleArgs
from torch import Tensor

import layerzero as lz
from benchmarks.ganging import decoding
from benchmarks.ganging.rank import plant_attention
from layerzero.native import COMPILING, FAST_PATH
from layerzero.ops.host_copies import to_device_with_host_copy
from layerzero.runtime import current

PAGE = 16


@dataclass(frozen=True)
class Load:
    """What is measured: so many requests behind so many tokens, and how many tokens each draws."""

    device: str
    layers: int
    requests: int
    context: int
    tokens: int

    @property
    def config(self) -> LlamaConfig:
        """Llama 3 8B with some of its layers, or a tiny one on a CPU."""
        if self.device == "cpu":
            return models.SHAPES["tiny"]
        return replace(models.SHAPES["8b-8"], num_hidden_layers=self.layers)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' type."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @property
    def limit(self) -> int:
        """The most tokens of one sequence."""
        return self.context + self.tokens + 8

    @property
    def pages(self) -> int:
        """Pages of all requests, of the padding, and of some that leave while others enter."""
        return (self.requests + 8) * (-(-self.limit // PAGE) + 1)


_BUILT: dict[Load, Whole] = {}


async def build(load: Load) -> dict[str, Any]:
    """Build the model, capture its steps, and let every request's calls be chosen once."""
    begin = time.perf_counter()
    if load.device == "cpu":
        torch.set_num_threads(1)
    planted = plant_attention(current())
    torch.manual_seed(0)
    model = models.llama.random(
        load.config, device=load.device, dtype=load.dtype, pages=load.pages, page_size=PAGE
    )
    built = time.perf_counter()
    whole = _BUILT[load] = Whole(model, load.limit, load.requests)
    whole.runner.capture()
    captured = time.perf_counter()
    FAST_PATH.start()
    while FAST_PATH.state == COMPILING:  # noqa: ASYNC110  a thread compiles, and tells nobody
        await asyncio.sleep(0.1)
    await decode(load, 4)
    return {
        "model_s": round(built - begin, 2), "capture_s": round(captured - built, 2),
        "ready_s": round(time.perf_counter() - begin, 2), "captures": whole.runner.captures,
        "pid": os.getpid(), "planted": planted, "awaited_path": FAST_PATH.describe(),
    }  # fmt: skip


async def decode(load: Load, tokens: int | None = None) -> tuple[float, list[list[int]]]:
    """Milliseconds a step of all requests, each an awaited loop that reads one token behind; their texts."""
    model: Any = _BUILT[load]
    refill(model)
    return await decoding.crowd(model, load.requests, load.context, tokens or load.tokens, behind=True)


async def prefill(load: Load) -> float:
    """Milliseconds until every request has the first token behind its prompt."""
    model = _BUILT[load]
    with ExitStack() as stack:
        opened = [stack.enter_context(model.sequence(load.limit)) for _ in range(load.requests)]

        async def first(sequence: Any, seed: int) -> None:
            draw = SampleArgs(0.0, 1.0, seed, 0)
            span = sequence.extend(load.context)
            await lz.to_host(await model.sample_next(_prompt(load, seed), span, draw))

        begin = time.perf_counter()
        await asyncio.gather(*map(first, opened, range(load.requests)))
        return (time.perf_counter() - begin) * 1e3


async def generation(
    load: Load, seed: int, tokens: int, so_far: list[int] | None = None
) -> AsyncIterator[int]:
    """The tokens of one request behind its prompt and `so_far`."""
    model, drawn = _BUILT[load], list(so_far or ())
    if len(drawn) >= tokens:
        return
    with model.sequence(load.limit) as sequence:
        offsets = itertools.count(len(drawn))

        async def step(ids: Tensor) -> Tensor:
            draw = SampleArgs(0.0, 1.0, seed, next(offsets))
            return await model.sample_next(ids, sequence.extend(len(ids)), draw)

        ids = _prompt(load, seed)
        if drawn:
            ids = torch.cat([ids, torch.tensor(drawn, device=ids.device)])
        async with aclosing(lz.run_ahead(step, ids, max_steps=tokens - len(drawn))) as steps:
            async for token in steps:
                yield int(token)


async def streams(load: Load) -> float:
    """Tokens a second of all requests in this process, each from its prompt on; the prompts count as well."""
    begin = time.perf_counter()

    async def one(seed: int) -> int:
        return len([token async for token in generation(load, seed, load.tokens)])

    counts = await asyncio.gather(*map(one, range(load.requests)))
    return sum(counts) / (time.perf_counter() - begin)


async def close() -> None:
    """Let every model go."""
    for whole in _BUILT.values():
        whole.close()
    _BUILT.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- the bundle -----------------------------------------------------------------------------------------


async def save(path: str, load: Load) -> str:
    """Write what this process compiled and decided; the digest."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
             "rms_norm_eps", "vocab_size")  # fmt: skip
    shape = {"model_type": "llama", **{name: getattr(load.config, name) for name in names}}
    manifest = lz.Manifest.of_model(shape, rows=(1, load.requests), dtype=str(load.dtype)[6:])
    return lz.save_bundle(path, manifest, device=load.device).sha256


async def take_bundle(path: str, sha256: str, device: str) -> str:
    """Load a bundle before a model is built."""
    return str(lz.load_bundle(Path(path), sha256=sha256, device=device))


async def bundles() -> tuple[str, ...]:
    """The digests of the bundles that this process has taken."""
    return tuple(lz.readiness_check().bundles)


def _prompt(load: Load, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(load.config.vocab_size, (load.context,), generator=generator)
    return to_device_with_host_copy(ids, torch.device(load.device))


def refill(model: Any) -> None:
    """Give every page the same keys and values, whichever a sequence gets: texts can be compared."""
    generator = torch.Generator(model.cache.device)
    for number, pools in enumerate(model.cache.pools):
        for pool in pools:
            generator.manual_seed(number)
            row = torch.randn(pool[0].shape, generator=generator, device=pool.device)
            pool.copy_(row.to(pool.dtype))

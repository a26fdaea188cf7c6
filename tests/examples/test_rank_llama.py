"""The loop over a part of a Llama that rank 0 of a rank group leads, here of a rank group of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not declared

import layerzero as lz

llama = pytest.importorskip("models.llama", reason="the example needs safetensors")
generate = pytest.importorskip("generate", reason="the example needs tokenizers")
rank_llama = pytest.importorskip("tensor_parallel.llama", reason="the example needs safetensors")

PROMPTS = [[3, 5, 7], [11, 2, 4, 6, 8, 10], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]


@pytest_asyncio.fixture
async def model() -> AsyncIterator[Any]:
    """The whole shipped model, led by the one rank of a rank group."""
    config = llama.LlamaConfig.read(llama.FOLDER)
    get = llama.weights_of(llama.FOLDER, "cpu", torch.float32)
    async with (
        lz.start(lz.Settings(device="cpu", inference=True)),
        lz.rank_group(1, rank=0, store=HashStore(), epoch=0) as member,
    ):
        made = rank_llama.RankLlama(config, get, llama.kv_pool(config, "cpu", torch.float32, 128, 16))
        made.join(member, "whole")
        yield made


async def texts(model: Any, tokens: list[int], after: list[int]) -> list[list[int]]:
    """What continues each prompt by so many tokens, sampled; a prompt comes so many turns late."""

    async def one(number: int) -> list[int]:
        for _ in range(after[number]):
            await asyncio.sleep(0)
        sampling = generate.SamplingParams(max_tokens=tokens[number], seed=number)
        return [token async for token in generate.generate(model, PROMPTS[number], sampling)]

    return list(await asyncio.gather(*map(one, range(len(PROMPTS)))))


@pytest.mark.asyncio
async def test_who_joins_and_leaves_gets_the_tokens_of_a_whole_model(model: Any) -> None:
    """Places made for a crowd that changed since then are not used: nobody reads another's pages."""
    whole = llama.load()
    tokens = [24, 3, 12, 20]
    wanted = await texts(whole, tokens, [0] * 4)
    for after in ([0] * 4, [0, 9, 0, 40], [30, 0, 15, 0]):
        assert await texts(model, tokens, after) == wanted
    assert model.cache.allocator.free_pages == model.cache.allocator.total

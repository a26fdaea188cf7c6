"""The loop over a part of a Llama that rank 0 of a gang leads, here of a gang of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

import layerzero as lz
from layerzero.actors.group.stores import LocalStore

llama = pytest.importorskip("llama", reason="the example needs safetensors")
generation = pytest.importorskip("generation", reason="the example needs tokenizers")
led = pytest.importorskip("led", reason="the example needs safetensors")

PROMPTS = [[3, 5, 7], [11, 2, 4, 6, 8, 10], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]


@pytest_asyncio.fixture
async def model() -> AsyncIterator[Any]:
    """The whole shipped model, led by the one rank of a gang."""
    config = llama.Config.read(llama.FOLDER)
    get = llama.weights_of(llama.FOLDER, "cpu", torch.float32)
    async with (
        lz.start(lz.Settings(device="cpu", inference=True)) as runtime,
        runtime.gang(1, rank=0, store=LocalStore(), epoch=0) as member,
    ):
        made = led.Led(config, get, llama.pool(config, "cpu", torch.float32, 128, 16))
        made.lead(member, "whole")
        yield made


async def texts(model: Any, tokens: list[int], after: list[int]) -> list[list[int]]:
    """What continues each prompt by so many tokens, sampled; a prompt comes so many turns late."""

    async def one(number: int) -> list[int]:
        for _ in range(after[number]):
            await asyncio.sleep(0)
        sampling = generation.Sampling(max_tokens=tokens[number], seed=number)
        return [token async for token in generation.generate(model, PROMPTS[number], sampling)]

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


@pytest.mark.asyncio
async def test_the_places_of_a_step_are_there_before_it_comes(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd that goes on by a token each waits for no table: it was made while its last step ran."""
    seen: list[str] = []

    def noted(name: str) -> None:
        real = getattr(model, name)

        def called(*args: Any) -> Any:
            seen.append(name)
            return real(*args)

        monkeypatch.setattr(model, name, called)

    noted("_places")
    noted("logits")
    await texts(model, [10] * 4, [0] * 4)
    assert seen == ["_places", *["logits", "_places"] * 10]

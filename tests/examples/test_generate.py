"""The loop of one request and its text: whole characters, stop strings, pages that come back."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

import layerzero as lz

generate = pytest.importorskip("generate", reason="the example needs safetensors and tokenizers")
llama = pytest.importorskip("models.llama", reason="the example needs safetensors")

TOKENIZER = generate.load_tokenizer()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 1 << 63}, "seed"),
    ],
)
def test_sampling_out_of_range_is_refused(values: dict[str, Any], named: str) -> None:
    """The message begins with the argument."""
    with pytest.raises(ValueError, match=f"^{named} needs"):
        generate.SamplingParams(**values)


@pytest.mark.asyncio
async def test_a_request_that_is_left_gives_its_pages_back() -> None:
    """Ended, closed after a token, cancelled at any moment: the pool is full again every time."""
    async with lz.start(lz.Settings(device="cpu", inference=True)) as runtime:
        model = llama.load(pages=16)
        sampling = generate.SamplingParams(max_tokens=20, seed=1)
        prompt = TOKENIZER.encode("In the beginning").ids

        async def whole() -> list[int]:
            return [token async for token in generate.generate(model, prompt, sampling)]

        tokens = await whole()
        assert 0 < len(tokens) <= 20
        assert await whole() == tokens
        async with aclosing(generate.generate(model, prompt, sampling)) as begun:
            assert await anext(begun) == tokens[0]
            assert model.cache.allocator.free_pages < 16
        assert model.cache.allocator.free_pages == 16
        for turns in range(12):
            task = asyncio.ensure_future(whole())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert model.cache.allocator.free_pages == 16
        assert await whole() == tokens
        stats = runtime.device("cpu").loop_drivers.stats()
        assert (
            stats.submitted == stats.ended + runtime.device("cpu").loop_drivers.current().batcher.unfinished
        )


@pytest.mark.asyncio
async def test_an_empty_prompt_is_refused() -> None:
    """There is nothing to continue."""
    async with lz.start(lz.Settings(device="cpu", inference=True)):
        with pytest.raises(ValueError, match="prompt needs at least one token"):
            await anext(generate.generate(llama.load(pages=4), [], generate.SamplingParams()))

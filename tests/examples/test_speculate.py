"""The speculative example: texts like the target's, pages that come back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import layerzero as lz

speculate = pytest.importorskip("speculate", reason="the example needs safetensors and tokenizers")
generate = pytest.importorskip("generate", reason="the example needs safetensors and tokenizers")

PROMPT = list(range(40, 60))


def models(layers: int) -> tuple[Any, Any]:
    """A draft of some layers, and the target."""
    like = torch.empty(0)
    config = speculate.LlamaConfig.read(speculate.FOLDER)
    get = speculate.weights_of(speculate.FOLDER, "cpu", like.dtype)
    draft, target = (speculate.first_layers(config, get, n, like) for n in (layers, config.num_hidden_layers))
    return draft, target


@pytest.mark.parametrize("layers", [1, 3, 4])
def test_the_likeliest_text_is_the_targets_whatever_drafts(layers: int) -> None:
    """At temperature 0 speculation changes nothing but the speed; no page is left behind."""
    draft, target = models(layers)
    sampling = generate.SamplingParams(max_tokens=12, temperature=0.0, seed=1)

    async def main() -> tuple[list[int], list[int], float]:
        async with lz.start(lz.Settings(inference=True, perfdb=None), scoped=True):
            plain = [token async for token in generate.generate(target, PROMPT, sampling)]
            tokens, stats = await speculate.speculate_request(
                draft, target, PROMPT, sampling, num_speculative_tokens=3
            )
            return plain, tokens, stats.acceptance_rate

    plain, tokens, acceptance = asyncio.run(main())
    assert tokens == plain
    assert (acceptance == 1.0) == (layers == 4)
    for model in (draft, target):
        assert model.cache.allocator.free_pages == model.cache.allocator.total


def test_a_generation_that_is_left_gives_its_pages_back() -> None:
    """Cancelled in the middle of drafts that run ahead, both pools are whole again."""
    draft, target = models(2)
    sampling = generate.SamplingParams(max_tokens=200, temperature=1.0, seed=1)

    async def main() -> None:
        async with lz.start(lz.Settings(inference=True, perfdb=None), scoped=True):
            task = asyncio.ensure_future(
                speculate.speculate_request(draft, target, PROMPT, sampling, num_speculative_tokens=3)
            )
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    for model in (draft, target):
        assert model.cache.allocator.free_pages == model.cache.allocator.total


def test_many_speculate_at_once() -> None:
    """Requests of two models meet in two groups, and each gets the text that it gets alone."""
    draft, target = models(3)

    async def one(seed: int) -> list[int]:
        sampling = generate.SamplingParams(max_tokens=8, temperature=0.8, seed=seed)
        tokens, _ = await speculate.speculate_request(
            draft, target, PROMPT, sampling, num_speculative_tokens=2
        )
        return list(tokens)

    async def main() -> tuple[list[list[int]], list[list[int]]]:
        async with lz.start(lz.Settings(inference=True, perfdb=None), scoped=True):
            return [await one(seed) for seed in range(4)], list(await asyncio.gather(*map(one, range(4))))

    alone, together = asyncio.run(main())
    assert alone == together


def test_a_long_prompt_is_filled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launch has more rows of logits than are read, or more tokens than a piece; the text is the same."""
    draft, target = models(2)
    monkeypatch.setattr(speculate, "PREFILL_CHUNK", 8)
    monkeypatch.setattr(speculate, "LOGIT_ROWS", 4)
    rows, with_logits = list[int](), list[int]()
    for model in (draft, target):
        for name, counted in (("sample_next", rows), ("forward_all_positions", with_logits)):
            run = getattr(model, name)

            def count(ids: Any, *rest: Any, run: Any = run, counted: list[int] = counted) -> Any:
                counted.append(len(ids))
                return run(ids, *rest)

            monkeypatch.setattr(model, name, count)
    sampling = generate.SamplingParams(max_tokens=6, temperature=0.0, seed=1)

    async def main() -> tuple[list[int], list[int]]:
        async with lz.start(lz.Settings(inference=True, perfdb=None), scoped=True):
            tokens, _ = await speculate.speculate_request(
                draft, target, PROMPT, sampling, num_speculative_tokens=3
            )
            assert max(with_logits) == 4 and sorted(rows) == [3, 8, 8, 8, 8]
            return [token async for token in generate.generate(target, PROMPT, sampling)], list(tokens)

    plain, tokens = asyncio.run(main())
    assert tokens == plain

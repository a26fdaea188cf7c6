"""The loop of one request without a server: every granularity, left at any moment, in a pool too small."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, closing
from typing import Any, ClassVar

import pytest
from torch import Tensor

for package in ("safetensors", "tokenizers"):
    pytest.importorskip(package, reason=f"the server needs {package}: pip install 'layerzero-runtime[test]'")

from models import llama  # noqa: E402  the skips come first
from server.engine import Drawn, Engine  # noqa: E402
from server.protocol import Sampling  # noqa: E402

import layerzero as lz  # noqa: E402
from layerzero.kvcache import TokenRange  # noqa: E402
from tests.examples.by_hand import ByHand, penalised  # noqa: E402

# No batch follows another without a turn, so that there is a turn to be cancelled in before each.
SETTINGS = lz.Settings(device="cpu", inference=True, max_inline_us=0, warm="off")


async def drawn(engine: Engine, prompt: list[int], sampling: Sampling, count: int) -> list[Drawn]:
    """Everything that a request is told."""
    return [one async for one in engine.generate(prompt, sampling, count)]


@pytest.mark.parametrize("per", ["op", "layer", "step"])
def test_every_granularity_obeys_the_rules(per: llama.Per) -> None:
    """One await an op, a layer or a step: the greedy tokens of the formula, and their probabilities."""
    with closing(ByHand()) as by_hand:
        prompt = by_hand.ids("And Jesus said unto them,")
        expected = by_hand.greedy(prompt, 12, penalised(presence=1.0, frequency=0.5))
        truth = by_hand.logprobs([*prompt, *expected], len(prompt))
    sampling = Sampling(temperature=0, presence_penalty=1.0, frequency_penalty=0.5, top_logprobs=2)
    engine = Engine(llama.load(pages=64, per=per), frozenset())

    async def both() -> list[list[Drawn]]:
        others = drawn(engine, prompt[:4], Sampling(seed=3), 12)
        return list(await asyncio.gather(drawn(engine, prompt, sampling, 12), others))

    with lz.start(SETTINGS, scoped=True):
        told, _ = asyncio.run(both())
    assert [one.token for one in told] == expected
    assert [one.logprob for one in told] == pytest.approx(
        [row[token] for row, token in zip(truth, expected, strict=True)], abs=1e-4
    )
    assert all(len(one.likeliest) == 2 and not one.ends for one in told)


@pytest.mark.parametrize("reads_behind", [False, True])
def test_a_request_that_is_left_gives_its_pages_back(reads_behind: bool) -> None:
    """Closed behind a token, or cancelled at any turn of the loop, with rules or without."""
    engine = Engine(llama.load(pages=32), frozenset(), reads_behind=reads_behind)
    allocator = engine.model.cache.allocator

    async def lives() -> None:
        for sampling in (Sampling(seed=1), Sampling(seed=1, min_p=0.1, top_logprobs=1)):
            whole = [one.token for one in await drawn(engine, [0, 5, 9], sampling, 20)]
            async with aclosing(engine.generate([0, 5, 9], sampling, 20)) as begun:
                assert (await anext(begun)).token == whole[0]
                assert allocator.free_pages < 32
            assert allocator.free_pages == 32
            for turns in range(0, 16, 2):
                task = asyncio.ensure_future(drawn(engine, [0, 5, 9], sampling, 20))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert allocator.free_pages == 32
            assert [one.token for one in await drawn(engine, [0, 5, 9], sampling, 20)] == whole

    with lz.start(SETTINGS, scoped=True):
        asyncio.run(lives())


@pytest.mark.parametrize(
    ("per", "reads_behind"),
    [
        ("op", False),
        pytest.param("layer", False, marks=pytest.mark.slow),
        pytest.param("step", False, marks=pytest.mark.slow),
        ("step", True),
    ],
)
def test_a_small_pool_draws_the_tokens_of_a_large_one(per: llama.Per, reads_behind: bool) -> None:
    """Eight requests of up to six pages in a pool of nine, some of which leave: the same tokens, preempted
    or not, and every page is free at the end."""
    requests = [([seed, *range(20, 24 + seed)], Sampling(seed=seed), 12) for seed in range(8)]

    async def all_of_them(engine: Engine, leave: bool) -> list[Any]:
        tasks = [asyncio.ensure_future(drawn(engine, *request)) for request in requests]
        if leave:
            for _ in range(100_000):
                await asyncio.sleep(0)
                if engine.requests.preemptions:
                    break
            tasks[2].cancel()
            tasks[7].cancel()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    settings = lz.Settings(device="cpu", inference=True, warm="off", determinism="strict")
    with lz.start(settings, scoped=True):
        large, small = (
            Engine(llama.load(pages=pages, page_size=4, per=per), frozenset(), reads_behind=behind)
            for pages, behind in ((128, False), (9, reads_behind))
        )
        expected = asyncio.run(all_of_them(large, False))
        told = asyncio.run(all_of_them(small, True))
    assert large.requests.preemptions == 0 < small.requests.preemptions
    for index, (truth, tokens) in enumerate(zip(expected, told, strict=True)):
        assert tokens == truth or (index in (2, 7) and isinstance(tokens, asyncio.CancelledError))
    assert small.model.cache.allocator.free_pages == 9


def test_reading_behind_gives_the_same_tokens_to_the_same_end() -> None:
    """With and without: the same texts, ended by a token or by their length, and the same pages are found by
    the next request, whose tokens are those of a computation from the start."""
    prompt = list(range(3, 12))
    whole = Engine(llama.load(pages=64, page_size=4), frozenset())

    async def texts(reads_behind: bool) -> list[Any]:
        told: list[Any] = []
        for eos in (frozenset[int](), frozenset({ends})):
            engine = Engine(llama.load(pages=64, page_size=4), eos, reads_behind=reads_behind)
            first = await drawn(engine, prompt, Sampling(seed=5), 14)
            assert [one.ends for one in first].count(True) == bool(eos) == first[-1].ends
            longer = [*prompt, *(one.token for one in first)]
            reused = engine.requests.reused_tokens
            second = [one.token for one in await drawn(engine, longer, Sampling(seed=6), 8)]
            assert engine.requests.reused_tokens - reused >= len(longer) // 4 * 4 - 4
            anew = [one.token for one in await drawn(whole, longer, Sampling(seed=6), 8)]
            assert second == (anew[: anew.index(ends) + 1] if eos and ends in anew else anew)
            assert engine.model.cache.allocator.free_pages == 64
            told += [first, second]
        return told

    with lz.start(SETTINGS, scoped=True):
        ends = asyncio.run(drawn(whole, prompt, Sampling(seed=5), 14))[9].token
        assert asyncio.run(texts(True)) == asyncio.run(texts(False))


@pytest.mark.parametrize("reads_behind", [None, True])
def test_a_token_on_its_way_is_awaited_behind_the_next_step(
    monkeypatch: pytest.MonkeyPatch, reads_behind: bool | None
) -> None:
    """A token's way to the host begins behind its step. Where it takes time, it is awaited when the next step
    is launched; with a rule that needs the token it is awaited at once."""
    engine = Engine(llama.load(pages=32), frozenset(), reads_behind=reads_behind)
    steps, begun, seen = 0, [], []
    sample_next, to_host = engine.model.sample_next, lz.to_host

    async def counted(*args: Any) -> Any:
        nonlocal steps
        result = await sample_next(*args)
        steps += 1
        return result

    class Noted:
        done = False

        def __init__(self, tensor: Any) -> None:
            begun.append(steps)
            self._reading = to_host(tensor)

        def __await__(self) -> Any:
            seen.append(steps)
            return self._reading.__await__()

    monkeypatch.setattr(engine.model, "sample_next", counted)
    monkeypatch.setattr(lz, "to_host", Noted)
    for sampling, expected in ((Sampling(), [2, 3, 4, 4]), (Sampling(presence_penalty=0.1), [1, 2, 3, 4])):
        steps, begun, seen = 0, [], []
        with lz.start(SETTINGS, scoped=True):
            asyncio.run(drawn(engine, [1, 2, 3], sampling, 4))
        assert seen == expected and begun == [1, 2, 3, 4]


class NotedLlama(llama.Llama):
    """A model that notes the rows of each caller of a step."""

    batches: ClassVar[list[list[int]]] = []

    def sample_next_batch(
        self, ids: Tensor, spans: list[TokenRange], draws: list[llama.SampleArgs]
    ) -> Tensor:
        self.batches.append([span.count for span in spans])
        return super().sample_next_batch(ids, spans, draws)


def test_next_tokens_go_before_prompts_that_wait() -> None:
    """A step has room for one prompt, and seven wait: the request that draws has its row in each step."""
    loaded = llama.load(pages=64)
    weights = llama.weights_of(llama.FOLDER, "cpu", loaded.embed_tokens.dtype)
    batches = NotedLlama.batches
    engine = Engine(NotedLlama(loaded.config, weights, loaded.cache), frozenset())

    async def crowd() -> None:
        first = engine.generate([1, 2, 3], Sampling(), 30)
        async with aclosing(first):
            await anext(first)
            batches.clear()
            prompts = [drawn(engine, [seed, *range(4, 33)], Sampling(), 1) for seed in range(7)]

            async def rest() -> None:
                async for _ in first:
                    pass

            await asyncio.gather(*prompts, rest())

    settings = lz.Settings(
        device="cpu", inference=True, max_inline_us=0, warm="off", max_num_batched_tokens=40,
        priority_aging_ms=1e6,
    )  # fmt: skip
    with lz.start(settings, scoped=True):
        asyncio.run(crowd())
    with_prompts = [counts for counts in batches if 30 in counts]
    assert len(with_prompts) == 7 and all(sorted(counts) == [1, 30] for counts in with_prompts[1:]), batches

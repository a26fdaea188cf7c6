"""Speculative decoding over models whose distributions are known exactly."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from layerzero.ops.sampling.draw import token_weights
from layerzero.speculative import generation as speculative

WORDS = 3


class Chain:
    """A model whose next token depends on the last two alone; its cache is the list of tokens."""

    def __init__(self, seed: int, blend: float = 0.0, other: Chain | None = None) -> None:
        table = torch.randn(WORDS, WORDS, WORDS, generator=torch.Generator().manual_seed(seed))
        self.table: Tensor = table if other is None else (1 - blend) * table + blend * other.table
        self.tokens: list[int] = []
        self.forwards = 0
        self.widest = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    def logits(self, before: int, last: int) -> Tensor:
        return self.table[before, last]

    async def forward(self, tokens: Tensor) -> Tensor:
        await asyncio.sleep(0)
        rows = []
        for token in tokens.tolist():
            self.tokens.append(token)
            rows.append(self.logits(self.tokens[-2] if len(self.tokens) > 1 else 0, token))
        self.forwards += 1
        self.widest = max(self.widest, len(rows))
        return torch.stack(rows)

    def rollback(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens)
        del self.tokens[length:]


def run(draft: Chain, target: Chain, **options: Any) -> tuple[list[int], speculative.SpeculationStats]:
    async def main() -> tuple[list[int], speculative.SpeculationStats]:
        generation = speculative.generate(draft, target, [0, 1], **options)
        return [token async for token in generation], generation.stats

    return asyncio.run(main())


def share(table: Tensor, tokens: tuple[int, ...]) -> float:
    """The probability of `tokens` behind the prompt 0, 1."""
    found, before, last = 1.0, 0, 1
    for token in tokens:
        found *= float(torch.softmax(table[before, last].double(), -1)[token])
        before, last = last, token
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("blend", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("count", [5, 7, 32])
def test_each_draft_is_verified_or_discarded(overlap: bool, blend: float, count: int) -> None:
    """What the counts say is what the draft has drawn: one forward a token, also where the text ends."""
    target = Chain(5)
    draft = Chain(6, blend, target)
    tokens, counted = run(
        draft, target, num_speculative_tokens=3, max_tokens=count, seed=count, overlap=overlap
    )
    assert len(tokens) == count
    assert draft.forwards == counted.num_draft_tokens + counted.num_discarded


def texts_of(count: int, blend: float, **options: Any) -> Counter[tuple[int, ...]]:
    """How often each text comes out of so many seeds, a hundred side by side: their draws share batches."""

    async def some(seeds: range) -> list[tuple[int, ...]]:
        own = Chain(1)
        draft, found = Chain(2, blend, own), []
        for seed in seeds:
            draft.rollback(0)
            own.rollback(0)
            texts = speculative.generate(draft, own, [0, 1], seed=seed, **options)
            found.append(tuple([token async for token in texts]))
        return found

    async def main() -> Counter[tuple[int, ...]]:
        each = await asyncio.gather(*(some(range(first, count, 100)) for first in range(100)))
        return Counter(itertools.chain.from_iterable(each))

    return asyncio.run(main())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("blend", [0.0, 0.7])
def test_texts_are_distributed_as_the_targets(blend: float, overlap: bool) -> None:
    """1,000 texts of three tokens, drafted badly or well: a chi-square test over all 27 outcomes."""
    target = Chain(1)
    found = texts_of(1000, blend, num_speculative_tokens=2, max_tokens=3, overlap=overlap)
    outcomes = list(itertools.product(range(WORDS), repeat=3))
    expected = [1000 * share(target.table, text) for text in outcomes]
    assert sum(found.values()) == 1000
    assert stats.chisquare([found[text] for text in outcomes], expected).pvalue > 1e-6


@given(
    st.integers(1, 6),
    st.integers(1, 20),
    st.integers(0, 2**40),
    st.booleans(),
    st.sampled_from([0.0, 0.9, 1.0]),
)
def test_the_caches_hold_what_is_certain(
    places: int, max_tokens: int, seed: int, overlap: bool, blend: float
) -> None:
    """Property: as many tokens as asked for, caches are prefixes of the text, counts add up."""
    target = Chain(1)
    draft = Chain(2, blend, target)
    tokens, counted = run(
        draft, target, num_speculative_tokens=places, max_tokens=max_tokens, seed=seed, overlap=overlap
    )
    text = [0, 1, *tokens]
    assert len(tokens) == max_tokens
    for model in (draft, target):  # the last round may have had one token more than was wanted
        common = min(len(text), len(model.tokens))
        assert model.tokens[:common] == text[:common]
    assert 0 <= counted.num_accepted <= counted.num_draft_tokens
    assert counted.num_rounds >= 1 and target.widest <= 2 + places + 1


def test_a_draft_that_is_the_target_is_accepted_whole() -> None:
    """Acceptance of 1: a quarter of the forwards, and nothing that was drafted ahead is lost."""
    target, draft = Chain(1), Chain(1)
    tokens, counted = run(draft, target, num_speculative_tokens=4, max_tokens=32, seed=3)
    assert len(tokens) == 32
    assert counted.acceptance_rate == 1.0 and counted.num_discarded <= 4
    assert target.forwards == 8


def test_a_draft_that_is_always_wrong_costs_a_forward_a_token() -> None:
    """Acceptance of 0: the target's own greedy text comes out all the same."""
    target, draft = Chain(1), Chain(1)
    draft.table = -target.table
    tokens, counted = run(draft, target, num_speculative_tokens=3, max_tokens=12, temperature=0.0, seed=0)
    before, last, wanted = 0, 1, []
    for _ in range(12):
        before, last = last, int(target.table[before, last].argmax())
        wanted.append(last)
    assert tokens == wanted
    assert counted.num_accepted == 0 and counted.num_rounds == 12


def test_a_seed_gives_the_same_tokens() -> None:
    """Twice the same; another seed, another text."""
    texts = [run(Chain(2), Chain(1), max_tokens=30, seed=seed)[0] for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


class Static(Chain):
    """A model whose forward writes its logits into the same memory each time, as a captured step does."""

    buffer = torch.empty(32, WORDS)

    async def forward(self, tokens: Tensor) -> Tensor:
        return self.buffer[: len(tokens)].copy_(await super().forward(tokens))


def test_a_draft_may_write_its_logits_where_the_last_ones_were() -> None:
    """Each draft is verified by the distribution that it was drawn from."""
    for seed in range(8):
        texts = [run(draft(2), Chain(1), max_tokens=30, seed=seed)[0] for draft in (Chain, Static)]
        assert texts[0] == texts[1]


def test_it_ends_behind_an_end_token() -> None:
    """The end token is given, nothing after it."""
    tokens, _ = run(Chain(2), Chain(1), max_tokens=200, seed=1, stop_token_ids={2})
    assert tokens[-1] == 2 and 2 not in tokens[:-1]


def test_a_cancelled_generation_stops_both_models() -> None:
    """No forward runs on behind it."""

    async def main() -> tuple[int, int]:
        target, draft = Chain(1), Chain(2)
        with anyio.move_on_after(0.02):
            async for _ in speculative.generate(draft, target, [0, 1], max_tokens=10**9, seed=0):
                await asyncio.sleep(0)
        before = target.forwards + draft.forwards
        await asyncio.sleep(0.02)
        return before, target.forwards + draft.forwards

    before, after = asyncio.run(main())
    assert before == after > 0


class Breaks(Chain):
    """A model that raises in its third forward, after its cache has grown."""

    async def forward(self, tokens: Tensor) -> Tensor:
        out = await super().forward(tokens)
        if self.forwards == 3:
            raise RuntimeError("broken shard")
        return out


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("which", ["draft", "target"])
def test_a_model_that_raises_is_heard_and_leaves_nothing(which: str, overlap: bool) -> None:
    """Its own error, no task beside it, and both caches hold no token that is not certain."""
    draft, target = (Breaks(2), Chain(1)) if which == "draft" else (Chain(2), Breaks(1))
    text = [0, 1]

    async def main() -> None:
        with pytest.raises(RuntimeError, match="broken shard"):
            async for token in speculative.generate(
                draft, target, [0, 1], max_tokens=60, seed=0, overlap=overlap
            ):
                text.append(token)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    for model in (draft, target):
        assert model.tokens == text[: model.length]


class Wider(Chain):
    """A model that knows two more tokens, and hardly ever draws them."""

    async def forward(self, tokens: Tensor) -> Tensor:
        out = await super().forward(tokens)
        return torch.cat([out, torch.full((len(out), 2), -1e3)], -1)


@pytest.mark.parametrize("models", [(Wider, Chain), (Chain, Wider)])
def test_two_vocabularies_are_named(models: tuple[type[Chain], type[Chain]]) -> None:
    """Draft and target that count their tokens differently cannot be compared."""
    draft, target = models[0](2), models[1](1)
    with pytest.raises(ValueError, match=r"draft needs the target's vocabulary of [35] tokens, got [35]"):
        run(draft, target, max_tokens=8, seed=0)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.7}, {"top_k": 2, "top_p": 0.8}])
def test_filters_shape_the_text_as_they_shape_the_targets(options: dict[str, Any]) -> None:
    """Two tokens under top-k and top-p are distributed as the filtered target's, and never others."""
    target = Chain(1)
    seen = texts_of(400, 0.0, max_tokens=2, num_speculative_tokens=2, **options)
    expected: dict[tuple[int, ...], float] = {}
    for pair in itertools.product(range(WORDS), repeat=2):
        chance, before, last = 1.0, 0, 1
        for token in pair:
            weights = token_weights(
                target.table[before, last].unsqueeze(0),
                1.0,
                options.get("top_k", 0),
                options.get("top_p", 1.0),
            )
            chance *= int(weights[0, token]) / int(weights.sum())
            before, last = last, token
        expected[pair] = chance
    assert all(expected[pair] > 0 for pair in seen)
    likely = [pair for pair, chance in expected.items() if chance > 0]
    if len(likely) > 1:
        counts = [seen[pair] for pair in likely]
        assert stats.chisquare(counts, [expected[pair] * 400 for pair in likely]).pvalue > 1e-4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens needs"),
        ({"max_tokens": 0}, "max_tokens needs"),
        ({"temperature": -1.0}, "temperature needs"),
        ({"top_p": 1.5}, "top_p needs"),
        ({"top_k": -1}, "top_k needs"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], words: str) -> None:
    """Before any model runs."""
    target = Chain(1)
    with pytest.raises(ValueError, match=words):
        speculative.generate(Chain(2), target, [0], **options)
    assert target.forwards == 0


def test_the_prompt_and_the_caches_have_to_fit() -> None:
    """No prompt; a cache that holds more than the prompt."""
    with pytest.raises(ValueError, match="prompt needs at least one token"):
        speculative.generate(Chain(2), Chain(1), [])
    full = Chain(1)
    full.tokens = [0, 1]
    with pytest.raises(ValueError, match="target needs less than the prompt's 2 tokens, got 2"):
        speculative.generate(Chain(2), full, [0, 1])


class Wrong(Chain):
    """A model whose forward gives what `spoil` makes of its logits."""

    def __init__(self, spoil: Callable[[Tensor], Any]) -> None:
        super().__init__(1)
        self.spoil = spoil

    async def forward(self, tokens: Tensor) -> Tensor:
        spoiled: Tensor = self.spoil(await super().forward(tokens))
        return spoiled


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("places", [1, 4])
def test_logits_that_give_no_token_are_an_error(worst: float, places: int) -> None:
    """Of the draft or of the target: nobody is given -1 as a token."""
    spoiled = Wrong(lambda logits: torch.full_like(logits, worst))
    with pytest.raises(ValueError, match="target needs logits with a finite largest value"):
        run(Chain(2), spoiled, num_speculative_tokens=places)
    spoiled = Wrong(lambda logits: torch.full_like(logits, worst))
    with pytest.raises(ValueError, match="logits needs a finite largest value in each row"):
        run(spoiled, Chain(2), num_speculative_tokens=places)


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        (lambda logits: None, TypeError, "got NoneType"),
        (lambda logits: logits.long(), TypeError, "got torch.int64"),
        (lambda logits: logits[None], ValueError, r"logits \(T, V\) of at least"),
        (lambda logits: logits[:0], ValueError, "got shape"),
    ],
)
def test_a_forward_that_gives_no_logits_is_named(
    spoil: Callable[[Tensor], Any], error: type[Exception], said: str
) -> None:
    """By whose it is and what it gave."""
    with pytest.raises(error, match=f"draft needs a forward that gives .*{said}"):
        run(Wrong(spoil), Chain(2))
    with pytest.raises(error, match=f"target needs a forward that gives .*{said}"):
        run(Chain(2), Wrong(spoil))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"prompt": torch.tensor([0, 1])}, TypeError, "prompt needs token ids as ints, got Tensor"),
        ({"prompt": "ab"}, TypeError, "prompt needs token ids as ints, got str"),
        ({"prompt": [0, 1.0]}, TypeError, "prompt needs an int"),
        ({"prompt": [0, -1]}, ValueError, "prompt needs an int >= 0"),
        ({"stop_token_ids": 3}, TypeError, "stop_token_ids needs token ids as ints, got int"),
        ({"seed": "one"}, TypeError, "seed needs an int"),
        ({"target": 3}, TypeError, "target needs `forward`"),
    ],
)
def test_arguments_are_refused_by_name_before_anything_runs(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    """When the generation is asked for, not when its first token is."""
    given: dict[str, Any] = {"draft": Chain(1), "target": Chain(2), "prompt": [0, 1]}
    with pytest.raises(error, match=said):
        speculative.generate(**given | changes)


def test_one_sequence_is_not_draft_and_target_at_once() -> None:
    """Both would write one cache."""
    model = Chain(1)
    with pytest.raises(ValueError, match="draft needs to be a sequence of its own"):
        speculative.generate(model, model, [0, 1])


def test_two_consumers_of_one_generation_are_refused() -> None:
    """The second one is; the first gets its text."""

    async def main() -> tuple[Any, Any, list[int]]:
        generation = speculative.generate(Chain(2), Chain(1), [0, 1], max_tokens=9, seed=4)

        async def consumed() -> list[int]:
            return [token async for token in generation]

        both = await asyncio.gather(consumed(), consumed(), return_exceptions=True)
        alone = speculative.generate(Chain(2), Chain(1), [0, 1], max_tokens=9, seed=4)
        return *both, [token async for token in alone]

    first, second, alone = asyncio.run(main())
    assert first == alone
    assert isinstance(second, RuntimeError) and "one consumer" in str(second)


def test_a_text_is_read_on_where_a_loop_left_it() -> None:
    """A round verifies several tokens: those that no loop took come next, and none behind a stop token."""
    expected, _ = run(Chain(6, 1.0, Chain(5)), Chain(5), max_tokens=20, seed=4)
    stop = expected.index(expected[-1])

    async def main(text: speculative.Generation) -> list[int]:
        steps = [anext(aiter(text), -1) for _ in range(21)]
        return [token for step in steps if (token := await step) >= 0]

    for stops, end in (((), 20), ((expected[stop],), stop + 1)):
        models = Chain(6, 1.0, Chain(5)), Chain(5)
        text = speculative.generate(*models, [0, 1], max_tokens=20, seed=4, stop_token_ids=stops)
        assert asyncio.run(main(text)) == expected[:end]

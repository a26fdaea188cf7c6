"""Three strategies, one behaviour: random lives of sequences, attention over each, no page lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor
from torch.testing import assert_close

from layerzero.kvcache import (
    ChunkedCache,
    ContiguousCache,
    KVCache,
    KVCacheSpec,
    PagedCache,
    PagedSequence,
    PageKeys,
    PagesExhaustedError,
    PrefixCache,
    TokenRange,
)
from layerzero.ops.paged.append import APPEND_KV
from layerzero.ops.paged.attention import PAGED_ATTENTION
from layerzero.ops.paged.reference import attend_sequence

SPEC = KVCacheSpec(num_kv_heads=2, head_dim=4, head_dim_v=6)


class Lives(RuleBasedStateMachine):
    """Every sequence lives in all three caches; the truth is a list of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(0)
        self.paged = PagedCache(SPEC, pages=24, page_size=4, layout="HND")
        self.caches: list[KVCache] = [
            self.paged,
            ContiguousCache(SPEC, capacity=2),
            ChunkedCache(SPEC, chunk=3),
        ]
        self.truth: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self.opened: dict[int, PagedSequence] = {}
        self.prefixes = PrefixCache(self.paged)
        self.published: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # by the tokens that stand there

    def draw(self, index: int) -> tuple[int, ...]:
        return sorted(self.truth)[index % len(self.truth)]

    @rule()
    def new(self) -> None:
        numbers = tuple(cache.new() for cache in self.caches)
        self.truth[numbers] = (torch.zeros(0, 2, 4), torch.zeros(0, 2, 6))

    @precondition(lambda self: self.truth)
    @rule(index=st.integers(0, 99), count=st.integers(0, 9))
    def append(self, index: int, count: int) -> None:
        numbers = self.draw(index)
        keys = torch.randn(count, 2, 4, generator=self.random)
        values = torch.randn(count, 2, 6, generator=self.random)
        before = self.paged.allocator.version
        try:
            self.paged.append(numbers[0], keys, values)
        except PagesExhaustedError:
            assert self.paged.allocator.version == before
            return
        assert count == 0 or self.paged.version > before
        for cache, number in zip(self.caches[1:], numbers[1:], strict=True):
            cache.append(number, keys, values)
        k, v = self.truth[numbers]
        self.truth[numbers] = torch.cat([k, keys]), torch.cat([v, values])

    @precondition(lambda self: self.truth)
    @rule(counts=st.dictionaries(st.integers(0, 9), st.integers(0, 6), min_size=1, max_size=4))
    def append_to_many(self, counts: dict[int, int]) -> None:
        """Slots for several sequences at once, forks of one prefix among them, written by one append_kv."""
        wanted = {self.draw(index): count for index, count in counts.items()}
        tokens = {
            numbers: (
                torch.randn(count, 2, 4, generator=self.random),
                torch.randn(count, 2, 6, generator=self.random),
            )
            for numbers, count in wanted.items()
        }
        before = self.paged.allocator.version
        try:
            slots = self.paged.extend([numbers[0] for numbers in wanted], list(wanted.values()))
        except PagesExhaustedError:
            assert self.paged.allocator.version == before
            return
        k, v = (torch.cat([given[part] for given in tokens.values()]) for part in (0, 1))
        APPEND_KV.reference(k, v, *self.paged.pools[0], slots, "HND")
        for numbers, (keys, values) in tokens.items():
            for cache, number in zip(self.caches[1:], numbers[1:], strict=True):
                cache.append(number, keys, values)
            known = self.truth[numbers]
            self.truth[numbers] = torch.cat([known[0], keys]), torch.cat([known[1], values])

    @precondition(lambda self: len(self.truth) < 9)
    @rule(tokens=st.integers(1, 20))
    def open(self, tokens: int) -> None:
        """A sequence as an object, its pages taken."""
        try:
            sequence = self.paged.sequence(tokens)
        except PagesExhaustedError:
            return
        numbers = (sequence.number, *(cache.new() for cache in self.caches[1:]))
        self.opened[sequence.number] = sequence
        self.truth[numbers] = (torch.zeros(0, 2, 4), torch.zeros(0, 2, 6))

    @precondition(lambda self: self.opened)
    @rule(count=st.integers(1, 5), alone=st.booleans())
    def grow_a_crowd(self, count: int, alone: bool) -> None:
        """Every object grows by itself; where the rows stand is asked for all of them at once."""
        crowd = [numbers for numbers in sorted(self.truth) if numbers[0] in self.opened]
        spans: list[TokenRange] = []
        for numbers in crowd:
            before = self.paged.version
            try:
                spans.append(self.opened[numbers[0]].extend(1 if alone else count))
            except PagesExhaustedError:
                assert self.paged.version == before
                break
        if spans:
            self.write(crowd[: len(spans)], spans)

    @precondition(lambda self: self.truth)
    @rule(indices=st.sets(st.integers(0, 9), min_size=1, max_size=4), count=st.integers(1, 6))
    def step(self, indices: set[int], count: int) -> None:
        """Sequences by their numbers, all of them or none, in one call."""
        crowd = sorted({self.draw(index) for index in indices})
        lengths = [self.paged.length(numbers[0]) for numbers in crowd]
        before = self.paged.version
        try:
            at = self.paged.prepare_batch([numbers[0] for numbers in crowd], [count] * len(crowd))
        except PagesExhaustedError:
            assert self.paged.version == before
            assert lengths == [self.paged.length(numbers[0]) for numbers in crowd]
            return
        assert at.seq_lens.tolist() == [length + count for length in lengths]
        k, v = self.tokens(count * len(crowd))
        APPEND_KV.reference(k, v, *self.paged.pools[0], at.slot_mapping, "HND")
        self.note(crowd, k.split(count), v.split(count))

    def write(self, crowd: list[tuple[int, ...]], spans: list[TokenRange]) -> None:
        """Tokens for every span, through the places that `rows` gives; attention through its tables."""
        at, counts = self.paged.attention_metadata(spans), [span.count for span in spans]
        k, v = self.tokens(sum(counts))
        APPEND_KV.reference(k, v, *self.paged.pools[0], at.slot_mapping, "HND")
        self.note(crowd, k.split(counts), v.split(counts))
        q = torch.randn(sum(counts), 4, 4, generator=self.random)
        pools = self.paged.pools[0]
        _, args = PAGED_ATTENTION.build(
            q, *pools, at.block_tables, at.seq_lens, cu_seqlens_q=at.cu_seqlens_q, layout="HND"
        )
        over_pages = PAGED_ATTENTION.reference(*args)
        for numbers, rows, got in zip(crowd, q.split(counts), over_pages.split(counts), strict=True):
            dense, _ = attend_sequence(rows, *self.caches[1].read(numbers[1]), is_causal=True)
            assert_close(dense, got)

    def tokens(self, count: int) -> tuple[Tensor, Tensor]:
        keys = torch.randn(count, 2, 4, generator=self.random)
        return keys, torch.randn(count, 2, 6, generator=self.random)

    def note(self, crowd: list[tuple[int, ...]], keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Give the other caches and the truth what the pages hold already."""
        for numbers, k, v in zip(crowd, keys, values, strict=True):
            for cache, number in zip(self.caches[1:], numbers[1:], strict=True):
                cache.append(number, k, v)
            known = self.truth[numbers]
            self.truth[numbers] = torch.cat([known[0], k]), torch.cat([known[1], v])

    @precondition(lambda self: self.truth)
    @rule(index=st.integers(0, 99), part=st.floats(0, 1))
    def rollback(self, index: int, part: float) -> None:
        """Going back forgets tokens, whoever shares their pages; the other caches begin anew."""
        numbers = self.draw(index)
        keys, values = self.truth.pop(numbers)
        kept = round(part * len(keys))
        before = self.paged.version
        self.paged.rollback(numbers[0], kept)
        assert self.paged.version > before
        again = [numbers[0]]
        for cache, number in zip(self.caches[1:], numbers[1:], strict=True):
            cache.free(number)
            again.append(cache.new())
            cache.append(again[-1], keys[:kept], values[:kept])
        self.truth[tuple(again)] = keys[:kept], values[:kept]

    @precondition(lambda self: self.truth)
    @rule(index=st.integers(0, 99), more=st.integers(0, 9))
    def reserve(self, index: int, more: int) -> None:
        """What is reserved is there: growing into it takes no page, whoever else shares the last one."""
        numbers = self.draw(index)
        try:
            self.paged.reserve(numbers[0], self.paged.length(numbers[0]) + more)
        except PagesExhaustedError:
            return
        free = self.paged.allocator.free_pages
        keys = torch.randn(more, 2, 4, generator=self.random)
        values = torch.randn(more, 2, 6, generator=self.random)
        self.paged.append(numbers[0], keys, values)
        assert self.paged.allocator.free_pages == free
        for cache, number in zip(self.caches[1:], numbers[1:], strict=True):
            cache.append(number, keys, values)
        k, v = self.truth[numbers]
        self.truth[numbers] = torch.cat([k, keys]), torch.cat([v, values])

    @precondition(lambda self: self.truth)
    @rule(index=st.integers(0, 99))
    def fork(self, index: int) -> None:
        numbers = self.draw(index)
        forked = tuple(cache.fork(n) for cache, n in zip(self.caches, numbers, strict=True))
        self.truth[forked] = self.truth[numbers]

    @precondition(lambda self: self.truth)
    @rule(index=st.integers(0, 99))
    def free(self, index: int) -> None:
        numbers = self.draw(index)
        for cache, number in zip(self.caches, numbers, strict=True):
            cache.free(number)
        self.opened.pop(numbers[0], None)
        del self.truth[numbers]

    @precondition(lambda self: self.truth)
    @rule(index=st.integers(0, 99))
    def publish(self, index: int) -> None:
        """A text's full pages may be found by others; the text is made up, a new one each time."""
        numbers = self.draw(index)
        keys, values = self.truth[numbers]
        text = tuple(range(len(self.published) * 100, len(self.published) * 100 + len(keys)))
        sequence = self.paged._sequences.get(numbers[0])
        self.prefixes.publish(sequence, text, PageKeys(4))
        self.published[text] = keys, values

    @precondition(lambda self: self.published and len(self.truth) < 9)
    @rule(index=st.integers(0, 99), more=st.integers(1, 6))
    def begin_with_a_known_prefix(self, index: int, more: int) -> None:
        """What is found is what was filled for these tokens, whatever happened to who filled it."""
        text, (keys, values) = list(self.published.items())[index % len(self.published)]
        try:
            sequence = self.prefixes.open((*text, *[-1] * more), PageKeys(4))
        except PagesExhaustedError:
            return
        length = sequence.length
        assert length % 4 == 0 and length <= len(text)
        numbers = (sequence.number, *(cache.new() for cache in self.caches[1:]))
        for cache, number in zip(self.caches[1:], numbers[1:], strict=True):
            cache.append(number, keys[:length], values[:length])
        self.truth[numbers] = keys[:length], values[:length]
        self.opened[sequence.number] = sequence

    @rule()
    def forget_prefixes(self) -> None:
        self.prefixes.clear()
        assert self.paged.allocator.idle_pages == 0 and len(self.prefixes) == 0

    @precondition(lambda self: self.truth)
    @rule()
    def attention_agrees(self) -> None:
        order = sorted(self.truth)
        q = torch.randn(len(order), 4, 4, generator=self.random)
        tables, lens = self.paged.block_tables([numbers[0] for numbers in order])
        _, args = PAGED_ATTENTION.build(q, self.paged.k_cache, self.paged.v_cache, tables, lens, layout="HND")
        PAGED_ATTENTION.check(args)
        over_pages = PAGED_ATTENTION.reference(*args)
        for row, numbers in enumerate(order):
            for cache, number in zip(self.caches[1:], numbers[1:], strict=True):
                keys, values = cache.read(number)
                dense, _ = attend_sequence(q[row : row + 1], keys, values, is_causal=True)
                assert_close(dense[0], over_pages[row])

    @invariant()
    def every_cache_holds_the_truth(self) -> None:
        for numbers, (keys, values) in self.truth.items():
            for cache, number in zip(self.caches, numbers, strict=True):
                assert cache.length(number) == keys.shape[0]
                held = cache.read(number)
                assert torch.equal(held[0], keys) and torch.equal(held[1], values)

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        allocator = self.paged.allocator
        held: dict[int, int] = {}
        for numbers in self.truth:
            for page in self.paged.pages(numbers[0]):
                held[page] = held.get(page, 0) + 1
        assert {p: n for p in range(allocator.total) if (n := allocator.refcount(p))} == held
        assert allocator.free_pages == allocator.total - len(held)
        assert allocator.idle_pages <= len(self.prefixes) <= allocator.total
        assert self.paged.allocated_bytes() == len(held) * 4 * SPEC.token_bytes

    def teardown(self) -> None:
        for numbers in self.truth:
            for cache, number in zip(self.caches, numbers, strict=True):
                cache.free(number)
        assert self.paged.allocator.free_pages == self.paged.allocator.total
        assert [cache.allocated_bytes() for cache in self.caches] == [0, 0, 0]


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_pages_that_are_none_or_too_many_are_named() -> None:
    """By the name that the caller gave, and with the bytes that there are not."""
    spec = KVCacheSpec(num_kv_heads=1, head_dim=8)
    with pytest.raises(ValueError, match="pages needs an int >= 1, got 0"):
        PagedCache(spec, pages=0)
    with pytest.raises(RuntimeError, match="memory"):
        PagedCache(spec, pages=10**12)

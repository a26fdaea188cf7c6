"""Pages: who owns them, what a fork shares, what is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from layerzero.kvcache import (
    ChunkedCache,
    ContiguousCache,
    ForeignPageError,
    FreedPageError,
    FreedSequenceError,
    KVCacheSpec,
    PageAllocator,
    PagedCache,
    PagesExhaustedError,
    UnknownSequenceError,
)
from layerzero.kvcache.protocol import KVCache

SPEC = KVCacheSpec(num_kv_heads=1, head_dim=2)
MAKERS: list[Callable[[], KVCache]] = [
    lambda: PagedCache(SPEC, pages=8, page_size=4),
    lambda: ContiguousCache(SPEC),
    lambda: ChunkedCache(SPEC),
]
every_cache = pytest.mark.parametrize("make", MAKERS, ids=["paged", "contiguous", "chunked"])


def tokens(count: int, value: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `count` tokens."""
    return torch.full((count, 1, 2), value), torch.full((count, 1, 2), -value)


def test_a_page_freed_twice_is_an_error() -> None:
    """The second free is refused and changes nothing."""
    pages = PageAllocator(4)
    (page,) = pages.allocate(1)
    pages.free([page])
    epoch = pages.version
    with pytest.raises(FreedPageError, match=f"page {page} needs an owner"):
        pages.free([page])
    assert pages.free_pages == 4 and pages.version == epoch


def test_one_call_cannot_free_a_page_more_often_than_it_is_held() -> None:
    """A list that names a page twice needs two owners."""
    pages = PageAllocator(4)
    (page,) = pages.allocate(1)
    with pytest.raises(FreedPageError):
        pages.free([page, page])
    assert pages.refcount(page) == 1


@pytest.mark.parametrize("page", [-1, 4, 1.5])
def test_ids_of_another_pool_are_refused(page: int) -> None:
    """Out of range, negative or no int: the message names the range."""
    pages = PageAllocator(4)
    with pytest.raises(ForeignPageError, match=r"id in \[0, 4\)"):
        pages.incref([page])


def test_a_free_page_cannot_be_shared() -> None:
    """Sharing needs an owner already."""
    with pytest.raises(FreedPageError):
        PageAllocator(4).incref([2])


def test_a_shared_page_is_free_behind_its_last_owner() -> None:
    """Two owners: the first one's end frees nothing, the second one's does."""
    pages = PageAllocator(2)
    taken = pages.allocate(1)
    pages.incref(taken)
    free = [pages.free_pages]
    for _ in range(2):
        pages.free(taken)
        free.append(pages.free_pages)
    assert free == [1, 1, 2]


def test_an_allocation_is_whole_or_nothing() -> None:
    """Too few pages: none is taken, and the error says how many are missing."""
    pages = PageAllocator(4)
    pages.allocate(3)
    with pytest.raises(PagesExhaustedError, match="needs 2 free pages, got 1 of 4") as caught:
        pages.allocate(2)
    assert pages.free_pages == 1 and caught.value.context["missing"] == 1


def test_the_eviction_hook_is_asked_for_what_is_missing() -> None:
    """It frees another sequence, and the append goes through."""
    asked: list[int] = []
    cache = PagedCache(SPEC, pages=2, page_size=4)
    old, fresh = cache.new(), cache.new()
    cache.append(old, *tokens(8))

    def evict(missing: int) -> None:
        asked.append(missing)
        cache.free(old)

    cache.allocator.evict = evict
    cache.append(fresh, *tokens(5))
    assert asked == [2] and cache.length(fresh) == 5 and cache.allocator.free_pages == 0


def test_a_hook_that_frees_the_growing_sequence_is_named() -> None:
    """The append is refused and no page is lost."""
    cache = PagedCache(SPEC, pages=2, page_size=4)
    only = cache.new()
    cache.append(only, *tokens(8))
    cache.allocator.evict = lambda missing: cache.free(only)
    with pytest.raises(FreedSequenceError):
        cache.append(only, *tokens(4))
    assert cache.allocator.free_pages == 2


def test_a_fork_copies_only_the_page_it_writes() -> None:
    """Full pages stay shared; the half full one is copied by whoever writes first."""
    cache = PagedCache(SPEC, pages=8, page_size=4)
    first = cache.new()
    cache.append(first, *tokens(6))
    second = cache.fork(first)
    assert cache.allocator.free_pages == 6
    cache.append(second, *tokens(1, 9.0))
    assert cache.pages(first)[0] == cache.pages(second)[0]
    assert cache.pages(first)[1] != cache.pages(second)[1]
    assert cache.read(first)[0].unique().tolist() == [1.0]
    assert cache.read(second)[0][:, 0, 0].tolist() == [1.0] * 6 + [9.0]
    owned = cache.pages(first)[1]
    cache.append(first, *tokens(1, 5.0))
    assert cache.pages(first)[1] == owned, "the last owner writes in place"


def test_tables_have_the_kernels_dtype_and_the_longest_width() -> None:
    """Shorter rows end in zeros that no length reaches."""
    cache = PagedCache(SPEC, pages=8, page_size=4)
    a, b = cache.new(), cache.new()
    cache.append(a, *tokens(9))
    table, lens = cache.block_tables([a, b], dtype=torch.int64)
    assert table.shape == (2, 3) and table.dtype == torch.int64
    assert lens.tolist() == [9, 0] and table[0].tolist() == list(cache.pages(a))


@every_cache
def test_every_change_bumps_the_epoch(make: Callable[[], KVCache]) -> None:
    """Append, fork and free are changes."""
    cache = make()
    sequence = cache.new()
    seen = [cache.version]
    cache.append(sequence, *tokens(3))
    seen.append(cache.version)
    forked = cache.fork(sequence)
    seen.append(cache.version)
    cache.append(forked, *tokens(1))
    seen.append(cache.version)
    cache.free(sequence)
    seen.append(cache.version)
    assert seen == sorted(set(seen))


@every_cache
def test_a_freed_sequence_cannot_be_used(make: Callable[[], KVCache]) -> None:
    """Every method refuses it by name; numbers are never given out again."""
    cache = make()
    sequence = cache.new()
    cache.free(sequence)
    for use in (cache.free, cache.fork, cache.length, cache.read):
        with pytest.raises(FreedSequenceError, match=f"sequence {sequence} needs to be live"):
            use(sequence)
    with pytest.raises(FreedSequenceError):
        cache.append(sequence, *tokens(1))
    assert cache.new() != sequence


@every_cache
def test_a_strange_sequence_is_refused(make: Callable[[], KVCache]) -> None:
    """A number this cache never gave."""
    with pytest.raises(UnknownSequenceError, match="sequence needs one that this cache gave, got 5"):
        make().length(5)


@every_cache
def test_nothing_is_converted_on_the_way(make: Callable[[], KVCache]) -> None:
    """Another dtype or shape is refused, and the cache stays as it was."""
    cache = make()
    sequence = cache.new()
    with pytest.raises(TypeError, match="keys needs dtype float32 like the cache, got bfloat16"):
        cache.append(sequence, torch.zeros(1, 1, 2, dtype=torch.bfloat16), torch.zeros(1, 1, 2))
    with pytest.raises(ValueError, match=r"values needs shape \(S, 1, 2\), got \(1, 1, 3\)"):
        cache.append(sequence, torch.zeros(1, 1, 2), torch.zeros(1, 1, 3))
    with pytest.raises(ValueError, match="values needs 1 tokens like keys, got 2"):
        cache.append(sequence, torch.zeros(1, 1, 2), torch.zeros(2, 1, 2))
    assert cache.length(sequence) == 0


@every_cache
def test_what_asks_for_a_gradient_is_refused(make: Callable[[], KVCache]) -> None:
    """A cache is written in place: it would keep the graph of every token that it has ever taken."""
    cache = make()
    sequence = cache.new()
    keys, values = tokens(3)
    with pytest.raises(ValueError, match=r"keys needs not to require grad, or torch\.no_grad\(\)"):
        cache.append(sequence, keys.requires_grad_(), values)
    assert cache.length(sequence) == 0
    with torch.no_grad():
        cache.append(sequence, keys, values)
    assert cache.length(sequence) == 3
    assert not cache.read(sequence)[0].requires_grad


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda: PagedCache(SPEC, pages=8, page_size=4),
        lambda: ContiguousCache(SPEC, capacity=2),
        lambda: ChunkedCache(SPEC, chunk=2),
    ],
    ids=["paged", "contiguous", "chunked"],
)
def test_a_cache_is_written_in_every_mode(make: Callable[[], KVCache], inside: bool) -> None:
    """What was made, grown or forked in inference mode is written outside of it, and the other way round."""
    with torch.inference_mode(inside):
        cache = make()
        first = cache.new()
        cache.append(first, *tokens(3))
        second = cache.fork(first)
    with torch.inference_mode(not inside):
        for sequence in (first, second):
            cache.append(sequence, *tokens(1))
            assert cache.length(sequence) == 4
            torch.testing.assert_close([part[:3] for part in cache.read(sequence)], list(tokens(3)))


def test_a_spec_needs_a_dtype() -> None:
    """The name of a dtype is none."""
    with pytest.raises(TypeError, match=r"dtype needs a torch\.dtype, got str"):
        KVCacheSpec(num_kv_heads=1, head_dim=2, dtype="float32")  # type: ignore[arg-type]


def test_a_device_without_an_index_is_any_of_its_kind() -> None:
    """A cache on "cuda" takes tokens of "cuda:0", which is what every tensor there says."""
    with FakeTensorMode():
        there = torch.empty(2, 1, 2, device="cuda:0")
        assert KVCacheSpec(num_kv_heads=1, head_dim=2, device="cuda").check(there, there) == 2
        with pytest.raises(ValueError, match="keys needs to be on cuda:1, got cuda:0"):
            KVCacheSpec(num_kv_heads=1, head_dim=2, device="cuda:1").check(there, there)

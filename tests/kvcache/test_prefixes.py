"""Prefixes by their content: what is found, what is given out first, and what is never found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.kvcache import (
    ForeignPageError,
    FreedPageError,
    KVCacheSpec,
    PageAllocator,
    PagedCache,
    PagedRequests,
    PagedSequence,
    PageKeys,
    PagesExhaustedError,
    PrefixCache,
)

SPEC = KVCacheSpec(num_kv_heads=1, head_dim=1)


def pool(pages: int) -> tuple[PagedCache, PrefixCache]:
    """Pages of two tokens."""
    cache = PagedCache(SPEC, pages=pages, page_size=2)
    return cache, PrefixCache(cache)


def filled(prefixes: PrefixCache, tokens: Sequence[int]) -> PagedSequence:
    """A sequence of `tokens`, published."""
    sequence = prefixes.open(tokens, PageKeys(2))
    sequence.extend(len(tokens) - sequence.length)
    prefixes.publish(sequence, tokens, PageKeys(2))
    return sequence


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12), st.integers(1, 4))
def test_keys_agree_as_far_as_the_texts_do(first: list[int], second: list[int], size: int) -> None:
    """A page's key stands for all tokens up to its end; how the text grew does not matter."""
    shared = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
                  min(len(first), len(second)))  # fmt: skip
    keys = [PageKeys(size).of(text, len(text)) for text in (first, second)]
    for index, (a, b) in enumerate(zip(*keys, strict=False)):
        assert (a == b) == ((index + 1) * size <= shared)
    growing = PageKeys(size)
    for length in range(len(first) + 1):
        assert growing.of(first[:length], length) == keys[0][: length // size]


def test_a_salt_keeps_texts_apart() -> None:
    """The same tokens under another salt have other keys."""
    assert PageKeys(2, b"a").of([1, 2], 2) != PageKeys(2, b"b").of([1, 2], 2)


def test_a_freed_prefix_is_found_until_its_pages_are_given_out() -> None:
    """Freed pages stay known; the pool gives out unknown ones first, then the longest freed, tails first."""
    cache, prefixes = pool(6)
    old, new = filled(prefixes, [1, 2, 3, 4]), filled(prefixes, [5, 6, 7, 8])
    old_pages, new_pages = list(old.pages), list(new.pages)
    old.close()
    new.close()
    assert cache.allocator.free_pages == 6 and cache.allocator.idle_pages == 4
    assert prefixes.match([1, 2, 3, 4, 9], PageKeys(2)) == old_pages
    taken = cache.allocator.allocate(3)
    assert not set(taken[:2]) & {*old_pages, *new_pages}
    assert taken[2] == old_pages[1]
    assert prefixes.match([1, 2, 3, 4, 9], PageKeys(2)) == old_pages[:1]
    assert prefixes.match([5, 6, 7, 8, 9], PageKeys(2)) == new_pages
    again = prefixes.open([5, 6, 7, 8, 9], PageKeys(2))
    assert again.length == 4 and again.pages[:2] == new_pages
    assert cache.allocator.free_pages == 0
    assert prefixes.match([1, 2, 3], PageKeys(2)) == []
    again.close()
    cache.allocator.free(taken)
    assert cache.allocator.free_pages == 6


def test_the_last_token_is_never_found() -> None:
    """A whole prompt that is known leaves its last page to compute: somebody has to give the logits."""
    _, prefixes = pool(4)
    with filled(prefixes, [1, 2, 3, 4]):
        assert len(prefixes.match([1, 2, 3, 4], PageKeys(2))) == 1


def test_pages_that_are_written_again_are_not_found() -> None:
    """Going back into a published page takes it out of the index, shared or not."""
    _, prefixes = pool(4)
    with filled(prefixes, [1, 2, 3, 4]) as sequence:
        sequence.length = 3
        sequence.extend(1)
        assert len(prefixes.match([1, 2, 3, 4, 5], PageKeys(2))) == 1
        sequence.length = 0
        assert len(prefixes) == 0


def test_a_text_published_twice_stays_where_it_was_first() -> None:
    """Two that computed the same at once: the second one's pages are ordinary pages."""
    cache, prefixes = pool(4)
    one, two = cache.sequence(4), cache.sequence(4)
    for sequence in (one, two):
        sequence.extend(4)
        prefixes.publish(sequence, [1, 2, 3, 4], PageKeys(2))
    assert prefixes.match([1, 2, 3, 4, 5], PageKeys(2)) == one.pages
    one.close()
    two.close()
    assert cache.allocator.free_pages == 4 and cache.allocator.idle_pages == 2


def test_a_gap_in_what_is_known_is_filled() -> None:
    """A page in the middle of a text is known, those before it were given out: they are found once more."""
    cache, prefixes = pool(8)
    keys = [PageKeys(2) for _ in range(3)]
    first, second = cache.sequence(4), cache.sequence(6)
    for sequence, text_keys in zip((first, second), keys, strict=False):
        sequence.extend(4)
        prefixes.publish(sequence, [1, 2, 3, 4], text_keys)
    second.extend(2)
    prefixes.publish(second, [1, 2, 3, 4, 5, 6], keys[1], start=4)
    first.close()
    taken = cache.allocator.allocate(5)
    assert prefixes.match([1, 2, 3, 4, 5, 6, 7], PageKeys(2)) == []
    cache.allocator.free(taken)
    third = cache.sequence(6)
    third.extend(6)
    prefixes.publish(third, [1, 2, 3, 4, 5, 6], keys[2])
    expected = [*third.pages[:2], second.pages[2]]
    assert prefixes.match([1, 2, 3, 4, 5, 6, 7], PageKeys(2)) == expected


def test_an_opening_that_fails_changes_nothing() -> None:
    """Too few pages for the rest: the known pages keep the owners that they had."""
    cache, prefixes = pool(4)
    filled(prefixes, [1, 2, 3, 4]).close()
    with cache.sequence(2), pytest.raises(PagesExhaustedError):
        prefixes.open([1, 2, 3, 4, 5, 6, 7, 8], PageKeys(2))
    assert cache.allocator.free_pages == 4 and cache.allocator.idle_pages == 2
    with pytest.raises(ValueError, match="pages needs at most tokens' 1"):
        cache.sequence(1, [0])
    assert cache.sequences() == []


def test_a_page_is_reclaimed_only_while_its_content_is_kept() -> None:
    """Free and unknown, given out again, or of another pool: refused by name, and nothing has changed."""
    pages = PageAllocator(2)
    forgotten: list[int] = []
    (page,) = pages.allocate(1)
    pages.keep(page, forgotten.append)
    pages.free([page])
    pages.reclaim([page])
    pages.reclaim([page])
    assert pages.refcount(page) == 2
    with pytest.raises(FreedPageError, match="kept content"):
        pages.reclaim([page, 1 - page])
    assert pages.refcount(page) == 2
    with pytest.raises(ForeignPageError):
        pages.reclaim([7])
    with pytest.raises(FreedPageError):
        pages.keep(1 - page, forgotten.append)
    pages.free([page, page])
    assert forgotten == [] and pages.allocate(2) == [1 - page, page] and forgotten == [page]


def test_keys_and_prefixes_of_other_pages_are_refused() -> None:
    """A text would be found in pages of another one that begins alike, or of anything."""
    cache, prefixes = pool(8)
    sequence = filled(prefixes, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="keys needs those of pages of 2 tokens, got 1"):
        prefixes.publish(sequence, [1, 2, 3, 4], PageKeys(1))
    with pytest.raises(ValueError, match="keys needs those of pages of 2 tokens, got 4"):
        prefixes.open([1, 2, 3, 4, 5], PageKeys(4))
    with pytest.raises(ValueError, match="prefixes needs those of the cache's own pages"):
        PagedRequests(pool(8)[0], prefixes=prefixes)
    assert PagedRequests(cache, prefixes=prefixes).capacity == 12 and len(prefixes) == 2

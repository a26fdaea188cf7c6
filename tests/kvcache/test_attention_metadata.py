"""Where the rows of several sequences stand, against each sequence by itself."""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import ExitStack

import pytest
import torch

from layerzero.kvcache import (
    AttentionMetadata,
    FreedSequenceError,
    KVCacheSpec,
    PagedCache,
    PagesExhaustedError,
    TokenRange,
)
from layerzero.ops import host_copies

SPEC = KVCacheSpec(num_kv_heads=1, head_dim=4)


def cache(pages: int = 512) -> PagedCache:
    """A pool of small pages on the CPU."""
    return PagedCache(SPEC, pages=pages, page_size=4)


def check(at: AttentionMetadata, spans: list[TokenRange]) -> None:
    """Each row's position, slot, table, length and last row are what its sequence's own pages say."""
    positions = [place for span in spans for place in range(span.start, span.end)]
    slots = [s.sequence.pages[p // 4] * 4 + p % 4 for s in spans for p in range(s.start, s.end)]
    assert at.positions.tolist() == positions
    assert at.slot_mapping.tolist() == slots
    assert at.seq_lens.tolist() == [span.end for span in spans]
    assert at.block_tables.shape == (len(spans), -(-max(span.end for span in spans) // 4))
    for row, span in zip(at.block_tables.tolist(), spans, strict=True):
        assert row[: -(-span.end // 4)] == span.sequence.pages[: -(-span.end // 4)]
    assert at.block_tables.dtype == at.seq_lens.dtype == torch.int32
    ends = [sum(span.count for span in spans[: n + 1]) - 1 for n in range(len(spans))]
    assert torch.arange(len(positions))[at.logits_indices].tolist() == ends
    if any(span.count > 1 for span in spans):
        assert at.cu_seqlens_q is not None and at.cu_seqlens_q.tolist() == [0, *(end + 1 for end in ends)]
    else:
        assert at.cu_seqlens_q is None


@pytest.mark.parametrize("seed", range(12))
def test_a_crowds_rows_are_those_of_its_members(seed: int) -> None:
    """Through turns in which sequences grow page by page, come, go, fork and forget."""
    draw, pool = random.Random(seed), cache()
    live = [pool.sequence(draw.randint(1, 30)) for _ in range(9)]
    for _ in range(12):
        crowd = draw.sample(live, draw.randint(1, len(live)))
        spans = [sequence.extend(draw.choice((1, 1, 5) if seed % 2 else (1,))) for sequence in crowd]
        with torch.inference_mode(draw.random() < 0.5):
            at = pool.attention_metadata(spans)
        check(at, spans)
        assert pool.attention_metadata(list(spans)) is at, "another layer of the same step"
        event = draw.random()
        if event < 0.3:
            live.remove(gone := draw.choice(crowd))
            gone.close()
            check(pool.attention_metadata(spans), spans)
        elif event < 0.5:
            sequence = draw.choice(live)
            sequence.length = draw.randint(0, sequence.length)
        if event > 0.4:
            live.append(pool.sequence(draw.randint(1, 30)))
    for sequence in live:
        sequence.close()
    assert pool.allocator.free_pages == 512


def test_a_step_grows_all_of_them_or_none() -> None:
    """One call for many sequences, by their numbers, also where one page is left for two."""
    pool = cache(3)
    first, second = pool.new(), pool.new()
    at = pool.prepare_batch([first, second], [4, 1])
    assert at.positions.tolist() == [0, 1, 2, 3, 0] and at.seq_lens.tolist() == [4, 1]
    assert at.slot_mapping.tolist() == [pool.pages(first)[0] * 4 + n for n in range(4)] + [
        pool.pages(second)[0] * 4
    ]
    before = pool.version
    with pytest.raises(PagesExhaustedError):
        pool.prepare_batch([first, second], [1, 4])
    assert (pool.length(first), pool.length(second), pool.version) == (4, 1, before)
    pool.prepare_batch([first, second], [1, 3])
    assert (pool.length(first), pool.length(second)) == (5, 4) and pool.version > before


@pytest.mark.parametrize("method", ["prepare_batch", "extend"])
def test_growing_many_names_what_is_wrong(method: str) -> None:
    """A freed one, one twice, one count too few, a count that is none."""
    pool = cache()
    one, gone = pool.new(), pool.new()
    pool.free(gone)
    grow = getattr(pool, method)
    with pytest.raises(FreedSequenceError, match=f"sequence {gone} needs to be live"):
        grow([one, gone], [1, 1])
    for numbers, counts in (([one, one], [1, 1]), ([one], [1, 1])):
        with pytest.raises(ValueError, match="sequences needs each sequence once, with one count each"):
            grow(numbers, counts)
    with pytest.raises(ValueError, match=r"counts needs an int >= \d, got -1"):
        grow([one], [-1])
    with pytest.raises(TypeError, match="counts needs an int, got bool"):
        grow([one], [True])
    assert pool.length(one) == 0


def test_rows_of_nobody_or_of_another_cache_are_refused() -> None:
    """Slots of another pool would name somebody else's pages."""
    pool = cache()
    with pytest.raises(ValueError, match="ranges needs at least one"):
        pool.attention_metadata([])
    with pytest.raises(ValueError, match="sequences needs at least one"):
        pool.prepare_batch([], [])
    with pytest.raises(ValueError, match="another cache's"):
        pool.attention_metadata([cache().sequence(4).extend(1)])


def test_a_step_that_is_longer_than_the_reserve_takes_pages() -> None:
    """What was reserved is sure; beyond it the pool decides, and nothing is lost where it says no."""
    pool = cache(3)
    with pool.sequence(5) as sequence:
        assert pool.allocator.free_pages == 1
        sequence.extend(5)
        sequence.extend(4)
        assert pool.allocator.free_pages == 0
        sequence.extend(3)
        with pytest.raises(PagesExhaustedError):
            sequence.extend()
        with pytest.raises(ValueError, match="count needs an int >= 1, got 0"):
            sequence.extend(0)
        assert sequence.length == 12
    assert pool.allocator.free_pages == 3
    with pytest.raises(FreedSequenceError):
        sequence.extend()
    with pytest.raises(FreedSequenceError):
        sequence.close()


def test_a_sequence_that_could_never_fit_is_named() -> None:
    """Against one that does not fit now, which leaves nothing behind."""
    pool = cache(2)
    with pytest.raises(ValueError, match="tokens needs 1 to 8, what the whole pool holds, got 9"):
        pool.sequence(9)
    with pool.sequence(5), pytest.raises(PagesExhaustedError):
        pool.sequence(1)
    assert pool.allocator.free_pages == 2 and pool.sequences() == []


def test_a_batch_that_outlives_its_caller_keeps_its_places() -> None:
    """The row of a freed sequence is nobody else's while a span of it lives, and is used again then."""
    pool = cache()
    with pool.sequence(8) as sequence:
        span = sequence.extend(5)
    row, pages = sequence.row, list(sequence.pages)
    others = [pool.sequence(8) for _ in range(70)]
    at = pool.attention_metadata([span, others[0].extend(1)])
    assert at.block_tables[0].tolist() == pages
    assert at.slot_mapping[:5].tolist() == [pages[n // 4] * 4 + n % 4 for n in range(5)]
    assert row not in {other.row for other in others}
    del span, sequence, at
    check(
        pool.attention_metadata(spans := [others[1].extend(1)]), spans
    )  # the maker lets go of the step before
    gc.collect()
    assert pool.sequence(4).row == row


def test_rows_of_tables_are_used_again_and_more_are_made() -> None:
    """More sequences than rows get rows of their own; who has a row later finds zeros behind its pages."""
    pool = cache()
    with ExitStack() as stack:
        opened = [stack.enter_context(pool.sequence(8)) for _ in range(70)]
        assert len({sequence.row for sequence in opened}) == 70
    del opened
    longest = pool.sequence(80)
    for _ in range(70):
        with pool.sequence(1) as short:
            at = pool.attention_metadata([longest.extend(1), short.extend(1)])
            assert at.block_tables[1].tolist() == [*short.pages, *[0] * (at.block_tables.shape[1] - 1)]
    longest.close()
    assert pool.allocator.free_pages == 512


def test_a_crowd_that_stays_sees_pages_that_change() -> None:
    """A copy on write changes a table whose crowd and width stay what they were."""
    pool = cache()
    first = pool.new()
    pool.extend([first], [5])
    second = pool.fork(first)
    tables = [pool.prepare_batch([first, second], [1, 1]).block_tables.tolist() for _ in range(2)]
    forked = pool.fork(first)
    after = pool.prepare_batch([first, second], [1, 1]).block_tables.tolist()
    assert tables[0] == tables[1] != after and after[1] == tables[1][1]
    assert [after[0], pool.block_tables([forked])[0].tolist()[0]] == [list(pool.pages(first)), tables[0][0]]
    assert pool.pages(forked)[1] != pool.pages(first)[1]


def test_ranges_that_are_asked_for_again_see_a_page_that_was_copied() -> None:
    """What a step had is used again only while no page has changed."""
    pool = cache()
    first = pool.sequence(6)
    spans = [first.extend(1)]
    at = pool.attention_metadata(spans)
    assert pool.attention_metadata(spans) is at
    pool.fork(first.number)
    before = list(first.pages)
    first.extend(1)
    assert first.pages != before
    check(pool.attention_metadata(spans), spans)


def test_reserving_nothing_leaves_a_shared_page_shared() -> None:
    """Both sharers go on writing pages of their own."""
    pool = cache()
    ones = torch.ones(6, 1, 4)
    first = pool.new()
    pool.append(first, ones, ones)
    second = pool.fork(first)
    for sequence in (first, second):
        pool.reserve(sequence, 6)
    pool.append(first, 2 * ones[:1], ones[:1])
    pool.append(second, 3 * ones[:1], ones[:1])
    assert pool.read(first)[0][:, 0, 0].tolist() == [1.0] * 6 + [2.0]
    assert pool.read(second)[0][:, 0, 0].tolist() == [1.0] * 6 + [3.0]


def test_forgotten_tokens_leave_a_fork_alone() -> None:
    """A sequence that goes back into pages it shares copies what it writes there, and only that."""
    pool = cache(8)
    ones = torch.ones(10, 1, 4)
    first = pool.new()
    pool.append(first, ones, ones)
    second = pool.fork(first)
    pool.rollback(second, 3)
    assert pool.length(second) == 3 and pool.pages(second) == pool.pages(first)[:1]
    pool.append(second, 5 * ones, 5 * ones)
    assert pool.read(first)[0].unique().tolist() == [1.0]
    assert pool.read(second)[0][:, 0, 0].tolist() == [1.0] * 3 + [5.0] * 10
    with pytest.raises(ValueError, match="tokens needs 0 to 13, what the sequence has, got 14"):
        pool.rollback(second, 14)
    for sequence in (first, second):
        pool.free(sequence)
    assert pool.allocator.free_pages == 8


def test_a_cache_dies_with_its_last_name() -> None:
    """A pool is gigabytes: no live sequence keeps it, and a sequence says that it is gone."""
    pool = cache()
    sequence, seen = pool.sequence(4), weakref.ref(pool)
    gc.disable()
    try:
        del pool
        assert seen() is None
    finally:
        gc.enable()
    sequence.extend(4)
    with pytest.raises(ReferenceError, match="needs its cache"):
        sequence.extend(1)
    sequence.close()


def test_a_hook_that_frees_one_of_a_crowd_is_named() -> None:
    """Also one that needs no page itself: nobody grows, and no page is lost."""
    pool = cache(3)
    first, second = pool.new(), pool.new()
    pool.extend([first, second], [4, 5])
    pool.allocator.evict = lambda missing: pool.free(second)
    with pytest.raises(FreedSequenceError, match=f"sequence {second} needs to be live"):
        pool.prepare_batch([first, second], [1, 1])
    assert pool.length(first) == 4 and pool.allocator.free_pages == 2


@pytest.mark.parametrize("count", [1, 4])
def test_a_device_gets_one_transfer_and_the_host_keeps_what_kernels_plan_by(count: int) -> None:
    """Positions, slots and lengths are pieces of one tensor, each on sixteen bytes; lengths have a mirror."""
    pool = PagedCache(KVCacheSpec(num_kv_heads=1, head_dim=4, device="meta"), pages=64, page_size=4)
    spans = [pool.sequence(20).extend(count) for _ in range(3)]
    at = pool.attention_metadata(spans)
    assert (
        at.positions.shape == at.slot_mapping.shape == (3 * count,) and at.slot_mapping.dtype == torch.int64
    )
    assert at.positions._base is at.slot_mapping._base is not None
    assert [piece.storage_offset() * piece.itemsize % 16 for piece in (at.positions, at.slot_mapping)] == [
        0,
        0,
    ]
    assert at.seq_lens.storage_offset() * 4 % 16 == 0 and at.seq_lens.dtype == torch.int32
    assert {
        tensor.device.type for tensor in (at.positions, at.slot_mapping, at.seq_lens, at.block_tables)
    } == {"meta"}
    assert host_copies.to_host_values(at.seq_lens).tolist() == [count] * 3
    assert host_copies.to_host_values(at.block_tables).tolist() == [span.sequence.pages[:1] for span in spans]

"""What graphs read beside their operands: it stays where they were captured with it, whatever comes later."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends.flash_attn import vllm
from layerzero.backends.flashinfer import norm_rope
from layerzero.ops import captures
from tests.backends.test_replays import empty_what_may_go

CPU = torch.device("cpu")


class Stream:
    """The current stream, which captures when told."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.capturing = False
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def read_by_a_graph(self, make: Any) -> Tensor:
        """What `make` gives where it was made before the capture that reads it."""
        before: Tensor = make()
        self.capturing = True
        captured: Tensor = make()
        self.capturing = False
        assert captured.data_ptr() == before.data_ptr()
        return captured


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    yield Stream(monkeypatch)
    captures.release()


def pool_of(pages: int, rows: int) -> tuple[Tensor, ...]:
    """What FlashInfer's append reads of a pool and of some rows."""
    seen: list[tuple[Tensor, ...]] = []

    def library(
        k: Tensor, v: Tensor, first: Tensor, places: Tensor, pools: Any, *others: Tensor, **_: Any
    ) -> None:
        seen.append((first, *others))

    module = type(
        "module", (), {"get_page_module": lambda: None, "append_paged_kv_cache": staticmethod(library)}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm_rope, "module", lambda _: module)
        append = norm_rope._append()
    cache = torch.zeros(pages, 4, 1, 64)
    append(
        torch.zeros(rows, 1, 64), torch.zeros(rows, 1, 64), cache, cache.clone(), torch.arange(rows), "NHD"
    )
    return seen[0]


def test_rows_of_every_number_share_few_buffers() -> None:
    """Each row's sequence is 0; steps of any number of rows take no more memory and no further transfer."""
    firsts = {rows: pool_of(1024, rows)[0] for rows in (1, 2, 3, 700, 1025, 1500, 2048)}
    assert all(first.shape == (rows,) and not first.any() for rows, first in firsts.items())
    assert firsts[1025].data_ptr() == firsts[1500].data_ptr() == firsts[2048].data_ptr()


@pytest.mark.parametrize("which", range(4), ids=["rows", "pages", "bounds", "last"])
def test_what_an_append_was_captured_with_outlives_other_pools(stream: Stream, which: int) -> None:
    """A graph that appends to a pool reads its page ids at every replay, after any number of other calls."""
    storage = weakref.ref(stream.read_by_a_graph(lambda: pool_of(7, 3)[which]).untyped_storage())
    for pages in range(8, 140):
        pool_of(pages, 3)
    for power in range(3, 12):
        pool_of(600, 1 << power)
    norm_rope._zeros.cache_clear()
    gc.collect()
    assert storage() is not None
    captures.release()
    gc.collect()
    assert storage() is None


def test_what_no_graph_reads_is_let_go(stream: Stream) -> None:
    """Calls outside of captures keep a bounded number of pools."""
    storage = weakref.ref(pool_of(7, 3)[1].untyped_storage())
    for pages in range(8, 140):
        pool_of(pages, 3)
    gc.collect()
    assert storage() is None


def test_a_rotary_table_of_a_graph_outlives_a_newer_one(stream: Stream) -> None:
    """Tables that are edited get another joined table; graphs still read the one they were captured with."""
    cos, sin = torch.rand(8, 32), torch.rand(8, 32)
    storage = weakref.ref(stream.read_by_a_graph(lambda: norm_rope.cos_sin_cache(cos, sin)).untyped_storage())
    cos.mul_(2)
    newer = norm_rope.cos_sin_cache(cos, sin)
    gc.collect()
    assert storage() is not None and torch.equal(newer[:, :32], cos)


def test_offsets_of_a_graph_outlive_others(stream: Stream) -> None:
    """FlashAttention's offsets of equal sequences are dropped together where there are many."""
    storage = weakref.ref(
        stream.read_by_a_graph(lambda: vllm._uniform_cu_seqlens(3, 7, CPU)).untyped_storage()
    )
    for length in range(2 * vllm._KEPT):
        vllm._uniform_cu_seqlens(2, length, CPU)
    gc.collect()
    assert storage() is not None


def test_a_capture_that_passes_keeps_nothing(stream: Stream) -> None:
    """Who measures captures hundreds of shapes, and lets each graph go."""
    vllm._steps_of.clear()
    with captures.passing_captures():
        storage = weakref.ref(
            stream.read_by_a_graph(lambda: vllm._uniform_cu_seqlens(3, 9, CPU)).untyped_storage()
        )
    vllm._steps_of.clear()
    gc.collect()
    assert storage() is None


def test_what_kernels_keep_within_a_bound_can_be_found(stream: Stream) -> None:
    """The card's test of replays drops all of it: here it finds what an append keeps."""
    pool_of(7, 3)
    assert norm_rope._whole_pool.cache_info().currsize and norm_rope._zeros.cache_info().currsize
    vllm._uniform_cu_seqlens(3, 7, CPU)
    empty_what_may_go()
    assert not norm_rope._whole_pool.cache_info().currsize and not norm_rope._zeros.cache_info().currsize
    assert not vllm._steps_of

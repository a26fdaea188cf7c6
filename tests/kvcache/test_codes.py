"""Caches whose pages hold codes: what they keep, share and refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.formats.errors import FormatError
from layerzero.kvcache import ChunkedCache, ContiguousCache, KVCacheSpec, PagedCache
from layerzero.spec.reasons import Reason

CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def cache(codes: torch.dtype, granularity: str = "token", layout: str = "NHD", layers: int = 1) -> PagedCache:
    """Eight pages of four tokens."""
    spec = KVCacheSpec(2, 8, pool_dtype=codes, scale_granularity=granularity)
    return PagedCache(spec, pages=8, page_size=4, layout=layout, layers=layers)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "head", "token"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_is_appended_is_read_and_attended_to(codes: torch.dtype, granularity: str, layout: str) -> None:
    """The numbers come back in the cache's dtype within the format's step; attention agrees with them."""
    pages = cache(codes, granularity, layout)
    if granularity != "token":
        for scale in pages.scales[0]:
            assert scale is not None
            scale.fill_(5.0 / {torch.int8: 127.0, CODES[0]: 448.0, CODES[1]: 57344.0}[codes])
    sequence = pages.new()
    k, v = torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    pages.append(sequence, k[:5], v[:5])
    fork = pages.fork(sequence)
    pages.append(fork, k[5:], v[5:])
    pages.append(sequence, -k[5:], -v[5:])  # the fork's page is its own, scales included
    keys, values = pages.read(fork)
    step = {torch.int8: 0.03, CODES[0]: 0.07, CODES[1]: 0.13}[codes]
    for found, given in ((keys, k), (values, v)):
        assert found.dtype == torch.float32 and (found - given).abs().max() <= step * given.abs().max()
    tables, lens = pages.block_tables([fork])
    named: dict[str, Any] = {
        "k_scale": pages.scales[0][0], "v_scale": pages.scales[0][1], "layout": layout
    }  # fmt: skip
    q = torch.randn(1, 2, 8)
    found = lz.sync.paged_attention(q, *pages.pools[0], tables, lens, **named)
    dense = [t.transpose(0, 1)[None] for t in (q, keys, values)]
    torch.testing.assert_close(found, lz.sync.attention(*dense)[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_scales_of_a_page_lie_by_head(layout: str) -> None:
    """A kernel reads those of a head's tokens with one load, whichever way the codes lie."""
    for scale in cache(torch.int8, "token", layout).scales[0]:
        assert scale is not None and scale.dim() == 3
        assert scale.stride(1 if layout == "NHD" else 2) == 1 and bool((scale == 1.0).all())


@pytest.mark.parametrize("granularity", ["head", "token"])
def test_a_cache_made_in_inference_mode_is_written_outside_of_it(granularity: str) -> None:
    """Pools and scales are ordinary tensors, whatever mode their maker is in."""
    with torch.inference_mode():
        pages = cache(torch.int8, granularity)
    k_scale, v_scale = pages.scales[0]
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.arange(3)
    lz.sync.append_kv(k, v, *pages.pools[0], slots, k_scale=k_scale, v_scale=v_scale, backend="reference")
    assert not any(t.is_inference() for t in (*pages.pools[0], k_scale, v_scale) if t is not None)


def test_pages_of_codes_count_a_byte_for_a_number_and_four_for_a_scale() -> None:
    """Memory is what the format costs: a quarter of float32, and the scales of tokens."""
    for granularity, own in (("token", 4), ("head", 0)):
        pages = cache(torch.int8, granularity)
        pages.append(pages.new(), torch.randn(3, 2, 8), torch.randn(3, 2, 8))
        assert pages.allocated_bytes() == 4 * 2 * 2 * (8 + own)
        assert pages.spec.token_bytes == 4 * 2 * 2 * 8


def test_a_pool_of_a_cache_is_not_read_in_another_format() -> None:
    """Not even before its first token: the cache has said what its pages hold."""
    pages = cache(torch.float8_e4m3fn, "head")
    sequence = pages.new()
    pages.append(sequence, torch.randn(3, 2, 8), torch.randn(3, 2, 8))
    tables, lens = pages.block_tables([sequence])
    k, v = (pool.view(torch.int8) for pool in pages.pools[0])
    named: dict[str, Any] = {"k_scale": pages.scales[0][0], "v_scale": pages.scales[0][1]}
    with pytest.raises(FormatError, match="k_cache needs float8_e4m3fn with scales by head") as caught:
        lz.sync.paged_attention(torch.randn(1, 2, 8), k, v, tables, lens, **named)
    assert caught.value.reason is Reason.KV_DTYPE_MISMATCH


def test_what_no_cache_can_hold_is_named() -> None:
    """A dtype that is neither the rows' nor a format's, a granularity that is none, a scale that is none."""
    with pytest.raises(FormatError, match="pool_dtype needs dtype or one of int8") as caught:
        KVCacheSpec(2, 8, pool_dtype=torch.uint8)
    assert caught.value.reason is Reason.KV_DTYPE_MISMATCH
    with pytest.raises(ValueError, match="scale_granularity needs one of tensor, head, token, got 'group'"):
        KVCacheSpec(2, 8, pool_dtype=torch.int8, scale_granularity="group")
    for dense in (ContiguousCache, ChunkedCache):
        with pytest.raises(FormatError, match="pool_dtype needs None for a cache without pages, got int8"):
            dense(KVCacheSpec(2, 8, pool_dtype=torch.int8))
    pages = cache(torch.int8, "tensor")
    scale = pages.scales[0][0]
    assert scale is not None
    scale.fill_(math.nan)
    sequence = pages.new()
    with pytest.raises(FormatError, match="k_scale needs finite scales above 0, got nan"):
        pages.append(sequence, torch.randn(1, 2, 8), torch.randn(1, 2, 8))
    assert pages.length(sequence) == 0 and not torch.count_nonzero(pages.k_cache)

"""Decoding equals the last row of a prefill, and long contexts equal float64 on sampled rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import layerzero as lz
import layerzero.sync
from layerzero.ops.attention.attention import MAX_SCORES

WIDTH, PAGE = 64, 16


@pytest.fixture(autouse=True)
def own_runtime() -> Iterator[None]:
    """A runtime of the test's own, with nothing loading behind it."""
    with lz.start(lz.Settings(warm="off")):
        yield


def heads(count: int, length: int, seed: int) -> Tensor:
    """(1, count, length, 64) of normal numbers."""
    return torch.randn(1, count, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def pages(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (1, H, S, D) in pages of 16 that stand in any order, and the table that finds them."""
    tokens = dense[0].transpose(0, 1)
    count = -(-len(tokens) // PAGE)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    padded = torch.cat([tokens, tokens.new_zeros(count * PAGE - len(tokens), *tokens.shape[1:])])
    pool = torch.empty(count, PAGE, *tokens.shape[1:])
    pool[order] = padded.view(count, PAGE, *tokens.shape[1:])
    return pool, order[None]


@pytest.mark.long
@pytest.mark.parametrize("length", [128, 512, 2048])
def test_decode_is_the_last_row_of_prefill(length: int) -> None:
    """E6.1: 32 query heads over 8, dense and in pages, with every kernel that takes the decode."""
    q, k, v = heads(32, length, 1), heads(8, length, 2), heads(8, length, 3)
    last = layerzero.sync.attention(q, k, v, is_causal=True)[:, :, -1:]
    step: dict[str, Any] = {"is_causal": True}
    takers = lz.select("attention", q[:, :, -1:], k, v, **step).order
    assert len(takers) >= 4
    for name in takers:
        out = layerzero.sync.attention(q[:, :, -1:], k, v, backend=name, **step)
        torch.testing.assert_close(out, last, atol=2e-5, rtol=1e-4)
    (k_cache, table), (v_cache, _) = pages(k), pages(v)
    paged = (q[0, :, -1][None], k_cache, v_cache, table, torch.tensor([length]))
    takers = lz.select("paged_attention", *paged).order
    for name in takers:
        out = layerzero.sync.paged_attention(*paged, backend=name)
        torch.testing.assert_close(out[0], last[0, :, 0], atol=2e-5, rtol=1e-4)


def sampled(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """The causal outputs of some rows in float64, (rows, 64)."""
    query, key, value = (t[0, 0].double() for t in (q, k, v))
    scores = query[rows] @ key.T * WIDTH**-0.5
    scores = scores.masked_fill(torch.arange(len(key)) > rows[:, None], -torch.inf)
    rows_out: Tensor = scores.softmax(-1) @ value
    return rows_out


@pytest.mark.long
@pytest.mark.parametrize("length", [8192, 32768])
def test_long_contexts_agree_with_float64_on_sampled_rows(length: int) -> None:
    """E6.1: one head, dense prefill and decode over pages; the first, the last and 30 rows between."""
    q, k, v = (heads(1, length, seed) for seed in (4, 5, 6))
    rows = torch.randperm(length, generator=torch.Generator().manual_seed(7))[:30]
    rows = torch.cat([torch.tensor([0, length - 1]), rows])
    truth = sampled(q, k, v, rows)
    whole = layerzero.sync.attention(q, k, v, is_causal=True)[0, 0, rows]
    torch.testing.assert_close(whole.double(), truth, atol=2e-5, rtol=1e-4)
    (k_cache, table), (v_cache, _) = pages(k), pages(v)
    tables = table.expand(len(rows), -1).contiguous()
    paged = layerzero.sync.paged_attention(q[0, 0, rows][:, None], k_cache, v_cache, tables, rows + 1)
    torch.testing.assert_close(paged[:, 0].double(), truth, atol=2e-5, rtol=1e-4)


LONG = 128 * 1024


def largest_allocation(run: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """What `run` returns, and the bytes of the largest piece of memory that torch took for it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
        out = run()
    return out, max((event.self_cpu_memory_usage for event in taken.events() or ()), default=0)


def test_128k_keys_need_no_matrix_of_scores() -> None:
    """NO-014: a decode and a chunk of 72 queries over 131,072 keys take a mask at most."""
    q, k, v = heads(2, 72, 8), heads(2, LONG, 9), heads(2, LONG, 10)
    rows = torch.tensor([0, 41, 71])
    padded = torch.cat([torch.zeros(1, 1, LONG - 72, WIDTH), q[:, :1]], 2)
    truth = sampled(padded, k, v, rows + LONG - 72)
    for backend in (None, "reference"):
        run = partial(layerzero.sync.attention, q, k, v, is_causal=True, backend=backend)
        out, taken = largest_allocation(run)
        torch.testing.assert_close(out[0, 0, rows].double(), truth, atol=2e-5, rtol=1e-4)
        assert taken <= 4 * MAX_SCORES < 4 * 2 * 72 * LONG
    step = q[:, :, -1:]
    takers = lz.select("attention", step, k, v, is_causal=True).order
    assert len(takers) >= 4
    _, taken = largest_allocation(lambda: layerzero.sync.attention(step, k, v, is_causal=True))
    assert taken < 4 * LONG * WIDTH  # less than the keys of one head
    for name in takers:
        out = layerzero.sync.attention(step, k, v, is_causal=True, backend=name)
        torch.testing.assert_close(out[0, 0].double(), truth[2:], atol=2e-5, rtol=1e-4)

"""Rows among others, as one projection makes them: read where they stand, copied where they cannot be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import layerzero as lz

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashInfer's row kernels need a CUDA device"),
]
HEADS, KEYS, WIDTH, ROWS = 8, 2, 64, 17


@pytest.fixture(scope="module", autouse=True)
def runtime() -> Iterator[lz.Runtime]:
    """A runtime of the GPU, or a skip where FlashInfer is not installed."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    with lz.start(lz.Settings(device="cuda", warm="off", perfdb=None), scoped=True) as opened:
        yield opened


def parts(spare: int, ahead: int, heads_first: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values cut out of wider rows, `ahead` elements in, with `spare` behind them."""
    heads = HEADS + 2 * KEYS
    torch.manual_seed(0)
    if heads_first:
        whole = torch.randn(heads, ROWS, WIDTH, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    else:
        wide = torch.randn(ROWS, ahead + heads * WIDTH + spare, device="cuda", dtype=torch.bfloat16)
        whole = wide[:, ahead : ahead + heads * WIDTH].unflatten(-1, (heads, WIDTH))
    q, k, v = whole.split((HEADS, KEYS, KEYS), dim=1)
    return q, k, v


LAYOUTS = [(0, 0, False), (8, 0, False), (3, 0, False), (16, 4, False), (0, 0, True)]


@pytest.mark.parametrize(("spare", "ahead", "heads_first"), LAYOUTS)
def test_rope_turns_rows_where_they_stand(spare: int, ahead: int, heads_first: bool) -> None:
    """The same bits as for rows by themselves, whatever stands between them."""
    q, k, _ = parts(spare, ahead, heads_first)
    cos, sin = lz.rope_tables(WIDTH, 64, device="cuda")
    for positions in (torch.arange(ROWS, device="cuda"), torch.arange(ROWS, device="cuda").int()):
        got = lz.sync.rope(q, k, positions, cos, sin, backend="flashinfer")
        want = lz.sync.rope(q.contiguous(), k.contiguous(), positions, cos, sin, backend="flashinfer")
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize(("spare", "ahead", "heads_first"), LAYOUTS)
def test_append_writes_rows_from_where_they_stand(spare: int, ahead: int, heads_first: bool) -> None:
    """Every row is in its slot, and nothing else is written."""
    _, k, v = parts(spare, ahead, heads_first)
    for dtype in (torch.int32, torch.int64):
        k_cache, v_cache = (torch.zeros(4, 8, KEYS, WIDTH, device="cuda", dtype=k.dtype) for _ in range(2))
        slot_mapping = torch.randperm(32, device="cuda")[:ROWS].to(dtype)
        lz.sync.append_kv(k, v, k_cache, v_cache, slot_mapping, backend="flashinfer")
        for pool, rows in ((k_cache, k), (v_cache, v)):
            want = torch.zeros(32, KEYS, WIDTH, device="cuda", dtype=k.dtype)
            want[slot_mapping.long()] = rows
            assert torch.equal(pool.flatten(0, 1), want)

"""Calls without queries, over ragged keys, pages and latent pages: nothing to compute, and still checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.ops.paged.attention import PAGED_ATTENTION
from layerzero.ops.paged.mla import MLA_ATTENTION
from layerzero.ops.paged.ragged import RAGGED_ATTENTION

Q, KEYS, POOL = torch.ones(0, 2, 8), torch.ones(4, 2, 6), torch.ones(3, 4, 2, 6)


def ids(*values: int) -> torch.Tensor:
    """Metadata, int32."""
    return torch.tensor(values, dtype=torch.int32)


def ragged(wrong: bool, **more: Any) -> Any:
    """Four keys, of which the offsets say more."""
    keys = torch.ones(4, 2, 8)
    return lz.sync.ragged_attention(Q, keys, KEYS, ids(0, 0), ids(0, 9 if wrong else 4), **more)


def paged(wrong: bool, **more: Any) -> Any:
    """Three pages, of which the table names another."""
    table = ids(7 if wrong else 2).view(1, 1)
    pool = torch.ones(3, 4, 2, 8)
    return lz.sync.paged_attention(Q, pool, POOL, table, ids(3), cu_seqlens_q=ids(0, 0), **more)


def latent(wrong: bool, **more: Any) -> Any:
    """The same over latent pages."""
    table = ids(7 if wrong else 2).view(1, 1)
    pools = torch.ones(3, 4, 8), torch.ones(3, 4, 4)
    return lz.sync.mla_attention(
        Q, torch.ones(0, 2, 4), *pools, table, ids(3), cu_seqlens_q=ids(0, 0), scale=1.0, **more
    )


@pytest.mark.parametrize(("call", "width"), [(ragged, 6), (paged, 6), (latent, 8)])
def test_a_call_without_queries_is_checked_all_the_same(call: Callable[..., Any], width: int) -> None:
    """Its result has the widths and dtypes of every other call's; metadata that does not fit is named."""
    assert call(wrong=False).shape == (0, 2, width)
    out, lse = call(wrong=False, return_lse=True)
    assert (out.shape, lse.shape, lse.dtype) == ((0, 2, width), (0, 2), torch.float32)
    with pytest.raises(ValueError, match=r"cu_seqlens_k needs to end at 4|block_tables needs page ids"):
        call(wrong=True)


@pytest.mark.parametrize("op", [RAGGED_ATTENTION, PAGED_ATTENTION, MLA_ATTENTION], ids=lambda op: op.name)
def test_results_are_told_ahead(op: Any) -> None:
    """Shapes and dtypes before a kernel runs, in numbers where queries are codes."""
    q = torch.ones(5, 2, 8, dtype=torch.float16)
    values = {"paged_attention": POOL, "ragged_attention": KEYS, "mla_attention": torch.ones(3, 4, 8)}[
        op.name
    ]
    at = {"paged_attention": 11}.get(op.name, 9)
    for lse in (False, True):
        args = [q, q, values, *[None] * 8, False]
        args[at] = lse
        specs = [(spec.shape, spec.dtype) for spec in op.outputs(tuple(args))]
        width = values.shape[-1]
        assert specs == [((5, 2, width), "float16"), ((5, 2), "float32")][: 1 + lse]

"""Pages that a batch's sequences begin with: how many are shared, and that two parts make the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerzero.backends.flashinfer import cascade as prefix
from layerzero.backends.flashinfer.planning import CompressedBlockTables
from layerzero.ops.paged.attention import paged_attention_reference

ATTENTION: Any = paged_attention_reference


def starts(*counts: int) -> torch.Tensor:
    """Where each sequence's queries start."""
    return torch.tensor([0, *counts]).cumsum(0).int()


@pytest.mark.parametrize(
    ("tables", "lengths", "queries", "shared"),
    [
        ([[3, 1, 5], [3, 1, 6]], [12, 9], (1, 1), 2),
        ([[3, 1, 5], [3, 1, 6]], [12, 8], (1, 1), 1),  # the last key stays with its query
        ([[3, 1, 5], [3, 1, 6]], [12, 10], (3, 3), 1),  # so do as many keys as there are queries
        ([[3, 1, 5], [4, 1, 5]], [12, 12], (1, 1), 0),
        ([[3, 1, 5], [3, 2, 5]], [12, 12], (1, 1), 1),  # what is equal behind a difference is not shared
        ([[3, 1, 5]], [12], (1,), 0),
        ([[3, 1, 5], [3, 1, 6]], [12, 12], (1, 0), 0),
        ([[3, 1, 5], [3, 1, 6]], [12, 0], (1, 1), 0),
        ([[3, 1, 5], [3, 1, 5]], [12, 12], (1, 1), 2),
    ],
)
def test_pages_that_all_sequences_begin_with(
    tables: list[list[int]], lengths: list[int], queries: tuple[int, ...], shared: int
) -> None:
    """From the loop driver, in whole pages, and never the keys that causality speaks about."""
    found = prefix.shared_pages(torch.tensor(tables), torch.tensor(lengths), starts(*queries), 4)
    assert found == shared


def test_shared_pages_pay_by_what_is_not_read_again() -> None:
    """All sequences but one are spared them."""
    assert prefix.saved_bytes(10, 1, 100) == 0
    assert prefix.saved_bytes(10, 8, 100) == 7000


@pytest.mark.parametrize("causal", [False, True])
def test_two_parts_make_the_whole(causal: bool) -> None:
    """Attention over shared pages and over the rest, merged by log-sum-exps, is attention over all."""
    torch.manual_seed(0)
    size, counts = 4, (2, 2, 2)
    pools = torch.randn(2, 12, size, 2, 16, dtype=torch.float64)
    tables = torch.tensor([[7, 2, 0, 4], [7, 2, 1, 5], [7, 2, 3, 6]])
    lengths, q = torch.tensor([15, 10, 12]), torch.randn(6, 4, 16, dtype=torch.float64)
    offsets = starts(*counts)
    shared = prefix.shared_pages(tables, lengths, offsets, size)
    assert shared == 2
    rest: tuple[Any, ...] = (None, None, None, "NHD", True)
    whole, known = ATTENTION(q, *pools, tables, lengths, offsets, causal, *rest)
    front, weight = ATTENTION(
        q, *pools, tables[:1, :shared], torch.tensor([shared * size]), starts(6), False, *rest
    )
    pages = CompressedBlockTables.of(tables[:, shared:], lengths.int() - shared * size, size)
    behind = torch.zeros(3, 2, dtype=torch.long)
    for row in range(3):
        own = pages.ids[pages.starts[row] : pages.starts[row + 1]]
        behind[row, : len(own)] = own
    out, lse = ATTENTION(q, *pools, behind, pages.lengths, offsets, causal, *rest)
    both = torch.logaddexp(lse, weight)
    merged = out * (lse - both).exp().unsqueeze(-1) + front * (weight - both).exp().unsqueeze(-1)
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(both, known)

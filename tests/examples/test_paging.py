"""Where the rows of several sequences stand, against each sequence by itself."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import pytest
import torch

paging = pytest.importorskip("paging", reason="the examples are not on the path")


def pool(pages: int = 512) -> Any:
    """A pool of small pages on the CPU."""
    return paging.Pages(
        layers=1, heads=1, head_dim=4, pages=pages, page_size=4, positions=256,
        dtype=torch.float32, device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_a_crowds_places_are_those_of_its_members(seed: int) -> None:
    """Each row's position, slot, table, length and last row are what its sequence's own pages say."""
    draw, pages = random.Random(seed), pool()
    with ExitStack() as stack:
        sequences = [stack.enter_context(pages.sequence(draw.randint(40, 80))) for _ in range(9)]
        for sequence in sequences:
            sequence.extend(draw.randint(1, 20))
        chunks = [sequence.extend(draw.choice((1, 1, 5) if seed % 2 else (1,))) for sequence in sequences]
        at = paging.places(chunks)
        positions = [place for chunk in chunks for place in chunk.positions]
        slots = [chunk.sequence.pages[p // 4] * 4 + p % 4 for chunk in chunks for p in chunk.positions]
        width = -(-max(chunk.end for chunk in chunks) // 4)
        assert at.positions.tolist() == positions
        assert at.slots.tolist() == slots
        assert at.lengths.tolist() == [chunk.end for chunk in chunks]
        assert torch.equal(at.tables, torch.stack([chunk.sequence.table[:width] for chunk in chunks]))
        assert at.tables.dtype == at.lengths.dtype == torch.int32
        last = torch.arange(len(positions))[at.last].tolist()
        ends = [sum(chunk.count for chunk in chunks[: n + 1]) - 1 for n in range(len(chunks))]
        assert last == ends
        if any(chunk.count > 1 for chunk in chunks):
            assert at.offsets.tolist() == [0, *(end + 1 for end in ends)]
        else:
            assert at.offsets is None


def test_a_row_is_used_again_and_more_are_made() -> None:
    """More sequences than rows get rows of their own; one that opens later takes a closed one's."""
    pages = pool()
    opened = [pages.sequence(8) for _ in range(70)]
    assert len({sequence.row for sequence in opened}) == 70
    for sequence in opened:
        assert pages.tables.rows[sequence.row, :3].tolist() == [*sequence.pages, 0]
    rows = len(pages.tables.rows)
    for sequence in opened:
        sequence.close()
    for _ in range(3):
        for sequence in [pages.sequence(4) for _ in range(70)]:
            assert sequence.table[:2].tolist() == [*sequence.pages, 0]
            sequence.close()
    assert len(pages.tables.rows) == rows
    assert pages.free == 512

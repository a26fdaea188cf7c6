"""What is copied together when results are read back, and that every reader gets its own."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerzero.scheduler.modes.readback import SMALL_BYTES, copy_blocks, split_block


def arrived(tensors: list[Tensor]) -> tuple[list[Tensor], int]:
    """Every tensor's copy in order, and how many copies that took."""
    parts = copy_blocks(tensors)
    found = [pair for part in parts for pair in split_block(part, part.whole.clone())]
    assert sorted(index for index, _ in found) == list(range(len(tensors)))
    return [copy for _, copy in sorted(found, key=lambda pair: pair[0])], len(parts)


def test_the_rows_of_a_batch_are_one_copy() -> None:
    """64 tokens in any order are one transfer; each is by itself afterwards."""
    batch = torch.arange(64)
    rows = list(batch.split(1))[::-1]
    copies, launched = arrived(rows)
    assert launched == 1
    assert [int(copy) for copy in copies] == list(range(63, -1, -1))
    assert all(copy.untyped_storage().nbytes() == 8 for copy in copies)
    assert len(pickle.dumps(copies[0])) < 600


@pytest.mark.parametrize("rows", [[0, 1, 3], [5, 0, 2]])
def test_rows_between_which_others_stand_are_one_copy(rows: list[int]) -> None:
    """Who has left the batch does not split it, up to half of the rows."""
    batch = torch.randn(6, 3)
    copies, launched = arrived([batch[row : row + 1] for row in rows])
    assert launched == 1
    assert all(torch.equal(copy, batch[row : row + 1]) for copy, row in zip(copies, rows, strict=True))


def test_what_lies_apart_is_copied_apart() -> None:
    """Few rows of many, rows that overlap, large ones, scalars, columns and strangers."""
    batch, large = torch.randn(64, 3), torch.randn(2, SMALL_BYTES)
    assert arrived([batch[:1], batch[60:61]])[1] == 2
    assert arrived([batch[:2], batch[1:3]])[1] == 2
    assert arrived([large[:1], large[1:]])[1] == 2
    assert arrived([batch[0, 0], batch[1, 0]])[1] == 2
    assert arrived([batch[:, 0], batch[:, 1]])[1] == 2
    assert arrived([batch[:1], batch[1:2].clone()])[1] == 2
    assert arrived([batch.flatten()[1:2], batch.flatten()[4:5].view(1, 1)])[1] == 2


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 4), st.booleans()), min_size=1, max_size=12))
def test_every_reader_gets_what_it_asked_for(asked: list[tuple[int, int, bool]]) -> None:
    """Any slices of two batches, empty and equal ones too, arrive as they were."""
    batches = torch.arange(40.0).view(20, 2), torch.arange(40, 60)
    tensors = [batches[second][start : start + count] for start, count, second in asked]
    copies, _ = arrived(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert copy.dtype == tensor.dtype and torch.equal(copy, tensor)

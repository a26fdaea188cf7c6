"""A compiled step pads to its buckets and gives each call its own rows; on the CPU without a graph."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import layerzero as lz
from layerzero.graphs.step import Step

WEIGHT = torch.linspace(0.5, 1.5, 8)


def norm(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Two results, each with a row a row."""
    y = lz.sync.rms_norm(x, WEIGHT) * scale
    return y, y.sum(-1)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_padding_changes_no_row(sizes: list[int]) -> None:
    """Whatever sizes follow each other, results are the function's own on those rows."""
    step = lz.compile(norm, buckets=(1, 3, 8))
    for rows in sizes:
        x, scale = torch.randn(rows, 8), torch.randn(rows, 1)
        for got, want in zip(step(x, scale), norm(x, scale), strict=True):
            assert torch.equal(got, want)
    assert step.captures <= 3


def test_padding_rows_hold_what_fill_says() -> None:
    """The function sees the bucket's rows: the caller's, then the fill of each argument."""
    seen: list[Tensor] = []

    def look(ids: Tensor, x: Tensor) -> Tensor:
        seen.append(torch.stack([ids, x]))
        return x

    step = lz.compile(look, buckets=(4,), fill={"ids": 9})
    step(torch.tensor([1, 2]), torch.tensor([5, 6]))
    assert seen[-1].tolist() == [[1, 2, 9, 9], [5, 6, 0, 0]]
    step(torch.tensor([3]), torch.tensor([7]))
    assert seen[-1].tolist() == [[3, 9, 9, 9], [7, 0, 0, 0]], "rows of an earlier call are gone"


def test_results_are_the_callers_own() -> None:
    """A later call does not write into what an earlier one returned."""
    step = lz.compile(lambda x: x * 2, buckets=(2,))
    first = step(torch.ones(2, 3))
    step(torch.full((2, 3), 5.0))
    assert torch.equal(first, torch.full((2, 3), 2.0))


def test_buckets_can_be_made_ready_ahead() -> None:
    """`capture` makes every bucket; calls then add none, other dtypes add their own."""
    step = lz.compile(lambda x: x + 1, buckets=(1, 2, 4))
    step.capture(torch.zeros(1, 3))
    assert step.captures == 3
    step(torch.zeros(3, 3))
    assert step.captures == 3
    step(torch.zeros(3, 3, dtype=torch.float64))
    assert step.captures == 4


def test_another_generation_is_captured_anew() -> None:
    """Plans inside a graph may be quarantined or denied: then it must not be replayed."""
    now = [1]
    step = Step(lambda x: x + 1, buckets=(2,), generation=lambda _: now[0])
    step(torch.zeros(2))
    step(torch.zeros(2))
    assert step.captures == 1
    now[0] = 2
    step(torch.zeros(2))
    assert step.captures == 2


def test_a_step_runs_under_any_mode() -> None:
    """Buffers made under inference mode serve calls outside it."""
    step = lz.compile(lambda x: x * 3, buckets=(2,))
    with torch.inference_mode():
        inside = step(torch.ones(2))
    assert torch.equal(step(torch.ones(2)), inside)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lz.compile(norm, buckets=()), "buckets needs"),
        (lambda: lz.compile(norm, buckets=(0, 2)), "at least 1"),
        (lambda: lz.compile(norm, fill={"y": 1}), "among x, scale, got y"),
        (lambda: lz.compile(norm, buckets=(2,))(torch.ones(3, 8), torch.ones(3, 1)), "at most 2 rows, got 3"),
        (lambda: lz.compile(norm)(torch.ones(3, 8), torch.ones(2, 1)), "as many rows"),
        (lambda: lz.compile(norm)(torch.ones(3, 8)), "rows for x, scale"),
        (lambda: lz.compile(lambda x: x)(torch.ones(2, requires_grad=True)), "without a gradient"),
        (lambda: lz.compile(lambda x: x.sum(), buckets=(2,))(torch.ones(2)), "results of 2 rows"),
        (lambda: lz.compile(lambda x: 3, buckets=(2,))(torch.ones(2)), "return tensors, got int"),
    ],
)
def test_what_does_not_fit_is_named(call: object, message: str) -> None:
    """The error says which argument, what it needs and what it got."""
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.asyncio
async def test_a_compiled_step_batches_across_coroutines() -> None:
    """Calls of many tasks become one padded run, and each gets its rows."""
    runs: list[int] = []

    def doubled(x: Tensor) -> Tensor:
        runs.append(len(x))
        return x * 2

    awaited = lz.batched(lz.compile(doubled, buckets=(4, 8)), key="doubled")
    rows = [torch.full((1, 3), float(i)) for i in range(6)]
    results = await asyncio.gather(*(awaited(row) for row in rows))
    assert all(torch.equal(got, row * 2) for got, row in zip(results, rows, strict=True))
    assert set(runs) <= {4, 8} and len(runs) < 2 * len(rows)

"""A call without rows has a gradient like any other: zero, also that of an expert without rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz

NONE = torch.zeros(0, dtype=torch.int64)
CALLS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "linear": (lz.sync.linear, ((0, 8), (5, 8), (5,))),
    "linear without inputs": (lz.sync.linear, ((2, 0), (5, 0), (5,))),
    "rms_norm": (lz.sync.rms_norm, ((0, 8), (8,))),
    "add_rms_norm": (lz.sync.add_rms_norm, ((0, 8), (0, 8), (8,))),
    "attention without queries": (lz.sync.attention, ((1, 2, 0, 4), (1, 1, 3, 4), (1, 1, 3, 4))),
    "attention without keys": (lz.sync.attention, ((1, 2, 3, 4), (1, 1, 0, 4), (1, 1, 0, 4))),
    "embedding": (lambda weight: lz.sync.embedding(NONE, weight), ((5, 8),)),
    "cross_entropy": (lambda x: lz.sync.cross_entropy(x, NONE, reduction="sum"), ((0, 8),)),
    "moe": (lz.sync.moe, ((0, 4), (0, 3), (3, 4, 4), (3, 4, 2))),
    "torch.ops": (torch.ops.layerzero.linear, ((0, 8), (5, 8), (5,))),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_gradient_of_nothing_is_zero(name: str) -> None:
    """Each operand gets one in its shape, as from torch; a bias added to a sum over nothing keeps its own."""
    op, shapes = CALLS[name]
    operands = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = op(*operands)
    for part in out if isinstance(out, tuple) else (out,):
        assert part.grad_fn is not None
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    expected = [torch.zeros(shape) for shape in shapes]
    if name == "linear without inputs":
        expected[-1] += 2
    for operand, gradient in zip(operands, expected, strict=True):
        assert operand.grad is not None and torch.equal(operand.grad, gradient)


def test_awaited_and_without_grad() -> None:
    """An awaited call has it, too; under no_grad nothing of it is recorded."""
    weight = torch.randn(5, 8, requires_grad=True)

    async def main() -> tuple[Tensor, Tensor]:
        learning = await lz.linear(torch.ones(0, 8), weight)
        with torch.no_grad():
            return learning, await lz.linear(torch.ones(0, 8), weight)

    learning, other = asyncio.run(main())
    assert learning.requires_grad and not other.requires_grad

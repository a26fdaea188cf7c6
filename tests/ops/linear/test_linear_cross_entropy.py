"""The projection and its loss in one: equal to the two ops, bad arguments named, rows of many callers."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import layerzero as lz


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (2, 5, 12), weight (30, 12), target (2, 5) with one ignored row, bias (30,)."""
    source = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 5, 12, generator=source), torch.randn(30, 12, generator=source)
    target = torch.randint(0, 30, (2, 5), generator=source)
    target[1, 2] = -100
    return x.to(dtype), weight.to(dtype), target, torch.randn(30, generator=source).to(dtype)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_it_equals_the_two_ops(reduction: str, smoothing: float) -> None:
    """The loss and all three gradients are those of the projection followed by the loss."""
    x, weight, target, bias = (t.requires_grad_() if t.is_floating_point() else t for t in operands())
    named: dict[str, Any] = {"label_smoothing": smoothing, "reduction": reduction}
    fused = lz.sync.linear_cross_entropy(x, weight, target, bias, **named)
    logits = functional.linear(x, weight, bias)
    plain = functional.cross_entropy(logits.view(-1, 30), target.view(-1), **named)
    torch.testing.assert_close(fused, plain.view(2, 5) if reduction == "none" else plain)
    grads = [torch.autograd.grad(loss.sum(), (x, weight, bias)) for loss in (fused, plain)]
    torch.testing.assert_close(*grads)


def test_no_row_at_all() -> None:
    """A sum of nothing is zero, a mean of nothing is NaN."""
    x, weight, target, _ = operands()
    none = x[:0], weight, target[:0]
    assert lz.sync.linear_cross_entropy(*none, reduction="sum") == 0
    assert lz.sync.linear_cross_entropy(*none).isnan()
    assert lz.sync.linear_cross_entropy(*none, reduction="none").shape == (0, 5)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"target": torch.ones(2, 5)},
            TypeError,
            "target needs dtype int32 or int64",
        ),
        ({"target": torch.zeros(5, 2).long()}, ValueError, r"target needs shape \(2, 5\) like x without"),
        ({"weight": torch.ones(30, 11)}, ValueError, "x needs a last axis of 11"),
        ({"weight": torch.ones(0, 12)}, ValueError, "weight needs at least 1 row"),
        ({"bias": torch.ones(29)}, ValueError, "bias needs 30 elements"),
        ({"reduction": "max"}, ValueError, "reduction needs one of mean, sum, none"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing"),
        ({"ignore_index": 0.5}, TypeError, "ignore_index needs an int"),
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    """The message says which argument, what it needs and what it got."""
    x, weight, target, bias = operands()
    with pytest.raises(error, match=words):
        lz.sync.linear_cross_entropy(**{"x": x, "weight": weight, "target": target, "bias": bias, **changes})


def test_a_target_out_of_range_fails_its_own_caller_alone() -> None:
    """Losses of rows batch; a class id that does not exist is named to the caller that brought it."""
    x, weight, target, _ = operands()
    outcomes: list[Any] = [None] * 6

    async def one(at: int) -> None:
        wrong = target.clone()
        if at == 3:
            wrong[0, 1] = 30
        try:
            outcomes[at] = await lz.linear_cross_entropy(x + at, weight, wrong, reduction="none")
        except ValueError as error:
            outcomes[at] = str(error)

    async def go() -> None:
        async with anyio.create_task_group() as group:
            for at in range(6):
                group.start_soon(one, at)

    anyio.run(go)
    assert "target needs ids in [0, 30)" in outcomes.pop(3)
    for at, outcome in zip((0, 1, 2, 4, 5), outcomes, strict=True):
        right = lz.sync.linear_cross_entropy(x + at, weight, target, reduction="none")
        torch.testing.assert_close(outcome, right)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_a_loss_is_float32(dtype: torch.dtype, backend: str | None) -> None:
    """As torch's own: eight bits of a loss of 49 would tell it apart from 48.75 and 49.25 alone."""
    x, weight = torch.randn(6, 32).to(dtype).requires_grad_(), torch.randn(50, 32)
    target = torch.arange(6)
    with torch.autocast("cpu", torch.bfloat16):
        logits = functional.linear(x, weight)
        expected = functional.cross_entropy(logits, target)
        fused = lz.sync.linear_cross_entropy(x, weight, target, backend=backend)
        apart = lz.sync.cross_entropy(logits, target, backend=backend)
    assert fused.dtype == apart.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(apart, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused, expected, rtol=1e-2, atol=1e-6)  # of logits in bfloat16
    fused.backward()
    assert x.grad is not None and x.grad.dtype is dtype

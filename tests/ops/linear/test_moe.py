"""Mixtures of experts: routing with its ties, both ways of scoring, gradients, callers that batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import layerzero as lz
from layerzero.ops.linear.moe import moe_reference, route


def operands(rows: int = 6, experts: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (rows, 12), router_logits (rows, experts), w_up (experts, 40, 12), w_down (experts, 12, 20)."""
    source = torch.Generator().manual_seed(seed)
    shapes = (rows, 12), (rows, experts), (experts, 40, 12), (experts, 12, 20)
    x, logits, up, down = (torch.randn(shape, generator=source) for shape in shapes)
    return x, logits, up, down


def dense(
    x: Tensor, logits: Tensor, up: Tensor, down: Tensor, k: int, scoring: str, renormalize: bool
) -> Tensor:
    """Every expert on every row in float64, row by row, weighed by what the router says."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for row in range(len(x)):
        scores = logits[row].double()
        order = sorted(range(len(scores)), key=lambda e: (-scores[e].item(), e))[:k]
        weights = scores.sigmoid() if scoring == "sigmoid" else scores.softmax(0)
        total = sum(weights[e] for e in order) if renormalize else torch.tensor(1.0)
        for e in order:
            gate, value = (up[e].double() @ x[row].double()).chunk(2)
            out[row] += weights[e] / total * (down[e].double() @ (functional.silu(gate) * value))
    return out


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_it_equals_every_expert_on_every_row(
    scoring: Literal["softmax", "sigmoid"], renormalize: bool, top_k: int
) -> None:
    """Routing, experts and sums agree with a dense computation that knows no batches."""
    calls = operands()
    out = lz.sync.moe(*calls, top_k=top_k, scoring=scoring, renormalize=renormalize)
    wanted = dense(*calls, top_k, scoring, renormalize).float()
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_of_equal_experts_the_first_are_chosen() -> None:
    """A router that cannot decide gives the same experts on every run and in every batch."""
    experts, scores = route(torch.zeros(3, 8), 2, "softmax", True)
    assert experts.tolist() == [[0, 1]] * 3 and torch.equal(scores, torch.full((3, 2), 0.5))
    experts, _ = route(torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]]), 2, "softmax", False)
    assert experts.tolist() == [[1, 2]]


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 6), st.data())
def test_weights_are_shares(seed: int, rows: int, experts: int, data: Any) -> None:
    """Renormalised weights sum to one and fall; chosen experts differ; all are in range."""
    top_k = data.draw(st.integers(1, experts))
    logits = torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed)) * 40
    chosen, scores = route(logits, top_k, "softmax", True)
    torch.testing.assert_close(scores.sum(-1), torch.ones(rows))
    assert (scores.diff(dim=-1) <= 0).all()
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    assert int(chosen.min()) >= 0 and int(chosen.max()) < experts


def test_gradients_reach_everything() -> None:
    """Rows, router and the experts' weights learn, as in the reference."""
    leaves: Any = tuple(t.requires_grad_() for t in operands())
    functions: tuple[Callable[..., Tensor], ...] = (
        lambda x, logits, up, down: lz.sync.moe(x, logits, up, down, top_k=2),
        lambda x, logits, up, down: moe_reference(x, logits, up, down, 2, "softmax", True, "swiglu"),
    )
    found = [torch.autograd.grad((function(*leaves) ** 2).sum(), leaves) for function in functions]
    torch.testing.assert_close(*found)


def test_concurrent_callers_share_a_launch_and_get_their_own() -> None:
    """Rows of many callers go to the experts together; each caller's result is what it gets alone."""
    x, logits, up, down = operands(rows=16)
    results: list[Any] = [None] * 16

    async def one(at: int) -> None:
        results[at] = await lz.moe(x[at : at + 1], logits[at : at + 1], up, down)

    async def go() -> None:
        async with anyio.create_task_group() as group:
            for at in range(16):
                group.start_soon(one, at)

    anyio.run(go)
    torch.testing.assert_close(
        torch.cat(results), moe_reference(x, logits, up, down, 2, "softmax", True, "swiglu")
    )


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"router_logits": torch.ones(6, 3)}, ValueError, r"w_down needs shape \(3, 12, F\)"),
        ({"router_logits": torch.ones(5, 4)}, ValueError, r"router_logits needs shape \(6, 4\)"),
        ({"w_up": torch.ones(4, 39, 12)}, ValueError, r"w_up needs shape \(4, 40, 12\), \(E, 2F, C\)"),
        ({"w_down": torch.ones(4, 12, 0)}, ValueError, "w_down needs shape"),
        ({"top_k": 5}, ValueError, r"top_k needs an int in \[1, 4\], got 5"),
        ({"top_k": 0}, ValueError, "top_k needs an int"),
        ({"scoring": "max"}, ValueError, "scoring needs one of softmax, sigmoid"),
        ({"renormalize": "yes"}, TypeError, "renormalize needs a bool"),
        ({"activation": "gelu"}, ValueError, "activation needs one of swiglu"),
        ({"w_up": 3}, TypeError, "w_up needs a torch.Tensor"),
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    """The message says which argument, what it needs and what it got."""
    names = ("x", "router_logits", "w_up", "w_down")
    with pytest.raises(error, match=words):
        lz.sync.moe(**{**dict(zip(names, operands(), strict=True)), **changes})


def test_memory_is_that_of_the_chosen_rows() -> None:
    """Experts that nobody chose may hold anything, NaN included: they are never multiplied."""
    x, logits, up, down = operands(experts=5)
    logits[:, 3:] = -50.0
    up[3:], down[3:] = torch.nan, torch.nan
    for kernel in ("reference.moe", "torch.moe.by_expert"):
        with lz.prefer(kernel):
            assert lz.sync.moe(x, logits, up, down, top_k=3).isfinite().all()


def test_an_op_of_no_rows_runs_no_kernel() -> None:
    """Nothing in, nothing out."""
    x, logits, up, down = operands()
    assert lz.sync.moe(x[:0], logits[:0], up, down).shape == (0, 12)
    assert lz.sync.moe(x.view(2, 3, 12), logits.view(2, 3, 4), up, down).shape == (2, 3, 12)

"""Experts in two steps: routing against a loop over rows, products against plain experts, shares of ranks."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.formats import FORMATS, QuantizedTensor


def chosen_by_hand(
    logits: list[float], bias: list[float], top_k: int, sigmoid: bool, groups: int, top_groups: int
) -> list[int]:
    """The experts of one row, as DeepSeek's report describes the choice; of equal ones the lower."""
    total = sum(math.exp(x) for x in logits)
    scores = [1 / (1 + math.exp(-x)) if sigmoid else math.exp(x) / total for x in logits]
    ranked = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // groups
    parts = [sorted(ranked[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
    strength = [part[0] + part[1] if any(bias) else part[0] for part in parts]
    best = sorted(range(groups), key=lambda g: (-strength[g], g))[:top_groups]
    allowed = [e for e in range(len(logits)) if e // size in best]
    return sorted(allowed, key=lambda e: (-ranked[e], e))[:top_k]


@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (8, 3)])
def test_experts_are_chosen_as_the_report_says(
    sigmoid: bool, with_bias: bool, groups: int, top_groups: int
) -> None:
    """Scores, the bias for the choice alone, groups by their best, weights from the scores, scaled."""
    generator = torch.Generator().manual_seed(groups + 2 * sigmoid)
    logits = torch.randn(40, 32, generator=generator)
    bias = torch.randn(32, generator=generator) * 0.3 if with_bias else None
    scoring = "sigmoid" if sigmoid else "softmax"
    named: dict[str, Any] = {"top_k": 4, "scoring": scoring, "groups": groups, "top_groups": top_groups}
    experts, weights = lz.sync.select_experts(logits, bias, **named, scaling=2.5)
    raw = lz.sync.select_experts(logits, bias, **named, renormalize=False)[1]
    for row in range(40):
        shift = [0.0] * 32 if bias is None else bias.tolist()
        wanted = chosen_by_hand(logits[row].double().tolist(), shift, 4, sigmoid, groups, top_groups)
        assert experts[row].tolist() == wanted
    wide = logits.double()
    scores = (wide.sigmoid() if sigmoid else wide.softmax(-1)).gather(1, experts.long())
    torch.testing.assert_close(raw.double(), scores, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        weights.double(), scores / scores.sum(-1, keepdim=True) * 2.5, rtol=1e-5, atol=1e-7
    )
    assert experts.dtype == torch.int32 and weights.dtype == torch.float32


def test_of_equal_scores_the_lower_expert_is_chosen() -> None:
    """Rows of equal logits, within groups and among them."""
    experts, weights = lz.sync.select_experts(torch.zeros(2, 8), top_k=3, groups=4, top_groups=2)
    assert experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_no_expert_of_a_closed_group_is_chosen() -> None:
    """Not even where an open group's own cannot be told from it: their logits are minus infinity."""
    logits = torch.tensor([[0.5, 0.4, 1.0, -torch.inf]])
    experts, weights = lz.sync.select_experts(logits, top_k=2, groups=2, top_groups=1)
    assert experts.tolist() == [[2, 3]] and weights.tolist() == [[1.0, 0.0]]


def made(count: int = 6, width: int = 64, hidden: int = 32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, logits = torch.randn(9, width, generator=generator), torch.randn(9, count, generator=generator)
    w_up = torch.randn(count, 2 * hidden, width, generator=generator) * width**-0.5
    return x, logits, w_up, torch.randn(count, width, hidden, generator=generator) * hidden**-0.5


def test_plain_weights_are_the_experts_of_moe() -> None:
    """Routing and experts one after the other give what `moe` gives, and the gate may stand below."""
    x, logits, w_up, w_down = made()
    wanted = lz.sync.moe(x, logits, w_up, w_down, top_k=3)
    experts, scores = lz.sync.select_experts(logits, top_k=3)
    torch.testing.assert_close(lz.sync.fused_experts(x, experts, scores, w_up, w_down), wanted)
    turned = w_up.roll(32, 1)
    below = lz.sync.fused_experts(x, experts, scores, turned, w_down, gate="second")
    torch.testing.assert_close(below, wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_experts_are_those_of_their_numbers(name: str) -> None:
    """In every format: the answer of the dequantized weights; a score may weigh what an expert gets."""
    x, logits, w_up, w_down = made(width=128, hidden=128)
    up, down = (QuantizedTensor.quantize(w, name) for w in (w_up, w_down))
    experts, scores = lz.sync.select_experts(logits, top_k=2)
    parts: dict[str, Any] = {
        "up_tensor_scale": up.tensor_scale,
        "down_tensor_scale": down.tensor_scale,
        "format": name,
    }
    for weighed in ("outputs", "inputs"):
        got = lz.sync.fused_experts(x, experts, scores, up.codes, down.codes, up.scale, down.scale, **parts,
                                    weighed=weighed)  # fmt: skip
        right = lz.sync.fused_experts(x, experts, scores, up.dequantize(), down.dequantize(), weighed=weighed)
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


def test_shares_of_ranks_add_up_and_shared_experts_take_every_row() -> None:
    """Two halves of the experts by their first number; the last weights as experts of all rows."""
    x, logits, w_up, w_down = made()
    experts, scores = lz.sync.select_experts(logits, top_k=3)
    whole = lz.sync.fused_experts(x, experts, scores, w_up, w_down)
    halves = [
        lz.sync.fused_experts(x, experts, scores, w_up[at : at + 3], w_down[at : at + 3], first_expert=at)
        for at in (0, 3)
    ]
    torch.testing.assert_close(halves[0] + halves[1], whole)
    routed, weights = lz.sync.select_experts(logits[:, :5], top_k=2)
    got = lz.sync.fused_experts(x, routed, weights, w_up, w_down, shared=1)
    alone = lz.sync.mlp(x, w_up[5], w_down[5])
    routed_alone = lz.sync.fused_experts(x, routed, weights, w_up[:5], w_down[:5])
    torch.testing.assert_close(got, routed_alone + alone)
    nobody = lz.sync.fused_experts(x, torch.full_like(experts, -1), scores, w_up, w_down)
    assert torch.equal(nobody, torch.zeros_like(x))


def test_awaited_rows_are_those_of_one_call() -> None:
    """Callers who share the weights meet in one batch, and each gets its rows."""
    x, logits, w_up, w_down = made()
    up, down = (QuantizedTensor.quantize(w, "int8") for w in (w_up, w_down))
    experts, scores = lz.sync.select_experts(logits, top_k=2)
    whole = lz.sync.fused_experts(x, experts, scores, up.codes, down.codes, up.scale, down.scale)

    async def one(row: int) -> Tensor:
        part = slice(row, row + 1)
        routed, weights = await lz.select_experts(logits[part], top_k=2)
        assert torch.equal(routed, experts[part])
        return await lz.fused_experts(x[part], routed, weights, up.codes, down.codes, up.scale, down.scale)

    async def everybody() -> list[Tensor]:
        return await asyncio.gather(*(one(row) for row in range(9)))

    rows = asyncio.run(everybody())
    torch.testing.assert_close(torch.cat(rows), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"down_scale": None}, "down_scale needs to be given where up_scale is"),
        ({"experts": torch.zeros(8, 2).int()}, r"experts needs shape \(9, 2\)"),
        ({"scores": torch.zeros(9, 3)}, r"scores needs shape \(9, 2\)"),
        ({"gate": "third"}, "gate needs one of first, second"),
        ({"weighed": "both"}, "weighed needs one of outputs, inputs"),
        ({"shared": 7}, "shared needs an int in"),
        ({"first_expert": -1}, "first_expert needs an int >= 0"),
        ({"up_scale": torch.ones(6, 64, 3)}, r"up_scale needs shape .* got \(6, 64, 3\)"),
        ({"up_zero_point": torch.zeros(6, 64, 1).byte()}, "up_zero_point needs None for int8"),
        ({"activation": "gelu"}, "activation needs one of swiglu"),
    ],
)
def test_a_wrong_argument_of_fused_experts_is_named(change: dict[str, Any], words: str) -> None:
    """What it needs and what it got."""
    x, logits, w_up, w_down = made()
    up, down = (QuantizedTensor.quantize(w, "int8") for w in (w_up, w_down))
    experts, scores = lz.sync.select_experts(logits, top_k=2)
    named: dict[str, Any] = {"experts": experts, "scores": scores, "w_up": up.codes, "w_down": down.codes,
                             "up_scale": up.scale, "down_scale": down.scale}  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=words):
        lz.sync.fused_experts(x, **(named | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"groups": 5}, "groups needs to divide the 6 experts"),
        ({"groups": 3, "top_groups": 4}, "top_groups needs an int in"),
        ({"groups": 3, "top_groups": 1, "top_k": 3}, "top_k needs an int in"),
        ({"scoring": "relu"}, "scoring needs one of softmax, sigmoid"),
        ({"bias": torch.zeros(5)}, "bias needs 6 elements"),
        ({"scaling": float("nan")}, "scaling needs a finite number"),
    ],
)
def test_a_wrong_argument_of_select_experts_is_named(change: dict[str, Any], words: str) -> None:
    """As above."""
    with pytest.raises((ValueError, TypeError), match=words):
        lz.sync.select_experts(torch.zeros(4, 6), **change)

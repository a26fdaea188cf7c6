"""A mixture of experts: each row goes through the few feed-forward blocks that its router likes best."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from layerzero._util import foreign
from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe, estimate
from layerzero.ops.linear.mlp import GATES, activate
from layerzero.ops.op import Args, define_op, output_like
from layerzero.ops.signature import SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec

SCORINGS = ("softmax", "sigmoid")


@op_signature()
def moe(
    x: Tensor,
    router_logits: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    top_k: int = 2,
    scoring: str = "softmax",
    renormalize: bool = True,
    activation: str = "swiglu",
) -> SignedCall:
    """Send each row of `x` to its `top_k` experts and add their answers, weighed by the router.

    Args: x (..., C), any float dtype; router_logits (..., E), any float dtype; w_up (E, 2F, C) with the
        gate's F rows above the F rows it multiplies; w_down (E, C, F). Weights are the scores of the chosen
        experts: softmax over all experts or sigmoid of each logit, divided by their sum over the chosen where
        `renormalize`. Of equal logits the lower expert is chosen. activation is a gated kind of `mlp`.
    Returns: x's shape and dtype; scores, hidden rows and sums are float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 2401.04088, section 2.1; sigmoid scores: arXiv 2412.19437, section 2.1.2.
    """
    raise NotImplementedError


def _check(args: Args) -> CallSpec:
    x, router_logits, w_up, w_down, top_k, scoring, renormalize, activation = args
    checks.need_choice("activation", activation, GATES)
    checks.need_choice("scoring", scoring, SCORINGS)
    checks.need_bool("renormalize", renormalize)
    checks.need_rows("x", x)
    checks.need_rows("router_logits", router_logits)
    checks.need_weight("w_up", w_up, rank=3)
    checks.need_weight("w_down", w_down, rank=3)
    width, experts = x.shape[-1], router_logits.shape[-1]
    why = ", one logit a row of x and expert"
    checks.need_shape("router_logits", router_logits, (*x.shape[:-1], experts), why)
    hidden = w_down.shape[-1]
    if hidden == 0 or tuple(w_down.shape[:2]) != (experts, width):
        expected_shape = f"({experts}, {width}, F), for router_logits' experts and x's last axis"
        raise ValueError(f"w_down needs shape {expected_shape}, got {tuple(w_down.shape)}")
    checks.need_shape("w_up", w_up, (experts, 2 * hidden, width), ", (E, 2F, C)")
    checks.need_int("top_k", top_k, low=1, high=experts)
    checks.need_same_device("x", x, router_logits=router_logits, w_up=w_up, w_down=w_down)
    dims = {"N": x.numel() // width, "C": width, "F": hidden, "E": experts, "T": top_k}
    sigmoid, raw = scoring == "sigmoid", not renormalize
    features = {f"act_{activation}": True, "scores_sigmoid": sigmoid, "scores_raw": raw}
    return describe("moe", (x, w_up, w_down), dims, features)


def route(router_logits: Tensor, top_k: int, scoring: str, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The chosen experts (N, top_k) int64, best first, and their weights in float32 at least."""
    wide = router_logits if router_logits.dtype == torch.float64 else router_logits.float()
    ordered, experts = wide.sort(dim=-1, descending=True, stable=True)
    chosen = ordered[..., :top_k]
    if renormalize:
        # From the logits: where all scores round to zero, their ratios are still what they are.
        scores = (chosen if scoring == "softmax" else F.logsigmoid(chosen)).softmax(-1)
    elif scoring == "softmax":
        scores = (chosen - wide.logsumexp(-1, keepdim=True)).exp()
    else:
        scores = chosen.sigmoid()
    return experts[..., :top_k], scores


def moe_reference(*args: Any) -> Tensor:
    """Expert by expert over the rows that chose it, in float32 at least."""
    x, router_logits, w_up, w_down, top_k, scoring, renormalize, activation = args
    rows: Tensor = x.reshape(-1, x.shape[-1])
    wide = rows if x.dtype == torch.float64 else rows.float()
    experts, scores = route(router_logits.reshape(len(rows), -1), top_k, scoring, renormalize)
    parts = wide.new_zeros(len(rows), top_k, rows.shape[1])
    mapped = foreign.in_transform()  # vmap cannot count rows: each goes through every expert
    for expert in range(w_up.shape[0]):
        chosen = experts == expert
        row, place = (None, None) if mapped else chosen.nonzero(as_tuple=True)
        up = F.linear(wide if row is None else wide[row], w_up[expert].to(wide.dtype))
        down = F.linear(activate(up, activation), w_down[expert].to(wide.dtype)).to(parts.dtype)  # autocast
        if row is None:
            parts = torch.where(chosen.unsqueeze(-1), down.unsqueeze(1), parts)
        else:
            parts = parts.index_put((row, place), down)
    # Answers are added in the order of their scores, whatever the order of the experts.
    return (parts * scores.to(wide.dtype).unsqueeze(-1)).sum(1).to(x.dtype).view(x.shape)


MOE = define_op(
    build=moe,
    check=_check,
    reference=moe_reference,
    outputs=output_like(0),
    # Three products for each row and chosen expert; the weights of the experts that may be chosen move.
    work=estimate(lambda N, C, F, E, T: (6 * N * T * C * F, 2 * N * C + 3 * min(E, N * T) * C * F, 0)),
    operands=(0, 2, 3),
    exact_dims=frozenset({"C", "F", "E", "T"}),
    batching=RowBatching(row_operands=(0, 1)),
)

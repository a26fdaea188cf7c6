"""The routing of a mixture of experts: which experts each row goes to, and with what weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe, estimate
from layerzero.ops.linear.moe import SCORINGS
from layerzero.ops.op import Args, define_op
from layerzero.ops.signature import SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, OutputSpec


@op_signature()
def select_experts(
    router_logits: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int = 2,
    scoring: str = "softmax",
    renormalize: bool = True,
    groups: int = 1,
    top_groups: int = 1,
    scaling: float = 1.0,
) -> SignedCall:
    """Choose the `top_k` experts of each row, best first, and their weights.

    Args: router_logits (..., E), any float dtype; bias (E,) is added to the scores for the choice alone, or
        None. Scores are the softmax over all experts or the sigmoid of each logit. With groups, E is cut into
        that many groups of neighbours, and only experts of the top_groups groups are chosen whose two best
        scores, with bias, have the largest sum (their best one, where there is no bias). Weights are the
        scores without bias, divided by their sum over the chosen where renormalize, times scaling.
    Returns: (experts (..., top_k) int32, weights (..., top_k) float32). Of equal scores the lower expert and
        the lower group are chosen.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 2412.19437, sections 2.1.2 and 3.2.2; groups without bias: arXiv 2405.04434.
    """
    raise NotImplementedError


def _check(args: Args) -> CallSpec:
    logits, bias, top_k, scoring, renormalize, groups, top_groups, scaling = args
    checks.need_rows("router_logits", logits)
    experts = logits.shape[-1]
    checks.need_vector("bias", bias, experts, "router_logits' experts")
    checks.need_choice("scoring", scoring, SCORINGS)
    checks.need_bool("renormalize", renormalize)
    checks.need_int("groups", groups, low=1, high=experts)
    if experts % groups:
        raise ValueError(f"groups needs to divide the {experts} experts, got {groups}")
    checks.need_int("top_groups", top_groups, low=1, high=groups)
    checks.need_int("top_k", top_k, low=1, high=experts // groups * top_groups)
    checks.need_number("scaling", scaling)
    checks.need_same_device("router_logits", logits, bias=bias)
    features = {
        "bias": bias is not None,
        "scores_sigmoid": scoring == "sigmoid",
        "scores_raw": not renormalize,
        "expert_groups": top_groups < groups,
    }
    dims = {"N": logits.numel() // experts, "E": experts, "T": top_k, "G": groups}
    typed = [logits] if bias is None else [logits, bias]
    return describe("select_experts", [logits], dims, features, typed=typed)


def select_experts_reference(*args: Any) -> tuple[Tensor, Tensor]:
    """Sorted stably, in float32 at least."""
    router_logits, bias, top_k, scoring, renormalize, groups, top_groups, scaling = args
    wide = router_logits if router_logits.dtype == torch.float64 else router_logits.float()
    scores = wide.sigmoid() if scoring == "sigmoid" else wide.softmax(-1)
    # Without a bias the logits have the same order, and differ where scores round to one number.
    ranked = wide if bias is None else scores + bias.to(scores.dtype)
    if top_groups < groups:
        by_group = ranked.unflatten(-1, (groups, -1))
        best = by_group.sort(-1, descending=True).values
        strength = best[..., 0] if bias is None else best[..., :2].sum(-1)
        strongest = strength.sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]
        open_groups, size = strongest.sort(-1).values, by_group.shape[-1]
        numbers = open_groups.unsqueeze(-1) * size + torch.arange(size, device=wide.device)
        numbers = numbers.flatten(-2)
        best = ranked.gather(-1, numbers).sort(dim=-1, descending=True, stable=True).indices
        experts = numbers.gather(-1, best[..., :top_k])
    else:
        experts = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    chosen = scores.gather(-1, experts)
    if renormalize:
        # From the logits: where all scores round to zero, their ratios are still what they are.
        logits = wide.gather(-1, experts)
        chosen = (logits if scoring == "softmax" else torch.nn.functional.logsigmoid(logits)).softmax(-1)
    return experts.int(), (chosen * scaling).float()


def _outputs(args: Args) -> tuple[OutputSpec, ...]:
    shape = (*args[0].shape[:-1], args[2])
    return (OutputSpec(shape, "int32"), OutputSpec(shape, "float32"))


SELECT_EXPERTS = define_op(
    build=select_experts,
    check=_check,
    reference=select_experts_reference,
    outputs=_outputs,
    # A score and a comparison an expert.
    work=estimate(lambda N, E, T: (10 * N * E, N * E, 8 * N * T)),
    operands=(0,),
    exact_dims=frozenset({"E", "T", "G"}),
    batching=RowBatching(),
    castable=False,
    differentiable=False,
    wide_outputs=frozenset({0, 1}),
)

"""A mixture whose experts are spread over ranks: rows travel to their experts and back.

A row goes once to each rank that has one of its experts, however many of them that rank has; the rank adds
their answers, weighed, and one row comes back. Two exchanges of rows, and one of counts before them.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from layerzero import sync
from layerzero.parallel.tensor import TensorGroup

Activation = Literal["swiglu", "geglu", "geglu_tanh", "reglu"]


def expert_parallel_moe(
    group: TensorGroup,
    x: Tensor,
    experts: Tensor,
    scores: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    activation: Activation = "swiglu",
) -> Tensor:
    """`fused_experts` where each rank of `group` has its own rows and its own experts; every rank calls it.

    Args: x (N, C), this rank's rows, N may be 0 and differ between ranks; experts (N, T) and scores (N, T)
        as `select_experts` gives them over all experts; w_up (E / ranks, 2F, C) and w_down (E / ranks, C, F),
        those of this rank, which begin with expert rank * E / ranks. Every rank has as many.
    Returns: (N, C) in x's dtype. A row's answers of one rank are added in float32, those of several ranks in
        x's dtype, in the order of the ranks.
    Raises: ValueError: an argument does not fit, by name; on the rank that has it, before its exchange.
        RuntimeError: one wants a gradient.
    """
    _check(x, experts, scores, w_up, w_down)
    local = len(w_up)
    first = group.rank * local
    if group.ranks == 1:
        return sync.fused_experts(x, experts, scores, w_up, w_down, activation=activation)
    owner = experts.long().div(local, rounding_mode="floor")
    # One line for each pair of a rank and a row of ours that it gets, the ranks in order.
    goes_to = torch.zeros(group.ranks + 1, len(x), dtype=torch.bool, device=x.device)
    goes_to.scatter_(0, owner.where((experts >= 0) & (owner < group.ranks), group.ranks).t(), True)
    ranks, rows = goes_to[: group.ranks].nonzero(as_tuple=True)
    sent = ranks.bincount(minlength=group.ranks)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.group)
    counts = sent.tolist(), received.tolist()

    def exchange(tensor: Tensor, *, back: bool = False) -> Tensor:
        ours, theirs = counts[::-1] if back else counts
        arriving = tensor.new_empty(sum(theirs), *tensor.shape[1:])
        dist.all_to_all_single(arriving, tensor.contiguous(), theirs, ours, group=group.group)
        return arriving

    arrived, chosen, weights = exchange(x[rows]), exchange(experts[rows]), exchange(scores[rows])
    if len(arrived):
        arrived = sync.fused_experts(
            arrived, chosen, weights, w_up, w_down, activation=activation, first_expert=first
        )
    answers = exchange(arrived, back=True)
    # Added rank by rank: the same sum whatever the rows of other callers are.
    out = torch.zeros_like(x)
    for part, of_rows in zip(answers.split(counts[0]), rows.split(counts[0]), strict=True):
        out[of_rows] += part
    return out


def _check(x: Tensor, experts: Tensor, scores: Tensor, w_up: Tensor, w_down: Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(f"x needs shape (N, C), got {tuple(x.shape)}")
    for name, tensor in (("experts", experts), ("scores", scores)):
        if tensor.dim() != 2 or len(tensor) != len(x):
            raise ValueError(f"{name} needs shape ({len(x)}, T), for x's rows, got {tuple(tensor.shape)}")
    if w_up.dim() != 3 or w_down.dim() != 3 or len(w_up) != len(w_down):
        shapes = f"{tuple(w_up.shape)} and {tuple(w_down.shape)}"
        raise ValueError(f"w_up and w_down need as many experts, (E, 2F, C) and (E, C, F), got {shapes}")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, scores, w_up, w_down)):
        raise RuntimeError("an exchange over ranks needs tensors without a gradient, got one that wants it")

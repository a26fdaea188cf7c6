"""Mixtures of experts out of torch's functions: one expert after another, or all in one grouped product."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.ops.linear.mlp import activate
from layerzero.ops.linear.moe import route
from layerzero.spec.kernel import Kernel

_FEATURES = "act_swiglu act_geglu act_geglu_tanh act_reglu scores_sigmoid scores_raw"


def by_expert(x: Tensor, router_logits: Tensor, w_up: Tensor, w_down: Tensor, *routing: Any) -> Tensor:
    """Two products an expert, in the operands' dtype; reads on the host which experts were chosen."""
    *choice, activation = routing
    sent = _sent(x, router_logits, w_up.shape[0], *choice)
    parts = torch.cat(
        [
            functional.linear(activate(functional.linear(part, w_up[e]), activation), w_down[e])
            for e, part in enumerate(sent.rows.split(sent.counts.tolist()))
        ]
    )
    return sent.weighed(parts, x)


def grouped_experts(x: Tensor, router_logits: Tensor, w_up: Tensor, w_down: Tensor, *routing: Any) -> Tensor:
    """`torch.nn.functional.grouped_mm` twice, over rows in the order of their experts; reads nothing back."""
    *choice, activation = routing
    sent = _sent(x, router_logits, w_up.shape[0], *choice)
    ends = sent.counts.cumsum(0).int()
    up = functional.grouped_mm(sent.rows, w_up.transpose(1, 2), offs=ends)
    hidden = activate(up, activation)
    return sent.weighed(functional.grouped_mm(hidden, w_down.transpose(1, 2), offs=ends), x)


class _DispatchedTokens(NamedTuple):
    """Rows (N * top_k, C) in the order of their experts, and the way back."""

    rows: Tensor
    counts: Tensor  # rows of each expert
    back: Tensor  # where each choice went
    scores: Tensor

    def weighed(self, parts: Tensor, x: Tensor) -> Tensor:
        """Each row's answers, added in the order of their scores."""
        answers = parts[self.back].view(*self.scores.shape, -1)
        return (answers * self.scores.unsqueeze(-1)).sum(1).to(x.dtype).view(x.shape)


def _sent(
    x: Tensor, router_logits: Tensor, number: int, top_k: int, scoring: str, renormalize: bool
) -> _DispatchedTokens:
    rows = x.reshape(-1, x.shape[-1])
    experts, scores = route(router_logits.reshape(len(rows), -1), top_k, scoring, renormalize)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    counts = torch.zeros(number, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return _DispatchedTokens(rows[order // top_k], counts, back, scores)


_H200 = "benchmarks/results/rows_h200.json"
_by_expert = functools.partial(
    Kernel.of,
    load=lambda: by_expert,
    source="torch.nn.functional.linear for each expert; run on torch 2.13 CPU and 2.11 CUDA",
    features=_FEATURES,
    tie_break_order=45,
    default=True,
)

KERNELS: tuple[Kernel, ...] = (
    _by_expert(
        "torch.moe.by_expert",
        efficiency=(0.5, 0.4, 25.0),
        measured="an estimate: two products an expert",
        platforms="cpu",
    ),
    _by_expert(
        "torch.moe.by_expert_cuda", efficiency=(0.58, 0.4, 640.0), measured=_H200, platforms="cuda rocm"
    ),
    Kernel.of(
        "torch.moe.grouped",
        lambda: grouped_experts,
        (0.57, 0.6, 395.0),
        _H200,
        source="torch.nn.functional.grouped_mm: rows of 16 bytes, bfloat16, compute capability 9.0",
        platforms="cuda",
        sm_min=90,
        dtypes="bfloat16",
        features=_FEATURES,
        contiguous=True,
        alignment=16,
        limits=("C % 8 == 0", "F % 8 == 0"),
        gradient=False,
        tie_break_order=40,
    ),
)

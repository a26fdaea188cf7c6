"""Routing and mixtures of experts over quantized weights out of torch's functions."""

from __future__ import annotations

import functools

import torch

from layerzero.ops.linear.experts import fused_experts_reference
from layerzero.ops.linear.select_experts import select_experts_reference
from layerzero.ops.quantize.operands import EXPERT_FEATURES, FORMAT_FEATURES, INPUT_FEATURES, PART_FEATURES
from layerzero.spec.kernel import Kernel

# Two products an expert in float32; reads on the host which experts were chosen.
by_expert = torch.no_grad()(fused_experts_reference)

_kernel = functools.partial(Kernel.of, gradient=False, default=True, tie_break_order=45, mixed_dtypes=True)

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "torch.select_experts.sorted",
        lambda: select_experts_reference,
        (0.05, 0.1, 40.0),
        "an estimate: two sorts of each row",
        source="torch's stable sort",
        features="bias scores_sigmoid scores_raw expert_groups",
        batch_invariant=True,
    ),
    _kernel(
        "torch.fused_experts.by_expert",
        lambda: by_expert,
        (0.3, 0.1, 60.0),
        "an estimate: each expert's weights are written and read again in float32",
        source="torch.nn.functional.linear for each expert",
        features=f"{FORMAT_FEATURES} {PART_FEATURES} {INPUT_FEATURES} {EXPERT_FEATURES} weights_plain",
    ),
)

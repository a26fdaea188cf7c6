"""Definitions of experts as calls of our ops, made small: references name their sizes in their source."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

import layerzero.sync as sync
from layerzero.formats import QuantizedTensor
from tests.references.definitions import Definition

Inputs = dict[str, Any]
_BLOCK = 128


def number_of(definition: Definition, name: str, default: int) -> int:
    """A size that the reference's source gives a name."""
    found = re.search(rf"^\s+{name}\s*=\s*(\d+)", definition.reference, re.MULTILINE)
    return int(found[1]) if found else default


def smaller(definition: Definition) -> Definition:
    """The same definition with few and small experts, in its axes and in its source."""
    groups = number_of(definition, "N_GROUP", 1)
    experts, width, hidden = max(8, 4 * groups), 2 * _BLOCK, 3 * _BLOCK
    chosen = min(number_of(definition, "TOP_K", 2), 3)
    sizes = {"E_global": experts, "E": experts, "H": width, "I": hidden, "TOP_K": chosen}
    source = definition.reference
    for name, size in sizes.items():
        source = re.sub(rf"^(\s+{name}\s*=\s*)\d+", rf"\g<1>{size}", source, flags=re.MULTILINE)
    local = experts // 2 if "local_expert_offset" in definition.inputs else experts
    axes = {
        "num_experts": experts, "num_local_experts": local, "hidden_size": width, "intermediate_size": hidden,
        "gemm1_out_size": 2 * hidden, "top_k": chosen, "num_hidden_blocks": width // _BLOCK,
        "num_intermediate_blocks": hidden // _BLOCK, "num_gemm1_out_blocks": 2 * hidden // _BLOCK,
    }  # fmt: skip
    return replace(definition, const={**definition.const, **axes}, reference=source)


def experts_inputs(definition: Definition, made: Inputs) -> Inputs:
    """Inputs that mean something: scales above zero, weights that keep hidden rows near 1, packed choices."""
    generator = torch.Generator().manual_seed(4)
    for name, value in made.items():
        if "scale" in name and isinstance(value, Tensor):
            made[name] = torch.rand(value.shape, generator=generator) * 0.05 + 0.02
        elif name.startswith("gemm") and isinstance(value, Tensor) and value.dtype == torch.float32:
            made[name] = value * value.shape[-1] ** -0.5
    if "local_expert_offset" in made:
        made |= {"local_expert_offset": 2, "routed_scaling_factor": 2.5}
    if "topk_ids" in made:
        rows, chosen = made["topk_ids"].shape
        ids = (
            torch.rand(rows, definition.const["num_experts"], generator=generator)
            .argsort(-1)[:, :chosen]
            .int()
        )
        weights = torch.rand(rows, chosen, generator=generator).bfloat16().view(torch.int16).int() & 0xFFFF
        made["topk_ids"] = ids << 16 | weights
    return made


def routing(definition: Definition, i: Inputs) -> tuple[Tensor, Tensor]:
    """The experts that the source chooses for each row, and their weights."""
    if "topk_ids" in i:
        packed = i["topk_ids"]
        return packed >> 16, (packed & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()
    scaling = i.get("routed_scaling_factor", 1.0)
    top_k = definition.const["top_k"]
    if "softmax(topk" in definition.reference:
        return sync.select_experts(i["routing_logits"], top_k=top_k, scaling=scaling)
    if "routing_bias" not in i:
        scoring: Literal["softmax", "sigmoid"]
        scoring = "sigmoid" if "sigmoid(" in definition.reference else "softmax"
        divides = ".sum(" in definition.reference
        return sync.select_experts(
            i["routing_logits"], top_k=top_k, scoring=scoring, renormalize=divides, scaling=scaling
        )
    if "output1_scales_scalar" in i:  # the score itself, of logits alone
        return sync.select_experts(i["routing_logits"], top_k=top_k, scoring="sigmoid", renormalize=False)
    return sync.select_experts(
        i["routing_logits"], i["routing_bias"], top_k=top_k, scoring="sigmoid", scaling=scaling,
        groups=number_of(definition, "N_GROUP", 1), top_groups=number_of(definition, "TOPK_GROUP", 1),
    )  # fmt: skip


def in_codes(definition: Definition, made: Inputs, form: str) -> tuple[Inputs, dict[str, Any]]:
    """The inputs with experts rounded to a format, and the same experts' codes as our call takes them."""
    up, down = (QuantizedTensor.quantize(made[name], form) for name in ("gemm1_weights", "gemm2_weights"))
    rounded = {"gemm1_weights": up.dequantize(), "gemm2_weights": down.dequantize()}
    named = {
        "w_up": up.codes, "w_down": down.codes, "up_scale": up.scale, "down_scale": down.scale,
        "format": form, "up_tensor_scale": up.tensor_scale, "down_tensor_scale": down.tensor_scale,
    }  # fmt: skip
    return {**made, **rounded}, named


def moe(definition: Definition, i: Inputs, **more: Any) -> tuple[Tensor, ...]:
    """The routing that the reference describes, then the experts with scales as they come."""
    experts, scores = routing(definition, i)
    x, w_up, w_down = i["hidden_states"], i["gemm1_weights"], i["gemm2_weights"]
    named: dict[str, Any] = {"gate": "second", "first_expert": i.get("local_expert_offset", 0)}
    if "* w  # scale" in definition.reference or "A_e = hs_f32[tok_idx] * w" in definition.reference:
        named["weighed"] = "inputs"
    if "gemm1_weights_scale" in i:
        named |= {
            "up_scale": i["gemm1_weights_scale"],
            "down_scale": i["gemm2_weights_scale"],
            "block_size": _BLOCK,
        }
        x = (x.float().unflatten(-1, (-1, _BLOCK)) * i["hidden_states_scale"].t().unsqueeze(-1)).flatten(-2)
    elif "output1_scales_scalar" in i:
        ends = (i["output1_scales_scalar"], i["output1_scales_gate_scalar"])
        hidden = w_down.shape[-1]
        named["up_scale"] = torch.cat(
            [end.view(-1, 1, 1).expand(-1, hidden, 1) for end in ends], 1
        ).contiguous()
        named["down_scale"] = (
            i["output2_scales_scalar"].view(-1, 1, 1).expand(-1, w_down.shape[1], 1).contiguous()
        )
        x = x.float()
    weights = {"w_up": w_up, "w_down": w_down}
    out = sync.fused_experts(x, experts, scores, **(weights | named | more))
    return (out.bfloat16(),)

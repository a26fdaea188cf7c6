"""Weights of a model that may be quantized, and the products with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import layerzero as lz
from layerzero.formats import QuantizedTensor
from layerzero.parallel import FolderWeights, WeightSource

weights_of = FolderWeights  # of a Hugging Face folder, each by its name and the shape that it must have
# One matrix, or several one below the other that share no scales.
Weight = Tensor | QuantizedTensor | tuple[Tensor | QuantizedTensor, ...]


def random_weights(device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> WeightSource:
    """Random weights of any name and shape; those of norms are ones."""
    generator = torch.Generator(device).manual_seed(seed)

    def get(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=device, dtype=dtype)
        scale = shape[-1] ** -0.5
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale)

    return get


def joined(rows: Sequence[Any]) -> Weight:
    """Matrices one below the other: one where all are plain, or their codes and scales may be joined."""
    if len(rows) == 1:
        one: Tensor | QuantizedTensor = rows[0]
        return one
    if all(isinstance(each, Tensor) for each in rows):
        return torch.cat(list(rows))
    first = rows[0]
    fits = all(
        isinstance(each, QuantizedTensor)
        and (each.format, each.granularity, each.group_size)
        == (first.format, first.granularity, first.group_size)
        and each.tensor_scale is None
        and each.scale.dim() > 0
        and (each.zero_point is None) == (first.zero_point is None)
        and (not each.block_size or each.shape[0] % each.block_size == 0)
        for each in rows
    )
    if not fits:
        return tuple(rows)
    zero = None if first.zero_point is None else torch.cat([each.zero_point for each in rows])
    codes, scale = (torch.cat([getattr(each, name) for each in rows]) for name in ("codes", "scale"))
    whole: QuantizedTensor = replace(first, codes=codes, scale=scale, zero_point=zero)
    return whole


async def project(ops: Any, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Rows `x` times `weight` transposed, plus `bias`, by the op that the weight's kind needs."""
    if isinstance(weight, tuple):
        out = torch.cat([await project(ops, x, part) for part in weight], -1)
        return out if bias is None else out + bias
    if isinstance(weight, QuantizedTensor):
        quantized: Tensor = await ops.quantized_linear(x, bias=bias, **weight.arguments())
        return quantized
    plain: Tensor = await ops.linear(x, weight, bias)
    return plain


async def feed_forward(
    ops: Any, x: Tensor, w_up: Weight, w_down: Weight, b_up: Tensor | None, b_down: Tensor | None
) -> Tensor:
    """SwiGLU, the gate's rows above the others' in `w_up`: one op, or two products of codes."""
    if isinstance(w_up, Tensor) and isinstance(w_down, Tensor):
        out: Tensor = await ops.mlp(x, w_up, w_down, b_up, b_down, activation="swiglu")
        return out
    gate, up = (await project(ops, x, w_up, b_up)).chunk(2, -1)
    return await project(ops, functional.silu(gate) * up, w_down, b_down)


def quantized_weights_of(folder: Path, device: torch.device | str, dtype: torch.dtype) -> WeightSource | None:
    """How to get the weights of a quantized folder, as `weights_of` does of others; None where it is none."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" not in config and not (folder / "hf_quant_config.json").exists():
        return None
    checkpoint = lz.load_quantized(folder, device=device)

    def get(name: str, shape: tuple[int, ...]) -> Tensor | QuantizedTensor:
        if name not in checkpoint:
            raise ValueError(f"folder needs the weight {name}, got none in {folder}")
        weight = checkpoint[name]
        if tuple(weight.shape) != shape:
            raise ValueError(f"{name} needs shape {shape}, got {tuple(weight.shape)} in {folder}")
        return weight if isinstance(weight, QuantizedTensor) else weight.to(dtype)

    return get

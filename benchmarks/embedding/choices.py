"""What LayerZero says about itself: how large its batches were, which kernels it took, and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from models.minilm import EPS, HEADS, MiniLM
from torch import Tensor

import layerzero as lz


def launches(runtime: lz.Runtime) -> Counter[int]:
    """Return how many batches of each size the batchers have run so far: {requests in a batch: batches}."""
    total: Counter[int] = Counter()
    for device in runtime.devices.values():
        total.update(device.loop_drivers.stats().sizes)
    return total


def example_calls(model: MiniLM, texts: list[str]) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Return one call of each op of the encoder, with the rows that `texts` have together."""
    ids = torch.cat(model.tokenize(texts))
    longest = max(texts, key=len)
    layer = model.layers[0]
    x = model.words[ids]
    q, k, v = _projected(model, model.tokenize([longest])[0]).unbind(2)
    return [
        ("embedding", (ids, model.words), {}),
        ("add_layer_norm", (x, x, *model.norm), {"eps": EPS}),
        ("linear", (x, layer.w_qkv, layer.b_qkv), {}),
        ("attention", (q, k, v), {"layout": "BSHD"}),
        ("mlp", (x, layer.w_up, layer.w_down, layer.b_up, layer.b_down), {"activation": "gelu"}),
    ]


def kernels(model: MiniLM, texts: list[str]) -> list[dict[str, Any]]:
    """Return for each op the kernel that serves `texts` together, what it is expected to cost, and why it."""
    rows = []
    for op, args, options in example_calls(model, texts):
        chosen = lz.select(op, *args, **options)
        rows.append(
            {
                "op": op,
                "call": " ".join(str(tuple(arg.shape)) for arg in args if arg is args[0] or arg.dim() > 1),
                "kernel": chosen.kernel,
                "expected_us": chosen.expected_us,
                "why": chosen.why,
            }
        )
    return rows


def explanation(model: MiniLM, texts: list[str], op_name: str = "attention") -> str:
    """Return every kernel's verdict on one op's call, as a table for people."""
    for op, args, options in example_calls(model, texts):
        if op == op_name:
            return str(lz.explain(op, *args, **options))
    raise ValueError(f"wanted needs to be an op of the encoder, got {op_name!r}")


def _projected(model: MiniLM, ids: Tensor) -> Tensor:
    """Return query, key and value of the first layer's shape, (1, S, 3, H, D)."""
    width = model.words.shape[1]
    return torch.zeros(1, len(ids), 3, HEADS, width // HEADS, device=model.device)

"""Calls of every op that reads ids, offsets, lengths or probabilities, and what must never reach a kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Call = dict[str, Any]
DRAW = torch.Generator().manual_seed(29)
FAR = 100_000_000


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW)


def shares(*shape: int) -> Tensor:
    return torch.softmax(draw(*shape), -1)


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def _with(tensor: Tensor, value: float) -> Tensor:
    """The tensor with another first element."""
    other = tensor.clone()
    other.view(-1)[0] = value
    return other


_PAGED: Call = {
    "block_tables": torch.tensor([[0, 1], [2, 3]]), "seq_lens": ints(5, 7), "cu_seqlens_q": ints(0, 1, 4),
}  # fmt: skip
_LOSS: Call = {"target": ints(0, 3, 6, 2), "reduction": "none"}
_DRAWN: Call = {"logits": draw(3, 9), "seed": 5, "temperature": torch.ones(3)}

GOOD: dict[str, Call] = {
    "embedding": {"ids": ints(0, 3, 6), "weight": draw(7, 8)},
    "cross_entropy": {"logits": draw(4, 7), **_LOSS},
    "linear_cross_entropy": {"x": draw(4, 8), "weight": draw(7, 8), **_LOSS},
    "rope": {
        "q": draw(3, 2, 8), "k": draw(3, 1, 8), "positions": ints(0, 4, 8), "cos": draw(9, 4),
        "sin": draw(9, 4),
    },
    "ragged_attention": {
        "q": draw(6, 2, 8), "k": draw(7, 2, 8), "v": draw(7, 2, 8), "cu_seqlens_q": ints(0, 2, 6),
        "cu_seqlens_k": ints(0, 3, 7),
    },
    "paged_attention": {
        "q": draw(4, 2, 8), "k_cache": draw(4, 4, 2, 8), "v_cache": draw(4, 4, 2, 8), **_PAGED,
    },
    "mla_attention": {
        "q_nope": draw(4, 2, 8), "q_pe": draw(4, 2, 4), "ckv_cache": draw(4, 4, 8),
        "kpe_cache": draw(4, 4, 4), **_PAGED, "scale": 0.5,
    },
    "append_kv": {
        "k": draw(3, 2, 8), "v": draw(3, 2, 8), "k_cache": draw(4, 4, 2, 8), "v_cache": draw(4, 4, 2, 8),
        "slot_mapping": ints(1, 9, 4),
    },
    "rope_append_kv": {
        "q": draw(3, 4, 8), "k": draw(3, 2, 8), "v": draw(3, 2, 8), "positions": ints(0, 4, 8),
        "cos": draw(9, 4), "sin": draw(9, 4), "k_cache": draw(4, 4, 2, 8), "v_cache": draw(4, 4, 2, 8),
        "slot_mapping": ints(1, 9, 4),
    },
    "sample": {**_DRAWN, "top_k": ints(2, 3, 9), "top_p": torch.full((3,), 0.9)},
    "sample_topk": {**_DRAWN, "k": ints(2, 3, 9)},
    "sample_topp": {**_DRAWN, "p": torch.full((3,), 0.9)},
    "verify_chain": {
        "draft_probs": shares(3, 2, 6), "draft_tokens": torch.tensor([[0, 5], [1, 1], [2, 3]]),
        "target_probs": shares(3, 3, 6), "seed": 5,
    },
    "verify_tree": {
        "draft_probs": shares(3, 3, 6), "draft_tokens": torch.tensor([[0, 5, 4], [1, 1, 1], [2, 3, 0]]),
        "target_probs": shares(3, 3, 6), "seed": 5, "parents": (-1, 0, 1),
    },
}  # fmt: skip

_TABLES: dict[str, list[Tensor]] = {
    "block_tables": [
        torch.tensor([[0, 4], [2, 3]]), torch.tensor([[0, 1], [2, -1]]), torch.tensor([[0, 1], [2, 2]]),
        torch.tensor([[0, 2_000_000_000], [2, 3]]), torch.tensor([[0, -(1 << 62)], [2, 3]]),
    ],
    "seq_lens": [ints(5, 9), ints(-1, 7), ints(FAR, 7)],
    "cu_seqlens_q": [ints(0, 1, 3), ints(1, 1, 4), ints(0, 5, 4), ints(0, 1, FAR)],
}  # fmt: skip
_PROBABILITIES = {
    name: [_with(GOOD["verify_chain"][name], value) for value in (-0.5, math.nan)]
    for name in ("draft_probs", "target_probs")
}
_HEAT = {"temperature": [torch.tensor([1.0, value, 1.0]) for value in (-1.0, math.nan, math.inf)]}
_ROWS = {"logits": [_DRAWN["logits"].clone().index_fill_(0, ints(1), v) for v in (math.nan, -math.inf)]}
_SHARE = [torch.tensor([0.5, 0.5, value]) for value in (2.0, -0.5, math.nan)]
_SLOTS = {"slot_mapping": [ints(1, 16, 4), ints(1, -1, 4), ints(1, 4, 4), ints(0, 1, 1 << 40)]}
_TARGET = {"target": [ints(0, 7, 6, 2), ints(0, -1, 6, 2), ints(0, 1 << 40, 6, 2)]}

BAD: dict[str, dict[str, list[Tensor]]] = {
    "embedding": {"ids": [ints(0, 7, 1), ints(-1, 0, 0), ints(0, 0, -(1 << 40))]},
    "cross_entropy": _TARGET,
    "linear_cross_entropy": _TARGET,
    "rope": {"positions": [ints(0, -1, 1), ints(0, 1, 9)]},
    "ragged_attention": {
        "cu_seqlens_q": [ints(1, 2, 6), ints(0, 2, 5), ints(0, 7, 6), ints(0, 2, FAR), ints(-FAR, 2, 6)],
        "cu_seqlens_k": [ints(1, 3, 7), ints(0, 3, 8), ints(0, 8, 7), ints(0, 3, FAR)],
    },
    "paged_attention": _TABLES,
    "mla_attention": _TABLES,
    "append_kv": _SLOTS,
    "rope_append_kv": {"positions": [ints(0, -1, 1), ints(0, 1, 9)], **_SLOTS},
    "sample": {**_ROWS, **_HEAT, "top_k": [ints(2, -1, 3)], "top_p": _SHARE},
    "sample_topk": {**_ROWS, **_HEAT, "k": [ints(2, 0, 3), ints(2, -4, 3)]},
    "sample_topp": {**_ROWS, **_HEAT, "p": _SHARE},
    "verify_chain": {"draft_tokens": [torch.tensor([[0, 6], [1, 1], [2, 3]]),
                                      torch.tensor([[0, 5], [1, -1], [2, 3]])], **_PROBABILITIES},
    "verify_tree": {"draft_tokens": [torch.tensor([[0, 6, 4], [1, 1, 1], [2, 3, 0]])]},
}  # fmt: skip

# The operands that say where a kernel reads or writes.
INDICES = {
    op: [name for name, value in call.items() if isinstance(value, Tensor) and not value.is_floating_point()]
    for op, call in GOOD.items()
}


def fresh(op: str) -> Call:
    """A good call of `op` whose tensors nobody else has."""
    return {n: v.clone() if isinstance(v, Tensor) else v for n, v in GOOD[op].items()}


def answer(op: str, call: Call, result: Any) -> tuple[Tensor, ...]:
    """What a call is for: its result, or the pools that it wrote."""
    written = (call["k_cache"].clone(), call["v_cache"].clone()) if op.endswith("append_kv") else ()
    results = result if isinstance(result, tuple) else (result,)
    return written if op == "append_kv" else (*written, *results)


def same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    """Whether two answers agree to rounding."""
    return all(torch.allclose(a.double(), b.double(), atol=1e-4) for a, b in zip(left, right, strict=True))

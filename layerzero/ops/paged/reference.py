"""The plain-torch reference of attention over paged and ragged keys: one sequence after the other."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from layerzero.ops.attention.arguments import Window
from layerzero.ops.attention.attention import attention_reference


def attend_sequences(
    sequences: Iterable[tuple[Tensor, Tensor, Tensor]],
    is_causal: bool,
    scale: float | None,
    window: Window,
    softcap: float | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention`'s reference for (queries, keys, values) of each sequence; the results are concatenated."""
    results = [attend_sequence(*sequence, is_causal, scale, window, softcap) for sequence in sequences]
    out = torch.cat([result[0] for result in results])
    return (out, torch.cat([result[1] for result in results])) if return_lse else out


def attend_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    window: Window,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """One sequence, tokens before heads: (Sq, Hq, Dv) in q's dtype and float32 (Sq, Hq)."""
    if not q.shape[0] or not k.shape[0]:
        hidden = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        return q.new_zeros((*q.shape[:2], v.shape[2])), hidden
    query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    result = attention_reference(
        query, key, value, is_causal=is_causal, scale=scale, window=window, softcap=softcap, return_lse=True
    )
    return result[0][0].transpose(0, 1), result[1][0].transpose(0, 1)

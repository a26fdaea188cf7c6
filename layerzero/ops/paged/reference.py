"""The plain-torch reference of attention over paged and ragged keys: one sequence after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.attention.arguments import MlaArgs, PagedArgs, RaggedArgs
from layerzero.ops.attention.attention import attention_reference

Sequence = tuple[Tensor, Tensor, Tensor]


def attend_sequences(
    sequences: Iterable[Sequence],
    call: RaggedArgs | PagedArgs | MlaArgs,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention`'s reference for (queries, keys, values) of each sequence; the results are concatenated.

    They are in the queries' dtype, or in `dtype`.
    """
    flags: dict[str, Any] = {
        name: getattr(call, name, None) for name in ("is_causal", "scale", "window", "softcap")
    }
    results = [attend_sequence(*sequence, **flags) for sequence in sequences]
    out = torch.cat([result[0] for result in results])
    out = out if dtype is None else out.to(dtype)
    return (out, torch.cat([result[1] for result in results])) if call.return_lse else out


def attend_sequence(q: Tensor, k: Tensor, v: Tensor, **flags: Any) -> tuple[Tensor, Tensor]:
    """One sequence, tokens before heads: (Sq, Hq, Dv) in q's dtype and float32 (Sq, Hq)."""
    if not q.shape[0] or not k.shape[0]:
        hidden = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        return q.new_zeros((*q.shape[:2], v.shape[2])), hidden
    query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    result = attention_reference(query, key, value, **flags, return_lse=True)
    return result[0][0].transpose(0, 1), result[1][0].transpose(0, 1)

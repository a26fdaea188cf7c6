"""What a query may see, as one additive bias: masks, causality and windows folded together."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.ops.checks import alignment_of

Window = tuple[int, int] | None


def visible(sq: int, sk: int, is_causal: bool, window: Window, device: torch.device) -> Tensor | None:
    """(Sq, Sk) bool, true where the query may see the key; None where every query sees every key.

    The last query stands at the last key (bottom-right); `window` is (left, right), -1 for no bound.
    """
    left, right = window if window is not None else (-1, -1)
    if is_causal:
        right = 0 if right < 0 else min(right, 0)
    if left < 0 and right < 0:
        return None
    here = torch.arange(sk - sq, sk, device=device).unsqueeze(1)
    keys = torch.arange(sk, device=device)
    seen = keys <= here + right if right >= 0 else None
    if left >= 0:
        near = keys >= here - left
        seen = near if seen is None else seen & near
    return seen


def fold(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    window: Window,
    slopes: Tensor | None = None,
    dtype: torch.dtype | None = None,
    scale: float | None = None,
) -> tuple[Tensor | None, bool]:
    """(bias, is_causal), never both, for an operator whose causal flag is top-left aligned.

    `dtype` is the bias's; left out it is q's where that loses nothing, else the next wider one. With a
    `scale` of zero or less causality is a bias: torch hides scores by -inf before it scales them.
    """
    if attn_mask is None and window is None and slopes is None and not is_causal:
        return None, False
    causal = is_causal and q.shape[2] > 1  # one query, at the last key, sees every key
    plain = window is None and (not causal or (q.shape[2] == k.shape[2] and (scale is None or scale > 0)))
    if plain and attn_mask is None and slopes is None:
        return None, causal
    return additive(
        q, k, attn_mask, causal, window, slopes, dtype or _bias_dtype(q, attn_mask, slopes)
    ), False


def _bias_dtype(q: Tensor, attn_mask: Tensor | None, slopes: Tensor | None) -> torch.dtype:
    if slopes is None and (attn_mask is None or attn_mask.dtype in (torch.bool, q.dtype)):
        return q.dtype
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def additive(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    window: Window,
    slopes: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """All that changes the scores of `q`, `k` (B, H, S, D) as one bias that broadcasts to (B, H, Sq, Sk).

    Hidden keys get -inf, seen ones what a floating `attn_mask` and ALiBi `slopes` say, else 0; None where
    every score stays as it is.
    """
    sq, sk = q.shape[2], k.shape[2]
    seen = visible(sq, sk, is_causal, window, q.device)
    bias = None if slopes is None else _alibi(slopes, sq, sk, dtype)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            seen = attn_mask if seen is None else attn_mask & seen
        else:
            added = _loadable(attn_mask.to(dtype))
            bias = added if bias is None else bias + added
    if seen is None:
        return bias
    return _as_bias(seen, dtype) if bias is None else bias.masked_fill(~seen, -torch.inf)


def _loadable(mask: Tensor) -> Tensor:
    """`mask`, copied where torch's kernels on a GPU cannot read its rows: they end the use of the device."""
    return mask.clone() if mask.is_cuda and alignment_of([mask]) < 16 else mask


def _alibi(slopes: Tensor, sq: int, sk: int, dtype: torch.dtype) -> Tensor:
    """-slope * distance to the diagonal, ([B,] H, Sq, Sk)."""
    here = torch.arange(sk - sq, sk, device=slopes.device).unsqueeze(1)
    distance = (torch.arange(sk, device=slopes.device) - here).abs().to(dtype)
    return -slopes.to(dtype)[..., None, None] * distance


def _as_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def sees_nothing(bias: Tensor) -> Tensor:
    """The bias's rows in which every key is hidden: the bias's shape without its last axis."""
    return (bias == -torch.inf).all(-1)

"""What a query may see, as one additive bias: masks, causality and windows folded together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.ops.attention.arguments import Window as Window
from layerzero.ops.attention.checks import window_bounds
from layerzero.ops.checks import alignment_of


def visible_mask(sq: int, sk: int, is_causal: bool, window: Window, device: torch.device) -> Tensor | None:
    """(Sq, Sk) bool, true where the query may see the key; None where every query sees every key.

    The last query is at the last key (bottom-right); `window` is (left, right), -1 for no bound.
    """
    left_window, right_window = window_bounds(is_causal, window)
    if left_window < 0 and right_window < 0:
        return None
    query_positions = torch.arange(sk - sq, sk, device=device).unsqueeze(1)
    keys = torch.arange(sk, device=device)
    visible_keys = keys <= query_positions + right_window if right_window >= 0 else None
    if left_window >= 0:
        in_window = keys >= query_positions - left_window
        visible_keys = in_window if visible_keys is None else visible_keys & in_window
    return visible_keys


def fold_mask(
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
    if dtype is None:
        is_exact = slopes is None and (attn_mask is None or attn_mask.dtype in (torch.bool, q.dtype))
        dtype = q.dtype if is_exact or q.dtype == torch.float64 else torch.float32
    return additive_bias(q, k, attn_mask, causal, window, slopes, dtype), False


def additive_bias(
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
    visible_keys = visible_mask(sq, sk, is_causal, window, q.device)
    bias = None if slopes is None else alibi_bias(slopes, sq, sk, dtype)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            visible_keys = attn_mask if visible_keys is None else attn_mask & visible_keys
        else:
            added = attn_mask.to(dtype)
            if added.is_cuda and alignment_of([added]) < 16:
                added = added.clone()  # torch's kernels cannot read its rows, and end the use of the device
            bias = added if bias is None else bias + added
    if visible_keys is None:
        return bias
    if bias is not None:
        return bias.masked_fill(~visible_keys, -torch.inf)
    zeros = torch.zeros(visible_keys.shape, dtype=dtype, device=visible_keys.device)
    return zeros.masked_fill_(~visible_keys, -torch.inf)


def alibi_bias(slopes: Tensor, sq: int, sk: int, dtype: torch.dtype) -> Tensor:
    """-slope * distance to the diagonal, ([B,] H, Sq, Sk)."""
    query_positions = torch.arange(sk - sq, sk, device=slopes.device).unsqueeze(1)
    distance = (torch.arange(sk, device=slopes.device) - query_positions).abs().to(dtype)
    return -slopes.to(dtype)[..., None, None] * distance


def fully_masked_rows(bias: Tensor) -> Tensor:
    """The bias's rows in which every key is hidden: the bias's shape without its last axis."""
    return (bias == -torch.inf).all(-1)


def merge_block_mask(attn_mask: Tensor | None, block_mask: Any, batch: int, heads: int) -> Tensor:
    """`attn_mask` with what a torch BlockMask hides hidden, too; broadcasts to (B, H, Sq, Sk).

    Partial blocks go by the mask's function, full ones are seen whole. The function is asked about every
    sequence and head, as torch does it, also where blocks do not differ.
    """
    listed = _listed_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, block_mask)
    seen = evaluate_mask_mod(block_mask, batch, heads) & listed
    if block_mask.full_kv_num_blocks is not None:
        seen = seen | _listed_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, block_mask)
    if attn_mask is None:
        return seen
    return attn_mask & seen if attn_mask.dtype is torch.bool else attn_mask.masked_fill(~seen, -torch.inf)


def evaluate_mask_mod(block_mask: Any, batch: int, heads: int) -> Tensor:
    """What the function says, over sequences and heads only where that depends on them."""
    device = block_mask.kv_num_blocks.device
    places = [torch.arange(size, device=device) for size in (batch, heads, *block_mask.shape[2:])]
    mapped = torch.vmap(block_mask.mask_mod, in_dims=(None, None, None, 0))
    mapped = torch.vmap(mapped, in_dims=(None, None, 0, None))
    for by_batch, by_head in ((None, None), (0, None), (None, 0), (0, 0)):
        inner = torch.vmap(mapped, in_dims=(None, 0, None, None), out_dims=by_head)
        try:
            seen: Tensor = torch.vmap(inner, in_dims=(0, None, None, None), out_dims=by_batch)(*places)
        except ValueError:  # a value that differs along an axis which it was to be without
            if by_batch == by_head == 0:
                raise
            continue
        return seen.reshape(
            1 if by_batch is None else batch, 1 if by_head is None else heads, *seen.shape[-2:]
        )
    raise AssertionError("the last of them raises")


def _listed_blocks(counts: Tensor, indices: Tensor, block_mask: Any) -> Tensor:
    """(B, H, Sq, Sk) bool: the elements of the first `counts` blocks that `indices` name, row by row."""
    rows, columns = block_mask.BLOCK_SIZE
    sq, sk = block_mask.shape[2:]
    many = indices.shape[-1]
    named = torch.arange(many, device=indices.device) < counts[..., None]
    # What is not named goes to a column of its own, which is cut off.
    table = torch.zeros((*indices.shape[:-1], many + 1), dtype=torch.bool, device=indices.device)
    table.scatter_(-1, torch.where(named, indices.long(), many), True)
    spread = table[..., :-1].repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    return spread[..., :sq, :sk]

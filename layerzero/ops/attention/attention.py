"""Scaled dot product attention: MHA, GQA, MQA; masks, window, soft cap, ALiBi, sinks, modifiers, dropout.

`checks` holds what is checked, `batching` how callers share a launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.ops import checks, kv_formats
from layerzero.ops.attention import checks as attention_checks
from layerzero.ops.attention import masks
from layerzero.ops.attention.arguments import AttentionArgs, ScoreMod
from layerzero.ops.attention.batching import StackedBatching
from layerzero.ops.attention.checks import head_axes, normalized_window, window_bounds
from layerzero.ops.decoding import OPERAND_DECODING
from layerzero.ops.op import Args, Layouts, Split, define_op
from layerzero.ops.signature import SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, OutputSpec, WorkEstimate

# What torch.vmap maps of a score and its place, innermost first: keys, queries, heads, sequences.
_AXES = tuple((0, *(0 if axis == mapped_axis else None for axis in range(4))) for mapped_axis in (3, 2, 1, 0))
# The reference holds at most this many scores at once: 64 MiB of float32.
MAX_SCORES = 1 << 24


@op_signature(
    default={"layout": attention_checks.infer_layout},
    convert={"window": normalized_window},
    key={
        ("sinks", "score_mod", "block_mask"): attention_checks.modifier_signature,
        ("q_scale", "k_scale", "v_scale"): kv_formats.scales_key,
    },
    state=attention_checks.switched_off,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    layout: str | None = "BHSD",
    return_lse: bool = False,
    combine_mask: bool = False,
    rows_nonempty: bool = False,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> SignedCall:
    """Attend `q` to `k` and `v`: softmax(scale * q k^T + bias) v.

    Args: q (B, Hq, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv) with Hq % Hk == 0, or heads behind tokens
        with `layout="BSHD"`; `layout=None` infers it from shapes and strides and raises where both fit.
        attn_mask broadcasts to (B, Hq, Sq, Sk): bool, True attends, or any float dtype, added.
        is_causal is aligned at the last query and the last key; with a mask it needs `combine_mask=True`.
        scale defaults to D**-0.5. window=(left, right) keys around the diagonal, -1 is unbounded, and so are
        2**30 and more. softcap c turns scores s into c * tanh(s / c). alibi_slopes (Hq,) or (B, Hq) subtract
        slope * |distance to the diagonal|. rows_nonempty asserts that the mask leaves each query a key.
        sinks (Hq,) are logits that join each softmax's denominator, and nothing else. score_mod(score, b,
        h, q_idx, kv_idx), as torch's flex_attention takes it, changes scaled and capped scores before ALiBi
        and masks. block_mask is a torch BlockMask of Sq and Sk: what it hides is hidden, a mask beside it
        holds too, and with is_causal it needs `combine_mask=True`.
        q, k and v, or k and v alone, may be codes of one of float8_e4m3fn, float8_e5m2 and int8; q_scale,
        k_scale and v_scale, float32, are what they are multiplied by: () for all, (heads,) for each head, or
        the operand's shape without its last axis for each token's head.
    Returns: (B, Hq, Sq, Dv) in q's dtype, bfloat16 where q is codes, in q's layout; with return_lse also the
        natural log of the softmax's denominator, float32 (B, Hq, Sq). A query that sees no key gives 0, and
        -inf or its sink.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1706.03762; GQA 2305.13245; ALiBi 2108.12409; sinks 2309.17453, arXiv 2508.10925.
    """
    raise NotImplementedError


def attention_reference(*args: Any, **named: Any) -> Tensor | tuple[Tensor, Tensor]:
    """The op in plain torch: scores in float32 (float64 stays), a block of queries at a time.

    Args: those of `AttentionArgs`.
    """
    call = AttentionArgs(*args, **named)
    result_dtype = kv_formats.number_dtype(call.q)
    call = call._replace(**kv_formats.decoded_operands(call, head_axes(call.layout)[0]))
    q, k, v, softcap = call.q, call.k, call.v, call.softcap
    swapped = call.layout == "BSHD"
    query, key, value = (t.transpose(1, 2) if swapped else t for t in (q, k, v))
    batch, heads, q_len, width = query.shape
    k_len = key.shape[2]
    left_window, right_window = window_bounds(call.is_causal, call.window)
    factor = width**-0.5 if call.scale is None else call.scale
    compute_dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    mask = call.attn_mask
    if call.block_mask is not None:
        mask = masks.merge_block_mask(mask, call.block_mask, batch, heads)
    mask = None if mask is None else mask.expand(batch, heads, q_len, k_len)
    rows = max(1, MAX_SCORES // max(1, batch * heads * k_len))
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for start in range(0, q_len, rows):
        stop = min(start + rows, q_len)
        first, last = _key_range(start, stop, k_len - q_len, k_len, left_window, right_window)
        scores = _scores(query[:, :, start:stop], key[:, :, first:last], factor, compute_dtype)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if call.score_mod is not None:
            scores = _apply_score_mod(scores, call.score_mod, start, first)
        scores = _apply_bias(
            scores, start + k_len - q_len, first, left_window, right_window, call.alibi_slopes,
            None if mask is None else mask[:, :, start:stop, first:last],
        )  # fmt: skip
        out, lse = _softmax_values(scores, value[:, :, first:last], call.dropout_p, call.sinks)
        outs.append(out)
        lses.append(lse)
    result = (outs[0] if len(outs) == 1 else torch.cat(outs, 2)).to(result_dtype)
    if swapped:
        result = result.transpose(1, 2).contiguous()
    if not call.return_lse:
        return result
    return result, (lses[0] if len(lses) == 1 else torch.cat(lses, 2)).float()


def _key_range(
    start: int, stop: int, shift: int, k_len: int, left_window: int, right_window: int
) -> tuple[int, int]:
    """The keys that queries [start, stop) can see; at least one, so that no product is empty."""
    first = 0 if left_window < 0 else min(max(start + shift - left_window, 0), k_len - 1)
    last = k_len if right_window < 0 else min(stop + shift + right_window, k_len)
    return first, max(last, first + 1)


def _scores(query: Tensor, key: Tensor, factor: float, compute_dtype: torch.dtype) -> Tensor:
    """factor * q k^T, (B, Hq, n, m); query heads of one key head are folded into its rows."""
    batch, heads, rows, width = query.shape
    groups = key.shape[1]
    folded = query.to(compute_dtype).reshape(batch, groups, heads // groups * rows, width)
    return (folded @ key.to(compute_dtype).transpose(-1, -2)).reshape(batch, heads, rows, -1) * factor


def _apply_bias(
    scores: Tensor,
    position: int,
    first: int,
    left_window: int,
    right_window: int,
    slopes: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """Scores with ALiBi and the mask added and with what causal and window hide at -inf.

    `position` is the key on the diagonal of the first row, `first` the key of the first column.
    """
    if slopes is not None or left_window >= 0 or right_window >= 0:
        rows = torch.arange(position, position + scores.shape[2], device=scores.device)
        columns = torch.arange(first, first + scores.shape[3], device=scores.device)
        ahead = columns - rows[:, None]
        if slopes is not None:
            per_head = slopes.to(scores.dtype)[..., None, None]
            scores = scores - per_head * ahead.abs().to(scores.dtype)
        if right_window >= 0:
            scores = scores.masked_fill(ahead > right_window, -torch.inf)
        if left_window >= 0:
            scores = scores.masked_fill(ahead < -left_window, -torch.inf)
    if mask is None:
        return scores
    if mask.dtype is torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return scores + mask.to(scores.dtype)


def _apply_score_mod(scores: Tensor, score_mod: ScoreMod, row: int, column: int) -> Tensor:
    """Every score (B, H, n, m) as `score_mod` gives it; the first is of query `row` and key `column`."""
    mapped: Any = score_mod
    for axes in _AXES:
        mapped = torch.vmap(mapped, in_dims=axes)
    firsts = (0, 0, row, column)
    places = [
        torch.arange(first, first + size, device=scores.device)
        for first, size in zip(firsts, scores.shape, strict=True)
    ]
    changed: Tensor = mapped(scores, *places)
    return changed.to(scores.dtype)


def _softmax_values(
    scores: Tensor, value: Tensor, dropout_p: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """softmax(scores) value and the log of its denominator; a row of -inf gives 0 and -inf, or its sink.

    The row maximum only shifts the exponent, so no gradient flows through it.
    """
    peak = scores.detach().amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.to(scores.dtype)[:, None, None]
        peak = torch.maximum(peak, sinks.detach())
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - peak)
    hidden = total == 0
    total = total.masked_fill(hidden, 1.0)
    weights = weights / total
    if dropout_p > 0:
        weights = functional.dropout(weights, dropout_p)
    batch, heads, rows, keys = weights.shape
    groups = value.shape[1]
    folded = weights.reshape(batch, groups, heads // groups * rows, keys)
    out = (folded @ value.to(weights.dtype)).reshape(batch, heads, rows, -1)
    lse = (peak + total.log()).masked_fill(hidden, -torch.inf).squeeze(-1)
    return out.masked_fill(hidden, 0.0), lse


def outputs(args: Args) -> tuple[OutputSpec, ...]:
    """The output like q with v's head size, and float32 (B, Hq, Sq) with return_lse."""
    call = AttentionArgs._make(args)
    q = call.q
    out = OutputSpec((*q.shape[:3], call.v.shape[3]), checks.dtype_name(kv_formats.number_dtype(q)))
    if not call.return_lse:
        return (out,)
    heads, tokens = head_axes(call.layout)
    return out, OutputSpec((q.shape[0], q.shape[heads], q.shape[tokens]), "float32")


def validate_values(args: Args) -> Args:
    """Scales that are positive; nothing to look at beside numbers."""
    if args[18] is not None:
        kv_formats.need_valid_operand_scales(args[17:20])
    return args


def empty(args: Args) -> Tensor | tuple[Tensor, Tensor] | None:
    """The result of a call without queries or without keys: zeros, and -inf for the LSE."""
    call = AttentionArgs._make(args)
    if call.q.numel() and call.k.numel():
        return None
    specs = outputs(args)
    out = call.q.new_zeros(specs[0].shape, dtype=kv_formats.number_dtype(call.q))
    if len(specs) == 1:
        return out
    lse = call.q.new_full(specs[1].shape, -torch.inf, dtype=torch.float32)
    return out, lse if call.sinks is None else call.sinks[None, :, None].expand_as(lse).float().clone()


def cut(args: Args, start: int, stop: int) -> Args:
    """The call of sequences [start, stop): masks and slopes are cut where they differ between sequences."""
    call = AttentionArgs._make(args)
    score_mod, mask, slopes = call.score_mod, call.attn_mask, call.alibi_slopes
    if call.block_mask is not None:
        heads = call.q.shape[head_axes(call.layout)[0]]
        mask = masks.merge_block_mask(mask, call.block_mask, call.q.shape[0], heads)
    if score_mod is not None:
        whole = score_mod
        score_mod = lambda score, b, *place: whole(score, b + start, *place)  # noqa: E731
    if mask is not None and mask.dim() == 4 and mask.shape[0] > 1:
        mask = mask[start:stop]
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[start:stop]
    q, k, v = (operand[start:stop] for operand in call[:3])
    scales: dict[str, Any] = {
        name: scale[start:stop] if scale is not None and scale.dim() > 1 else scale
        for name, scale in zip(kv_formats.OPERAND_SCALES, call[17:20], strict=True)
    }
    return tuple(
        call._replace(
            q=q, k=k, v=v, attn_mask=mask, alibi_slopes=slopes, score_mod=score_mod, block_mask=None, **scales
        )
    )


def visible_pairs(spec: CallSpec) -> float:
    """How many (query, key) pairs of one head have a score: all, or what causal and window leave."""
    q_len, k_len = spec.dim("Sq"), spec.dim("Sk")
    pairs = float(q_len * k_len)
    if "causal" in spec.features:
        seen = min(q_len, k_len)
        pairs = seen * k_len - seen * (seen - 1) / 2
    if "window" in spec.features:
        pairs = min(pairs, float(q_len * spec.dim("W", k_len)))
    return pairs


def work(spec: CallSpec) -> WorkEstimate:
    """Two products over the visible pairs; q, k, v and the output once through memory."""
    batch, heads, groups = spec.dim("B"), spec.dim("Hq"), spec.dim("Hk")
    widths = spec.dim("D") + spec.dim("Dv")
    element = checks.dtype_bytes(spec.dtype)
    key_element = kv_formats.code_bytes(spec)
    moved = batch * widths * (spec.dim("Sq") * heads * element + spec.dim("Sk") * groups * key_element)
    return WorkEstimate(flops=2.0 * batch * heads * widths * visible_pairs(spec), bytes=float(moved))


ATTENTION = define_op(
    build=attention,
    check=attention_checks.check,
    reference=attention_reference,
    outputs=outputs,
    work=work,
    operands=(0, 1, 2),
    exact_dims=frozenset({"Hq", "Hk", "G", "D", "Dv"}),
    empty=empty,
    wide_outputs=frozenset({1}),
    validate_values=validate_values,
    decoding=OPERAND_DECODING,
    batching=StackedBatching(),
    layouts=Layouts(operands=(0, 1, 2), argument=10, names=("BHSD", "BSHD"), swap=(1, 2)),
    split=Split("B", cut),
)

"""What `attention` checks once per new kind of call, and how it describes the call as a CallSpec."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks, kv_formats
from layerzero.ops.attention.arguments import AttentionArgs, PagedArgs, RaggedArgs
from layerzero.ops.describe import describe
from layerzero.ops.op import Args
from layerzero.ops.signature import signature_of
from layerzero.spec.call_spec import CallSpec

LAYOUTS = ("BHSD", "BSHD")
# No sequence is as long; a position and this many keys fit in the 32 bits that kernels count with.
MAX_WINDOW = 1 << 30


def head_axes(layout: str) -> tuple[int, int]:
    """The axes of heads and of tokens."""
    return (1, 2) if layout == "BHSD" else (2, 1)


def window_bounds(is_causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """How far left and right of the diagonal a query sees; -1 is unbounded."""
    left_window, right_window = window if window is not None else (-1, -1)
    return left_window, 0 if is_causal else right_window


# Whether each of torch's implementations of attention is switched on, by the name that a feature gives it.
_SWITCHES = tuple(
    (f"sdpa_no_{name}", getattr(torch._C, f"_get_{flag}_sdp_enabled"))
    for name, flag in zip(
        ("flash", "efficient", "math", "cudnn"), ("flash", "mem_efficient", "math", "cudnn"), strict=True
    )
)
_FLASH, _EFFICIENT, _MATH, _CUDNN = (is_on for _, is_on in _SWITCHES)


def switched_off() -> tuple[str, ...]:
    """What a call asks of kernels where torch's `sdpa_kernel` rules implementations out, by feature."""
    if _FLASH() and _EFFICIENT() and _MATH() and _CUDNN():
        return ()
    return tuple(feature for feature, is_on in _SWITCHES if not is_on())


def modifier_signature(sinks: Any, score_mod: Any, block_mask: Any) -> tuple[Any, ...]:
    """What a signature holds of them: whether they fit is decided by that, whose they are is not."""
    blocks = None if block_mask is None else _block_mask_key(block_mask)
    return signature_of(sinks), score_mod if score_mod is None else callable(score_mod), blocks


def _block_mask_key(block_mask: Any) -> tuple[Any, ...]:
    """Type, (B, H, Sq, Sk), block sizes and device of a torch BlockMask; the type alone of anything else."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")  # who has a mask has imported it
    if flex is None or not isinstance(block_mask, flex.BlockMask):
        return (type(block_mask),)
    return type(block_mask), block_mask.shape, block_mask.BLOCK_SIZE, block_mask.kv_num_blocks.device


def normalized_window(window: Any) -> Any:
    """`window` as a tuple; a side of MAX_WINDOW keys or more is -1, so that no kernel's integers overflow."""
    if not isinstance(window, list | tuple):
        return window
    return tuple(-1 if isinstance(side, int) and side >= MAX_WINDOW else side for side in window)


def infer_layout(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The layout that the shapes allow; where both do, the one that transposed views show.

    A tensor whose axis 2 has the larger stride is in memory with axis 2 in front: tokens by heads, as a
    projection leaves them, turned to heads by tokens. Dense tensors of one shape fit both readings.
    Raises: ValueError: both readings fit and no operand is a transposed view.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.need_tensor(name, tensor, rank=4)
    possible = [layout for layout in LAYOUTS if _fits(q, k, v, head_axes(layout))]
    if len(possible) == 1:
        return possible[0]
    if not possible:
        return "BHSD"
    transposed = [t for t in (q, k, v) if t.shape[1] > 1 and t.shape[2] > 1 and t.stride(1) < t.stride(2)]
    if transposed:
        return "BHSD"
    first, second = q.shape[1:3]
    raise ValueError(
        f"layout=None needs operands that fit one reading, got q {tuple(q.shape)}: either BHSD with {first} "
        f"heads and {second} tokens or BSHD with {first} tokens and {second} heads; pass layout="
    )


def _fits(q: Tensor, k: Tensor, v: Tensor, axes: tuple[int, int]) -> bool:
    heads, tokens = axes
    return (
        k.shape[heads] == v.shape[heads] > 0
        and q.shape[heads] % k.shape[heads] == 0
        and k.shape[tokens] == v.shape[tokens]
    )


def check(args: Args) -> CallSpec:
    """Validate a call and describe it; see `attention` for the arguments."""
    call = AttentionArgs._make(args)
    checks.need_choice("layout", call.layout, LAYOUTS)
    checks.need_bools(call, "is_causal", "return_lse", "combine_mask", "rows_nonempty")
    q, dims = call.q, _check_operands(call.q, call.k, call.v, call.layout)
    causal_alone = call.is_causal and not call.combine_mask
    if call.attn_mask is not None:
        _check_mask(call.attn_mask, q, dims, causal_alone)
    if call.alibi_slopes is not None:
        _check_slopes(call.alibi_slopes, q, dims)
    needs = "a number in [0, 1)"
    if checks.need_number("dropout_p", call.dropout_p, low=0.0, high=1.0, needs=needs) == 1.0:
        raise ValueError(f"dropout_p needs {needs}, got 1.0")
    check_score_options(call.scale, call.softcap, call.window)
    if call.sinks is not None:
        checks.need_tensor("sinks", call.sinks)
        checks.need_shape("sinks", call.sinks, (dims["Hq"],), ", one logit a query head")
        checks.need_same_device("q", q, sinks=call.sinks)
    if call.score_mod is not None and not callable(call.score_mod):
        raise TypeError(f"score_mod needs a callable of (score, b, h, q_idx, kv_idx), got {call.score_mod!r}")
    if call.block_mask is not None:
        _check_blocks(call.block_mask, q, dims, causal_alone)
    if call.window is not None and min(call.window) >= 0:
        dims["W"] = min(sum(call.window) + 1, dims["Sk"])
    scales = kv_formats.check_operand_scales(call, head_axes(call.layout)[0])
    features, typed = _features(call, dims) | scales, args[:1] if scales else ()
    return describe("attention", args[:3], dims, features, layout=call.layout, typed=typed)


def _check_operands(q: Any, k: Any, v: Any, layout: str) -> dict[str, int]:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.need_tensor(name, tensor, rank=4, floating=not kv_formats.holds_codes(tensor))
    checks.need_same_device("q", q, k=k, v=v)
    heads, tokens = head_axes(layout)
    batch, width = q.shape[0], q.shape[3]
    if width == 0:
        raise ValueError(f"q needs a head size of at least 1, got shape {tuple(q.shape)}")
    if v.shape[3] == 0:
        raise ValueError(f"v needs a head size of at least 1, got shape {tuple(v.shape)}")
    checks.need_like("k", "batch {}", k.shape[0], batch, "q")
    checks.need_like("v", "batch {}", v.shape[0], batch, "q")
    checks.need_like("k", "head size {}", k.shape[3], width, "q")
    checks.need_like("v", "heads {}", v.shape[heads], k.shape[heads], "k")
    checks.need_like("v", "tokens {}", v.shape[tokens], k.shape[tokens], "k")
    query_heads, key_heads = q.shape[heads], k.shape[heads]
    if key_heads == 0 or query_heads == 0 or query_heads % key_heads:
        raise ValueError(
            f"k needs a number of heads that divides q's {query_heads}, got {key_heads}: "
            f"q {tuple(q.shape)} and k {tuple(k.shape)} in layout {layout}"
        )
    return {
        "B": batch, "Hq": query_heads, "Hk": key_heads, "G": query_heads // key_heads,
        "Sq": q.shape[tokens], "Sk": k.shape[tokens], "D": width, "Dv": v.shape[3],
    }  # fmt: skip


def _check_mask(mask: Any, q: Tensor, dims: dict[str, int], with_causal: bool) -> None:
    checks.need_tensor("attn_mask", mask, floating=False)
    if mask.dtype is not torch.bool and not mask.dtype.is_floating_point:
        got = checks.dtype_name(mask.dtype)
        raise TypeError(f"attn_mask needs a bool or floating point dtype, got {got}")
    if with_causal:
        raise ValueError("attn_mask with is_causal=True needs combine_mask=True, got combine_mask=False")
    target = (dims["B"], dims["Hq"], dims["Sq"], dims["Sk"])
    sizes = tuple(mask.shape)
    fits = 2 <= len(sizes) <= 4 and all(
        size in (1, full) for size, full in zip(reversed(sizes), reversed(target), strict=False)
    )
    if not fits:
        raise ValueError(
            f"attn_mask needs 2 to 4 axes that broadcast to (B, Hq, Sq, Sk) = {target}, got shape {sizes}"
        )
    checks.need_same_device("q", q, attn_mask=mask)


def _check_slopes(slopes: Any, q: Tensor, dims: dict[str, int]) -> None:
    checks.need_tensor("alibi_slopes", slopes)
    batch, heads = dims["B"], dims["Hq"]
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes needs shape ({heads},) or ({batch}, {heads}), got {tuple(slopes.shape)}"
        )
    checks.need_same_device("q", q, alibi_slopes=slopes)


def _check_blocks(block_mask: Any, q: Tensor, dims: dict[str, int], with_causal: bool) -> None:
    mask_key = _block_mask_key(block_mask)
    if len(mask_key) == 1:
        expected_type = "torch.nn.attention.flex_attention.BlockMask"
        raise TypeError(f"block_mask needs a {expected_type}, got {type(block_mask).__name__}")
    if with_causal:
        raise ValueError("block_mask with is_causal=True needs combine_mask=True, got combine_mask=False")
    target, shape = (dims["B"], dims["Hq"], dims["Sq"], dims["Sk"]), tuple(mask_key[1])
    if shape[2:] != target[2:] or any(
        size not in (1, full) for size, full in zip(shape, target, strict=True)
    ):
        raise ValueError(
            f"block_mask needs (B, Hq, Sq, Sk) = {target}, 1 for each of B and Hq or not, got {shape}"
        )
    if mask_key[3] != q.device:
        raise ValueError(f"block_mask needs to be on {q.device} like q, got {mask_key[3]}")


def check_score_options(scale: Any, softcap: Any, window: Any) -> None:
    """A scale is a number, a softcap one above 0, a window a pair of ints from -1; each may be None."""
    if scale is not None:
        checks.need_number("scale", scale)
    if softcap is not None:
        checks.need_number("softcap", softcap, above=0.0)
    if window is None:
        return
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"window needs a pair (left, right) of ints >= -1, got {window!r}")
    for side in window:
        checks.need_int("window", side, low=-1)


def score_features(call: AttentionArgs | RaggedArgs | PagedArgs, dims: Mapping[str, int]) -> dict[str, bool]:
    """What all attention over separate heads may ask of a kernel."""
    return {
        "causal": call.is_causal,
        "gqa": dims["G"] > 1,
        "scale": call.scale is not None and call.scale != dims["D"] ** -0.5,
        "scale_not_positive": call.scale is not None and call.scale <= 0,
        "window": call.window is not None and max(call.window) >= 0,
        "softcap": call.softcap is not None,
        "lse": call.return_lse,
    }


def _features(call: AttentionArgs, dims: Mapping[str, int]) -> dict[str, bool]:
    mask, operands = call.attn_mask, call[:3]
    needs_gradient = any(t.requires_grad for t in operands)
    has_mask = mask is not None or call.block_mask is not None
    right = window_bounds(call.is_causal, call.window)[1]
    # The first query's last visible key lies before the first key.
    hides_rows = right >= 0 and dims["Sk"] - dims["Sq"] + right < 0
    return score_features(call, dims) | {
        "mask_bool": mask is not None and mask.dtype is torch.bool,
        "mask_float": mask is not None and mask.dtype is not torch.bool,
        "mask_and_causal": mask is not None and call.is_causal,
        "empty_rows": (has_mask and not call.rows_nonempty) or hides_rows,
        "dropout": call.dropout_p > 0,
        "alibi": call.alibi_slopes is not None,
        "sinks": call.sinks is not None,
        # The mode is part of every table: parameters that want no gradient now cost nothing.
        "sinks_grad": call.sinks is not None
        and torch.is_grad_enabled()
        and (needs_gradient or call.sinks.requires_grad),
        "score_mod": call.score_mod is not None,
        "block_mask": call.block_mask is not None,
        # Gradients that fused kernels leave out, and a mask that q's dtype cannot hold.
        "lse_grad": call.return_lse and needs_gradient,
        "mask_grad": any(t is not None and t.requires_grad for t in (mask, call.alibi_slopes)),
        "mask_wide": mask is not None and mask.dtype not in (torch.bool, call.q.dtype),
        **dict.fromkeys(switched_off(), True),
    }

"""Attention out of torch: each implementation behind `scaled_dot_product_attention` as its own kernel.

The implementations are called by their aten operators, never through the `sdpa_kernel` context: that
switches them for every thread of the process. torch's own `is_causal` is top-left aligned where queries
and keys differ in number, ours is bottom-right: it is used only where the two agree, or where the operator
itself is bottom-right (Flash); otherwise the hidden keys go in as a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.ops.attention import masks
from layerzero.ops.attention.attention import cut
from layerzero.ops.attention.lse import apply_sinks
from layerzero.ops.batching import concat_copy
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import SDPA_CUDNN, SDPA_EFFICIENT, SDPA_FLASH, SDPA_MATH
from layerzero.spec.kernel import Kernel, Tiling


def _operator(name: str) -> Callable[..., Any]:
    """An aten operator by the binding that torch generates for it: `torch.ops` takes longer."""
    return getattr(torch, name, None) or getattr(torch.ops.aten, name)  # type: ignore[no-any-return]


_math = _operator("_scaled_dot_product_attention_math")
_flash_cpu = _operator("_scaled_dot_product_flash_attention_for_cpu")
_flash = _operator("_scaled_dot_product_flash_attention")
_efficient = _operator("_scaled_dot_product_efficient_attention")
_cudnn = _operator("_scaled_dot_product_cudnn_attention")
_sdpa = functional.scaled_dot_product_attention


def math(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
    dropout_p: float, window: masks.Window, softcap: float | None, alibi_slopes: Tensor | None,
    layout: str = "BHSD", return_lse: bool = False, combine_mask: bool = False, rows_nonempty: bool = False,
    sinks: Tensor | None = None, score_mod: Any = None, block_mask: Any = None, *_: Any,
) -> Tensor:  # fmt: skip
    """Softmax of the whole score matrix, step by step; half precision keeps float32 in between."""
    if block_mask is not None:
        attn_mask = masks.merge_block_mask(attn_mask, block_mask, q.shape[0], q.shape[1])
    if sinks is not None:
        q, k, v, attn_mask = _with_sink(q, k, v, sinks, attn_mask, is_causal, window, alibi_slopes)
        is_causal, window, alibi_slopes = False, None, None
    bias, causal = masks.fold_mask(q, k, attn_mask, is_causal, window, alibi_slopes, scale=scale)
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = _math(q, k, v, bias, dropout_p, causal, None, scale=scale, enable_gqa=grouped)[0]
    return out


def flash_cpu(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
    dropout_p: float, window: masks.Window, softcap: float | None, alibi_slopes: Tensor | None, layout: str,
    return_lse: bool, combine_mask: bool = False, rows_nonempty: bool = False, sinks: Tensor | None = None,
    score_mod: Any = None, block_mask: Any = None, *_: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The CPU's tiled kernel, which never writes the score matrix."""
    if block_mask is not None:
        attn_mask = masks.merge_block_mask(attn_mask, block_mask, q.shape[0], q.shape[1])
    bias, causal = masks.fold_mask(q, k, attn_mask, is_causal, window, alibi_slopes, scale=scale)
    if bias is not None and bias.dim() != 2:  # the operator takes two or four axes
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    out, lse = _flash_cpu(q, k, v, dropout_p, causal, attn_mask=bias, scale=scale)
    if not return_lse and sinks is None:
        return out  # type: ignore[no-any-return]
    if bias is not None:
        lse = lse.masked_fill(masks.fully_masked_rows(bias), -torch.inf)
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)
    return (out, lse.float()) if return_lse else out


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, attn_mask: Tensor | None, is_causal: bool,
    window: masks.Window, slopes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Operands with one more key, of zeros: its score is the sink, its value nothing; and the whole bias."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    bias = masks.additive_bias(q, k, attn_mask, is_causal, window, slopes, dtype)
    if bias is None:
        bias = q.new_zeros((), dtype=dtype)
    batch, heads, rows, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    column = sinks.to(dtype)[:, None, None].expand(batch, heads, rows, 1)
    whole = torch.cat([bias.expand(batch, heads, rows, keys), column], -1)
    return q, functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1)), whole


def by_sequence(*args: Any) -> Any:
    """`flash_cpu` of every sequence alone, from buffers of its own: the same bits in every batch."""
    outs: list[Any] = []
    for i in range(args[0].shape[0]):
        q, k, v, *rest = cut(args, i, i + 1)
        outs.append(flash_cpu(q.clone(), k.clone(), v.clone(), *rest))
    if isinstance(outs[0], tuple):
        return tuple(concat_copy(parts) for parts in zip(*outs, strict=True))
    return concat_copy(outs)


def flash(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
    dropout_p: float, window: masks.Window, softcap: float | None, alibi_slopes: Tensor | None, layout: str,
    return_lse: bool, *_: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention 2 as torch carries it: its causal flag is bottom-right by itself."""
    out, lse, *_rest = _flash(q, k, v, dropout_p, is_causal and q.shape[2] > 1, False, scale=scale)
    if not return_lse:
        return out  # type: ignore[no-any-return]
    return out, lse.masked_fill(lse == torch.inf, -torch.inf)  # it marks rows that see nothing with +inf


def efficient(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
    dropout_p: float, window: masks.Window, softcap: float | None, alibi_slopes: Tensor | None, layout: str,
    return_lse: bool, *_: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The memory-efficient kernel that torch carries from xFormers (CUTLASS)."""
    hidden = q.shape[2] - k.shape[2] if is_causal and attn_mask is None and window is None else 0
    if hidden > 0 and _wants_gradient(q, k, v):
        # Over rows that see nothing its backward gets the keys wrong (torch 2.11, bfloat16).
        seen = q[:, :, hidden:]
        result = efficient(
            seen, k, v, None, True, scale, dropout_p, None, softcap, alibi_slopes, layout, return_lse
        )
        out, lse = result if isinstance(result, tuple) else (result, None)
        out = functional.pad(out, (0, 0, hidden, 0))
        return out if lse is None else (out, functional.pad(lse, (hidden, 0), value=-torch.inf))
    bias, causal = masks.fold_mask(q, k, attn_mask, is_causal, window, dtype=q.dtype)
    out, lse, *_rest = _efficient(
        q, k, v, _padded(bias, q, k), return_lse or _wants_gradient(q, k, v), dropout_p, causal, scale=scale
    )
    if not return_lse:
        return out  # type: ignore[no-any-return]
    lse = lse[:, :, : q.shape[2]]  # the operator rounds the rows up to 32
    if bias is not None:
        lse = lse.masked_fill(masks.fully_masked_rows(bias), -torch.inf)
    return out, lse


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
    dropout_p: float, window: masks.Window, softcap: float | None, alibi_slopes: Tensor | None, layout: str,
    return_lse: bool, *_: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """cuDNN's fused attention; what it writes for a row that sees nothing is arbitrary."""
    bias, causal = masks.fold_mask(q, k, attn_mask, is_causal, window, dtype=q.dtype)
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    out, lse, *_rest = _cudnn(
        q, k, v, bias, return_lse or _wants_gradient(q, k, v), dropout_p, causal, False, scale=scale
    )
    if not return_lse:
        return out  # type: ignore[no-any-return]
    return out, lse.view(q.shape[:3])


def default(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
    dropout_p: float, window: masks.Window, softcap: float | None, alibi_slopes: Tensor | None, *_: Any,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` with torch's own choice of implementation."""
    grouped = q.size(1) != k.size(1)
    if attn_mask is None and not is_causal and window is None and alibi_slopes is None:
        return _sdpa(q, k, v, None, dropout_p, False, scale=scale, enable_gqa=grouped)
    dtype = None if q.device.type == "cpu" else q.dtype
    bias, causal = masks.fold_mask(q, k, attn_mask, is_causal, window, alibi_slopes, dtype, scale)
    return _sdpa(q, k, v, bias, dropout_p, causal, scale=scale, enable_gqa=grouped)


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _padded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias as the memory-efficient kernel reads it: full shape over rows of 16 elements."""
    if bias is None:
        return None
    sk = k.shape[2]
    if sk % 16:
        bias = functional.pad(bias.expand(*bias.shape[:-1], sk), (0, 16 - sk % 16))[..., :sk]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], sk)


def _score_bytes(request: CallSpec) -> int:
    """What the step by step implementation holds at once, in float32: scores, softmax and operands.

    Two copies of queries, four of keys and values together.
    """
    heads = request.dim("B", 1) * request.dim("Hq", 1)
    rows, keys, width = (request.dim(name, 1) for name in ("Sq", "Sk", "D"))
    return 2 * 4 * heads * (rows * keys + (rows + 2 * keys) * width)


_H200 = "an estimate for an H200, beside the prefills in benchmarks/results/regret_h200.json"
_CPU = "scripts/measure_efficiency.py, AMD EPYC with AVX-512, 1 thread"
_AS_DISPATCHED = "ATen/native/transformers/attention.cpp; run against float64 on torch 2.13 CPU"
_DISPATCHER = "ATen/native/transformers/cuda/sdp_utils.cpp"
_EFFICIENT_TILES = Tiling(
    rows=((128, 64), (256, 32)),
    packed=False,
    splits=False,
    source="ATen/native/transformers/cuda/mem_eff_attention/kernels/cutlassF.h, half precision from sm80 on",
)
_MASKED = "scale causal mask_bool mask_float mask_and_causal window"
# With a float32 bias beside half precision operands.
_ANYWHERE = f"{_MASKED} alibi mask_wide scale_not_positive"
_TILED = f"{_ANYWHERE} gqa empty_rows lse sinks"
_GRID = "B * Hq <= 65535 else CUDA_BLOCK_LIMIT_EXCEEDED"
_SAME_HEAD_SIZES = "D == Dv else HEAD_DIMS_DIFFER"
_HEAD_SIZES = ("D <= 256 else HEAD_DIM_TOO_LARGE", "D % 8 == 0 else HEAD_DIM_ALIGNMENT", _SAME_HEAD_SIZES)

_kernel = functools.partial(Kernel.of, layouts="BHSD")
# torch's own choice is held to torch's switches by torch; with one implementation but the step by step one
# left it raises where that one refuses the call, which would be no fault of a kernel.
# The tiled kernel of the CPU, in one call or in one a sequence.
_tiled = functools.partial(
    _kernel, measured=_CPU, platforms="cpu", last_stride1=True, limits=(_SAME_HEAD_SIZES,)
)
_fused = functools.partial(
    _kernel, measured=_H200, platforms="cuda", sm_min=80, sm_max=121, last_stride1=True, alignment=16,
    graph_safe=True,
)  # fmt: skip

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "torch.attention.sdpa_math", lambda: math, (0.02, 0.1, 40.0), _H200, source=_AS_DISPATCHED,
        features=f"{_ANYWHERE} gqa dropout empty_rows mask_grad sinks sinks_grad block_mask "
        f"{SDPA_MATH}",
        graph_safe=True, workspace_bytes=_score_bytes, tie_break_order=80,
    ),
    _tiled(
        "torch.attention.sdpa_flash_cpu", lambda: flash_cpu, (0.4, 0.8, 9.0),
        source="ATen/native/cpu/FlashAttentionKernel.cpp; run against float64 on torch 2.13 CPU",
        features=f"{_TILED} block_mask {SDPA_FLASH}", tie_break_order=40,
    ),
    _tiled(
        "torch.attention.by_sequence", lambda: by_sequence, (0.3, 0.5, 20.0),
        source="by construction; run bitwise against other batches on torch 2.13 CPU",
        features=f"{_TILED} {SDPA_FLASH}", batch_invariant=True, tie_break_order=90,
    ),
    _kernel(
        "torch.attention.sdpa_cpu", lambda: default, (0.4, 0.8, 7.0), _CPU, source=_AS_DISPATCHED,
        platforms="cpu", features=f"{_ANYWHERE} gqa dropout empty_rows mask_grad {SDPA_MATH}",
        last_stride1=True,  # of queries whose rows overlap it makes garbage (torch 2.13)
        tie_break_order=45, default=True,
    ),
    _kernel(
        # cuDNN, which torch takes where it can, writes garbage for rows that see nothing, and reads other
        # numbers than it was given where rows do not begin at multiples of 16 bytes (H100, torch 2.11).
        "torch.attention.sdpa", lambda: default, (0.51, 0.63, 9.2), _H200,
        source="torch docs, scaled_dot_product_attention; run on an H200, torch 2.11",
        alignment=16, platforms="cuda rocm", features=f"{_MASKED} gqa dropout {SDPA_MATH}", graph_safe=True,
        tie_break_order=45, default=True,
    ),
    _fused(
        # Rows that see nothing come out right, but not their gradient (torch 2.11, bfloat16). Misaligned rows
        # end the process's use of the device (H100, torch 2.11).
        "torch.attention.sdpa_flash", lambda: flash, (0.27, 0.6, 9.2),
        source=f"{_DISPATCHER}; alignment: torch/nn/attention/bias.py", dtypes="float16 bfloat16",
        features=f"scale causal gqa dropout lse {SDPA_FLASH}",
        limits=(*_HEAD_SIZES, _GRID), tie_break_order=40,
    ),
    _fused(
        "torch.attention.sdpa_efficient", lambda: efficient, (0.16, 0.3, 7.7), tiling=_EFFICIENT_TILES,
        source=f"{_DISPATCHER}; run on an H200, torch 2.11", dtypes="float16 bfloat16 float32",
        features=f"{_MASKED} dropout empty_rows lse {SDPA_EFFICIENT}",
        limits=("D % 8 == 0 else HEAD_DIM_ALIGNMENT", "Dv % 8 == 0 else HEAD_DIM_ALIGNMENT", _GRID),
        deterministic=False,  # its backward adds with atomics
        tie_break_order=60,
    ),
    _fused(
        "torch.attention.sdpa_cudnn", lambda: cudnn, (0.51, 0.63, 8.7),
        source=f"{_DISPATCHER}; run on an H200, torch 2.11, cuDNN 9.19", dtypes="float16 bfloat16",
        features=f"{_MASKED} gqa dropout lse {SDPA_CUDNN}",
        limits=(
            *_HEAD_SIZES, "B <= 65535 else CUDA_BLOCK_LIMIT_EXCEEDED",
            "Hq <= 65535 else CUDA_BLOCK_LIMIT_EXCEEDED",
        ),
        deterministic=False,  # torch refuses it under use_deterministic_algorithms
        tie_break_order=42,
    ),
)  # fmt: skip

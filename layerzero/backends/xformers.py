"""xFormers: each of its forward operators that needs no extension of its own as a kernel.

Its wheel's extension is built for CUDA 12.8 and does not load beside a CUDA 13 torch. Without it
`memory_efficient_attention` refuses CUDA tensors for every operator, those too that call torch's kernels or
Triton's, so the operators are called themselves (`FwOp.apply`); what they refuse is in the capabilities.
Its import fails where FlashAttention-4 is installed without FlashAttention-2, whose module it takes for
granted.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.attention import masks
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import AtMost, Capability, MultipleOf, OneOf, SameAs
from layerzero.spec.kernel import Efficiency, Kernel
from layerzero.spec.reasons import Reason


@functools.cache
def _fmha() -> Any:
    spec = importlib.util.find_spec
    if spec("flash_attn") is not None and spec("flash_attn.flash_attn_interface") is None:
        raise ImportError(
            "xformers imports flash_attn.flash_attn_interface wherever it finds flash_attn, and "
            "FlashAttention-4 alone does not bring it: it needs flash-attn beside flash-attn-4, or neither"
        )
    with warnings.catch_warnings():
        # It warns of every operator that does not load, and uses what torch deprecated.
        warnings.simplefilter("ignore")
        return importlib.import_module("xformers.ops.fmha")


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, S, H, D) as it is, or (B, S, G, H, D) with each key head spread over its queries' heads."""
    heads = k.shape[2]
    if q.shape[2] == heads:
        return q, k, v
    each = q.shape[2] // heads
    k, v = (t.unsqueeze(3).expand(-1, -1, -1, each, -1) for t in (k, v))
    return q.unflatten(2, (heads, each)), k, v


def _mask(q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, window: masks.Window) -> Any:
    """The mask as a bias (B, H, Sq, Sk) whose rows have addresses of whole vectors; None without any."""
    queries, keys = q.transpose(1, 2), k.transpose(1, 2)
    bias = masks.additive_bias(queries, keys, attn_mask, is_causal, window, None, q.dtype)
    if bias is None:
        return None
    batch, rows, heads, columns = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    if columns % 8:
        bias = torch.nn.functional.pad(bias.expand(*bias.shape[:-1], columns), (0, 8 - columns % 8))
    return bias[..., :columns].expand(batch, heads, rows, columns)


def _bias(q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, window: masks.Window) -> Any:
    if attn_mask is not None or window is not None:
        return _mask(q, k, attn_mask, is_causal, window)
    if not is_causal:
        return None
    return importlib.import_module("xformers.ops.fmha.attn_bias").LowerTriangularFromBottomRightMask()


# Far below any score, and finite: a block of keys that are all hidden would give the split kernel NaN.
_HIDDEN = -3e4


def _finite_bias(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, window: masks.Window
) -> Tensor | None:
    """The mask as a bias without infinities, (B, G, H, Sq, Sk) where heads are grouped."""
    bias = _mask(q, k, attn_mask, is_causal, window)
    if bias is None:
        return None
    bounded: Tensor = bias.clamp_min(_HIDDEN)
    return bounded if q.shape[2] == k.shape[2] else bounded.unflatten(1, (k.shape[2], -1))


def _load(module: str, bias_of: Callable[..., Any] = _bias) -> Callable[..., Any]:
    fmha = _fmha()
    operator, inputs = getattr(fmha, module).FwOp, fmha.Inputs

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
        dropout_p: float, window: masks.Window, softcap: float | None, alibi_slopes: Tensor | None,
        *_: Any,
    ) -> Tensor:  # fmt: skip
        """`FwOp.apply` over (B, S, H, D), or five axes where heads are grouped."""
        bias = bias_of(q, k, attn_mask, is_causal, window)
        query, key, value = _grouped(q, k, v)
        call_inputs = inputs(query=query, key=key, value=value, attn_bias=bias, scale=scale)
        out = operator.apply(call_inputs, needs_gradient=False)[0]
        return out.reshape(*q.shape[:3], v.shape[3])  # type: ignore[no-any-return]

    return attention


def _bias_bytes(request: CallSpec) -> int:
    """The mask as a bias in whole vectors, and again where it is bounded."""
    b, h, sq, sk = (request.dim(name) for name in ("B", "Hq", "Sq", "Sk"))
    masked = request.features & {"mask_bool", "mask_float", "mask_and_causal", "window"}
    return 2 * 4 * b * h * sq * (sk + 8) if masked else 4 * b * h * sq


def _flash_bytes(request: CallSpec) -> int:
    """Log-sum-exps, and partial results in float32: two blocks of 64 rows a multiprocessor, of some 150."""
    return _bias_bytes(request) + 150 * 2 * 64 * 4 * (request.dim("D") + 1)


def _split_bytes(request: CallSpec) -> int:
    """A bias, or at most 64 partial results in float32 and their log-sum-exps in float64."""
    b, h, sq, d = (request.dim(name) for name in ("B", "Hq", "Sq", "D"))
    rows = b * max(h * (sq + 63), request.dim("Hk") * 64)
    return _bias_bytes(request) + 64 * rows * (4 * d + 8)


_LIMITS = (
    MultipleOf("D", 8, Reason.HEAD_DIM_ALIGNMENT),
    AtMost("D", 256, Reason.HEAD_DIM_TOO_LARGE),
    SameAs("D", "Dv", Reason.HEAD_DIMS_DIFFER),
)


def _kernel(
    variant: str, module: str, dtypes: frozenset[str], features: frozenset[str], efficiency: Efficiency,
    limits: tuple[Any, ...] = _LIMITS, bias_of: Callable[..., Any] = _bias,
    workspace_bytes: Callable[[CallSpec], int] = _bias_bytes, **more: Any,
) -> Kernel:  # fmt: skip
    return Kernel.of(
        f"xformers.attention.{variant}",
        functools.partial(_load, module, bias_of),
        Capability(
            source=f"xformers 0.0.35, ops/fmha/{module}.py, called without its extension",
            platforms=frozenset({"cuda"}),
            sm_min=80,
            sm_max=90,
            dtypes=dtypes,
            features=features,
            layouts=frozenset({"BSHD"}),
            last_stride1=True,
            alignment=16,
            limits=limits,
            gradient=False,
            **more,
        ),
        efficiency,
        tie_break_order=70,
        slow_import=True,
        distributions=("xformers>=0.0.35",),
        co_requirements=(("flash-attn-4", "flash-attn"),),
        workspace_bytes=workspace_bytes,
    )


_HALF = frozenset({"float16", "bfloat16"})
_AS_TORCH = "torch's kernel on one H200, bf16, causal prefill 2048, 32/8 heads of 128: {} us; host estimated"

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "cutlass", "cutlass", _HALF | {"float32"},
        frozenset({"causal", "scale", "mask_bool", "mask_float", "mask_and_causal", "window"}),
        Efficiency(0.16, 0.3, 40.0, _AS_TORCH.format(269)),
    ),
    _kernel(
        "flash", "flash", _HALF, frozenset({"causal", "scale", "gqa"}),
        Efficiency(0.27, 0.6, 40.0, _AS_TORCH.format(164)),
        workspace_bytes=_flash_bytes,
    ),
    _kernel(
        "triton_splitk", "triton_splitk", _HALF, frozenset({"scale", "gqa", "mask_bool", "mask_float"}),
        Efficiency(0.1, 0.6, 60.0, "an estimate"),
        (OneOf("D", (16, 32, 64, 128, 256)), _LIMITS[2]),
        bias_of=_finite_bias, workspace_bytes=_split_bytes,
    ),
)  # fmt: skip

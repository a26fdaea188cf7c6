"""xFormers: each of its forward operators that needs no extension of its own as a kernel.

Its wheel's extension is built for CUDA 12.8 and does not load beside a CUDA 13 torch. Without it
`memory_efficient_attention` refuses CUDA tensors for every operator, those too that call torch's kernels or
Triton's, so the operators are called themselves (`FwOp.apply`); what they refuse is in the capabilities.
Its import fails where FlashAttention-4 is installed without FlashAttention-2, whose module it wants.
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
from layerzero.ops.attention.adapters import takes
from layerzero.ops.attention.arguments import AttentionArgs
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import SDPA_EFFICIENT, SDPA_FLASH
from layerzero.spec.kernel import Kernel


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


def _mask(call: AttentionArgs) -> Any:
    """The mask as a bias (B, H, Sq, Sk) whose rows have addresses of whole vectors; None without any."""
    q, k = call.q, call.k
    queries, keys = q.transpose(1, 2), k.transpose(1, 2)
    bias = masks.additive_bias(queries, keys, call.attn_mask, call.is_causal, call.window, None, q.dtype)
    if bias is None:
        return None
    batch, rows, heads, columns = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    if columns % 8:
        bias = torch.nn.functional.pad(bias.expand(*bias.shape[:-1], columns), (0, 8 - columns % 8))
    return bias[..., :columns].expand(batch, heads, rows, columns)


def _bias(call: AttentionArgs) -> Any:
    if call.attn_mask is not None or call.window is not None:
        return _mask(call)
    if not call.is_causal:
        return None
    return importlib.import_module("xformers.ops.fmha.attn_bias").LowerTriangularFromBottomRightMask()


# Far below any score, and finite: a block of keys that are all hidden would give the split kernel NaN.
_HIDDEN = -3e4


def _finite_bias(call: AttentionArgs) -> Tensor | None:
    """The mask as a bias without infinities, (B, G, H, Sq, Sk) where heads are grouped."""
    bias, key_heads = _mask(call), call.k.shape[2]
    if bias is None:
        return None
    bounded: Tensor = bias.clamp_min(_HIDDEN)
    return bounded if call.q.shape[2] == key_heads else bounded.unflatten(1, (key_heads, -1))


def _load(module: str, bias_of: Callable[..., Any] = _bias) -> Callable[..., Any]:
    fmha = _fmha()
    operator, inputs = getattr(fmha, module).FwOp, fmha.Inputs

    @takes(AttentionArgs)
    def attention(call: AttentionArgs) -> Tensor:
        """`FwOp.apply` over (B, S, H, D), or five axes where heads are grouped."""
        query, key, value = _grouped(call.q, call.k, call.v)
        call_inputs = inputs(query=query, key=key, value=value, attn_bias=bias_of(call), scale=call.scale)
        out = operator.apply(call_inputs, needs_gradient=False)[0]
        return out.reshape(*call.q.shape[:3], call.v.shape[3])  # type: ignore[no-any-return]

    return attention


def _bias_bytes(request: CallSpec) -> int:
    """The mask as a bias in whole vectors, and again where it is bounded."""
    b, h, sq, sk = (request.dim(name) for name in ("B", "Hq", "Sq", "Sk"))
    masked = request.features & {"mask_bool", "mask_float", "mask_and_causal", "window"}
    return 2 * 4 * b * h * sq * (sk + 8) if masked else 4 * b * h * sq


def _split_bytes(request: CallSpec) -> int:
    """A bias, or at most 64 partial results in float32 and their log-sum-exps in float64."""
    b, h, sq, d = (request.dim(name) for name in ("B", "Hq", "Sq", "D"))
    rows = b * max(h * (sq + 63), request.dim("Hk") * 64)
    return _bias_bytes(request) + 64 * rows * (4 * d + 8)


_kernel = functools.partial(
    Kernel.of,
    platforms="cuda",
    sm_min=80,
    sm_max=90,
    layouts="BSHD",
    last_stride1=True,
    alignment=16,
    gradient=False,
    tie_break_order=70,
    slow_import=True,
    distributions=("xformers>=0.0.35",),
    co_requirements=(("flash-attn-4", "flash-attn"),),
)
_SOURCE = "xformers 0.0.35, ops/fmha/{}.py, called without its extension"
_AS_TORCH = "torch's kernel on one H200, bf16, causal prefill 2048, 32/8 heads of 128: {} us; host estimated"
_SAME_HEAD_SIZES = "D == Dv else HEAD_DIMS_DIFFER"
_LIMITS = ("D % 8 == 0 else HEAD_DIM_ALIGNMENT", "D <= 256 else HEAD_DIM_TOO_LARGE", _SAME_HEAD_SIZES)

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "xformers.attention.cutlass", lambda: _load("cutlass"), (0.16, 0.3, 40.0), _AS_TORCH.format(269),
        source=_SOURCE.format("cutlass"), dtypes="float16 bfloat16 float32", limits=_LIMITS,
        features=f"causal scale mask_bool mask_float mask_and_causal window {SDPA_EFFICIENT}",
        workspace_bytes=_bias_bytes,
    ),
    _kernel(
        "xformers.attention.flash", lambda: _load("flash"), (0.27, 0.6, 40.0), _AS_TORCH.format(164),
        source=_SOURCE.format("flash"), dtypes="float16 bfloat16", limits=_LIMITS,
        features=f"causal scale gqa {SDPA_FLASH}",
        # Log-sum-exps, and partial results in float32: two blocks of 64 rows a multiprocessor, of some 150.
        workspace_bytes=lambda request: _bias_bytes(request) + 150 * 2 * 64 * 4 * (request.dim("D") + 1),
    ),
    _kernel(
        "xformers.attention.triton_splitk", lambda: _load("triton_splitk", _finite_bias), (0.1, 0.6, 60.0),
        "an estimate", source=_SOURCE.format("triton_splitk"), dtypes="float16 bfloat16",
        limits=("D in [16, 32, 64, 128, 256]", _SAME_HEAD_SIZES),
        features="scale gqa mask_bool mask_float", workspace_bytes=_split_bytes,
    ),
)  # fmt: skip

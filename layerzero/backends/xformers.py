"""xFormers: `memory_efficient_attention` with each of its forward operators as a kernel of its own.

Its wheel's extension is built for CUDA 12.8 and does not load beside a CUDA 13 torch, and without it every
operator refuses CUDA tensors: the route into torch's own kernels and the Triton split-K kernel as well. Its
import fails where FlashAttention-4 is installed without FlashAttention-2, whose module it takes for granted.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.kernel import AtMost, Capability, Efficiency, Kernel, MultipleOf, SameAs
from layerzero.ops import masks
from layerzero.reasons import Reason


@functools.cache
def _fmha() -> Any:
    with warnings.catch_warnings():
        # It warns of every operator that does not load, and uses what torch deprecated.
        warnings.simplefilter("ignore")
        found = importlib.import_module("xformers.ops.fmha")
    if not found.common._built_with_cuda:
        raise ImportError(
            "xformers needs its compiled extension, which did not load beside this torch; without it every "
            "operator of it refuses CUDA tensors, those that call torch's own kernels among them"
        )
    return found


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, S, H, D) as it is, or (B, S, G, H, D) with each key head spread over its queries' heads."""
    heads = k.shape[2]
    if q.shape[2] == heads:
        return q, k, v
    each = q.shape[2] // heads
    k, v = (t.unsqueeze(3).expand(-1, -1, -1, each, -1) for t in (k, v))
    return q.unflatten(2, (heads, each)), k, v


def _bias(q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, window: masks.Window) -> Any:
    if attn_mask is None and window is None:
        if not is_causal:
            return None
        return importlib.import_module("xformers.ops.fmha.attn_bias").LowerTriangularFromBottomRightMask()
    queries, keys = q.transpose(1, 2), k.transpose(1, 2)
    bias = masks.additive(queries, keys, attn_mask, is_causal, window, None, q.dtype)
    if bias is None:
        return None
    batch, rows, heads, columns = q.shape[0], q.shape[1], q.shape[2], k.shape[1]
    if columns % 8:  # rows of the bias need addresses of whole vectors
        bias = torch.nn.functional.pad(bias.expand(*bias.shape[:-1], columns), (0, 8 - columns % 8))
    return bias[..., :columns].expand(batch, heads, rows, columns)


def _load(module: str) -> Callable[..., Any]:
    fmha = _fmha()
    operator = getattr(fmha, module).FwOp

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
        dropout_p: float, window: masks.Window, softcap: float | None, alibi_slopes: Tensor | None,
        *_: Any,
    ) -> Tensor:  # fmt: skip
        """`memory_efficient_attention_forward` over (B, S, H, D), or five axes where heads are grouped."""
        bias = _bias(q, k, attn_mask, is_causal, window)
        query, key, value = _grouped(q, k, v)
        forward = fmha.memory_efficient_attention_forward
        out = forward(query, key, value, attn_bias=bias, scale=scale, op=operator)
        return out.reshape(*q.shape[:3], v.shape[3])  # type: ignore[no-any-return]

    return attention


_LIMITS = (
    MultipleOf("D", 8, Reason.HEAD_DIM_ALIGNMENT),
    AtMost("D", 256, Reason.HEAD_DIM_TOO_LARGE),
    SameAs("D", "Dv", Reason.HEAD_DIMS_DIFFER),
)


def _kernel(
    variant: str, module: str, dtypes: frozenset[str], features: frozenset[str], efficiency: Efficiency,
    limits: tuple[Any, ...] = _LIMITS, **more: Any,
) -> Kernel:  # fmt: skip
    return Kernel(
        id=f"xformers.attention.{variant}",
        op="attention",
        backend="xformers",
        capability=Capability(
            source=f"xformers 0.0.35, ops/fmha/{module}.py; its wheel refuses to run beside CUDA 13",
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
        load=functools.partial(_load, module),
        efficiency=efficiency,
        rank=70,
        cold=True,
        distributions=("xformers>=0.0.35",),
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
    ),
    _kernel(
        "triton_splitk", "triton_splitk", _HALF, frozenset({"scale", "gqa"}),
        Efficiency(0.1, 0.6, 60.0, "an estimate"),
        (*_LIMITS[1:], MultipleOf("D", 16, Reason.HEAD_DIM_ALIGNMENT)),
    ),
)  # fmt: skip

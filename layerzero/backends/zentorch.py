"""ZenDNN, AMD's kernels for EPYC, out of the `zentorch` package.

Importing it takes over a second (it imports torch's inductor) and registers operators and a compile
backend named "zentorch"; it patches no function of torch's and no thread setting. Its operators trust
their caller: a strided row or a third axis makes the norms read and write outside their tensors, so every
limit here is one that keeps memory safe. Its matrix products keep reordered weights by address, and answer
with the weights of a tensor long freed; that cache is switched off before the import.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.ops.attention import masks
from layerzero.ops.quantize import kept_codes
from layerzero.spec.kernel import Kernel, loading

# Below it, as a float32, its norms print a complaint and leave their output as memory was.
LEAST_EPS = torch.finfo(torch.float32).tiny
WEIGHT_CACHE = "ZENDNNL_MATMUL_WEIGHT_CACHE"
Run = Callable[..., Tensor]


@functools.cache
def operators() -> Any:
    """`torch.ops.zentorch`, its weight cache off.

    Raises: ImportError: the package is not there, or its CPU check says no.
    """
    if "zentorch" not in sys.modules:  # it reads this once, at its first product
        os.environ.setdefault(WEIGHT_CACHE, "0")
    with warnings.catch_warnings():
        # The inductor modules it pulls in use what torch itself has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("zentorch")
    if not torch.ops.zentorch.zentorch_is_avx512_supported():
        raise ImportError("zentorch refuses this CPU: it needs an AMD CPU with AVX-512")
    return torch.ops.zentorch


@loading(lambda: operators().zentorch_sdpa)
def _attention(
    sdpa: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None,
    is_causal: bool, scale: float | None, dropout_p: float, window: masks.Window, softcap: float | None,
    alibi_slopes: Tensor | None, *_: Any,
) -> Tensor:  # fmt: skip
    """`zentorch_sdpa`; its second result, meant for the log-sum-exp, is not filled in."""
    bias, causal = masks.fold_mask(q, k, attn_mask, is_causal, window, alibi_slopes)
    if bias is not None and bias.dim() != 2:  # the operator takes two or four axes
        bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    # It refuses rows that repeat.
    q, k, v = (t if t.stride(2) else t.clone(memory_format=torch.contiguous_format) for t in (q, k, v))
    return sdpa(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)[0]


@loading(lambda: operators().zentorch_rms_norm)
def _rms_norm(kernel: Run, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`zentorch_rms_norm` over two axes: with three it writes outside its output."""
    if eps < LEAST_EPS:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    return kernel(x.view(-1, x.shape[-1]), weight, eps).view(x.shape)


@loading(lambda: operators().zentorch_add_rms_norm_)
def _add_rms_norm(
    kernel: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`zentorch_add_rms_norm_` on copies: it overwrites both operands."""
    if eps < LEAST_EPS:
        total = x + residual
        return functional.rms_norm(total, x.shape[-1:], weight, eps), total
    normed, total = x.clone(), residual.clone()
    width = x.shape[-1]
    kernel(normed.view(-1, width), weight, total.view(-1, width), eps)
    return normed, total


def _product(name: str) -> Any:
    """An operator with weights, whose products follow them."""
    _refuse_stale_weights(operators().zentorch_linear_unary)
    return getattr(operators(), name)


@loading(lambda: _product("zentorch_linear_unary"))
def _linear(kernel: Run, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`zentorch_linear_unary` without its cache of weights."""
    return kernel(x, weight, bias)


@loading(lambda: _product("zentorch_dynamic_qlinear"))
def _quantized_linear(
    kernel: Run, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *_: Any
) -> Tensor:
    """`zentorch_dynamic_qlinear`, which quantizes rows as `quantize` does.

    Scales need the shape (C, 1): with (C,) it prints complaints and answers all the same.
    """
    columns = scale.expand(weight.shape[0], 1).contiguous()
    return kernel(x, weight.contiguous(), columns, bias)


def _weight_only() -> Callable[..., Any]:
    kernel: Run = _product("zentorch_woq_linear")
    # Codes of two's complement, and scales by group.
    layout = kept_codes.keep(
        lambda weight: weight ^ 0x88, lambda scale: scale.float().resolve_neg().t().contiguous()
    )

    def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
        """`zentorch_woq_linear` over eight codes in an int32; with zero points it gives other numbers."""
        codes, scales = layout.of(weight, scale)
        packed = codes.view(weight.shape).view(torch.int32).t()
        shift = None if bias is None else bias.to(x.dtype).resolve_neg()
        return kernel(x.view(-1, x.shape[-1]), packed, scales, None, shift).view(*x.shape[:-1], len(weight))

    return quantized_linear


def _moe() -> Callable[..., Any]:
    # A first call of attention reads this file, and needs no experts.
    from layerzero.ops.linear.moe import route

    kernel = _product("zentorch_fused_moe")

    def moe(
        x: Tensor, router_logits: Tensor, w_up: Tensor, w_down: Tensor, top_k: int, scoring: str,
        renormalize: bool, _: str,
    ) -> Tensor:  # fmt: skip
        """`zentorch_fused_moe` over our own routing; "silu" is its name for the gate of swiglu."""
        rows = x.view(-1, x.shape[-1])
        experts, scores = route(router_logits.reshape(len(rows), -1), top_k, scoring, renormalize)
        out = torch.empty_like(rows)
        weights, chosen = scores.float().contiguous(), experts.int().contiguous()
        kernel(out, rows, w_up, w_down, None, None, weights, chosen, False, "silu")
        return out.view(x.shape)

    return moe


def _refuse_stale_weights(kernel: Callable[..., Tensor]) -> None:
    """Raise ImportError unless the cache was off from the start and products follow their weight."""
    remedy = f"set {WEIGHT_CACHE}=0 before zentorch is imported"
    if os.environ.get(WEIGHT_CACHE) != "0":
        raise ImportError(f"zentorch keeps weights by their address; {remedy}")
    generator = torch.Generator("cpu").manual_seed(0)
    x, weight = (torch.randn(rows, 128, generator=generator, device="cpu") for rows in (8, 64))
    before = kernel(x, weight)
    if torch.equal(before, kernel(x, weight.neg_())):
        raise ImportError(f"zentorch answers with a weight's earlier values; {remedy}")


_kernel = functools.partial(
    Kernel.of,
    measured="scripts/measure_efficiency.py, AMD EPYC with AVX-512, 1 thread",
    source="probed with zentorch 2.13.0.2, torch 2.13.0, on an AMD EPYC with AVX-512",
    platforms="cpu",
    cpu_vendors="amd",
    isa="avx512f avx512bw",
    torch_min="2.13",
    torch_below="2.14",
    dtypes="float32 bfloat16",
    contiguous=True,
    gradient=False,
    slow_import=True,
    distributions=("zentorch>=2.13,<2.14",),
)

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "zentorch.attention.sdpa", _attention, (0.8, 0.8, 12.0),
        features="causal scale gqa mask_bool mask_float mask_wide mask_and_causal empty_rows window alibi",
        limits=("D == Dv else HEAD_DIMS_DIFFER", "D >= 2"), layouts="BHSD", contiguous=False,
        last_stride1=True,
    ),
    _kernel("zentorch.rms_norm.native", _rms_norm, (0.3, 1.0, 8.0), limits=("C >= 2",), batch_invariant=True),
    _kernel(
        "zentorch.add_rms_norm.native", _add_rms_norm, (0.2, 0.9, 8.0), limits=("C >= 2",),
        batch_invariant=True,
    ),
    _kernel("zentorch.linear.native", _linear, (0.8, 0.3, 20.0), features="bias"),
    _kernel(
        "zentorch.quantized_linear.dynamic", _quantized_linear, (1.0, 0.6, 14.0),
        measured="an estimate: below torch._int_mm's time on an AMD EPYC with AVX-512",
        features="quant_int8 scale_per_tensor scale_per_row bias inputs_quantized",
        isa="avx512f avx512bw avx512_vnni",
    ),
    _kernel(
        "zentorch.quantized_linear.weight_only", _weight_only, (1.0, 0.15, 14.0),
        measured="an estimate: before native.quantized_linear.codes from a few dozen rows on",
        features="quant_int4 scale_per_row scale_per_group scale_16bit bias inputs_float",
        limits=("K % 8 == 0", "N >= 1"), dtypes="bfloat16", mixed_dtypes=True,
        workspace_bytes=kept_codes.workspace,
    ),
    _kernel(
        "zentorch.moe.fused", _moe, (0.7, 0.5, 60.0),
        measured="an estimate, beside torch's expert by expert",
        features="act_swiglu scores_sigmoid scores_raw",
        limits=("T >= 2",),  # it refuses a call in which one expert gets every row
        dtypes="bfloat16",  # in float32 its gate errs by 7e-6
    ),
)  # fmt: skip

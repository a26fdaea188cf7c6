"""Row kernels: norms, rotary embedding, the gate of an mlp, tokens into pages, a product in eight bits."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.flashinfer.common import ESTIMATE, LOAD_BYTES, SOURCE, compilation_of, kernel, module
from layerzero.ops.captures import keep_if_captured
from layerzero.ops.linear.mlp import gated_bytes
from layerzero.ops.paged.append import copy_if_aliased
from layerzero.ops.quantize.quantize import quantize_reference
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel, loading

# A module is compiled as its first kernel loads, in the background, not by the first call.


def _compiled(part: str) -> Any:
    """A module of FlashInfer's whose kernels are compiled."""
    library = module(f"flashinfer.{part}")
    getattr(library, f"get_{part}_module")()
    return library


@loading(lambda: _compiled("norm").rmsnorm)
def _rms_norm(kernel: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rmsnorm` over rows."""
    out: Tensor = kernel(x.view(-1, x.shape[-1]), weight, eps)
    return out.view(x.shape)


@loading(lambda: _compiled("norm").fused_add_rmsnorm)
def _add_rms_norm(
    kernel: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`fused_add_rmsnorm` on copies: it overwrites both operands."""
    normed, total = x.clone(), residual.clone()
    width = x.shape[-1]
    kernel(normed.view(-1, width), total.view(-1, width), weight, eps)
    return normed, total


def _loadable(x: Tensor) -> Tensor:
    """`x` (..., H, D), copied only where its heads are apart or a row begins between two loads.

    The keys of a projection that made queries, keys and values at once are read in place.
    """
    if x.data_ptr() % LOAD_BYTES == 0:
        if x.is_contiguous():
            return x
        if x.dim() == 3:
            row, head, one = x.stride()
            if one == 1 and head == x.shape[2] and row * x.element_size() % LOAD_BYTES == 0:
                return x
    return x.clone(memory_format=torch.contiguous_format)


_TABLE = "_layerzero_flashinfer_table"


def cos_sin_cache(cos: Tensor, sin: Tensor) -> Tensor:
    """cos and sin side by side in float32, as FlashInfer reads them; made once for a pair of tables.

    A graph keeps the one that it was captured with, whatever becomes of `cos` and `sin`.
    """
    cached = getattr(cos, _TABLE, None)
    if cached is not None and not cos.is_inference() and not sin.is_inference():
        other, versions, table = cached
        if other() is sin and versions == (cos._version, sin._version):
            keep_if_captured(table)
            return table  # type: ignore[no-any-return]
    cos_sin = torch.cat([cos, sin], -1).float().contiguous()
    if not cos.is_inference() and not sin.is_inference():
        setattr(cos, _TABLE, (weakref.ref(sin), (cos._version, sin._version), cos_sin))
    return cos_sin


@loading(lambda: _compiled("rope").apply_rope_with_cos_sin_cache)
def _rope(
    kernel: Any, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    """`apply_rope_with_cos_sin_cache`, out of place."""
    count, width = positions.numel(), q.shape[-1]
    rows, keys = _loadable(q).view(count, -1), _loadable(k).view(count, -1)
    places = positions.reshape(-1).contiguous()
    turned = kernel(places, rows, keys, width, cos_sin_cache(cos, sin), is_neox=not interleaved)
    return turned[0].view(q.shape), turned[1].view(k.shape)


def _mlp() -> Callable[..., Any]:
    activation = module("flashinfer.activation")
    for name in ("silu", "gelu"):
        activation.get_act_and_mul_module(name)
    gates = {"swiglu": activation.silu_and_mul, "geglu": activation.gelu_and_mul}

    def mlp(
        x: Tensor, w_up: Tensor, w_down: Tensor, b_up: Tensor | None, b_down: Tensor | None, kind: str
    ) -> Tensor:
        """torch's products with FlashInfer's gate between them."""
        hidden = gates[kind](functional.linear(x, w_up, b_up))
        return functional.linear(hidden, w_down, b_down)

    return mlp


@loading(lambda: _compiled("page").append_paged_kv_cache)
def _append(
    kernel: Any,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    layout: str,
    *_: None,
) -> Tensor:
    """`append_paged_kv_cache` with the whole pool as one sequence, in which a slot is a position."""
    pages, size = k_cache.shape[0], k_cache.shape[1 if layout == "NHD" else 2]
    ids, bounds, last = _whole_pool(pages, size, k.device)
    # Steps of any number of rows share a few buffers.
    first = _zeros(1 << max(k.shape[0] - 1, 0).bit_length(), k.device)
    keep_if_captured(ids, bounds, last, first)
    first = first[: k.shape[0]]
    places = slot_mapping.to(torch.int32).contiguous()
    k, v = copy_if_aliased(k, k_cache, v_cache), copy_if_aliased(v, k_cache, v_cache)
    kernel(_loadable(k), _loadable(v), first, places, (k_cache, v_cache), ids, bounds, last, kv_layout=layout)
    return slot_mapping


# Some pools of pages and numbers of rows; what graphs were captured with stays, however many others come.
@functools.lru_cache(maxsize=64)
def _whole_pool(pages: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
    """A pool as one sequence: page ids, their bounds, the last page's length."""
    with torch.inference_mode(False):
        ids = torch.arange(pages, dtype=torch.int32, device="cpu").to(device)
        bounds = torch.tensor([0, pages], dtype=torch.int32, device=device)
        return ids, bounds, torch.tensor([size], dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=64)
def _zeros(count: int, device: torch.device) -> Tensor:
    """The sequence of each of `count` tokens in a pool that is one: copied, so that every stream may read."""
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.int32, device="cpu").to(device)


def _fp8_product() -> Callable[..., Any]:
    library = module("flashinfer.gemm")
    module("flashinfer.gemm.gemm_base").get_gemm_module()

    def quantized_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
        """`bmm_fp8` through cuBLAS over codes; both scales follow the product, each row having its own."""
        codes, spread = quantize_reference(x, "fp8_e4m3", "row", 0, None)
        rows = codes.view(1, -1, codes.shape[-1])
        one = _one(x.device)
        out: Tensor = library.bmm_fp8(
            rows, weight.contiguous().t().unsqueeze(0), one, one, torch.bfloat16, backend="cublas"
        )
        wide = out[0].float() * spread.view(-1, 1) * scale.view(-1)
        wide = wide if bias is None else wide + bias.float()
        return wide.to(x.dtype).view(*x.shape[:-1], weight.shape[0])

    return quantized_linear


@functools.cache
def _one(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones((), dtype=torch.float32, device=device)


def _product_bytes(request: CallSpec) -> int:
    """The codes of the rows, and the product before it is scaled, as bfloat16 and twice as float32."""
    n, c, k = (request.dim(name) for name in ("N", "C", "K"))
    return n * k * (1 + 3 * 4) + n * c * (2 + 2 * 4) + (32 << 20)


_HEADS = "D in [64, 128, 256]"  # what its templates exist for
_kernel = functools.partial(kernel, graph_safe=True, tie_break_order=36)
# Bound by memory, and by the host where rows are few.
_rows = functools.partial(
    _kernel, measured="benchmarks/results/rows_step_h200.json, beside torch.rms_norm.cuda"
)

KERNELS: tuple[Kernel, ...] = (
    _rows(
        "flashinfer.rms_norm.rmsnorm", _rms_norm, (0.1, 0.7, 14.0), source=SOURCE.format("rmsnorm"),
        limits=("C >= 2",), on_disk=compilation_of("norm"), contiguous=True, alignment=LOAD_BYTES,
    ),
    _rows(
        "flashinfer.add_rms_norm.fused_add_rmsnorm", _add_rms_norm, (0.1, 0.39, 18.0),
        source=SOURCE.format("fused_add_rmsnorm"), limits=("C >= 2",),
        on_disk=compilation_of("norm"), contiguous=True, alignment=LOAD_BYTES,
    ),
    _rows(
        "flashinfer.rope.cos_sin_cache", _rope, (0.1, 0.6, 26.0), source=SOURCE.format("cos_sin_cache"),
        features="interleaved partial_rotary", limits=(_HEADS, "R % 16 == 0"), on_disk=compilation_of("rope"),
    ),
    _kernel(
        "flashinfer.mlp.act_and_mul", _mlp, (0.8, 0.7, 25.0), ESTIMATE.format("by its two products"),
        source=SOURCE.format("act_and_mul"), features="bias act_swiglu act_geglu", contiguous=True,
        workspace_bytes=gated_bytes, on_disk=compilation_of("silu_and_mul", "gelu_and_mul"),
    ),
    _rows(
        "flashinfer.append_kv.page", _append, (0.1, 0.6, 18.0), source=SOURCE.format("page"),
        limits=("D == Dv else HEAD_DIMS_DIFFER", _HEADS), layouts="NHD HND", on_disk=compilation_of("page"),
    ),
    # The product over bare codes overflows float16.
    _kernel(
        "flashinfer.quantized_linear.bmm_fp8", _fp8_product, (0.5, 0.6, 110.0),
        ESTIMATE.format("as torch._scaled_mm"), dtypes="bfloat16", sm_min=89, contiguous=True,
        source="flashinfer-python 0.7.2.post1, bmm_fp8 through cuBLAS",
        features="quant_fp8_e4m3 scale_per_row bias inputs_quantized",
        limits=("K % 32 == 0", "C % 32 == 0"), workspace_bytes=_product_bytes,
        on_disk=compilation_of("gemm"),
    ),
)  # fmt: skip

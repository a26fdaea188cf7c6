"""Attention: dense batches, ragged batches and pages, each with FlashInfer's FA2 and FA3 templates.

A dense batch is a ragged one whose lengths are its shape. Windows are one-sided in FlashInfer, ours are
two-sided, so none is claimed. The head sizes are those its templates exist for: it runs others without a
word, and wrongly (flashinfer issue 4299).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.common import (
    ESTIMATE,
    LOAD_BYTES,
    SOURCE,
    TEMPLATES,
    kernel,
    module,
    modules_on_disk,
    planned_bytes,
)
from layerzero.ops import host_copies
from layerzero.ops.attention.adapters import Result, int32, takes
from layerzero.ops.attention.arguments import AttentionArgs, PagedArgs, RaggedArgs
from layerzero.ops.rehearsal import dummy_run
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel, Tiling

if TYPE_CHECKING:
    from layerzero.backends.flashinfer import planning


def _paged_wrapper(backend: str, layout: str, floats: Tensor) -> Any:
    from layerzero.backends.flashinfer.cascade import CascadeWrapper

    wrapper = module().BatchPrefillWithPagedKVCacheWrapper
    return CascadeWrapper(functools.partial(wrapper, floats, layout, backend=backend))


def _run_ragged(
    backend: str, call: AttentionArgs | RaggedArgs, rows: tuple[Tensor, Tensor, Tensor],
    lengths: planning.PlanKey, starts: Callable[[], tuple[Tensor, Tensor]],
) -> Result:  # fmt: skip
    """Run over `rows` (T, H, D), planned with `starts` where `lengths` are new."""
    q, k, v = rows

    from layerzero.backends.flashinfer import planning

    def plan(wrapper: Any) -> None:
        queries, keys = starts()
        wrapper.plan(
            queries, keys, q.shape[1], k.shape[1], q.shape[2],
            causal=call.is_causal, sm_scale=call.scale, logits_soft_cap=call.softcap,
            q_data_type=q.dtype, kv_data_type=k.dtype,
        )  # fmt: skip

    def launch(wrapper: Any) -> Result:
        if call.return_lse:
            return wrapper.run(q, k, v, return_lse=True, lse_base="ln")  # type: ignore[no-any-return]
        return wrapper.run(q, k, v)  # type: ignore[no-any-return]

    def make(floats: Tensor) -> Any:
        return module().BatchPrefillWithRaggedKVCacheWrapper(floats, "NHD", backend=backend)

    return planning.stream_workspaces(q.device).run(("ragged", backend), lengths, make, plan, launch)


def _flags(call: AttentionArgs | RaggedArgs | PagedArgs, q: Tensor, k: Tensor) -> tuple[Any, ...]:
    """What a plan depends on beside the lengths."""
    return (q.shape[1:], k.shape[1:], q.dtype, k.dtype, call.is_causal, call.scale, call.softcap)


def _dense(backend: str) -> Callable[..., Any]:
    from layerzero.backends.flashinfer import planning

    module()

    @takes(AttentionArgs)
    def attention(call: AttentionArgs) -> Result:
        """Contiguous (B, S, H, D) operands as one ragged batch; the plan is kept by shape."""
        batch, q_len, heads, width = call.q.shape
        k_len = call.k.shape[1]

        def starts() -> tuple[Tensor, Tensor]:
            steps = torch.arange(batch + 1, dtype=torch.int32, device="cpu")
            return steps * q_len, steps * k_len

        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in call[:3])
        lengths = planning.PlanKey((_flags(call, q, k), batch, q_len, k_len), (True,))
        result = _run_ragged(backend, call, (q, k, v), lengths, starts)
        if not isinstance(result, tuple):
            return result.view(batch, q_len, heads, width)
        out, lse = result
        return out.view(batch, q_len, heads, width), lse.view(batch, q_len, heads).transpose(1, 2)

    return attention


def _ragged(backend: str) -> Callable[..., Any]:
    from layerzero.backends.flashinfer import planning

    module()

    @takes(RaggedArgs)
    def ragged_attention(call: RaggedArgs) -> Result:
        """Sequences behind each other, as FlashInfer takes them."""

        def starts() -> tuple[Tensor, Tensor]:
            queries = int32(host_copies.to_host_values(call.cu_seqlens_q))
            if call.cu_seqlens_k is call.cu_seqlens_q:
                return queries, queries
            return queries, int32(host_copies.to_host_values(call.cu_seqlens_k))

        flags = _flags(call, call.q, call.k)
        lengths = planning.PlanKey.of(flags, call.cu_seqlens_q, call.cu_seqlens_k)
        return _run_ragged(backend, call, call[:3], lengths, starts)

    return ragged_attention


def _paged(backend: str) -> Callable[..., Any]:
    from layerzero.backends.flashinfer import planning

    module()

    @takes(PagedArgs)
    def paged_attention(call: PagedArgs) -> Result:
        """Prefill, chunked prefill and decode over one pool; a decode step is a prefill of one query.

        Pages that all sequences begin with are read once, where the tables have a host copy.
        """
        q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q = call[:6]
        size, heads = k_cache.shape[1:3] if call.layout == "NHD" else k_cache.shape[2:0:-1]

        def plan(wrapper: Any) -> None:
            page_bytes = (k_cache[0].numel() + v_cache[0].numel()) * k_cache.element_size()
            named = {
                "causal": call.is_causal, "sm_scale": call.scale, "logits_soft_cap": call.softcap,
                "q_data_type": q.dtype, "kv_data_type": k_cache.dtype,
            }  # fmt: skip
            starts = planning.query_starts(cu_seqlens_q, block_tables.shape[0])
            sizes = (q.shape[1], heads, q.shape[2])
            wrapper.plan(block_tables, seq_lens, starts, size, page_bytes, named, sizes)

        def launch(wrapper: Any) -> Result:
            return wrapper.run(q, (k_cache, v_cache), call.return_lse)  # type: ignore[no-any-return]

        lengths = planning.PlanKey.of(_flags(call, q, k_cache), block_tables, seq_lens, cu_seqlens_q)
        make, kind = functools.partial(_paged_wrapper, backend, call.layout), ("paged", backend, call.layout)
        return planning.stream_workspaces(q.device).run(kind, lengths, make, plan, launch)

    return paged_attention


def _build(op: str, run: Callable[[], Callable[..., Any]], request: CallSpec) -> None:
    """Compile a request's module, and over pages the merge of partial results that a plan may take."""
    if op == "paged_attention":
        module("flashinfer.cascade").get_cascade_module()
    dummy_run(run(), request)


def _module(request: CallSpec) -> str:
    """What one of its modules is compiled for; the dense, ragged and paged kernels of a template share it."""
    return f"{request.dtype} {request.dim('D')}{' softcap' if 'softcap' in request.features else ''}"


_DTYPES = {"float16": "f16", "bfloat16": "bf16"}


def _on_disk(template: str, request: CallSpec) -> bool:
    """Whether a request's module was compiled, and over pages the merge of partial results.

    The name is FlashInfer's own (0.7, jit/attention/modules.py: get_batch_prefill_uri).
    """
    dtype, width = _DTYPES[request.dtype], request.dim("D")
    name = (
        f"batch_prefill_with_kv_cache_dtype_q_{dtype}_dtype_kv_{dtype}_dtype_o_{dtype}_dtype_idx_i32_"
        f"head_dim_qk_{width}_head_dim_vo_{width}_posenc_0_use_swa_False_"
        f"use_logits_cap_{'softcap' in request.features}_f16qk_False{'_sm90' if template == 'fa3' else ''}"
    )
    return modules_on_disk([name, *(["cascade"] if request.op == "paged_attention" else [])])


_WRAPPER = "BatchPrefillWith{}KVCacheWrapper, backend {}"
_PREFILL = ESTIMATE.format("beside a causal prefill in benchmarks/results/regret_h200.json")
_DECODES = ESTIMATE.format("beside the decodes in benchmarks/results/regret_h200.json")
_OF_ROOF = {"fa2": 0.39, "fa3": 0.69}
_TILES = Tiling(
    rows=((64, 192), (256, 128)),
    packed=False,
    splits=False,
    source="FlashInfer 0.7.2, attention/hopper/prefill_sm90.cuh: getCTATileSize",
)
_FEATURES = "causal scale gqa softcap lse"


def _kernel(op: str, template: str, load: Callable[[str], Callable[..., Any]], **own: Any) -> Kernel:
    run = functools.cache(functools.partial(load, template))
    return kernel(
        f"flashinfer.{op}.{template}",
        run,
        **TEMPLATES[template],
        source=SOURCE.format(_WRAPPER.format("Paged" if op == "paged_attention" else "Ragged", template)),
        limits=("D in [64, 128, 256]", "D == Dv else HEAD_DIMS_DIFFER"),
        contiguous=True,
        last_stride1=True,
        alignment=LOAD_BYTES,
        workspace_bytes=planned_bytes,
        compile_key=_module,
        compile=lambda request: _build(op, run, request),
        on_disk=functools.partial(_on_disk, template),
        **own,
    )


def _kernels(template: str) -> tuple[Kernel, ...]:
    of_roof, decode = _OF_ROOF[template], 0.98 if template == "fa2" else 0.6
    return (
        _kernel(
            "attention", template, _dense, efficiency=(of_roof, 0.6, 45.0), measured=_PREFILL,
            features=_FEATURES, layouts="BSHD", tiling=_TILES if template == "fa3" else None,
        ),
        _kernel(
            "ragged_attention", template, _ragged, efficiency=(of_roof, 0.6, 150.0), measured=_PREFILL,
            features=_FEATURES,
        ),
        _kernel(
            "paged_attention", template, _paged, efficiency=(of_roof, decode, 150.0), measured=_DECODES,
            features=f"{_FEATURES} prefill", layouts="NHD HND",
        ),
    )  # fmt: skip


KERNELS: tuple[Kernel, ...] = tuple(kernel for template in TEMPLATES for kernel in _kernels(template))

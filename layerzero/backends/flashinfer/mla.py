"""Multi-head latent attention over pages, for the widths of DeepSeek's models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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
from layerzero.ops.attention.adapters import Result, takes
from layerzero.ops.attention.arguments import MlaArgs
from layerzero.ops.rehearsal import dummy_run
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel


def _latent(backend: str) -> Callable[..., Any]:
    from layerzero.backends.flashinfer import planning

    library = module("flashinfer.mla")
    metadata = library.MLAPlanMetadata
    make = functools.partial(library.BatchMLAPagedAttentionWrapper, backend=backend)

    @takes(MlaArgs)
    def mla_attention(call: MlaArgs) -> Result:
        """Absorbed queries against latent pages; compressed keys and rotary keys stay two pools."""
        q_nope, q_pe, ckv_cache, kpe_cache, block_tables, seq_lens, cu_seqlens_q = call[:7]
        is_causal, scale, return_lse = call.is_causal, call.scale, call.return_lse
        heads, size = q_nope.shape[1], ckv_cache.shape[1]
        widths = (ckv_cache.shape[2], kpe_cache.shape[2])
        flags = (heads, widths, size, q_nope.dtype, ckv_cache.dtype, is_causal, scale, return_lse)

        def plan(wrapper: Any) -> None:
            pages = planning.CompressedBlockTables.of(block_tables, seq_lens, size)
            starts = planning.query_starts(cu_seqlens_q, block_tables.shape[0])
            wrapper.plan(
                metadata=metadata.csr(
                    qo_indptr=starts, kv_indptr=pages.starts, kv_indices=pages.ids, kv_len_arr=pages.lengths
                ),
                num_heads=heads, head_dim_ckv=widths[0], head_dim_kpe=widths[1], page_size=size,
                causal=is_causal, sm_scale=scale, q_data_type=q_nope.dtype, kv_data_type=ckv_cache.dtype,
                query_layout="split", kv_cache_layout="split", lse_mode="basee" if return_lse else "none",
            )  # fmt: skip

        def launch(wrapper: Any) -> Any:
            operands = {"query": (q_nope, q_pe), "kv_cache": (ckv_cache, kpe_cache)}
            if return_lse:
                return wrapper.run(**operands, return_lse=True, return_lse_base_on_e=True)
            return wrapper.run(**operands)

        lengths = planning.PlanKey.of(flags, block_tables, seq_lens, cu_seqlens_q)
        out = planning.stream_workspaces(q_nope.device).run(("latent", backend), lengths, make, plan, launch)
        return tuple(out) if return_lse else out

    return mla_attention


def _on_disk(template: str, request: CallSpec) -> bool:
    """Whether the module was compiled; its name is FlashInfer's (0.7, modules.py: get_batch_mla_uri)."""
    dtype = {"float16": "f16", "bfloat16": "bf16"}[request.dtype]
    name = (
        f"batch_mla_attention_dtype_q_{dtype}_dtype_kv_{dtype}_dtype_o_{dtype}_dtype_idx_i32_"
        f"head_dim_ckv_512_head_dim_kpe_64_profiler_False_planabi2{'_sm90' if template == 'fa3' else ''}"
    )
    return modules_on_disk([name])


def _kernel(template: str) -> Kernel:
    run = functools.cache(functools.partial(_latent, template))
    return kernel(
        f"flashinfer.mla_attention.{template}",
        run,
        (0.4, 0.6, 150.0),
        ESTIMATE.format("as paged attention"),
        source=SOURCE.format(f"BatchMLAPagedAttentionWrapper, backend {template}"),
        **TEMPLATES[template],
        features="causal prefill lse",
        limits=("C in [512]", "R in [64]"),
        contiguous=True,
        alignment=LOAD_BYTES,
        workspace_bytes=planned_bytes,
        compile_key=lambda request: request.dtype,
        compile=lambda request: dummy_run(run(), request),
        on_disk=functools.partial(_on_disk, template),
    )


KERNELS: tuple[Kernel, ...] = tuple(map(_kernel, TEMPLATES))

"""Attention of SGLang's decode steps by the kernel that is chosen here: its backend `layerzero`.

A decode step goes to the kernel of `paged_attention` that is chosen for its shape, as `engine_pages` says.
Everything else (prompts, drafts, windows, caps, sinks, quantized keys, latent and cross attention) stays with
SGLang's FlashAttention, from which this backend inherits pages, metadata, capture and limits; `why_not` says
why, and the event `engine.own_attention` is logged once a reason, and each such call counted
(`own_attention`).

Not run on a card. Source: sglang 0.5.23, srt/layers/attention/{base_attn,flashattention}_backend.py.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec
from torch import Tensor

from layerzero.integrations import engine_pages


class ChosenSGLangBackend(FlashAttentionBackend):  # type: ignore[misc]
    """FlashAttention's pages and limits; decode steps by a chosen kernel."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._unfit = self._why_never()

    def _why_never(self) -> str:
        """Why no batch of this model is ours; empty where decode steps may be."""
        features = {
            "a latent cache": self.use_mla,
            "an encoder": self.is_encoder_decoder,
            "attention in chunks": self.local_attn_builder is not None,
            "a window that spares prompts": self.is_prefill_aware_swa,
            "pages spread over ranks": self._kv_shard_pool is not None,
            "determinism, which SGLang promises": get_exec().deterministic.enable_deterministic_inference,
        }
        return next((name for name, is_asked in features.items() if is_asked), "")

    def why_not(self, query: Tensor, layer: Any, batch: Any, options: dict[str, Any]) -> str:
        """Why a call stays with SGLang's own kernel; empty where ours is taken. `options` is by argument."""
        features = {
            f"attention of kind {layer.attn_type.value}": layer.attn_type is not AttentionType.DECODER,
            "cross attention": layer.is_cross_attention,
            "a sliding window": layer.sliding_window_size > -1,
            "a soft cap": bool(layer.logit_cap),
            "values of another width": layer.v_head_dim != layer.qk_head_dim,
            f"keys in {self.kv_cache_dtype}": self.kv_cache_dtype != query.dtype,
            "drafts": batch.spec_info is not None,
            "sequences with several queries": self._rows(query, layer) != len(self._lengths()),
        }
        features |= {name: value is not None and value is not False for name, value in options.items()}
        return self._unfit or next((name for name, is_asked in features.items() if is_asked), "")

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Any:
        """SGLang's call of a layer: q (B, Hq * D), k and v (B, Hk, D) go to the pool first; (B, Hq * D)."""
        reason = self.why_not(q, layer, forward_batch, options)
        if reason:
            engine_pages.leave("sglang", reason, q)
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **options)
        if k is not None and save_kv_cache:
            place = KVWriteLoc.for_layer(
                forward_batch, layer, swa_loc=self.forward_metadata.swa_out_cache_loc
            )
            self.token_to_kv_pool.set_kv_buffer(layer, place, k, v, layer.k_scale, layer.v_scale)
        k_cache, v_cache = self.get_paged_mha_kv_cache(layer)
        mixed = engine_pages.attend(
            "sglang", q.reshape(-1, layer.tp_q_head_num, layer.head_dim), k_cache, v_cache,
            self.forward_metadata.page_table, self._lengths(), layer.scaling,
        )  # fmt: skip
        memory = getattr(forward_batch, "_attn_output", None)
        if memory is not None:  # SGLang's own memory for it
            mixed = memory.view_as(mixed).copy_(mixed)
        return mixed.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _lengths(self) -> Tensor:
        lengths: Tensor = self.forward_metadata.cache_seqlens_int32
        return lengths

    @staticmethod
    def _rows(query: Tensor, layer: Any) -> int:
        width: int = layer.tp_q_head_num * layer.head_dim
        return query.numel() // width

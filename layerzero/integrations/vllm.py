"""Attention of vLLM's decode steps by the kernel that is chosen here: vLLM's backend `CUSTOM`.

Installed beside vLLM, `register` is found by it (entry point `vllm.general_plugins`), and
`--attention-backend CUSTOM` takes it. A batch in which every sequence has one query goes to the kernel of
`paged_attention` that is chosen for its shape; it is chosen before vLLM captures the shape, among kernels
that a graph may hold. Everything else (prompts, windows, sinks, quantized keys) stays with vLLM's
FlashAttention, from which this backend inherits pages, metadata and limits; `why_not` says why, and the
event `engine.own_attention` is logged once a reason, and each such call is counted (`own_attention`).

Source: vllm 0.26.0, v1/attention/backend.py and backends/{flash_attn,registry}.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from layerzero.integrations import engine_pages


def register() -> None:
    """Name this backend to vLLM as `CUSTOM`, unless that name is taken; called in each of its processes."""
    if AttentionBackendEnum.CUSTOM.is_overridden():
        return
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{ChosenBackend.__name__}")


class ChosenBackend(FlashAttentionBackend):  # type: ignore[misc]
    """FlashAttention's pages and limits; decode steps by a chosen kernel."""

    @staticmethod
    def get_name() -> str:
        """vLLM's name of a backend that is not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[ChosenImpl]:
        """What computes a layer."""
        return ChosenImpl

    @staticmethod
    def get_builder_cls() -> type[ChosenBuilder]:
        """What describes a batch."""
        return ChosenBuilder


class ChosenBuilder(FlashAttentionMetadataBuilder):  # type: ignore[misc]
    """FlashAttention's metadata. A graph of decode steps holds our kernel: no other batch may replay it."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class ChosenImpl(FlashAttentionImpl):  # type: ignore[misc]
    """One layer's attention over vLLM's pages."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._unfit = self._why_never()

    def _why_never(self) -> str:
        """Why no batch of this layer is ours; empty where decode steps may be."""
        features = {
            "alibi slopes": self.alibi_slopes is not None,
            "attention sinks": self.sinks is not None,
            "a soft cap": bool(self.logits_soft_cap),
            "a sliding window": self.sliding_window != (-1, -1),
            f"attention of kind {self.attn_type}": self.attn_type != AttentionType.DECODER,
            f"keys in {self.kv_cache_dtype}": self.kv_cache_dtype not in ("auto", "float16", "bfloat16"),
            "context parallel decoding": self.dcp_world_size > 1,
            "batch invariance, which vLLM promises": self.batch_invariant_enabled,
        }
        return next((name for name, is_asked in features.items() if is_asked), "")

    def why_not(self, metadata: Any) -> str:
        """Why a batch stays with vLLM's own kernel; empty where ours is taken."""
        if self._unfit:
            return self._unfit
        if metadata.max_query_len != 1 or metadata.seq_lens.shape[0] != metadata.num_actual_tokens:
            return "sequences with several queries"
        if metadata.use_cascade:
            return "a common prefix computed once"
        if metadata.causal is not True or metadata.mm_prefix_range_tensor is not None:
            return "a mask other than causal"
        return "a window of its own" if metadata.rswa_prefix_lens is not None else ""

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """vLLM's call of a layer: query (T, Hq, D), kv_cache (N, Hk, P, 2D), output (T, Hq, D) is written."""
        reason = "a run that only sizes memory" if attn_metadata is None else self.why_not(attn_metadata)
        if output_scale is not None or output_block_scale is not None:
            reason = "a quantized output"
        if attn_metadata is None or reason:
            engine_pages.leave("vllm", reason, query, counted=attn_metadata is not None)
            output_of_vllm: Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return output_of_vllm
        count = attn_metadata.num_actual_tokens
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        mixed = engine_pages.attend(
            "vllm", query[:count], k_cache, v_cache, attn_metadata.block_table, attn_metadata.seq_lens,
            self.scale,
        )  # fmt: skip
        output[:count].copy_(mixed.view_as(output[:count]))
        return output

"""The arguments of the attention ops by name, for kernels and checks: `AttentionArgs._make(args)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Window = tuple[int, int] | None


class AttentionArgs(NamedTuple):
    """What kernels of `attention` take."""

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    window: Window = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    layout: str = "BHSD"
    return_lse: bool = False
    combine_mask: bool = False
    rows_nonempty: bool = False
    sinks: Tensor | None = None
    score_mod: ScoreMod | None = None
    block_mask: Any = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class RaggedArgs(NamedTuple):
    """What kernels of `ragged_attention` take."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    is_causal: bool = False
    scale: float | None = None
    window: Window = None
    softcap: float | None = None
    return_lse: bool = False
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class PagedArgs(NamedTuple):
    """What kernels of `paged_attention` take."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None = None
    is_causal: bool = True
    scale: float | None = None
    window: Window = None
    softcap: float | None = None
    layout: str = "NHD"
    return_lse: bool = False
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class AppendArgs(NamedTuple):
    """What kernels of `append_kv` take."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_mapping: Tensor
    layout: str = "NHD"
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class MlaArgs(NamedTuple):
    """What kernels of `mla_attention` take."""

    q_nope: Tensor
    q_pe: Tensor
    ckv_cache: Tensor
    kpe_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    scale: float
    is_causal: bool = True
    return_lse: bool = False
    ckv_scale: Tensor | None = None
    kpe_scale: Tensor | None = None

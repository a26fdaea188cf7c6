"""The ops, blocking: same names and signatures as the awaitable ones in `layerzero`.

Written by scripts/make_stubs.py; do not edit.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from torch import Tensor

def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-05,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Add `residual` to `x` and normalise the sum to mean 0 and variance 1; both are returned."""

def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-06,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Add `residual` to `x` and normalise the sum; both are returned."""

def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-06,
    format: str = "fp8_e4m3",
    granularity: str = "row",
    group_size: int = 0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add `residual` to `x`, normalise the sum and round it to eight-bit codes."""

def alibi(
    slopes: Tensor,
    q_len: int,
    k_len: int,
    *,
    backend: str | None = None,
) -> Tensor:
    """The bias that `slopes` put on the scores of `q_len` queries and `k_len` keys."""

def append_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    layout: str = "NHD",
    backend: str | None = None,
) -> Tensor:
    """Write new tokens' keys and values, of any number of sequences, into their places in a pool of pages."""

@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    layout: str | None = "BHSD",
    return_lse: Literal[False] = False,
    combine_mask: bool = False,
    rows_nonempty: bool = False,
    sinks: Tensor | None = None,
    score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    block_mask: Any = None,
    backend: str | None = None,
) -> Tensor:
    """Attend `q` to `k` and `v`: softmax(scale * q k^T + bias) v."""

@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    layout: str | None = "BHSD",
    return_lse: Literal[True],
    combine_mask: bool = False,
    rows_nonempty: bool = False,
    sinks: Tensor | None = None,
    score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    block_mask: Any = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    layout: str | None = "BHSD",
    return_lse: bool = False,
    combine_mask: bool = False,
    rows_nonempty: bool = False,
    sinks: Tensor | None = None,
    score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    block_mask: Any = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """The negative log likelihood of each row's target class."""

def dequantize(
    codes: Tensor,
    scale: Tensor,
    *,
    dtype: str = "float32",
    backend: str | None = None,
) -> Tensor:
    """Give back the numbers that `codes` and `scale` stand for."""

def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    padding_idx: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """The row of `weight` for each id."""

def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-05,
    backend: str | None = None,
) -> Tensor:
    """Shift and scale each row of `x` to mean 0 and variance 1, times `weight`, plus `bias`."""

def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Multiply each row of `x` by `weight` transposed and add `bias`."""

def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
) -> Tensor:
    """The negative log likelihood of each row's target class, from the rows before the last projection."""

@overload
def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_pages: Tensor,
    kpe_pages: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float,
    is_causal: bool = True,
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Tensor:
    """Attend absorbed queries to the latent vectors that all heads share: softmax(scale * s) ckv."""

@overload
def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_pages: Tensor,
    kpe_pages: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float,
    is_causal: bool = True,
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_pages: Tensor,
    kpe_pages: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    scale: float,
    is_causal: bool = True,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def mlp(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: str = "swiglu",
    backend: str | None = None,
) -> Tensor:
    """Project each row of `x` up to F, apply `activation`, project down again."""

def moe(
    x: Tensor,
    router_logits: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    top_k: int = 2,
    scoring: str = "softmax",
    renormalize: bool = True,
    activation: str = "swiglu",
    backend: str | None = None,
) -> Tensor:
    """Send each row of `x` to its `top_k` experts and add their answers, weighed by the router."""

@overload
def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    layout: str = "NHD",
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Tensor:
    """Attend the queries of several sequences to their keys and values in a shared pool of pages."""

@overload
def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    layout: str = "NHD",
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    layout: str = "NHD",
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def quantize(
    x: Tensor,
    *,
    format: str = "int8",
    granularity: str = "row",
    group_size: int = 0,
    scale: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Round `x` to eight-bit codes and the scales that give it back."""

def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    inputs: str = "float",
    backend: str | None = None,
) -> Tensor:
    """Multiply each row of `x` by an eight-bit `weight` transposed and add `bias`."""

@overload
def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
) -> Tensor:
    """Attend each sequence's queries to its own keys and values, without padding."""

@overload
def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    return_lse: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-06,
    backend: str | None = None,
) -> Tensor:
    """Scale each row of `x` to unit root mean square, times `weight`."""

def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    xpos_scale: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn the first R features of each head by the angles of the token's position."""

def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
    backend: str | None = None,
) -> Tensor:
    """Draw one token a row, after temperature, top-k and top-p."""

def sample_topk(
    logits: Tensor,
    k: int | Tensor,
    *,
    temperature: float | Tensor = 1.0,
    seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
    backend: str | None = None,
) -> Tensor:
    """Draw one token a row among its `k` largest logits: `sample` with top_k=k of at least 1."""

def sample_topp(
    logits: Tensor,
    p: float | Tensor,
    *,
    temperature: float | Tensor = 1.0,
    seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
    backend: str | None = None,
) -> Tensor:
    """Draw one token a row among the fewest whose probability reaches `p`: `sample` with top_p=p."""

def verify_chain(
    draft_probs: Tensor,
    draft_tokens: Tensor,
    target_probs: Tensor,
    *,
    seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Keep the drafted tokens that the target agrees with, and draw the one after them."""

def verify_tree(
    draft_probs: Tensor,
    draft_tokens: Tensor,
    target_probs: Tensor,
    parents: Sequence[int],
    *,
    seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk a tree of drafted tokens as far as the target agrees, and draw the token after it."""

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "add_rms_norm_quantize",
    "alibi",
    "append_kv",
    "attention",
    "cross_entropy",
    "dequantize",
    "embedding",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "mla_attention",
    "mlp",
    "moe",
    "paged_attention",
    "quantize",
    "quantized_linear",
    "ragged_attention",
    "rms_norm",
    "rope",
    "sample",
    "sample_topk",
    "sample_topp",
    "verify_chain",
    "verify_tree",
]

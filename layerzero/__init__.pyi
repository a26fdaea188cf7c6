"""Choose, explain and run the fastest healthy kernel for an operation, and batch awaited calls.

Written by scripts/make_stubs.py; do not edit.
"""
# ruff: noqa: ASYNC109

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from torch import Tensor

from layerzero import speculative as speculative
from layerzero import sync as sync
from layerzero.api.batched import batched as batched
from layerzero.api.binding import bind as bind
from layerzero.api.calls import last_selection as last_selection
from layerzero.api.configuration import add_policy as add_policy
from layerzero.api.configuration import configure as configure
from layerzero.api.configuration import disabled as disabled
from layerzero.api.configuration import get_config as get_config
from layerzero.api.configuration import get_locks as get_locks
from layerzero.api.configuration import load_config as load_config
from layerzero.api.configuration import load_policy as load_policy
from layerzero.api.configuration import lock as lock
from layerzero.api.configuration import prefer as prefer
from layerzero.api.configuration import reset_policy as reset_policy
from layerzero.api.configuration import unlock as unlock
from layerzero.api.graphs import compile as compile
from layerzero.api.graphs import is_graph_safe as is_graph_safe
from layerzero.api.graphs import rehearse_capture as rehearse_capture
from layerzero.api.graphs import validate_graph_capture as validate_graph_capture
from layerzero.api.host import to_host as to_host
from layerzero.api.inspection import dry_run as dry_run
from layerzero.api.inspection import explain as explain
from layerzero.api.inspection import list_kernels as list_kernels
from layerzero.api.inspection import select as select
from layerzero.api.inspection import select_batch as select_batch
from layerzero.api.inspection import validate as validate
from layerzero.api.inspection import which as which
from layerzero.api.start import start as start
from layerzero.api.tokenizing import detokenize as detokenize
from layerzero.api.tokenizing import tokenize as tokenize
from layerzero.api.tuning import TuneReport as TuneReport
from layerzero.api.tuning import record as record
from layerzero.api.tuning import solve as solve
from layerzero.api.tuning import tune as tune
from layerzero.api.tuning import tune_blocking as tune_blocking
from layerzero.api.warming import readiness_check as readiness_check
from layerzero.api.warming import warmup as warmup
from layerzero.api.warming import warmup_blocking as warmup_blocking
from layerzero.backends.hub import Hub as Hub
from layerzero.backends.hub import hub_kernel as hub_kernel
from layerzero.backends.triton_kernels.own import TritonLaunch as TritonLaunch
from layerzero.backends.triton_kernels.own import triton_kernel as triton_kernel
from layerzero.doctor import doctor as doctor
from layerzero.errors import BackendNotAvailableError as BackendNotAvailableError
from layerzero.errors import CacheCorruptionError as CacheCorruptionError
from layerzero.errors import ConfigurationError as ConfigurationError
from layerzero.errors import ConsistencyError as ConsistencyError
from layerzero.errors import CudaGraphUnsafeError as CudaGraphUnsafeError
from layerzero.errors import DeadlineExceededError as DeadlineExceededError
from layerzero.errors import DeviceLostError as DeviceLostError
from layerzero.errors import KernelExecutionError as KernelExecutionError
from layerzero.errors import LayerZeroError as LayerZeroError
from layerzero.errors import ModeChangedError as ModeChangedError
from layerzero.errors import NoKernelAvailableError as NoKernelAvailableError
from layerzero.errors import NoKernelFoundError as NoKernelFoundError
from layerzero.errors import Overloaded as Overloaded
from layerzero.errors import PolicyLoadError as PolicyLoadError
from layerzero.errors import PolicyValidationError as PolicyValidationError
from layerzero.errors import RuntimeClosedError as RuntimeClosedError
from layerzero.errors import SelectionTimeoutError as SelectionTimeoutError
from layerzero.hardware import Hardware as Hardware
from layerzero.integrations import patch as patch
from layerzero.integrations import unpatch as unpatch
from layerzero.kernel import Capability as Capability
from layerzero.kernel import Efficiency as Efficiency
from layerzero.kernel import Kernel as Kernel
from layerzero.ops.alibi import alibi_slopes as alibi_slopes
from layerzero.ops.rope_scaling import NTK as NTK
from layerzero.ops.rope_scaling import DynamicNTK as DynamicNTK
from layerzero.ops.rope_scaling import Linear as Linear
from layerzero.ops.rope_scaling import Llama3 as Llama3
from layerzero.ops.rope_scaling import Yarn as Yarn
from layerzero.ops.rope_scaling import rope_tables as rope_tables
from layerzero.ops.rope_scaling import xpos_table as xpos_table
from layerzero.ops.verify import tree_mask as tree_mask
from layerzero.reasons import Reason as Reason
from layerzero.reasons import Rejected as Rejected
from layerzero.runtime import Runtime as Runtime
from layerzero.selection.record import Accepted as Accepted
from layerzero.selection.record import Selection as Selection
from layerzero.settings import Settings as Settings
from layerzero.tokenization.tokenizer import Tokenizer as Tokenizer
from layerzero.tokenization.tokenizer import Tokens as Tokens
from layerzero.warmup.manifest import Manifest as Manifest

__version__: str

async def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-05,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Add `residual` to `x` and normalise the sum to mean 0 and variance 1; both are returned."""

async def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-06,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Add `residual` to `x` and normalise the sum; both are returned."""

async def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-06,
    format: str = "fp8_e4m3",
    granularity: str = "row",
    group_size: int = 0,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add `residual` to `x`, normalise the sum and round it to eight-bit codes."""

async def alibi(
    slopes: Tensor,
    q_len: int,
    k_len: int,
    *,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """The bias that `slopes` put on the scores of `q_len` queries and `k_len` keys."""

async def append_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    layout: str = "NHD",
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Write new tokens' keys and values, of any number of sequences, into their places in a pool of pages."""

@overload
async def attention(
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
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Attend `q` to `k` and `v`: softmax(scale * q k^T + bias) v."""

@overload
async def attention(
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
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
async def attention(
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
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
async def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """The negative log likelihood of each row's target class."""

async def dequantize(
    codes: Tensor,
    scale: Tensor,
    *,
    dtype: str = "float32",
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Give back the numbers that `codes` and `scale` stand for."""

async def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    padding_idx: int | None = None,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """The row of `weight` for each id."""

async def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-05,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Shift and scale each row of `x` to mean 0 and variance 1, times `weight`, plus `bias`."""

async def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Multiply each row of `x` by `weight` transposed and add `bias`."""

async def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """The negative log likelihood of each row's target class, from the rows before the last projection."""

@overload
async def mla_attention(
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
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Attend absorbed queries to the latent vectors that all heads share: softmax(scale * s) ckv."""

@overload
async def mla_attention(
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
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
async def mla_attention(
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
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
async def mlp(
    x: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    activation: str = "swiglu",
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Project each row of `x` up to F, apply `activation`, project down again."""

async def moe(
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
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Send each row of `x` to its `top_k` experts and add their answers, weighed by the router."""

@overload
async def paged_attention(
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
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Attend the queries of several sequences to their keys and values in a shared pool of pages."""

@overload
async def paged_attention(
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
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
async def paged_attention(
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
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
async def quantize(
    x: Tensor,
    *,
    format: str = "int8",
    granularity: str = "row",
    group_size: int = 0,
    scale: Tensor | None = None,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Round `x` to eight-bit codes and the scales that give it back."""

async def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    inputs: str = "float",
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Multiply each row of `x` by an eight-bit `weight` transposed and add `bias`."""

@overload
async def ragged_attention(
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
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Attend each sequence's queries to its own keys and values, without padding."""

@overload
async def ragged_attention(
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
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
async def ragged_attention(
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
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
async def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-06,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Scale each row of `x` to unit root mean square, times `weight`."""

async def rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    xpos_scale: Tensor | None = None,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn the first R features of each head by the angles of the token's position."""

async def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Draw one token a row, after temperature, top-k and top-p."""

async def sample_topk(
    logits: Tensor,
    k: int | Tensor,
    *,
    temperature: float | Tensor = 1.0,
    seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Draw one token a row among its `k` largest logits: `sample` with top_k=k of at least 1."""

async def sample_topp(
    logits: Tensor,
    p: float | Tensor,
    *,
    temperature: float | Tensor = 1.0,
    seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Draw one token a row among the fewest whose probability reaches `p`: `sample` with top_p=p."""

async def verify_chain(
    draft_probs: Tensor,
    draft_tokens: Tensor,
    target_probs: Tensor,
    *,
    seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Keep the drafted tokens that the target agrees with, and draw the one after them."""

async def verify_tree(
    draft_probs: Tensor,
    draft_tokens: Tensor,
    target_probs: Tensor,
    parents: Sequence[int],
    *,
    seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk a tree of drafted tokens as far as the target agrees, and draw the token after it."""

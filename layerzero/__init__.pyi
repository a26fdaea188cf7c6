"""Choose, explain and run the fastest healthy kernel for an operation, and batch awaited calls.

Written by scripts/make_stubs.py; do not edit.
"""
# ruff: noqa: ASYNC109, E501
# fmt: off

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from torch import Tensor

from layerzero import kvcache as kvcache
from layerzero import parallel as parallel
from layerzero import speculative as speculative
from layerzero import sync as sync
from layerzero.actors.group.cluster import remote_rank_group as remote_rank_group
from layerzero.actors.group.join import rank_group as rank_group
from layerzero.api import metrics as metrics
from layerzero.api.config import add_policy as add_policy
from layerzero.api.config import configure as configure
from layerzero.api.config import disable as disable
from layerzero.api.config import get_config as get_config
from layerzero.api.config import get_locks as get_locks
from layerzero.api.config import load_config as load_config
from layerzero.api.config import load_policy as load_policy
from layerzero.api.config import lock as lock
from layerzero.api.config import prefer as prefer
from layerzero.api.config import reset_policy as reset_policy
from layerzero.api.config import unlock as unlock
from layerzero.api.doctor import doctor as doctor
from layerzero.api.graphs import compile as compile
from layerzero.api.graphs import is_graph_safe as is_graph_safe
from layerzero.api.graphs import rehearse_capture as rehearse_capture
from layerzero.api.graphs import validate_graph_capture as validate_graph_capture
from layerzero.api.inspect import dry_run as dry_run
from layerzero.api.inspect import explain as explain
from layerzero.api.inspect import list_kernels as list_kernels
from layerzero.api.inspect import select as select
from layerzero.api.inspect import select_batch as select_batch
from layerzero.api.inspect import validate as validate
from layerzero.api.inspect import which as which
from layerzero.api.readback import run_ahead as run_ahead
from layerzero.api.readback import to_host as to_host
from layerzero.api.solve import solve as solve
from layerzero.api.start import start as start
from layerzero.api.step_runner import StepRunner as StepRunner
from layerzero.api.timeline import timeline as timeline
from layerzero.api.tune import record as record
from layerzero.api.tune import tune as tune
from layerzero.api.tune import tune_blocking as tune_blocking
from layerzero.api.warmup import load_bundle as load_bundle
from layerzero.api.warmup import readiness_check as readiness_check
from layerzero.api.warmup import save_bundle as save_bundle
from layerzero.api.warmup import warmup as warmup
from layerzero.api.warmup import warmup_blocking as warmup_blocking
from layerzero.backends.hub import Hub as Hub
from layerzero.backends.hub import hub_kernel as hub_kernel
from layerzero.backends.triton_kernels.user_kernel import TritonLaunch as TritonLaunch
from layerzero.backends.triton_kernels.user_kernel import triton_kernel as triton_kernel
from layerzero.calls.batched import batched as batched
from layerzero.calls.blocking import last_selection as last_selection
from layerzero.calls.bound import BoundOp
from layerzero.calls.compile_choice import compile_choice as compile_choice
from layerzero.calls.inlining import CompiledChoice as CompiledChoice
from layerzero.checkpoints import QuantizedCheckpoint as QuantizedCheckpoint
from layerzero.checkpoints import load_quantized as load_quantized
from layerzero.formats.errors import FormatError as FormatError
from layerzero.formats.quantized_tensor import QuantizedTensor as QuantizedTensor
from layerzero.integrations import patch as patch
from layerzero.integrations import patch_table as patch_table
from layerzero.integrations import unpatch as unpatch
from layerzero.integrations.loading import patch_on_load as patch_on_load
from layerzero.measure.tuning import TuneReport as TuneReport
from layerzero.ops.attention.alibi import alibi_slopes as alibi_slopes
from layerzero.ops.rope.scaling import DynamicNTKScaling as DynamicNTKScaling
from layerzero.ops.rope.scaling import LinearScaling as LinearScaling
from layerzero.ops.rope.scaling import Llama3Scaling as Llama3Scaling
from layerzero.ops.rope.scaling import NTKScaling as NTKScaling
from layerzero.ops.rope.scaling import YarnScaling as YarnScaling
from layerzero.ops.rope.scaling import rope_tables as rope_tables
from layerzero.ops.rope.scaling import xpos_table as xpos_table
from layerzero.ops.sampling.logits import adjust_logits as adjust_logits
from layerzero.ops.sampling.logits import token_logprobs as token_logprobs
from layerzero.ops.sampling.verify import tree_mask as tree_mask
from layerzero.planner.block import Block as Block
from layerzero.planner.block import BlockOp as BlockOp
from layerzero.planner.block import Edge as Edge
from layerzero.planner.plan import load_plan as load_plan
from layerzero.planner.plan import plan as plan
from layerzero.planner.planned import PlannedBlock as PlannedBlock
from layerzero.planner.record import PlanRecord as PlanRecord
from layerzero.runtime import Runtime as Runtime
from layerzero.selection.record import Accepted as Accepted
from layerzero.selection.record import Selection as Selection
from layerzero.spec.capability import Capability as Capability
from layerzero.spec.errors import BackendNotAvailableError as BackendNotAvailableError
from layerzero.spec.errors import BlockError as BlockError
from layerzero.spec.errors import BundleRefusedError as BundleRefusedError
from layerzero.spec.errors import CacheCorruptionError as CacheCorruptionError
from layerzero.spec.errors import ChatTemplateError as ChatTemplateError
from layerzero.spec.errors import ConfigurationError as ConfigurationError
from layerzero.spec.errors import ConsistencyError as ConsistencyError
from layerzero.spec.errors import CudaGraphUnsafeError as CudaGraphUnsafeError
from layerzero.spec.errors import DeadlineExceededError as DeadlineExceededError
from layerzero.spec.errors import DeviceLostError as DeviceLostError
from layerzero.spec.errors import FileRefusedError as FileRefusedError
from layerzero.spec.errors import GrammarLimitError as GrammarLimitError
from layerzero.spec.errors import KernelExecutionError as KernelExecutionError
from layerzero.spec.errors import KernelStillLoadingError as KernelStillLoadingError
from layerzero.spec.errors import LayerZeroError as LayerZeroError
from layerzero.spec.errors import ModeChangedError as ModeChangedError
from layerzero.spec.errors import NoKernelAvailableError as NoKernelAvailableError
from layerzero.spec.errors import NoKernelFoundError as NoKernelFoundError
from layerzero.spec.errors import OverloadedError as OverloadedError
from layerzero.spec.errors import PlanRefusedError as PlanRefusedError
from layerzero.spec.errors import PolicyLoadError as PolicyLoadError
from layerzero.spec.errors import PolicyValidationError as PolicyValidationError
from layerzero.spec.errors import RuntimeClosedError as RuntimeClosedError
from layerzero.spec.errors import SelectionTimeoutError as SelectionTimeoutError
from layerzero.spec.errors import TokenizerMismatchError as TokenizerMismatchError
from layerzero.spec.errors import UnknownOpError as UnknownOpError
from layerzero.spec.hardware import Hardware as Hardware
from layerzero.spec.kernel import Efficiency as Efficiency
from layerzero.spec.kernel import Kernel as Kernel
from layerzero.spec.reasons import Reason as Reason
from layerzero.spec.reasons import Rejected as Rejected
from layerzero.spec.settings import Settings as Settings
from layerzero.tokenization.detokenizer import IncrementalDetokenizer as IncrementalDetokenizer
from layerzero.tokenization.prompts import PromptCache as PromptCache
from layerzero.tokenization.templates import ChatTemplate as ChatTemplate
from layerzero.tokenization.tokenize import detokenize as detokenize
from layerzero.tokenization.tokenize import tokenize as tokenize
from layerzero.tokenization.tokenize import tokenize_chat as tokenize_chat
from layerzero.tokenization.tokenizer import Tokenizer as Tokenizer
from layerzero.tokenization.tokens import Padded as Padded
from layerzero.tokenization.tokens import Tokens as Tokens
from layerzero.warmup.manifest import Manifest as Manifest

__version__: str

@overload
def bind(op: Literal["add_layer_norm", "add_rms_norm", "quantize", "rope", "select_experts", "verify_chain"], /, *example: object, guard: bool = True, backend: str | None = None, **fixed: object) -> BoundOp[tuple[Tensor, Tensor]]:
    """Resolve `op` for tensors like `example` and return a callable that takes such tensors.

    The positional arguments of the example are what each call passes anew; keyword arguments stay fixed.
    The callable always checks the generation: after a policy change, an open circuit or a quarantine it is
    bound again before it runs. With `guard` it also checks shape, strides, dtype, device and
    requires_grad, and plans a call that differs for itself; `guard=False` trusts the caller.
    The callable's `.binding.plan` is what it holds.

    Raises: NoKernelFoundError, ValueError, TypeError: as the call itself would.

    Example:
        >>> import torch, layerzero as lz
        >>> x, weight = torch.ones(2, 8), torch.ones(8)
        >>> with lz.start(scoped=True):
        ...     norm = lz.bind("rms_norm", x, weight)
        ...     norm(x, weight).shape
        torch.Size([2, 8])
    """

@overload
def bind(op: Literal["add_rms_norm_quantize", "verify_tree"], /, *example: object, guard: bool = True, backend: str | None = None, **fixed: object) -> BoundOp[tuple[Tensor, Tensor, Tensor]]: ...
@overload
def bind(op: Literal["alibi", "append_kv", "cross_entropy", "dequantize", "embedding", "fused_experts", "layer_norm", "linear", "linear_cross_entropy", "mlp", "moe", "quantized_linear", "rms_norm", "rms_norm_linear", "rope_append_kv", "sample", "sample_topk", "sample_topp"], /, *example: object, guard: bool = True, backend: str | None = None, **fixed: object) -> BoundOp[Tensor]: ...
@overload
def bind(op: Literal["attention", "mla_attention", "paged_attention", "ragged_attention"], /, *example: object, guard: bool = True, backend: str | None = None, **fixed: object) -> BoundOp[Tensor | tuple[Tensor, Tensor]]: ...
@overload
def bind(op: str, /, *example: object, guard: bool = True, backend: str | None = None, **fixed: object) -> BoundOp[Any]: ...
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
    """Add `residual` to `x` and normalise the sum to mean 0 and variance 1; both are returned.

    Args: x and residual (..., C) of one shape and dtype; weight and bias (C,) or None.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (normed, x + residual), each of x's shape and dtype; the sum that is normalised is the one
        returned, rounded to x's dtype.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1607.06450, with the residual stream of post-norm transformers.
    """

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
    """Add `residual` to `x` and normalise the sum; both are returned.

    Args: x and residual (..., C) of one shape and dtype; weight (C,) or None.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (normed, x + residual), each of x's shape and dtype; the sum that is normalised is the one
        returned, rounded to x's dtype, so that fused and separate kernels agree.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1910.07467, with the residual stream of pre-norm transformers.
    """

async def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-06,
    format: Literal["int8", "fp8_e4m3", "fp8_e5m2"] = "fp8_e4m3",
    granularity: Literal["row", "group"] = "row",
    group_size: int = 0,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add `residual` to `x`, normalise the sum and round it to eight-bit codes.

    Args: x and residual (..., C) of one shape and dtype; weight (C,) or None; format is int8, fp8_e4m3 or
        fp8_e5m2; granularity is row, or group of group_size neighbours of a row, which divides C.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (codes, scale, x + residual): codes in x's shape; scale float32 of shape (..., 1) or
        (..., C / group_size), the largest magnitude of what shares it over the format's largest; the sum in
        x's dtype, which is what is normalised. Codes may differ by one between kernels, since the norm that
        is rounded is in float32 and sums in any order.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1910.07467 and 2208.07339.
    """

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
    """The bias that `slopes` put on the scores of `q_len` queries and `k_len` keys.

    Args: slopes (H,), any float dtype. The last query is at the last key, as in causal attention.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (H, q_len, k_len) in slopes' dtype: -slope * |distance to the diagonal|.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    """

async def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: Literal["NHD", "HND"] = "NHD",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Write new tokens' keys and values, of any number of sequences, into their places in a pool of pages.

    Args: k (T, Hk, D) and v (T, Hk, Dv), of one dtype. k_cache (N, P, Hk, D) and v_cache (N, P, Hk, Dv), or
        heads before tokens with `layout="HND"`, are changed; a pool of another dtype takes the numbers
        rounded to it. slot_mapping (T,), int32 or int64, is each token's place: page * P + its position in
        the page. A pool of float8_e4m3fn, float8_e5m2 or int8 takes codes: k_scale and v_scale, float32, of
        shape () or (Hk,), are what the numbers are divided by before they are rounded, halves to even, what
        lies beyond the format clamped, NaN to 0; of the pool's shape without its last axis they are changed,
        too: each token's head gets the scale that takes its largest magnitude to the format's.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: `slot_mapping`. Awaited before `paged_attention` over the same pool, it says that the tokens are
    there.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also a slot that the pool
        does not have, or that two tokens share, within a call or across the callers of a batch: nothing of
        theirs is written. FormatError, which is both, with a reason code: codes and scales do not fit, a
        scale is zero, negative or NaN, the pool was written in another format.
        KernelExecutionError: a kernel raised; what it wrote is unknown.
    Source: arXiv 2309.06180, section 4.3; the places are what vLLM and SGLang call slot mapping.
    """

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
    layout: Literal["BHSD", "BSHD"] | None = "BHSD",
    return_lse: Literal[False] = False,
    combine_mask: bool = False,
    rows_nonempty: bool = False,
    sinks: Tensor | None = None,
    score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    block_mask: Any = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Attend `q` to `k` and `v`: softmax(scale * q k^T + bias) v.

    Args: q (B, Hq, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv) with Hq % Hk == 0, or heads behind tokens
        with `layout="BSHD"`; `layout=None` infers it from shapes and strides and raises where both fit.
        attn_mask broadcasts to (B, Hq, Sq, Sk): bool, True attends, or any float dtype, added.
        is_causal is aligned at the last query and the last key; with a mask it needs `combine_mask=True`.
        scale defaults to D**-0.5. window=(left, right) keys around the diagonal, -1 is unbounded, and so are
        2**30 and more. softcap c turns scores s into c * tanh(s / c). alibi_slopes (Hq,) or (B, Hq) subtract
        slope * |distance to the diagonal|. rows_nonempty asserts that the mask leaves each query a key.
        sinks (Hq,) are logits that join each softmax's denominator, and nothing else. score_mod(score, b,
        h, q_idx, kv_idx), as torch's flex_attention takes it, changes scaled and capped scores before ALiBi
        and masks. block_mask is a torch BlockMask of Sq and Sk: what it hides is hidden, a mask beside it
        holds too, and with is_causal it needs `combine_mask=True`.
        q, k and v, or k and v alone, may be codes of one of float8_e4m3fn, float8_e5m2 and int8; q_scale,
        k_scale and v_scale, float32, are what they are multiplied by: () for all, (heads,) for each head, or
        the operand's shape without its last axis for each token's head.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (B, Hq, Sq, Dv) in q's dtype, bfloat16 where q is codes, in q's layout; with return_lse also the
        natural log of the softmax's denominator, float32 (B, Hq, Sq). A query that sees no key gives 0, and
        -inf or its sink.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1706.03762; GQA 2305.13245; ALiBi 2108.12409; sinks 2309.17453, arXiv 2508.10925.
    """

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
    layout: Literal["BHSD", "BSHD"] | None = "BHSD",
    return_lse: Literal[True],
    combine_mask: bool = False,
    rows_nonempty: bool = False,
    sinks: Tensor | None = None,
    score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    block_mask: Any = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
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
    layout: Literal["BHSD", "BSHD"] | None = "BHSD",
    return_lse: bool = False,
    combine_mask: bool = False,
    rows_nonempty: bool = False,
    sinks: Tensor | None = None,
    score_mod: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    block_mask: Any = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
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
    reduction: Literal["mean", "sum", "none"] = "mean",
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """The negative log likelihood of each row's target class.

    Args: logits (..., V), classes last, any float dtype; target (...), int32 or int64 class ids; weight (V,)
        scales each class; rows whose target is ignore_index count nothing; label_smoothing in [0, 1] moves
        that share of the target to all classes alike; reduction is mean, sum or none. The mean divides by
        the weights of the rows that count, so that it is NaN where none counts.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: a scalar, or (...) for reduction="none", in logits' dtype, and float32 under autocast; log
        and sums are float32.
    Raises: ValueError, TypeError: an argument does not fit, by name; class probabilities as target are not
        taken; on the CPU also a target out of range, with its position.
    """

async def dequantize(
    codes: Tensor,
    scale: Tensor,
    *,
    dtype: Literal["float32", "float16", "bfloat16", "float64"] = "float32",
    format: Literal["int8", "fp8_e4m3", "fp8_e5m2", "int4", "nf4", "mxfp4", "mxfp8", "nvfp4"] | None = None,
    zero_point: Tensor | None = None,
    tensor_scale: Tensor | None = None,
    block_size: int = 0,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Give back the numbers that `codes` and `scale` stand for.

    Args: codes (..., C) of int8, float8_e4m3fn or float8_e5m2, or uint8 (..., C / 2) of a packed format;
        scale in a dtype of the format, of shape (), (..., 1), (..., G), each of a row's G scales for C / G
        neighbours, or with block_size b (..., R / b, C / b) rounded up; dtype is the name of the result's;
        format is what the dtype of codes does not say; zero_point uint8 in scale's shape (int4);
        tensor_scale float32 () or one a matrix (nvfp4).
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (codes - zero_point) times scale times tensor_scale, multiplied in float32, (..., C). Numbers
        under a scale that is NaN or infinite, as `quantize` gives it for such numbers, are not finite. On a
        CPU a negative scale is refused, and zero where the format has none (nf4 and nvfp4 have).
    Raises: ValueError, TypeError: an argument does not fit, by name; FormatError has a reason code.
    """

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
    """The row of `weight` for each id.

    Args: ids (...), int32 or int64, each in [0, V); weight (V, C), any float dtype; padding_idx: the row that
        gets no gradient, negative counts from the end.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (..., C) in weight's dtype.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also an id out of range, with
        its position. On other devices the range is the kernel's to check, since reading ids would wait.
    """

async def fused_experts(
    x: Tensor,
    experts: Tensor,
    scores: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    *,
    activation: Literal["swiglu", "geglu", "geglu_tanh", "reglu"] = "swiglu",
    gate: Literal["first", "second"] = "first",
    weighed: Literal["outputs", "inputs"] = "outputs",
    first_expert: int = 0,
    shared: int = 0,
    inputs: Literal["float"] = "float",
    format: str | None = None,
    up_zero_point: Tensor | None = None,
    down_zero_point: Tensor | None = None,
    up_tensor_scale: Tensor | None = None,
    down_tensor_scale: Tensor | None = None,
    block_size: int = 0,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Send each row of `x` to the experts chosen for it and add their answers, weighed by their scores.

    Args: x (..., C), any float dtype; experts (..., T) int32 or int64 and scores (..., T) float, as
        `select_experts` gives them; w_up (E, 2F, C) and w_down (E, C, F) of x's kind without scales, or codes
        with up_scale and down_scale as `quantize` gives them for each expert (E, ...), with zero points,
        tensor scales (E,) or (), format, block_size and inputs as in `quantized_linear`. gate says which F
        rows of an expert's 2F are the gate's; activation is a gated kind of `mlp`; weighed says whether a
        score multiplies the expert's answer or what it gets. The first weight is that of expert
        `first_expert`; experts without a weight here, as -1, add nothing. The last `shared` weights are no
        routed experts: every row goes through each, with weight 1.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: x's shape and dtype; answers are added in float32, in the order of experts' columns.
    Raises: ValueError, TypeError: an argument does not fit, by name; FormatError has a reason code.
    Source: arXiv 2401.04088, section 2.1; shared experts: arXiv 2412.19437, section 2.1.2.
    """

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
    """Shift and scale each row of `x` to mean 0 and variance 1, times `weight`, plus `bias`.

    Args: x (..., C), any float dtype; weight and bias (C,) or None; eps is added to the variance.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: x's shape and dtype; mean and (biased) variance are taken in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1607.06450.
    """

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
    """Multiply each row of `x` by `weight` transposed and add `bias`.

    Args: x (..., K), any float dtype; weight (C, K); bias (C,) or None.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (..., C) in x's dtype; products are summed in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    """

async def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """The negative log likelihood of each row's target class, from the rows before the last projection.

    Args: x (..., K), any float dtype; weight (V, K); target (...), int32 or int64 class ids; bias (V,) or
        None; the others as in `cross_entropy`. A kernel need never hold all logits, (..., V), at once.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: a scalar, or (...) for reduction="none", in x's dtype, and float32 under autocast; log and sums
        are float32.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also a target out of range.
    Source: arXiv 2410.10989, section 3.2.
    """

@overload
async def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    scale: float,
    is_causal: bool = True,
    return_lse: Literal[False] = False,
    ckv_scale: Tensor | None = None,
    kpe_scale: Tensor | None = None,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Attend absorbed queries to the latent vectors that all heads share: softmax(scale * s) ckv.

    s = q_nope . ckv + q_pe . kpe; the caller has multiplied q_nope by the keys' up-projection and multiplies
    the result by the values'.
    Args: q_nope (T, H, C) and q_pe (T, H, R), sequences concatenated along cu_seqlens_q (B + 1,), or one
        query a sequence without it; ckv_cache (N, P, C) and kpe_cache (N, P, R); block_tables (B, M) and
        seq_lens (B,) as in `paged_attention`. scale has no default: it follows from the head size before
        absorption, (128 + 64)**-0.5 for DeepSeek-V3. is_causal is aligned at the last query and the last key.
        Pools of float8_e4m3fn, float8_e5m2 or int8 hold codes; ckv_scale and kpe_scale, float32, are () for
        the pool or (N, P) for each token.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (T, H, C) in q_nope's dtype; with return_lse also the natural log of the softmax's denominator,
        float32 (T, H). A query that sees no key gives 0, and -inf.
    Raises: ValueError, TypeError: an argument does not fit, by name; page ids and lengths on the CPU.
        FormatError, which is both: codes and scales as in `paged_attention`.
    Source: arXiv 2405.04434.
    """

@overload
async def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    scale: float,
    is_causal: bool = True,
    return_lse: Literal[True],
    ckv_scale: Tensor | None = None,
    kpe_scale: Tensor | None = None,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
async def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    scale: float,
    is_causal: bool = True,
    return_lse: bool = False,
    ckv_scale: Tensor | None = None,
    kpe_scale: Tensor | None = None,
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
    activation: Literal["swiglu", "geglu", "geglu_tanh", "reglu", "gelu", "gelu_tanh", "silu", "relu"] = "swiglu",
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Project each row of `x` up to F, apply `activation`, project down again.

    Args: x (..., C), any float dtype; w_down (C, F). Gated kinds (swiglu, geglu, geglu_tanh, reglu): w_up
        (2F, C), the gate's F rows above the F rows it multiplies; plain kinds (gelu, gelu_tanh, silu, relu):
        w_up (F, C). b_up has as many elements as w_up has rows, b_down (C,). geglu and gelu use the exact
        erf, geglu_tanh and gelu_tanh its approximation.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: x's shape and dtype; a kernel may round hidden rows to that dtype in between.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 2002.05202 for the gated kinds.
    """

async def moe(
    x: Tensor,
    router_logits: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    top_k: int = 2,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    renormalize: bool = True,
    activation: Literal["swiglu", "geglu", "geglu_tanh", "reglu"] = "swiglu",
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Send each row of `x` to its `top_k` experts and add their answers, weighed by the router.

    Args: x (..., C), any float dtype; router_logits (..., E), any float dtype; w_up (E, 2F, C) with the
        gate's F rows above the F rows it multiplies; w_down (E, C, F). Weights are the scores of the chosen
        experts: softmax over all experts or sigmoid of each logit, divided by their sum over the chosen where
        `renormalize`. Of equal logits the lower expert is chosen. activation is a gated kind of `mlp`.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: x's shape and dtype; scores, hidden rows and sums are float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 2401.04088, section 2.1; sigmoid scores: arXiv 2412.19437, section 2.1.2.
    """

@overload
async def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    layout: Literal["NHD", "HND"] = "NHD",
    return_lse: Literal[False] = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Attend the queries of several sequences to their keys and values in a shared pool of pages.

    Args: q (T, Hq, D), all sequences' queries concatenated, sequence b's from cu_seqlens_q[b] to
        cu_seqlens_q[b + 1]; without cu_seqlens_q q is (B, Hq, D), one query a sequence. k_cache (N, P, Hk, D)
        and v_cache (N, P, Hk, Dv), or heads before tokens with `layout="HND"`; Hq % Hk == 0. block_tables (B,
        M) names sequence b's pages in order; seq_lens (B,) counts its keys, those of these queries included,
        and what a table holds behind that is never read. All metadata is int32 or int64.
        is_causal is aligned at the last query and the last key. scale defaults to D**-0.5; window=(left,
        right) keys around the diagonal, -1 is unbounded; softcap c turns scores s into c * tanh(s / c).
        A pool of float8_e4m3fn, float8_e5m2 or int8 holds codes; k_scale and v_scale, float32, are what they
        are multiplied by: () for the pool, (Hk,) for each head, or the pool's shape without its last axis for
        each token's head.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (T, Hq, Dv) in q's dtype; with return_lse also the natural log of the softmax's denominator,
        float32 (T, Hq). A query that sees no key gives 0, and -inf.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also a page id that is out of
        range or twice in one sequence, and a length that the tables cannot hold. FormatError, which is both,
        with a reason code: codes and scales do not fit, a scale is zero, negative or NaN, the pool was
        written by `append_kv` in another format.
    Source: arXiv 2309.06180.
    """

@overload
async def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    layout: Literal["NHD", "HND"] = "NHD",
    return_lse: Literal[True],
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
async def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    layout: Literal["NHD", "HND"] = "NHD",
    return_lse: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
async def quantize(
    x: Tensor,
    *,
    format: Literal["int8", "fp8_e4m3", "fp8_e5m2", "int4", "nf4", "mxfp4", "mxfp8", "nvfp4"] = "int8",
    granularity: Literal["tensor", "row", "group", "block"] | None = None,
    group_size: int | None = None,
    scale: Tensor | None = None,
    tensor_scale: Tensor | None = None,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Round `x` to the codes of a number format and the scales that give it back.

    Args: x (..., C), any float dtype; format is int8, fp8_e4m3, fp8_e5m2, int4, nf4, mxfp4, mxfp8 or nvfp4;
        granularity is tensor, row, group or block, the format's usual one where None; group_size is how many
        neighbours of a row share a scale, which divides C, or a block's side: None is the format's usual one,
        0 says that nothing is grouped. scale, in the shape and a dtype of the second result, is used as
        given and needs to be positive, which is looked at on a CPU; None takes the largest magnitude of what
        shares the scale. tensor_scale, float32 (), is nvfp4's second level, 1 where None.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (codes, scale): codes int8, float8 or, of four bits, uint8 (..., C / 2) with the even place in
        the low half of a byte; scale float32, float8_e8m0fnu (mxfp4, mxfp8) or float8_e4m3fn (nvfp4) of
        shape (), (..., 1), (..., C / group_size) or, of blocks, (..., R / group_size, C / group_size) rounded
        up.
        Halves round to even; what lies beyond the format is clamped, never NaN. A NaN or infinity in x makes
        the scale that it shares NaN or infinite, so that what comes back is not finite.
    Raises: ValueError, TypeError: an argument does not fit, by name; FormatError has a reason code.
    """

async def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    inputs: str = "float",
    format: str | None = None,
    zero_point: Tensor | None = None,
    tensor_scale: Tensor | None = None,
    block_size: int = 0,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Multiply each row of `x` by a quantized `weight` transposed and add `bias`.

    Args: x (..., K), any float dtype; weight (C, K) of int8, float8_e4m3fn or float8_e5m2, or of a packed
        format uint8 (C, K / 2); scale in a dtype of the format, of shape (), (C, 1), (C, G) or, with
        block_size b, (C / b, K / b) rounded up, as `quantize` gives them; bias (C,) or None; format is what
        the dtype of weight does not say; zero_point uint8 in scale's shape (int4), 8 where None; tensor_scale
        float32 () (nvfp4). inputs is float, where x is used as it is; dynamic, where rows of x are first
        rounded to weight's format, with scales by row, by the format's groups, or by block_size neighbours;
        or int8 or fp8_e4m3, to which rows are rounded with a scale each.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (..., C) in x's dtype; int8 products are summed exactly, others in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name; FormatError has a reason code.
    Source: arXiv 2208.07339 for rows that are quantized as they come; arXiv 2412.19437 for blocks.
    """

@overload
async def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Attend each sequence's queries to its own keys and values, without padding.

    Args: q (T, Hq, D), k (S, Hk, D) and v (S, Hk, Dv) with Hq % Hk == 0, sequences concatenated:
        b has q's rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], and k's and v's along cu_seqlens_k, which
        defaults to cu_seqlens_q. Offsets are (B + 1,), int32 or int64. is_causal is aligned at a sequence's
        last query and last key; scale defaults to D**-0.5; window, softcap, and codes with their scales, as
        in `attention`.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (T, Hq, Dv) in q's dtype, bfloat16 where q is codes; with return_lse also the natural log of the
        softmax's denominator, float32 (T, Hq). A query that sees no key gives 0, and -inf.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also offsets that do not
        start at 0, fall, or do not end at the number of rows.
    """

@overload
async def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    return_lse: Literal[True],
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
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
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
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
    """Scale each row of `x` to unit root mean square, times `weight`.

    Args: x (..., C), any float dtype; weight (C,) or None; eps is added to the mean square.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: x's shape and dtype; the mean is taken in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1910.07467.
    """

async def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-06,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Scale each row of `x` to unit root mean square, times `norm_weight`, and multiply it by `weight`.

    Args: x (..., K), any float dtype; norm_weight (K,) or None; weight (C, K) and bias (C,) or None as
        `linear` has them; eps is added to the mean square.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (..., C) in x's dtype; a kernel need not round the rows in between to it.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 1910.07467.
    """

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
    """Turn the first R features of each head by the angles of the token's position.

    Args: q (..., Hq, D), k (..., Hk, D), positions (...) int32 or int64, cos and sin (max_positions, R / 2)
        in float32 or float64, R <= D; what follows R passes unchanged. Feature i turns with i + R / 2
        (rotate-half, as in LLaMA), or 2i with 2i + 1 where `interleaved` (as in GPT-J).
        xpos_scale (max_positions, R / 2) multiplies the turned q and divides the turned k.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (q', k') in their shapes and dtypes; turned in float32.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 2104.09864; XPos 2212.10554.
    """

async def rope_append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    layout: str = "NHD",
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> Tensor:
    """Turn new queries and keys as `rope` does; write the turned keys and the values as `append_kv` does.

    Args: q (T, Hq, D), k (T, Hk, D), v (T, Hk, Dv); positions (T,) and the tables cos and sin as `rope` has
        them; k_cache, v_cache, slot_mapping (T,) and layout as `append_kv` has them, with pools of numbers.
        The pools are changed.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: the turned q. Awaited before `paged_attention` over the same pool, it says that the tokens are
    there.
    Raises: ValueError, TypeError: what `rope` and `append_kv` refuse, by name; nothing is written then.
        KernelExecutionError: a kernel raised; what it wrote is unknown.
    Source: arXiv 2104.09864 and 2309.06180.
    """

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
    """Draw one token a row, after temperature, top-k and top-p.

    Args: logits (B, V), any float dtype, -inf masks; every other argument is a number or a (B,) tensor.
        temperature 0 takes the largest logit; top_k 0 keeps all; top_p keeps the fewest tokens whose share
        of what top-k left reaches top_p. Among equal logits the lowest index comes first. The same (seed,
        offset) draws the same, of an int the low 64 bits count; one seed for B rows gives each row its own
        stream, the first row's being the seed itself; None takes a seed from torch's default generator when
        the call is made.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (B,) int64; -1 for a row of NaN or of nothing but -inf where the device's data is not read.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also such a row, by index.
    Source: splitmix64: Steele, Lea and Flood, OOPSLA 2014.
    """

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
    """Draw one token a row among its `k` largest logits: `sample` with top_k=k of at least 1.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    """

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
    """Draw one token a row among the fewest whose probability reaches `p`: `sample` with top_p=p.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    """

async def select_experts(
    router_logits: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int = 2,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    renormalize: bool = True,
    groups: int = 1,
    top_groups: int = 1,
    scaling: float = 1.0,
    backend: str | None = None,
    priority: int = 1,
    timeout: float | None = None,
    batching: Literal["off", "rows", "all"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the `top_k` experts of each row, best first, and their weights.

    Args: router_logits (..., E), any float dtype; bias (E,) is added to the scores for the choice alone, or
        None. Scores are the softmax over all experts or the sigmoid of each logit. With groups, E is cut into
        that many groups of neighbours, and only experts of the top_groups groups are chosen whose two best
        scores, with bias, have the largest sum (their best one, where there is no bias). Weights are the
        scores without bias, divided by their sum over the chosen where renormalize, times scaling.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: (experts (..., top_k) int32, weights (..., top_k) float32). Of equal scores the lower expert and
        the lower group are chosen.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: arXiv 2412.19437, sections 2.1.2 and 3.2.2; groups without bias: arXiv 2405.04434.
    """

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
    """Keep the drafted tokens that the target agrees with, and draw the one after them.

    Args: draft_probs (B, K, V), what each drafted token was drawn from; draft_tokens (B, K) integers;
        target_probs (B, K + 1, V), the target's distribution at each place and after the last; any one float
        dtype, rows that sum to 1. seed and offset as in `sample`: the same pair decides the same.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: tokens (B, K + 1) int64: those that stay, the one drawn after them, then -1; accepted (B,) int64,
        how many stay.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also ids out of range and
        probabilities below 0.
    Source: Leviathan, Kalman and Matias, ICML 2023; Chen et al., arXiv 2302.01318.
    """

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
    """Walk a tree of drafted tokens as far as the target agrees, and draw the token after it.

    Node 0 is the last token that is certain; node n > 0 continues node parents[n] < n. Children of one node
    are drafts drawn independently from one distribution, tried in the order of their numbers.
    Args: draft_probs (B, N, V), what the children of each node were drawn from (rows of leaves are not read);
        draft_tokens (B, N) integers (column 0 is not read); target_probs (B, N, V), the target's distribution
        after each node; parents, N integers, parents[0] == -1.
    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
    Returns: tokens (B, D + 1) int64 with D the tree's depth: those that stay, the one drawn after, then -1;
        nodes (B, D) int64, the path that stays, then -1; accepted (B,) int64, its length.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: Miao et al., ASPLOS 2024 (SpecInfer), multi-step speculative sampling.
    """

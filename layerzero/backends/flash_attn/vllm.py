"""FlashAttention-3 as vLLM ships it (`vllm`): Hopper's kernels in a wheel, where its own package has none.

The extension is loaded by itself. Importing the package would set up an inference engine: logging, settings
of torch's compiler, environment variables. The build knows sequences behind each other alone, so that dense
operands go in as such.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero._util.libraries import extension_of
from layerzero.backends.flash_attn.shared import FEATURES, HEAD_SIZES, THIRD, both, hopper, workspace_bytes
from layerzero.ops.attention.adapters import Result, bounds, int32
from layerzero.ops.attention.arguments import AttentionArgs, PagedArgs, RaggedArgs
from layerzero.ops.captures import keep_if_captured
from layerzero.ops.host_copies import max_seqlen
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel, Tiling, loading

_EXTENSION = "_vllm_fa3_C"
# What none of our calls sets; other arguments that a call leaves out are optional.
_CONSTANT = {"is_rotary_interleaved": True, "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}
_SET = frozenset(
    {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table",
     "softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap"}
)  # fmt: skip
_KEPT = 512
_steps_of: dict[tuple[int, int, torch.device], Tensor] = {}


def arguments(names: Mapping[str, bool]) -> dict[str, Any]:
    """The operator's arguments in its order, with what no call sets; `names` says which are optional.

    Raises: ImportError: it has an argument that must be given and that is unknown here, or lacks one.
    """
    if missing := _SET - names.keys():
        raise ImportError(f"vllm's {_EXTENSION}.fwd takes no {', '.join(sorted(missing))}")
    unknown = [
        name for name, optional in names.items() if not optional and name not in _SET | _CONSTANT.keys()
    ]
    if unknown:
        raise ImportError(
            f"vllm's {_EXTENSION}.fwd wants {', '.join(unknown)}, which this adapter does not know"
        )
    return {name: _CONSTANT.get(name) for name in names}


def extension() -> Path:
    """The compiled file in the installed `vllm`; nothing of the package is imported.

    Raises: ImportError: vllm is not installed, or was built without it.
    """
    return extension_of("vllm", f"vllm_flash_attn/{_EXTENSION}*.so")


@functools.cache
def _forward() -> Callable[[AttentionArgs | RaggedArgs | PagedArgs, dict[str, Any]], tuple[Tensor, Tensor]]:
    torch.ops.load_library(str(extension()))
    operator = torch.ops._vllm_fa3_C.fwd.default
    empty = arguments(
        {each.name: str(each.type).startswith("Optional") for each in operator._schema.arguments}
    )

    def run(
        call: AttentionArgs | RaggedArgs | PagedArgs, call_values: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        window_left, right = call.window or (-1, -1)
        values = empty | call_values
        values["softmax_scale"] = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
        values["is_causal"] = call.is_causal
        values["window_size_left"], values["window_size_right"] = window_left, right
        values["softcap"] = call.softcap or 0.0
        out, lse, *_ = operator(*values.values())
        return out, lse

    return run


def _uniform_cu_seqlens(batch: int, length: int, device: torch.device) -> Tensor:
    """Offsets of `batch` sequences of `length`: int32, batch + 1. Those that a capture makes are not kept."""
    key = (batch, length, device)
    cu_seqlens_q = _steps_of.get(key)
    if cu_seqlens_q is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        if len(_steps_of) >= _KEPT:
            _steps_of.clear()
        # A copy from ordinary memory has arrived when it returns, for whichever stream reads it.
        cu_seqlens_q = (torch.arange(batch + 1, dtype=torch.int32, device="cpu") * length).to(device)
        _steps_of[key] = cu_seqlens_q
    keep_if_captured(cu_seqlens_q)
    return cu_seqlens_q


@loading(_forward, AttentionArgs)
def _attention(run: Any, call: AttentionArgs) -> Result:
    """Operands (B, S, H, D), a view of them where they are contiguous."""
    batch, queries, heads, _ = call.q.shape
    keys, device = call.k.shape[1], call.q.device
    out, lse = run(call, {
        "q": call.q.flatten(0, 1), "k": call.k.flatten(0, 1), "v": call.v.flatten(0, 1),
        "cu_seqlens_q": _uniform_cu_seqlens(batch, queries, device), "max_seqlen_q": queries,
        "cu_seqlens_k": _uniform_cu_seqlens(batch, keys, device), "max_seqlen_k": keys,
    })  # fmt: skip
    out = out.unflatten(0, (batch, queries))
    return both(out, lse.view(heads, batch, queries).transpose(0, 1)) if call.return_lse else out


@loading(_forward, RaggedArgs)
def _ragged(run: Any, call: RaggedArgs) -> Result:
    """Sequences behind each other; the log-sum-exp comes heads first."""
    starts, starts_k, max_seqlen_q, most_k = bounds(call)
    out, lse = run(call, {
        "q": call.q, "k": call.k, "v": call.v, "cu_seqlens_q": starts, "max_seqlen_q": max_seqlen_q,
        "cu_seqlens_k": starts_k, "max_seqlen_k": most_k,
    })  # fmt: skip
    return both(out, lse.transpose(0, 1)) if call.return_lse else out


@loading(_forward, PagedArgs)
def _paged(run: Any, call: PagedArgs) -> Result:
    """Block tables and lengths as they are: no plan, nothing read on the host."""
    sequences, pages = call.block_tables.shape
    if call.cu_seqlens_q is None:
        starts, max_seqlen_q = _uniform_cu_seqlens(sequences, 1, call.q.device), 1
    else:
        starts, max_seqlen_q = int32(call.cu_seqlens_q), max_seqlen(call.cu_seqlens_q, call.q.shape[0])
    out, lse = run(call, {
        "q": call.q, "k": call.k_cache, "v": call.v_cache, "cu_seqlens_q": starts,
        "max_seqlen_q": max_seqlen_q,
        "seqused_k": int32(call.seq_lens), "max_seqlen_k": pages * call.k_cache.shape[1],
        "page_table": int32(call.block_tables),
    })  # fmt: skip
    return both(out, lse.transpose(0, 1)) if call.return_lse else out


_TILES = Tiling(
    rows=((96, 192), (256, 128)),
    packed=True,
    splits=True,
    source="vllm-project/flash-attention, hopper/tile_size.h and heuristics.h (should_pack_gqa)",
)


def _joined(request: CallSpec) -> int:
    """Bytes that joining the rows of a batch copies: rows of one head are adjacent in the layout BHSD."""
    batch = request.dim("B")
    if batch == 1 or request.layout != "BHSD":
        return 0
    width, value_width = request.dim("D"), request.dim("Dv") or request.dim("D")
    queries = request.dim("Hq") * request.dim("Sq") * width if request.dim("Sq") > 1 else 0
    keys = request.dim("Hk") * request.dim("Sk") * (width + value_width)
    return 2 * batch * (queries + keys)


_kernel = functools.partial(
    hopper,
    **THIRD,
    source="vllm 0.26.0, vllm_flash_attn/flash_attn_interface.py and its extension; run against float64 on "
    "an H200",
    features=f"{FEATURES} lse",
    cuda_min="12.3",
    graph_safe=True,
    tie_break_order=38,
    distributions=("vllm>=0.20",),
)

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "vllm_flash_attn_3.attention.varlen",
        _attention,
        layouts="BSHD",
        copied_bytes=_joined,
        tiling=_TILES,
        workspace_bytes=lambda request: workspace_bytes(request) + _joined(request),
    ),
    _kernel("vllm_flash_attn_3.ragged_attention.varlen", _ragged),
    _kernel(
        "vllm_flash_attn_3.paged_attention.page_table",
        _paged,
        features=f"{FEATURES} lse prefill",
        layouts="NHD",
        limits=(
            *HEAD_SIZES,
            "P <= 64",
        ),  # larger ones are loaded in whole tiles, with what follows them
    ),
)

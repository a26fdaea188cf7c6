"""Definitions as calls of our ops: inputs from the axes, our call, and what has no op here and why."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import layerzero.sync as sync
from layerzero.ops.attention.lse import LN_2
from tests.references.definitions import Definition
from tests.references.experts import experts_inputs, moe

MAX_BYTES = 160 << 20
# Kinds without an op, and why there is none; docs/guide/testing.md says more.
NO_OP = {
    "dsa_paged": "the indexer of sparse attention has no op: nothing here keeps its float8 keys",
    "gdn": "the gated delta net has no op: nothing here keeps its state, a matrix for each head and sequence",
    "mamba_ssu": "the selective state update has no op: nothing here keeps its state",
}
# What our calls read of a definition's inputs; another one would change the result unseen.
_POOL = "kv_indptr kv_indices kv_last_page_len qo_indptr sm_scale"
READS = {
    "gemm": "A B", "rmsnorm": "hidden_states residual weight", "rope": "q k cos_sin_cache positions",
    "gqa_paged": f"q k_cache v_cache {_POOL}", "mla_paged": f"q_nope q_pe ckv_cache kpe_cache {_POOL}",
    "gqa_ragged": f"q k v {_POOL}", "mla_ragged": f"q k v {_POOL}", "sampling": "probs top_k top_p",
    "dsa_sparse": "q_nope q_pe ckv_cache kpe_cache sparse_indices sm_scale",
    "moe": "routing_logits routing_bias topk_ids hidden_states hidden_states_scale gemm1_weights "
    "gemm2_weights gemm1_weights_scale gemm2_weights_scale local_expert_offset routed_scaling_factor "
    "output1_scales_scalar output1_scales_gate_scalar output2_scales_scalar",
}  # fmt: skip
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How large the free axes are: sequences with their keys, and queries of a prefill."""

    name: str
    lengths: tuple[int, ...]
    queries: tuple[int, ...]


SMALL = Size("small", (1, 20), (1, 16))
MEDIUM = Size("medium", (64, 129, 70, 1), (64, 16, 5, 1))


def kind_of(definition: Definition) -> str:
    """Which of our calls a definition is; attention over chosen tokens is attention over pages of one."""
    return "dsa_sparse" if "sparse_indices" in definition.inputs else definition.op_type


def scale_of(definition: Definition) -> float:
    """How much of its dtype's tolerance a result gets: both sides write rounded numbers."""
    return 4.0 if definition.op_type == "gemm" else 2.0  # a product's reference is in half precision itself


def why_not(definition: Definition, size: Size, most_bytes: int = MAX_BYTES) -> str:
    """Why a definition is not run; empty where it is. What was searched is named."""
    kind = kind_of(definition)
    if kind in NO_OP:
        return f"{kind}: {NO_OP[kind]}; searched layerzero's ops"
    if kind not in CALLS:
        return f"{kind}: unknown kind of op; known are {', '.join(sorted([*CALLS, *NO_OP]))}"
    unread = [name for name in definition.inputs if name not in READS[kind].split()]
    if unread:
        return f"{kind}: no call here reads {', '.join(unread)}; read are {READS[kind]}"
    if kind == "gemm" and any(port.dtype.startswith("float8") for port in definition.inputs.values()):
        return "gemm: float8 without scales, which no product here takes"
    axes = axes_of(definition, size)
    held = sum(
        math.prod(axes[a] if isinstance(a, str) else a for a in port.shape) * 4
        for port in definition.inputs.values()
        if port.shape
    )
    if held > most_bytes:
        return f"needs {held >> 20} MiB in float32, above the {most_bytes >> 20} MiB of a run without --all"
    return ""


def axes_of(definition: Definition, size: Size, given: Mapping[str, int] | None = None) -> dict[str, int]:
    """Every axis as a number: the given ones, the constants, and consistent sizes for the rest."""
    page = definition.const.get("page_size", 1)
    pages = sum(-(-n // page) for n in size.lengths)
    decode = "qo_indptr" not in definition.inputs
    free = {
        "batch_size": len(size.lengths),
        "M": 2 * len(size.lengths),
        "num_tokens": sum(size.queries),
        "max_seq_len": 256,
        "len_indptr": len(size.lengths) + 1,
        "total_q": len(size.lengths) if decode else sum(size.queries),
        "total_kv": sum(size.lengths),
        "num_pages": pages + 3,
        "num_kv_indices": pages,
    }
    axes = {**dict.fromkeys(definition.var, 4), **free, **definition.const, **(given or {})}
    for name, expression in definition.expr.items():
        axes[name] = int(eval(expression, {"__builtins__": {}}, axes))
    return axes


def inputs_of(definition: Definition, size: Size, given: Mapping[str, int] | None = None) -> Inputs:
    """Inputs that keep the definition's constraints: offsets, pages and last lengths fit each other."""
    axes, generator = axes_of(definition, size, given), torch.Generator().manual_seed(0)
    page = definition.const.get("page_size", 1)
    pages = [-(-n // page) for n in size.lengths]
    spare = axes["num_pages"]
    made = {
        "qo_indptr": offsets(size.queries),
        "kv_indptr": offsets(pages if "kv_indices" in definition.inputs else size.lengths),
        "kv_indices": torch.randperm(spare, generator=generator)[: sum(pages)].int(),
        "kv_last_page_len": torch.tensor([(n - 1) % page + 1 for n in size.lengths], dtype=torch.int32),
        "sm_scale": axes.get("head_dim", axes.get("qk_dim", 192)) ** -0.5,
        "sparse_indices": _picks(axes, generator) if "topk" in axes else None,
        "top_k": torch.tensor([1, 5, 40, 2][: axes["batch_size"]], dtype=torch.int32),
        "top_p": torch.tensor([0.3, 0.9, 1.0, 0.6][: axes["batch_size"]]),
    }
    found = {name: made[name] if name in made else _values(name, port, axes, generator)
             for name, port in definition.inputs.items()}  # fmt: skip
    return experts_inputs(definition, found) if definition.op_type == "moe" else found


def offsets(counts: Any) -> Tensor:
    """0 and the running sums, int32."""
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def _picks(axes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    """Distinct tokens of the pool for each row, fewer from row to row, and -1 behind them."""
    rows, width, tokens = axes["num_tokens"], axes["topk"], axes["num_pages"] * axes["page_size"]
    picks = torch.full((rows, width), -1, dtype=torch.int32)
    for row in range(rows):
        count = max(1, min(width, tokens) // (row + 1))
        picks[row, :count] = torch.randperm(tokens, generator=generator)[:count].int()
    return picks


def _values(name: str, port: Any, axes: Mapping[str, int], generator: torch.Generator) -> Any:
    dtype = getattr(torch, port.dtype)
    if port.shape is None:
        return 1.0
    shape = [axes[a] if isinstance(a, str) else a for a in port.shape]
    if name == "positions":
        return torch.randint(0, axes["max_seq_len"], shape, generator=generator)
    if name == "cos_sin_cache":
        angle = torch.rand(shape[0], shape[1] // 2, generator=generator) * 6
        return torch.cat([angle.cos(), angle.sin()], -1).to(dtype)
    values = torch.randn(shape, generator=generator)
    if name == "probs":
        return (4 * values).softmax(-1).to(dtype)
    if name == "B":
        values *= shape[-1] ** -0.5
    return values.to(dtype)


# -- our calls: the outputs in the definition's order ----------------------------------------------------


def _gemm(d: Definition, i: Inputs, **more: Any) -> tuple[Tensor, ...]:
    return (sync.linear(i["A"], i["B"], **more),)


def epsilon_of(d: Definition) -> float:
    """The epsilon that the source of a norm writes."""
    written = re.search(r"\beps\s*=\s*([0-9.]+e?-?[0-9]*)", d.reference, re.IGNORECASE)
    return float(written[1]) if written else 1e-6


def norm_weight(d: Definition, i: Inputs) -> Tensor:
    """The weight that multiplies: in a source of Gemma's kind it is stored less one."""
    stored: Tensor = i["weight"]
    less_one = re.search(r"\b1(\.0)?\s*\+\s*weight|\bweight(\.\w+\([^)]*\))?\s*\+\s*1", d.reference)
    return stored if less_one is None else stored.float() + 1


def _rmsnorm(d: Definition, i: Inputs, **more: Any) -> tuple[Tensor, ...]:
    eps = epsilon_of(d)
    if "residual" in i:
        both = sync.add_rms_norm(i["hidden_states"], i["residual"], norm_weight(d, i), eps=eps, **more)
        return both[: len(d.outputs)]
    return (sync.rms_norm(i["hidden_states"], norm_weight(d, i), eps=eps, **more),)


def is_interleaved(d: Definition) -> bool:
    """Whether neighbours turn together, as in GPT-J."""
    return re.search(r"::2\b", d.reference) is not None


def _rope(d: Definition, i: Inputs, **more: Any) -> tuple[Tensor, ...]:
    cos, sin = (half.contiguous() for half in i["cos_sin_cache"].chunk(2, -1))
    pairs = is_interleaved(d)
    return sync.rope(i["q"], i["k"], i["positions"], cos, sin, interleaved=pairs, **more)


def _table(i: Inputs, page: int) -> tuple[Tensor, Tensor]:
    """Offsets and page ids as a rectangular table and lengths."""
    starts = i["kv_indptr"].tolist()
    counts = [b - a for a, b in itertools.pairwise(starts)]
    table = torch.zeros(len(counts), max([1, *counts]), dtype=torch.int32)
    for row, own in enumerate(i["kv_indices"].split(counts)):
        table[row, : len(own)] = own
    last = i["kv_last_page_len"].tolist() if "kv_last_page_len" in i else [page] * len(counts)
    lens = torch.tensor([(n - 1) * page + int(m) if n else 0 for n, m in zip(counts, last, strict=True)])
    device = i["kv_indptr"].device
    return table.to(device), lens.to(device)


def _base2(result: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return result[0], result[1] / LN_2  # our log-sum-exp is natural, theirs of base 2


def _gqa_paged(d: Definition, i: Inputs, **more: Any) -> tuple[Tensor, ...]:
    table, lens = _table(i, d.const["page_size"])
    return _base2(
        sync.paged_attention(
            i["q"], i["k_cache"], i["v_cache"], table, lens, cu_seqlens_q=i.get("qo_indptr"),
            scale=i["sm_scale"], return_lse=True, **more,
        )
    )  # fmt: skip


def _ragged(d: Definition, i: Inputs, **more: Any) -> tuple[Tensor, ...]:
    return _base2(
        sync.ragged_attention(
            i["q"], i["k"], i["v"], i["qo_indptr"], i["kv_indptr"],
            is_causal=True, scale=i["sm_scale"], return_lse=True, **more,
        )
    )  # fmt: skip


def _mla_paged(d: Definition, i: Inputs, **more: Any) -> tuple[Tensor, ...]:
    table, lens = _table(i, d.const["page_size"])
    return _base2(
        sync.mla_attention(
            i["q_nope"], i["q_pe"], i["ckv_cache"], i["kpe_cache"], table, lens,
            cu_seqlens_q=i.get("qo_indptr"), scale=i["sm_scale"], return_lse=True, **more,
        )
    )  # fmt: skip


def _dsa_sparse(d: Definition, i: Inputs, **more: Any) -> tuple[Tensor, ...]:
    """Each query has the tokens that were chosen for it as pages of one token."""
    picks = i["sparse_indices"]
    lens = (picks >= 0).sum(-1)
    table = picks.gather(-1, (picks < 0).int().sort(dim=-1, stable=True).indices).clamp_min(0)
    ckv, kpe = (i[name].flatten(0, 1).unsqueeze(1) for name in ("ckv_cache", "kpe_cache"))
    return _base2(
        sync.mla_attention(
            i["q_nope"], i["q_pe"], ckv, kpe, table, lens, scale=i["sm_scale"], return_lse=True, **more
        )
    )


def _sampling(d: Definition, i: Inputs, **more: Any) -> tuple[Tensor, ...]:
    named = {"top_k": i["top_k"].long()} if "top_k" in i else {}
    named |= {"top_p": i["top_p"]} if "top_p" in i else {}
    return (sync.sample(i["probs"].log(), seed=more.pop("seed", 1), **named, **more),)


CALLS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "gemm": _gemm,
    "rmsnorm": _rmsnorm,
    "rope": _rope,
    "gqa_paged": _gqa_paged,
    "gqa_ragged": _ragged,
    "mla_ragged": _ragged,
    "mla_paged": _mla_paged,
    "dsa_sparse": _dsa_sparse,
    "moe": moe,
    "sampling": _sampling,
}
OPS = {
    "gemm": "linear", "rmsnorm": "rms_norm", "rope": "rope", "gqa_paged": "paged_attention",
    "gqa_ragged": "ragged_attention", "mla_ragged": "ragged_attention", "mla_paged": "mla_attention",
    "dsa_sparse": "mla_attention",
    "moe": "fused_experts", "sampling": "sample",
}  # fmt: skip

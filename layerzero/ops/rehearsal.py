"""Calling a kernel once on operands like a request's, so that whatever it compiles at first use is compiled.

The operands hold nothing in particular; a pool of pages is one page, which every table names. Only attention
over dense, ragged and paged operands is made here: what the vendors compile by shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import host_copies, table
from layerzero.ops.op import Args
from layerzero.spec.call_spec import CallSpec


def dummy_run(run: Callable[..., Any], spec: CallSpec) -> None:
    """Run a kernel's callable as `request` would, and wait for it."""
    device = torch.device(spec.device)
    with torch.no_grad(), torch.cuda.device(device):
        run(*dummy_args(spec, device))
        torch.cuda.synchronize(device)


def dummy_args(spec: CallSpec, device: torch.device) -> Args:
    """The op's argument tuple with the sizes, dtype and flags of `request`."""
    make = {
        "attention": _attention_args,
        "ragged_attention": _ragged_args,
        "paged_attention": _paged_args,
        "mla_attention": _mla_args,
    }
    named, features = make[spec.op](spec, device), spec.features
    named |= {"is_causal": "causal" in features, "return_lse": "lse" in features}
    if spec.op != "mla_attention":
        named["softcap"] = 30.0 if "softcap" in features else None
        named["window"] = (64, 0 if "causal" in features else 64) if "window" in features else None
    args: Args = table.get(spec.op).build(**named)[1]
    return args


def _zeros(spec: CallSpec, device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)


def _attention_args(spec: CallSpec, device: torch.device) -> dict[str, Any]:
    b, hq, hk, sq, sk, d = (spec.dim(name) for name in ("B", "Hq", "Hk", "Sq", "Sk", "D"))
    q, k = _zeros(spec, device, b, sq, hq, d), _zeros(spec, device, b, sk, hk, d)
    return {"q": q, "k": k, "v": k, "layout": "BSHD"}


def _even_cu_seqlens(total: int, parts: int, device: torch.device) -> Tensor:
    """Offsets of `parts` sequences over `total` rows, with their host copy."""
    values = torch.arange(parts + 1, device="cpu") * total // max(parts, 1)
    return host_copies.to_device_with_host_copy(values.to(torch.int32), device)


def _ragged_args(spec: CallSpec, device: torch.device) -> dict[str, Any]:
    tokens, keys, b = spec.dim("T"), spec.dim("S"), spec.dim("B")
    q = _zeros(spec, device, tokens, spec.dim("Hq"), spec.dim("D"))
    k = _zeros(spec, device, keys, spec.dim("Hk"), spec.dim("D"))
    offsets = {"cu_seqlens_q": _even_cu_seqlens(tokens, b, device)}
    return {"q": q, "k": k, "v": k, **offsets, "cu_seqlens_k": _even_cu_seqlens(keys, b, device)}


def _block_table_args(spec: CallSpec, device: torch.device) -> dict[str, Any]:
    b, width = spec.dim("B"), max(spec.dim("M"), 1)
    lengths = torch.full((b,), width * spec.dim("P"), dtype=torch.int32, device="cpu")
    pages = torch.zeros((b, width), dtype=torch.int32, device="cpu")
    named = {"block_tables": pages, "seq_lens": lengths}
    named = {name: host_copies.to_device_with_host_copy(part, device) for name, part in named.items()}
    if "prefill" in spec.features:
        named["cu_seqlens_q"] = _even_cu_seqlens(spec.dim("T"), b, device)
    return named


def _paged_args(spec: CallSpec, device: torch.device) -> dict[str, Any]:
    heads, size, d = (spec.dim(name) for name in ("Hk", "P", "D"))
    shape = (1, size, heads, d) if spec.layout == "NHD" else (1, heads, size, d)
    pool = _zeros(spec, device, *shape)
    q = _zeros(spec, device, spec.dim("T"), spec.dim("Hq"), d)
    pools = {"k_cache": pool, "v_cache": pool.clone()}
    return {"q": q, **pools, **_block_table_args(spec, device), "layout": spec.layout}


def _mla_args(spec: CallSpec, device: torch.device) -> dict[str, Any]:
    tokens, heads, c, r = (spec.dim(name) for name in ("T", "Hq", "C", "R"))
    named = _block_table_args(spec, device) | {"scale": 1.0}
    for query, pool, width in (("q_nope", "ckv_cache", c), ("q_pe", "kpe_cache", r)):
        named[query] = _zeros(spec, device, tokens, heads, width)
        named[pool] = _zeros(spec, device, 1, spec.dim("P"), width)
    return named

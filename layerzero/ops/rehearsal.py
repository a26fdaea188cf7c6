"""Calling a kernel once on operands like a request's, so that whatever it compiles at first use is compiled.

The operands hold nothing in particular; a pool of pages is one page, which every table names. Only attention
over dense, ragged and paged operands is made here: what the vendors compile by shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import host_copies as mirrors
from layerzero.ops import table
from layerzero.ops.op import Args
from layerzero.spec.call_spec import Request


def rehearse(run: Callable[..., Any], request: Request) -> None:
    """Run a kernel's callable as `request` would, and wait for it."""
    device = torch.device(request.device)
    with torch.no_grad(), torch.cuda.device(device):
        run(*arguments(request, device))
        torch.cuda.synchronize(device)


def arguments(request: Request, device: torch.device) -> Args:
    """The op's argument tuple with the sizes, dtype and flags of `request`."""
    make = {
        "attention": _dense,
        "ragged_attention": _ragged,
        "paged_attention": _paged,
        "mla_attention": _latent,
    }
    operands, named = make[request.op](request, device)
    asked = request.features
    flags: dict[str, Any] = {"is_causal": "causal" in asked, "return_lse": "lse" in asked}
    if request.op != "mla_attention":
        flags["softcap"] = 30.0 if "softcap" in asked else None
        flags["window"] = (64, 0 if "causal" in asked else 64) if "window" in asked else None
    args: Args = table.get(request.op).build(*operands, **flags, **named)[1]
    return args


def _zeros(request: Request, device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=getattr(torch, request.dtype), device=device)


def _dense(request: Request, device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
    b, hq, hk, sq, sk, d = (request.dim(name) for name in ("B", "Hq", "Hk", "Sq", "Sk", "D"))
    q, k = _zeros(request, device, b, sq, hq, d), _zeros(request, device, b, sk, hk, d)
    return [q, k, k], {"layout": "BSHD"}


def _spread(total: int, parts: int, device: torch.device) -> Tensor:
    """Offsets of `parts` sequences over `total` rows, with their host copy."""
    values = torch.arange(parts + 1, device="cpu") * total // max(parts, 1)
    return mirrors.on_device(values.to(torch.int32), device)


def _ragged(request: Request, device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
    tokens, keys, b = request.dim("T"), request.dim("S"), request.dim("B")
    q = _zeros(request, device, tokens, request.dim("Hq"), request.dim("D"))
    k = _zeros(request, device, keys, request.dim("Hk"), request.dim("D"))
    return [q, k, k, _spread(tokens, b, device), _spread(keys, b, device)], {}


def _tables(request: Request, device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
    b, width = request.dim("B"), max(request.dim("M"), 1)
    lengths = torch.full((b,), width * request.dim("P"), dtype=torch.int32, device="cpu")
    pages = torch.zeros((b, width), dtype=torch.int32, device="cpu")
    named = {"cu_seqlens": _spread(request.dim("T"), b, device)} if "prefill" in request.features else {}
    return [mirrors.on_device(pages, device), mirrors.on_device(lengths, device)], named


def _paged(request: Request, device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
    heads, size, d = (request.dim(name) for name in ("Hk", "P", "D"))
    shape = (1, size, heads, d) if request.layout == "NHD" else (1, heads, size, d)
    pool = _zeros(request, device, *shape)
    indices, named = _tables(request, device)
    q = _zeros(request, device, request.dim("T"), request.dim("Hq"), d)
    return [q, pool, pool.clone(), *indices], {**named, "layout": request.layout}


def _latent(request: Request, device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
    tokens, heads, c, r = (request.dim(name) for name in ("T", "Hq", "C", "R"))
    pools = [_zeros(request, device, 1, request.dim("P"), width) for width in (c, r)]
    indices, named = _tables(request, device)
    queries = [_zeros(request, device, tokens, heads, width) for width in (c, r)]
    return [*queries, *pools, *indices], {**named, "scale": 1.0}

"""Multi-head latent attention in its absorbed form, over pages of compressed keys."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.op import NO_SHAPE, Args, Call, Op, register, signature_of
from layerzero.ops.paged.attention import attend
from layerzero.ops.paged.batching import OverOnePool
from layerzero.ops.paged.checks import (
    check_pool,
    check_tables,
    dtypes_of,
    guard_pages,
    no_queries,
    pool_features,
    query_offsets,
)
from layerzero.spec.call_spec import OutSpec, Request, Work


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
) -> Call:
    """Attend absorbed queries to the latent vectors that all heads share: softmax(scale * s) ckv.

    s = q_nope . ckv + q_pe . kpe; the caller has multiplied q_nope by the keys' up-projection and multiplies
    the result by the values'.
    Args: q_nope (T, H, C) and q_pe (T, H, R), sequences behind each other along cu_seqlens (B + 1,), or one
        query a sequence without it; ckv_pages (N, P, C) and kpe_pages (N, P, R); block_tables (B, M) and
        context_lens (B,) as in `paged_attention`. scale has no default: it follows from the head size before
        absorption, (128 + 64)**-0.5 for DeepSeek-V3. is_causal is aligned at the last query and the last key.
    Returns: (T, H, C) in q_nope's dtype; with return_lse also the natural log of the softmax's denominator,
        float32 (T, H). A query that sees no key gives 0, and -inf.
    Raises: ValueError, TypeError: an argument does not fit, by name; page ids and lengths on the CPU.
    Source: arXiv 2405.04434.
    """
    args = (
        q_nope, q_pe, ckv_pages, kpe_pages, block_tables, context_lens, cu_seqlens, scale, is_causal,
        return_lse,
    )  # fmt: skip
    try:
        return (
            "mla_attention", *[signature_of(t) for t in args[:4]],
            block_tables.shape, block_tables.stride(), block_tables.dtype, block_tables.device,
            context_lens.shape, context_lens.stride(), context_lens.dtype, context_lens.device,
            signature_of(cu_seqlens), scale, is_causal, return_lse,
        ), args  # fmt: skip
    except NO_SHAPE:
        check(args)  # names the operand that is no tensor
        raise


def check(args: Args) -> Request:
    """Validate a call, without reading data, and describe it; see `mla_attention` for the arguments."""
    q_nope, q_pe, ckv, kpe, tables, lens, cu, scale, is_causal, return_lse = args
    checks.need_bool("is_causal", is_causal)
    checks.need_bool("return_lse", return_lse)
    checks.need_number("scale", scale)
    checks.need_tensor("q_nope", q_nope, rank=3)
    checks.need_tensor("q_pe", q_pe, rank=3)
    checks.need_same_device("q_nope", q_nope, q_pe=q_pe)
    if 0 in q_nope.shape[1:] or q_pe.shape[2] == 0:
        raise ValueError(
            f"q_nope needs heads of at least 1, got {tuple(q_nope.shape)} and q_pe {tuple(q_pe.shape)}"
        )
    if q_pe.shape[:2] != q_nope.shape[:2]:
        raise ValueError(
            f"q_pe needs (T, H) = {tuple(q_nope.shape[:2])} like q_nope, got {tuple(q_pe.shape[:2])}"
        )
    check_pool("ckv_pages", ckv, q_nope, 3)
    check_pool("kpe_pages", kpe, q_nope, 3)
    if kpe.shape[:2] != ckv.shape[:2]:
        raise ValueError(
            f"kpe_pages needs pages {tuple(ckv.shape[:2])} like ckv_pages, got {tuple(kpe.shape[:2])}"
        )
    if kpe.dtype != ckv.dtype:
        wanted, got = checks.dtype_name(ckv.dtype), checks.dtype_name(kpe.dtype)
        raise TypeError(f"kpe_pages needs dtype {wanted} like ckv_pages, got {got}")
    for name, pool, query, like in (("ckv_pages", ckv, q_nope, "q_nope"), ("kpe_pages", kpe, q_pe, "q_pe")):
        if pool.shape[2] != query.shape[2]:
            raise ValueError(f"{name} needs width {query.shape[2]} like {like}, got {pool.shape[2]}")
    dims = check_tables(q_nope, tables, lens, cu)
    dims |= {
        "Hq": q_nope.shape[1], "Hk": 1, "G": q_nope.shape[1], "C": ckv.shape[2], "R": kpe.shape[2],
        "N": ckv.shape[0], "P": ckv.shape[1],
    }  # fmt: skip
    asked = {
        "causal": is_causal,
        "prefill": cu is not None,
        "lse": return_lse,
        "scale_not_positive": scale <= 0,
        **pool_features(q_nope, ckv, kpe),
    }
    queries = [q_nope, q_pe]
    return Request(
        op="mla_attention",
        platform=q_nope.device.type,
        device=str(q_nope.device),
        dtype=checks.dtype_name(q_nope.dtype),
        dtypes=dtypes_of(args, (0, 1, 4, 5)),
        dims=dims,
        features=frozenset(name for name, wanted in asked.items() if wanted),
        contiguous=checks.is_plain_contiguous(queries),
        last_stride1=checks.last_stride_is_one(queries),
        alignment=checks.alignment_of([*queries, ckv, kpe]),
    )


def guard(args: Args) -> Args:
    """Page ids, lengths and offsets that fit, as copies."""
    return guard_pages(args, 4, "q_nope", args[2].shape[0], args[2].shape[1])


def mla_attention_reference(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_pages: Tensor,
    kpe_pages: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    is_causal: bool,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The op in plain torch: one key head of width C + R whose first C elements are the values."""
    args = (q_nope, q_pe, ckv_pages, kpe_pages, block_tables, context_lens, cu_seqlens)
    guard(args)
    size = ckv_pages.shape[1]
    queries = torch.cat([q_nope, q_pe.to(q_nope.dtype)], -1)
    starts = query_offsets(q_nope.shape[0], cu_seqlens)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for row, length in enumerate(context_lens.tolist()):
        pages = block_tables[row, : -(-length // size)].long()
        ckv, kpe = (pool.index_select(0, pages).flatten(0, 1)[:length] for pool in (ckv_pages, kpe_pages))
        key = torch.cat([ckv, kpe], -1).unsqueeze(1)
        mine = queries[starts[row] : starts[row + 1]]
        out, lse = attend(mine, key, ckv.unsqueeze(1), is_causal, scale, None, None)
        outs.append(out)
        lses.append(lse)
    result = torch.cat(outs)
    return (result, torch.cat(lses)) if return_lse else result


def outputs(args: Args) -> tuple[OutSpec, ...]:
    """(T, H, C) in q_nope's dtype, and float32 (T, H) where the LSE is asked for."""
    q = args[0]
    out = OutSpec(tuple(q.shape), checks.dtype_name(q.dtype))
    return (out, OutSpec(tuple(q.shape[:2]), "float32")) if args[9] else (out,)


def empty(args: Args) -> Tensor | tuple[Tensor, Tensor] | None:
    """The result of a call without queries; the guard still sees its tables."""
    q: Tensor = args[0]
    if q.shape[0]:
        return None
    guard(args)
    return no_queries(q.new_zeros(q.shape), tuple(q.shape[:2]), args[9])


def work(request: Request) -> Work:
    """Scores over C + R, values over C; each page is read once for all heads."""
    keys = request.dim("M") * request.dim("P")
    tokens, heads = request.dim("T"), request.dim("Hq")
    latent, rotary = request.dim("C"), request.dim("R")
    moved = max(request.dim("B"), 1) * keys * (latent + rotary) + tokens * heads * (2 * latent + rotary)
    flops = 2.0 * tokens * heads * keys * (2 * latent + rotary)
    return Work(flops, float(moved * checks.dtype_bytes(request.dtype)))


MLA_ATTENTION = register(
    Op(
        name="mla_attention",
        build=mla_attention,
        check=check,
        reference=mla_attention_reference,
        outputs=outputs,
        work=work,
        operands=(0, 1),
        fixed=(2, 3),
        exact=frozenset({"Hq", "Hk", "G", "C", "R", "P"}),
        empty=empty,
        guard=guard,
        wide_outputs=frozenset({1}),
        batching=OverOnePool(queries=2, pools=2),
    )
)

"""Attention of queries to keys and values that lie in pages: prefill, chunked prefill and decode."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.attention.attention import attention_reference
from layerzero.ops.attention.checks import as_window, check_window
from layerzero.ops.op import NO_SHAPE, Args, Call, Op, register, signature_of
from layerzero.ops.paged.batching import OverOnePool
from layerzero.ops.paged.checks import (
    LAYOUTS,
    check_pool,
    check_tables,
    dtypes_of,
    gather,
    guard_pages,
    no_queries,
    page_axes,
    pool_features,
    query_offsets,
)
from layerzero.spec.call_spec import OutSpec, Request, Work


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
) -> Call:
    """Attend the queries of several sequences to their keys and values in a shared pool of pages.

    Args: q (T, Hq, D), all sequences' queries behind each other, sequence b's from cu_seqlens[b] to
        cu_seqlens[b + 1]; without cu_seqlens q is (B, Hq, D), one query a sequence. k_pages (N, P, Hk, D) and
        v_pages (N, P, Hk, Dv), or heads before tokens with `layout="HND"`; Hq % Hk == 0. block_tables (B, M)
        names sequence b's pages in order; context_lens (B,) counts its keys, those of these queries included,
        and what a table holds behind that is never read. All metadata is int32 or int64.
        is_causal is aligned at the last query and the last key. scale defaults to D**-0.5; window=(left,
        right) keys around the diagonal, -1 is unbounded; softcap c turns scores s into c * tanh(s / c).
    Returns: (T, Hq, Dv) in q's dtype; with return_lse also the natural log of the softmax's denominator,
        float32 (T, Hq). A query that sees no key gives 0, and -inf.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also a page id that is out of
        range or twice in one sequence, and a length that the tables cannot hold.
    Source: arXiv 2309.06180.
    """
    if window is not None:
        window = as_window(window)
    args = (
        q, k_pages, v_pages, block_tables, context_lens, cu_seqlens, is_causal, scale, window, softcap,
        layout, return_lse,
    )  # fmt: skip
    try:
        return (
            "paged_attention", q.shape, q.stride(), q.dtype, q.device, q.requires_grad,
            k_pages.shape, k_pages.stride(), k_pages.dtype, k_pages.device, k_pages.requires_grad,
            v_pages.shape, v_pages.stride(), v_pages.dtype, v_pages.device, v_pages.requires_grad,
            block_tables.shape, block_tables.stride(), block_tables.dtype, block_tables.device,
            context_lens.shape, context_lens.stride(), context_lens.dtype, context_lens.device,
            cu_seqlens if cu_seqlens is None else signature_of(cu_seqlens),
            is_causal, scale, window, softcap, layout, return_lse,
        ), args  # fmt: skip
    except NO_SHAPE:
        check(args)  # names the operand that is no tensor
        raise


def check(args: Args) -> Request:
    """Validate a call, without reading data, and describe it; see `paged_attention` for the arguments."""
    q, k_pages, v_pages, tables, lens, cu, is_causal, scale, window, softcap, layout, return_lse = args
    checks.need_choice("layout", layout, LAYOUTS)
    checks.need_bool("is_causal", is_causal)
    checks.need_bool("return_lse", return_lse)
    checks.need_tensor("q", q, rank=3)
    dims = check_tables(q, tables, lens, cu)
    dims |= _check_pools(q, k_pages, v_pages, layout)
    if scale is not None:
        checks.need_number("scale", scale)
    if softcap is not None and checks.need_number("softcap", softcap, low=0.0, what="a number > 0") == 0.0:
        raise ValueError(f"softcap needs a number > 0, got {softcap}")
    if window is not None:
        check_window(window)
    asked = {
        "causal": is_causal,
        "prefill": cu is not None,
        "gqa": dims["G"] > 1,
        "scale": scale is not None and scale != dims["D"] ** -0.5,
        "scale_not_positive": scale is not None and scale <= 0,
        "window": window is not None and max(window) >= 0,
        "softcap": softcap is not None,
        "lse": return_lse,
        **pool_features(q, k_pages, v_pages),
    }
    return Request(
        op="paged_attention",
        platform=q.device.type,
        device=str(q.device),
        dtype=checks.dtype_name(q.dtype),
        dtypes=dtypes_of(args, (0, 3, 4)),
        dims=dims,
        features=frozenset(name for name, wanted in asked.items() if wanted),
        layout=layout,
        contiguous=checks.is_plain_contiguous([q]),
        last_stride1=checks.last_stride_is_one([q]),
        alignment=checks.alignment_of([q, k_pages, v_pages]),
    )


def _check_pools(q: Tensor, k_pages: Tensor, v_pages: Tensor, layout: str) -> dict[str, int]:
    if q.shape[2] == 0:
        raise ValueError(f"q needs a head size of at least 1, got shape {tuple(q.shape)}")
    check_pool("k_pages", k_pages, q, 4)
    check_pool("v_pages", v_pages, q, 4)
    tokens, heads = page_axes(layout)
    if v_pages.shape[:3] != k_pages.shape[:3]:
        raise ValueError(
            f"v_pages needs the pages, tokens and heads of k_pages, {tuple(k_pages.shape[:3])}, got "
            f"{tuple(v_pages.shape[:3])}"
        )
    if k_pages.dtype != v_pages.dtype:
        wanted, got = checks.dtype_name(k_pages.dtype), checks.dtype_name(v_pages.dtype)
        raise TypeError(f"v_pages needs dtype {wanted} like k_pages, got {got}")
    if k_pages.shape[3] != q.shape[2]:
        raise ValueError(f"k_pages needs head size {q.shape[2]} like q, got {k_pages.shape[3]}")
    query_heads, key_heads = q.shape[1], k_pages.shape[heads]
    if query_heads == 0 or query_heads % key_heads:
        raise ValueError(
            f"k_pages needs heads that divide q's {query_heads}, got {key_heads} in layout {layout}"
        )
    return {
        "Hq": query_heads, "Hk": key_heads, "G": query_heads // key_heads, "D": q.shape[2],
        "Dv": v_pages.shape[3], "N": k_pages.shape[0], "P": k_pages.shape[tokens],
    }  # fmt: skip


def guard(args: Args) -> Args:
    """Page ids, lengths and offsets that fit, as copies."""
    k_pages, layout = args[1], args[10]
    return guard_pages(args, 3, "q", k_pages.shape[0], k_pages.shape[page_axes(layout)[0]])


def paged_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    layout: str = "NHD",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The op in plain torch: each sequence's keys and values gathered, then `attention`'s reference."""
    guard(
        (
            q,
            k_pages,
            v_pages,
            block_tables,
            context_lens,
            cu_seqlens,
            is_causal,
            scale,
            window,
            softcap,
            layout,
        )
    )
    size = k_pages.shape[page_axes(layout)[0]]
    starts = query_offsets(q.shape[0], cu_seqlens)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for row, length in enumerate(context_lens.tolist()):
        mine = q[starts[row] : starts[row + 1]]
        pages = block_tables[row, : -(-length // size)]
        k, v = (gather(pool, pages, length, layout) for pool in (k_pages, v_pages))
        out, lse = attend(mine, k, v, is_causal, scale, window, softcap)
        outs.append(out)
        lses.append(lse)
    result = torch.cat(outs)
    return (result, torch.cat(lses)) if return_lse else result


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    window: tuple[int, int] | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """One sequence, tokens before heads: (Sq, Hq, Dv) in q's dtype and float32 (Sq, Hq)."""
    if not q.shape[0] or not k.shape[0]:
        hidden = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        return q.new_zeros((*q.shape[:2], v.shape[2])), hidden
    query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    result = attention_reference(
        query, key, value, is_causal=is_causal, scale=scale, window=window, softcap=softcap, return_lse=True
    )
    assert isinstance(result, tuple)
    return result[0][0].transpose(0, 1), result[1][0].transpose(0, 1)


def outputs(args: Args) -> tuple[OutSpec, ...]:
    """(T, Hq, Dv) in q's dtype, and float32 (T, Hq) where the LSE is asked for."""
    q, v_pages = args[0], args[2]
    out = OutSpec((q.shape[0], q.shape[1], v_pages.shape[3]), checks.dtype_name(q.dtype))
    return (out, OutSpec((q.shape[0], q.shape[1]), "float32")) if args[11] else (out,)


def empty(args: Args) -> Tensor | tuple[Tensor, Tensor] | None:
    """The result of a call without queries; the guard still sees its tables."""
    q: Tensor = args[0]
    if q.shape[0]:
        return None
    guard(args)
    return no_queries(q.new_zeros((0, q.shape[1], args[2].shape[3])), (0, q.shape[1]), args[11])


def work(request: Request) -> Work:
    """Two products over the pairs that full tables would have; pages, queries and outputs once.

    The lengths are data: a table's width bounds them, and within a factor of two it is what they are.
    """
    keys = request.dim("M") * request.dim("P")
    tokens, batch = request.dim("T"), max(request.dim("B"), 1)
    widths = request.dim("D") + request.dim("Dv")
    pairs = float(tokens * keys)
    if "causal" in request.features:
        each = tokens / batch
        pairs -= tokens * min(each - 1, keys) / 2
    moved = widths * (batch * keys * request.dim("Hk") + tokens * request.dim("Hq"))
    return Work(2.0 * request.dim("Hq") * widths * pairs, float(moved * checks.dtype_bytes(request.dtype)))


PAGED_ATTENTION = register(
    Op(
        name="paged_attention",
        build=paged_attention,
        check=check,
        reference=paged_attention_reference,
        outputs=outputs,
        work=work,
        operands=(0,),  # a pool is never copied to suit a kernel
        fixed=(1, 2),
        exact=frozenset({"Hq", "Hk", "G", "D", "Dv", "P"}),
        empty=empty,
        guard=guard,
        wide_outputs=frozenset({1}),
        batching=OverOnePool(queries=1, pools=2),
    )
)

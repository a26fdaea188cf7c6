"""Attention of queries to keys and values that lie in pages: prefill, chunked prefill and decode."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.attention.attention import attention_reference
from layerzero.ops.attention.checks import check_window, normalized_window
from layerzero.ops.op import NO_SHAPE, Args, Op, SignedCall, register, signature_of
from layerzero.ops.paged.batching import PagedBatching
from layerzero.ops.paged.checks import (
    LAYOUTS,
    cache_features,
    check_cache,
    check_tables,
    dtype_names_at,
    empty_result,
    gather_pages,
    page_axes,
    query_offsets,
    validate_paged_metadata,
)
from layerzero.spec.call_spec import CallSpec, OutputSpec, WorkEstimate


def paged_attention(
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
    layout: str = "NHD",
    return_lse: bool = False,
) -> SignedCall:
    """Attend the queries of several sequences to their keys and values in a shared pool of pages.

    Args: q (T, Hq, D), all sequences' queries behind each other, sequence b's from cu_seqlens_q[b] to
        cu_seqlens_q[b + 1]; without cu_seqlens_q q is (B, Hq, D), one query a sequence. k_cache (N, P, Hk, D)
        and v_cache (N, P, Hk, Dv), or heads before tokens with `layout="HND"`; Hq % Hk == 0. block_tables (B,
        M) names sequence b's pages in order; seq_lens (B,) counts its keys, those of these queries included,
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
        window = normalized_window(window)
    args = (
        q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, is_causal, scale, window, softcap,
        layout, return_lse,
    )  # fmt: skip
    try:
        return (
            "paged_attention", q.shape, q.stride(), q.dtype, q.device, q.requires_grad,
            k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device, k_cache.requires_grad,
            v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.device, v_cache.requires_grad,
            block_tables.shape, block_tables.stride(), block_tables.dtype, block_tables.device,
            seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.device,
            cu_seqlens_q if cu_seqlens_q is None else signature_of(cu_seqlens_q),
            is_causal, scale, window, softcap, layout, return_lse,
        ), args  # fmt: skip
    except NO_SHAPE:
        check(args)  # names the operand that is no tensor
        raise


def check(args: Args) -> CallSpec:
    """Validate a call, without reading data, and describe it; see `paged_attention` for the arguments."""
    q, k_cache, v_cache, tables, lens, cu, is_causal, scale, window, softcap, layout, return_lse = args
    checks.need_choice("layout", layout, LAYOUTS)
    checks.need_bool("is_causal", is_causal)
    checks.need_bool("return_lse", return_lse)
    checks.need_tensor("q", q, rank=3)
    dims = check_tables(q, tables, lens, cu)
    dims |= _check_pools(q, k_cache, v_cache, layout)
    if scale is not None:
        checks.need_number("scale", scale)
    if softcap is not None and checks.need_number("softcap", softcap, low=0.0, needs="a number > 0") == 0.0:
        raise ValueError(f"softcap needs a number > 0, got {softcap}")
    if window is not None:
        check_window(window)
    requested = {
        "causal": is_causal,
        "prefill": cu is not None,
        "gqa": dims["G"] > 1,
        "scale": scale is not None and scale != dims["D"] ** -0.5,
        "scale_not_positive": scale is not None and scale <= 0,
        "window": window is not None and max(window) >= 0,
        "softcap": softcap is not None,
        "lse": return_lse,
        **cache_features(q, k_cache, v_cache),
    }
    return CallSpec(
        op="paged_attention",
        platform=q.device.type,
        device=str(q.device),
        dtype=checks.dtype_name(q.dtype),
        dtypes=dtype_names_at(args, (0, 3, 4)),
        dims=dims,
        features=frozenset(name for name, is_set in requested.items() if is_set),
        layout=layout,
        contiguous=checks.is_plain_contiguous([q]),
        last_stride1=checks.last_stride_is_one([q]),
        alignment=checks.alignment_of([q, k_cache, v_cache]),
    )


def _check_pools(q: Tensor, k_cache: Tensor, v_cache: Tensor, layout: str) -> dict[str, int]:
    if q.shape[2] == 0:
        raise ValueError(f"q needs a head size of at least 1, got shape {tuple(q.shape)}")
    check_cache("k_cache", k_cache, q, 4)
    check_cache("v_cache", v_cache, q, 4)
    tokens, heads = page_axes(layout)
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache needs the pages, tokens and heads of k_cache, {tuple(k_cache.shape[:3])}, got "
            f"{tuple(v_cache.shape[:3])}"
        )
    if k_cache.dtype != v_cache.dtype:
        expected_dtype, got = checks.dtype_name(k_cache.dtype), checks.dtype_name(v_cache.dtype)
        raise TypeError(f"v_cache needs dtype {expected_dtype} like k_cache, got {got}")
    if k_cache.shape[3] != q.shape[2]:
        raise ValueError(f"k_cache needs head size {q.shape[2]} like q, got {k_cache.shape[3]}")
    query_heads, key_heads = q.shape[1], k_cache.shape[heads]
    if query_heads == 0 or query_heads % key_heads:
        raise ValueError(
            f"k_cache needs heads that divide q's {query_heads}, got {key_heads} in layout {layout}"
        )
    return {
        "Hq": query_heads, "Hk": key_heads, "G": query_heads // key_heads, "D": q.shape[2],
        "Dv": v_cache.shape[3], "N": k_cache.shape[0], "P": k_cache.shape[tokens],
    }  # fmt: skip


def validate_values(args: Args) -> Args:
    """Page ids, lengths and offsets that fit, as copies."""
    k_cache, layout = args[1], args[10]
    return validate_paged_metadata(args, 3, "q", k_cache.shape[0], k_cache.shape[page_axes(layout)[0]])


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    layout: str = "NHD",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The op in plain torch: each sequence's keys and values gathered, then `attention`'s reference."""
    validate_values(
        (
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            cu_seqlens_q,
            is_causal,
            scale,
            window,
            softcap,
            layout,
        )
    )
    size = k_cache.shape[page_axes(layout)[0]]
    starts = query_offsets(q.shape[0], cu_seqlens_q)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for row, length in enumerate(seq_lens.tolist()):
        seq_queries = q[starts[row] : starts[row + 1]]
        pages = block_tables[row, : -(-length // size)]
        k, v = (gather_pages(pool, pages, length, layout) for pool in (k_cache, v_cache))
        out, lse = attend_sequence(seq_queries, k, v, is_causal, scale, window, softcap)
        outs.append(out)
        lses.append(lse)
    result = torch.cat(outs)
    return (result, torch.cat(lses)) if return_lse else result


def attend_sequence(
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


def outputs(args: Args) -> tuple[OutputSpec, ...]:
    """(T, Hq, Dv) in q's dtype, and float32 (T, Hq) where the LSE is asked for."""
    q, v_cache = args[0], args[2]
    out = OutputSpec((q.shape[0], q.shape[1], v_cache.shape[3]), checks.dtype_name(q.dtype))
    return (out, OutputSpec((q.shape[0], q.shape[1]), "float32")) if args[11] else (out,)


def empty(args: Args) -> Tensor | tuple[Tensor, Tensor] | None:
    """The result of a call without queries; the guard still sees its tables."""
    q: Tensor = args[0]
    if q.shape[0]:
        return None
    validate_values(args)
    return empty_result(q.new_zeros((0, q.shape[1], args[2].shape[3])), (0, q.shape[1]), args[11])


def work(spec: CallSpec) -> WorkEstimate:
    """Two products over the pairs that full tables would have; pages, queries and outputs once.

    The lengths are data: a table's width bounds them, and within a factor of two it is what they are.
    """
    keys = spec.dim("M") * spec.dim("P")
    tokens, batch = spec.dim("T"), max(spec.dim("B"), 1)
    widths = spec.dim("D") + spec.dim("Dv")
    pairs = float(tokens * keys)
    if "causal" in spec.features:
        each = tokens / batch
        pairs -= tokens * min(each - 1, keys) / 2
    moved = widths * (batch * keys * spec.dim("Hk") + tokens * spec.dim("Hq"))
    return WorkEstimate(2.0 * spec.dim("Hq") * widths * pairs, float(moved * checks.dtype_bytes(spec.dtype)))


PAGED_ATTENTION = register(
    Op(
        name="paged_attention",
        build=paged_attention,
        check=check,
        reference=paged_attention_reference,
        outputs=outputs,
        work=work,
        operands=(0,),  # a pool is never copied to suit a kernel
        uncopied_operands=(1, 2),
        exact_dims=frozenset({"Hq", "Hk", "G", "D", "Dv", "P"}),
        empty=empty,
        validate_values=validate_values,
        wide_outputs=frozenset({1}),
        batching=PagedBatching(queries=1, pools=2),
    )
)

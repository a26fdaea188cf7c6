"""Attention of queries to keys and values in pages: prefill, chunked prefill and decode."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.ops import checks, kv_formats
from layerzero.ops.attention.arguments import PagedArgs
from layerzero.ops.attention.checks import check_score_options, normalized_window, score_features
from layerzero.ops.decoding import pages_decoding
from layerzero.ops.describe import describe
from layerzero.ops.op import Args, define_op
from layerzero.ops.paged import checks as paged
from layerzero.ops.paged.batching import PagedBatching
from layerzero.ops.paged.reference import attend_sequences
from layerzero.ops.signature import IndexTensor, SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, WorkEstimate


@op_signature(convert={"window": normalized_window})
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: IndexTensor,
    seq_lens: IndexTensor,
    *,
    cu_seqlens_q: IndexTensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    layout: str = "NHD",
    return_lse: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> SignedCall:
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
    Returns: (T, Hq, Dv) in q's dtype; with return_lse also the natural log of the softmax's denominator,
        float32 (T, Hq). A query that sees no key gives 0, and -inf.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also a page id that is out of
        range or twice in one sequence, and a length that the tables cannot hold. FormatError, which is both,
        with a reason code: codes and scales do not fit, a scale is zero, negative or NaN, the pool was
        written by `append_kv` in another format.
    Source: arXiv 2309.06180.
    """
    raise NotImplementedError


def check(args: Args) -> CallSpec:
    """Validate a call, without reading data, and describe it; see `paged_attention` for the arguments."""
    call = PagedArgs._make(args)
    q, k_cache, v_cache = call[:3]
    checks.need_choice("layout", call.layout, paged.LAYOUTS)
    checks.need_bools(call, "is_causal", "return_lse")
    paged.check_queries("q", q)
    dims = paged.check_tables(q, call.block_tables, call.seq_lens, call.cu_seqlens_q)
    dims |= _check_pools(q, k_cache, v_cache, call.layout)
    check_score_options(call.scale, call.softcap, call.window)
    features = score_features(call, dims) | paged.cache_features(q, k_cache, v_cache)
    features |= kv_formats.check_scales(call, kv_formats.POOLS, paged.page_axes(call.layout)[1])
    features["prefill"] = call.cu_seqlens_q is not None
    return describe(
        "paged_attention", [q], dims, features,
        layout=call.layout, typed=(q, call.block_tables, call.seq_lens), aligned=(k_cache, v_cache),
    )  # fmt: skip


def _check_pools(q: Tensor, k_cache: Tensor, v_cache: Tensor, layout: str) -> dict[str, int]:
    if q.shape[2] == 0:
        raise ValueError(f"q needs a head size of at least 1, got shape {tuple(q.shape)}")
    paged.check_cache("k_cache", k_cache, q, 4)
    paged.check_cache("v_cache", v_cache, q, 4)
    tokens, heads = paged.page_axes(layout)
    paged.check_pair(k_cache, v_cache)
    checks.need_like("k_cache", "head size {}", k_cache.shape[3], q.shape[2], "q")
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
    k_cache, tokens = args[1], paged.page_axes(args[10])[0]
    if args[12] is not None:
        paged.validate_codes(PagedArgs._make(args))
    return paged.validate_paged_metadata(args, 3, "q", k_cache.shape[0], k_cache.shape[tokens])


def paged_attention_reference(*args: Any, **named: Any) -> Tensor | tuple[Tensor, Tensor]:
    """The op in plain torch: each sequence's keys and values gathered, then `attention`'s reference.

    Args: those of `PagedArgs`.
    """
    call = PagedArgs(*args, **named)
    validate_values(call)
    pools = ((call.k_cache, call.k_scale), (call.v_cache, call.v_scale))
    return attend_sequences(paged.sequences_of(call, call.q, pools, call.layout), call)


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
    moved = kv_formats.code_bytes(spec) * batch * keys * spec.dim("Hk")
    moved += checks.dtype_bytes(spec.dtype) * tokens * spec.dim("Hq")
    return WorkEstimate(2.0 * spec.dim("Hq") * widths * pairs, float(widths * moved))


PAGED_ATTENTION = define_op(
    build=paged_attention,
    check=check,
    reference=paged_attention_reference,
    work=work,
    operands=(0,),  # a pool is never copied to suit a kernel
    uncopied_operands=(1, 2),
    exact_dims=frozenset({"Hq", "Hk", "G", "D", "Dv", "P"}),
    validate_values=validate_values,
    **paged.results_over_queries(values=2, return_lse=11, validate=validate_values),
    wide_outputs=frozenset({1}),
    decoding=pages_decoding(queries=1, scales=12),
    batching=PagedBatching(tensors=1, pools=2),
)

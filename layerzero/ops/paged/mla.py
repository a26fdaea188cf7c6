"""Multi-head latent attention in its absorbed form, over pages of compressed keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks, kv_formats
from layerzero.ops.attention.arguments import MlaArgs
from layerzero.ops.decoding import pages_decoding
from layerzero.ops.describe import describe
from layerzero.ops.op import Args, define_op
from layerzero.ops.paged import checks as paged
from layerzero.ops.paged.batching import PagedBatching
from layerzero.ops.paged.reference import attend_sequences
from layerzero.ops.signature import IndexTensor, SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, WorkEstimate

_POOLS = (("ckv_scale", "ckv_cache"), ("kpe_scale", "kpe_cache"))


@op_signature()
def mla_attention(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    block_tables: IndexTensor,
    seq_lens: IndexTensor,
    *,
    cu_seqlens_q: IndexTensor | None = None,
    scale: float,
    is_causal: bool = True,
    return_lse: bool = False,
    ckv_scale: Tensor | None = None,
    kpe_scale: Tensor | None = None,
) -> SignedCall:
    """Attend absorbed queries to the latent vectors that all heads share: softmax(scale * s) ckv.

    s = q_nope . ckv + q_pe . kpe; the caller has multiplied q_nope by the keys' up-projection and multiplies
    the result by the values'.
    Args: q_nope (T, H, C) and q_pe (T, H, R), sequences concatenated along cu_seqlens_q (B + 1,), or one
        query a sequence without it; ckv_cache (N, P, C) and kpe_cache (N, P, R); block_tables (B, M) and
        seq_lens (B,) as in `paged_attention`. scale has no default: it follows from the head size before
        absorption, (128 + 64)**-0.5 for DeepSeek-V3. is_causal is aligned at the last query and the last key.
        Pools of float8_e4m3fn, float8_e5m2 or int8 hold codes; ckv_scale and kpe_scale, float32, are () for
        the pool or (N, P) for each token.
    Returns: (T, H, C) in q_nope's dtype; with return_lse also the natural log of the softmax's denominator,
        float32 (T, H). A query that sees no key gives 0, and -inf.
    Raises: ValueError, TypeError: an argument does not fit, by name; page ids and lengths on the CPU.
        FormatError, which is both: codes and scales as in `paged_attention`.
    Source: arXiv 2405.04434.
    """
    raise NotImplementedError


def check(args: Args) -> CallSpec:
    """Validate a call, without reading data, and describe it; see `mla_attention` for the arguments."""
    call = MlaArgs._make(args)
    q_nope, q_pe, ckv, kpe, tables, lens, cu, scale, is_causal, return_lse = call[:10]
    checks.need_bools(call, "is_causal", "return_lse")
    checks.need_number("scale", scale)
    paged.check_queries("q_nope", q_nope)
    paged.check_queries("q_pe", q_pe)
    checks.need_same_device("q_nope", q_nope, q_pe=q_pe)
    if 0 in q_nope.shape[1:] or q_pe.shape[2] == 0:
        raise ValueError(
            f"q_nope needs heads of at least 1, got {tuple(q_nope.shape)} and q_pe {tuple(q_pe.shape)}"
        )
    checks.need_like("q_pe", "(T, H) = {}", tuple(q_pe.shape[:2]), tuple(q_nope.shape[:2]), "q_nope")
    paged.check_cache("ckv_cache", ckv, q_nope, 3)
    paged.check_cache("kpe_cache", kpe, q_nope, 3)
    checks.need_like("kpe_cache", "pages {}", tuple(kpe.shape[:2]), tuple(ckv.shape[:2]), "ckv_cache")
    kv_formats.need_same_dtype("kpe_cache", kpe, "ckv_cache", ckv)
    for name, pool, query, like in (("ckv_cache", ckv, q_nope, "q_nope"), ("kpe_cache", kpe, q_pe, "q_pe")):
        checks.need_like(name, "width {}", pool.shape[2], query.shape[2], like)
    dims = paged.check_tables(q_nope, tables, lens, cu)
    dims |= {
        "Hq": q_nope.shape[1], "Hk": 1, "G": q_nope.shape[1], "C": ckv.shape[2], "R": kpe.shape[2],
        "N": ckv.shape[0], "P": ckv.shape[1],
    }  # fmt: skip
    features = paged.cache_features(q_nope, ckv, kpe) | kv_formats.check_scales(call, _POOLS, None)
    features |= {"causal": is_causal, "prefill": cu is not None, "lse": return_lse}
    features["scale_not_positive"] = scale <= 0
    typed = (q_nope, q_pe, tables, lens)
    return describe("mla_attention", typed[:2], dims, features, typed=typed, aligned=(ckv, kpe))


def validate_values(args: Args) -> Args:
    """Page ids, lengths and offsets that fit, as copies."""
    if args[10] is not None:
        paged.validate_codes(MlaArgs._make(args), _POOLS)
    return paged.validate_paged_metadata(args, 4, "q_nope", args[2].shape[0], args[2].shape[1])


def mla_attention_reference(*args: Any, **named: Any) -> Tensor | tuple[Tensor, Tensor]:
    """The op in plain torch: one key head of width C + R whose first C elements are the values.

    Args: those of `MlaArgs`.
    """
    call = MlaArgs(*args, **named)
    validate_values(call)
    queries = torch.cat([call.q_nope, call.q_pe.to(call.q_nope.dtype)], -1)
    pools = ((call.ckv_cache, call.ckv_scale), (call.kpe_cache, call.kpe_scale))
    sequences = (
        (q, torch.cat([ckv, kpe], -1).unsqueeze(1), ckv.unsqueeze(1))
        for q, ckv, kpe in paged.sequences_of(call, queries, pools, "NHD")
    )
    return attend_sequences(sequences, call)


def work(spec: CallSpec) -> WorkEstimate:
    """Scores over C + R, values over C; each page is read once for all heads."""
    keys = spec.dim("M") * spec.dim("P")
    tokens, heads = spec.dim("T"), spec.dim("Hq")
    latent, rotary = spec.dim("C"), spec.dim("R")
    moved = kv_formats.code_bytes(spec) * max(spec.dim("B"), 1) * keys * (latent + rotary)
    moved += checks.dtype_bytes(spec.dtype) * tokens * heads * (2 * latent + rotary)
    flops = 2.0 * tokens * heads * keys * (2 * latent + rotary)
    return WorkEstimate(flops, float(moved))


MLA_ATTENTION = define_op(
    build=mla_attention,
    check=check,
    reference=mla_attention_reference,
    work=work,
    operands=(0, 1),
    uncopied_operands=(2, 3),
    exact_dims=frozenset({"Hq", "Hk", "G", "C", "R", "P"}),
    validate_values=validate_values,
    **paged.results_over_queries(values=2, return_lse=9, validate=validate_values),
    wide_outputs=frozenset({1}),
    decoding=pages_decoding(queries=2, scales=10),
    batching=PagedBatching(tensors=2, pools=2),
)

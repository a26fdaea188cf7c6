"""Attention over sequences of any lengths that are concatenated in one tensor."""

from __future__ import annotations

import itertools
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layerzero.ops import checks, kv_formats
from layerzero.ops.attention.arguments import RaggedArgs
from layerzero.ops.attention.batching import GATHER_BYTES, GATHER_BYTES_OTHER_DEVICES
from layerzero.ops.attention.checks import check_score_options, normalized_window, score_features
from layerzero.ops.batching import TokenBatching, as_view_of_base, concat_rows, split_outputs
from layerzero.ops.decoding import OPERAND_DECODING
from layerzero.ops.describe import describe
from layerzero.ops.op import Args, LaunchFunction, define_op
from layerzero.ops.paged.batching import concat_cu_seqlens
from layerzero.ops.paged.checks import check_cu_seqlens, results_over_queries, validate_cu_seqlens
from layerzero.ops.paged.reference import attend_sequences
from layerzero.ops.signature import IndexTensor, SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, WorkEstimate


@op_signature(default={"cu_seqlens_k": "cu_seqlens_q"}, convert={"window": normalized_window})
def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: IndexTensor,
    cu_seqlens_k: IndexTensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window: tuple[int, ...] | list[int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> SignedCall:
    """Attend each sequence's queries to its own keys and values, without padding.

    Args: q (T, Hq, D), k (S, Hk, D) and v (S, Hk, Dv) with Hq % Hk == 0, sequences concatenated:
        b has q's rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], and k's and v's along cu_seqlens_k, which
        defaults to cu_seqlens_q. Offsets are (B + 1,), int32 or int64. is_causal is aligned at a sequence's
        last query and last key; scale defaults to D**-0.5; window, softcap, and codes with their scales, as
        in `attention`.
    Returns: (T, Hq, Dv) in q's dtype, bfloat16 where q is codes; with return_lse also the natural log of the
        softmax's denominator, float32 (T, Hq). A query that sees no key gives 0, and -inf.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also offsets that do not
        start at 0, fall, or do not end at the number of rows.
    """
    raise NotImplementedError


def check(args: Args) -> CallSpec:
    """Validate a call, without reading data, and describe it; see `ragged_attention` for the arguments."""
    call = RaggedArgs._make(args)
    q, k, v, cu, cu_k = call[:5]
    checks.need_bools(call, "is_causal", "return_lse")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.need_tensor(name, tensor, rank=3, floating=not kv_formats.holds_codes(tensor))
    checks.need_index("cu_seqlens_q", cu, rank=1)
    if cu.shape[0] == 0:
        raise ValueError("cu_seqlens_q needs at least one offset, got none")
    batch = cu.shape[0] - 1
    check_cu_seqlens("cu_seqlens_k", cu_k, batch, "cu_seqlens_q's sequences")
    checks.need_same_device("q", q, k=k, v=v, cu_seqlens_q=cu, cu_seqlens_k=cu_k)
    dims = {"B": batch} | _check_operands(q, k, v)
    check_score_options(call.scale, call.softcap, call.window)
    features = score_features(call, dims)
    features["lse_grad"] = call.return_lse and any(t.requires_grad for t in (q, k, v))
    scales = kv_formats.check_operand_scales(call, 1)
    typed = (q, cu, cu_k) if scales else args[:5]
    return describe("ragged_attention", (q, k, v), dims, features | scales, typed=typed)


def _check_operands(q: Tensor, k: Tensor, v: Tensor) -> dict[str, int]:
    if 0 in q.shape[1:] or 0 in k.shape[1:] or v.shape[2] == 0:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise ValueError(f"q, k and v need at least one head of at least one element, got {shapes}")
    checks.need_like("v", "tokens and heads {}", tuple(v.shape[:2]), tuple(k.shape[:2]), "k")
    checks.need_like("k", "head size {}", k.shape[2], q.shape[2], "q")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"k needs heads that divide q's {q.shape[1]}, got {k.shape[1]}")
    return {
        "T": q.shape[0], "S": k.shape[0], "Hq": q.shape[1], "Hk": k.shape[1], "G": q.shape[1] // k.shape[1],
        "D": q.shape[2], "Dv": v.shape[2],
    }  # fmt: skip


def validate_values(args: Args) -> Args:
    """Offsets that fit the rows they count, as copies, one where both are the same, and positive scales."""
    if args[11] is not None:
        kv_formats.need_valid_operand_scales(args[10:13])
    q, k, v, cu, cu_k, *flags = args
    offsets = validate_cu_seqlens("cu_seqlens_q", cu, q.shape[0], "the rows of q")
    if cu_k is cu and q.shape[0] == k.shape[0]:
        return q, k, v, offsets, offsets, *flags
    return q, k, v, offsets, validate_cu_seqlens("cu_seqlens_k", cu_k, k.shape[0], "the rows of k"), *flags


def ragged_attention_reference(*args: Any, **named: Any) -> Tensor | tuple[Tensor, Tensor]:
    """The op in plain torch: `attention`'s reference, sequence by sequence.

    Args: those of `RaggedArgs`.
    """
    call = RaggedArgs(*args, **named)
    validate_values(call)
    result_dtype = kv_formats.number_dtype(call.q)
    call = call._replace(**kv_formats.decoded_operands(call, 1))
    rows, key_rows = (list(itertools.pairwise(offsets.tolist())) for offsets in call[3:5])
    sequences = [
        (call.q[start:stop], call.k[first:last], call.v[first:last])
        for (start, stop), (first, last) in zip(rows, key_rows, strict=True)
    ]
    return attend_sequences(sequences, call, result_dtype)


def work(spec: CallSpec) -> WorkEstimate:
    """Two products over the pairs of sequences of equal lengths: the lengths themselves are data."""
    batch = max(spec.dim("B"), 1)
    pairs = spec.dim("T") * spec.dim("S") / batch
    if "causal" in spec.features:
        pairs /= 2
    widths = spec.dim("D") + spec.dim("Dv")
    moved = checks.dtype_bytes(spec.dtype) * spec.dim("T") * spec.dim("Hq")
    moved += kv_formats.code_bytes(spec) * spec.dim("S") * spec.dim("Hk")
    return WorkEstimate(2.0 * spec.dim("Hq") * widths * pairs, float(widths * moved))


@dataclass(frozen=True, slots=True)
class RaggedBatching(TokenBatching):
    """Sequences of all callers concatenated; those that have to be copied only while they are small."""

    tensors: int = 3

    @property
    def concat_positions(self) -> Container[int]:
        """Queries, keys, values and both offsets."""
        return range(5)

    def compatibility(self, args: Args) -> Hashable | None:
        """Dtype, device and heads of the operands; None where scales are of a caller's own tokens."""
        if args[11] is not None and args[11].dim() > 1:
            return None
        return TokenBatching.compatibility(self, args)  # `super()` would look for the class without slots

    def run(self, calls: Sequence[Args], launch: LaunchFunction) -> list[Any]:
        """One launch over everybody's sequences, or one each where gathering costs more than launches."""
        if len(calls) == 1:
            return [launch(calls[0])]
        columns = [[args[p] for args in calls] for p in range(3)]
        device = calls[0][0].device
        largest = max(self.batch_cost(args)[1] for args in calls)
        if largest > GATHER_BYTES.get(device.type, GATHER_BYTES_OTHER_DEVICES) and any(
            as_view_of_base(column) is None for column in columns
        ):
            return [launch(args) for args in calls]
        counts = [args[0].shape[0] for args in calls]
        keys = [args[1].shape[0] for args in calls]
        merged = (
            *[concat_rows(column) for column in columns],
            concat_cu_seqlens([args[3] for args in calls], counts, device),
            concat_cu_seqlens([args[4] for args in calls], keys, device),
            *calls[0][5:],
        )
        return split_outputs(launch(merged), counts)


RAGGED_ATTENTION = define_op(
    build=ragged_attention,
    check=check,
    reference=ragged_attention_reference,
    work=work,
    operands=(0, 1, 2),
    exact_dims=frozenset({"Hq", "Hk", "G", "D", "Dv"}),
    validate_values=validate_values,
    **results_over_queries(values=2, return_lse=9, validate=validate_values),
    wide_outputs=frozenset({1}),
    decoding=OPERAND_DECODING,
    batching=RaggedBatching(),
)

"""The rotation of queries and keys with the write of keys and values into their pages: rope_append_kv."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layerzero.formats.errors import FormatError
from layerzero.ops import checks
from layerzero.ops.batching import split_outputs
from layerzero.ops.describe import describe
from layerzero.ops.kv_formats import is_coded
from layerzero.ops.op import Args, define_op, output_like
from layerzero.ops.paged import append
from layerzero.ops.rope.rope import check_rope, rope_reference, validate_rope_values
from layerzero.ops.signature import IndexTensor, SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, WorkEstimate
from layerzero.spec.reasons import Reason


@op_signature()
def rope_append_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: IndexTensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: IndexTensor,
    *,
    interleaved: bool = False,
    layout: str = "NHD",
) -> SignedCall:
    """Turn new queries and keys as `rope` does; write the turned keys and the values as `append_kv` does.

    Args: q (T, Hq, D), k (T, Hk, D), v (T, Hk, Dv); positions (T,) and the tables cos and sin as `rope` has
        them; k_cache, v_cache, slot_mapping (T,) and layout as `append_kv` has them, with pools of numbers.
        The pools are changed.
    Returns: the turned q. Awaited before `paged_attention` over the same pool, it says that the tokens are
    there.
    Raises: ValueError, TypeError: what `rope` and `append_kv` refuse, by name; nothing is written then.
        KernelExecutionError: a kernel raised; what it wrote is unknown.
    Source: arXiv 2104.09864 and 2309.06180.
    """
    raise NotImplementedError


def _append_args(args: Args) -> Args:
    """The arguments of the `append_kv` within."""
    _, k, v, _, _, _, k_cache, v_cache, slot_mapping, _, layout = args
    return k, v, k_cache, v_cache, slot_mapping, layout, None, None


def _check(args: Args) -> CallSpec:
    q, k, v, positions, cos, sin, k_cache, v_cache, slot_mapping, interleaved, layout = args
    checks.need_tensor("q", q, rank=3)
    for name, pool in (("k_cache", k_cache), ("v_cache", v_cache)):
        if isinstance(pool, Tensor) and is_coded(pool):
            needs = "a pool of numbers; rope and append_kv write one of codes"
            raise FormatError(
                name, needs, checks.dtype_name(pool.dtype), Reason.KV_DTYPE_MISMATCH, kind=TypeError
            )
    turned = check_rope((q, k, positions, cos, sin, interleaved, None))
    written = append.check(_append_args(args))
    dims = {**written.dims, "Hq": turned.dim("Hq"), "R": turned.dim("R")}
    features, typed = turned.features | written.features, (q, k, positions, slot_mapping)
    return describe("rope_append_kv", [q, k, v], dims, features, layout=layout, typed=typed)


def _validate_values(args: Args) -> Args:
    """Positions that the tables have and slots that the pool has, none twice, as copies."""
    q, k, v, *_ = args
    positions = validate_rope_values((q, k, *args[3:6]))[2]
    slot_mapping = append.validate_values(_append_args(args))[4]
    return q, k, v, positions, *args[4:8], slot_mapping, *args[9:]


def rope_append_kv_reference(*args: Any) -> Tensor:
    """The two ops' references, one after the other."""
    q, k, _, positions, cos, sin, *_, interleaved, _ = args
    turned, keys = rope_reference(q, k, positions, cos, sin, interleaved)
    append.append_kv_reference(keys, *_append_args(args)[1:])
    return turned


def _work(spec: CallSpec) -> WorkEstimate:
    """Queries are read and written, keys and values read and written into the pool."""
    queries = spec.dim("T") * spec.dim("Hq") * spec.dim("D") * checks.dtype_bytes(spec.dtype)
    turns = spec.dim("T") * (spec.dim("Hq") + spec.dim("Hk")) * spec.dim("R")
    return WorkEstimate(flops=3.0 * turns, bytes=2.0 * queries + append.work(spec).bytes)


@dataclass(frozen=True, slots=True)
class RopeAppendBatching(append.AppendBatching):
    """As appends: each caller gets the rows of its own queries."""

    tensors: int = 3
    ids: tuple[int, ...] = (3, 8)

    def results(self, calls: Sequence[Args], out: Any) -> list[Any]:
        """The turned queries of each call."""
        return split_outputs(out, [args[0].shape[0] for args in calls])


ROPE_APPEND_KV = define_op(
    build=rope_append_kv,
    check=_check,
    reference=rope_append_kv_reference,
    outputs=output_like(0),
    work=_work,
    operands=(0, 1, 2),
    exact_dims=frozenset({"Hq", "Hk", "D", "Dv", "R", "P"}),
    validate_values=_validate_values,
    pure=False,
    writes=(6, 7),
    differentiable=False,
    batching=RopeAppendBatching(),
)

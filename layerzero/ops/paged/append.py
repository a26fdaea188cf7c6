"""Writing new keys and values into a pool of pages: the op that changes what it is given."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from layerzero.ops import checks, kv_formats
from layerzero.ops.attention.arguments import AppendArgs
from layerzero.ops.batching import TokenBatching, concat_rows
from layerzero.ops.describe import describe
from layerzero.ops.op import Args, LaunchFunction, RejectedCall, define_op, output_like
from layerzero.ops.paged import checks as paged
from layerzero.ops.paged.batching import concat_index_rows
from layerzero.ops.paged.checks import page_axes
from layerzero.ops.signature import IndexTensor, SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, WorkEstimate


@op_signature()
def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: IndexTensor,
    *,
    layout: str = "NHD",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> SignedCall:
    """Write new tokens' keys and values, of any number of sequences, into their places in a pool of pages.

    Args: k (T, Hk, D) and v (T, Hk, Dv), of one dtype. k_cache (N, P, Hk, D) and v_cache (N, P, Hk, Dv), or
        heads before tokens with `layout="HND"`, are changed; a pool of another dtype takes the numbers
        rounded to it. slot_mapping (T,), int32 or int64, is each token's place: page * P + its position in
        the page. A pool of float8_e4m3fn, float8_e5m2 or int8 takes codes: k_scale and v_scale, float32, of
        shape () or (Hk,), are what the numbers are divided by before they are rounded, halves to even, what
        lies beyond the format clamped, NaN to 0; of the pool's shape without its last axis they are changed,
        too: each token's head gets the scale that takes its largest magnitude to the format's.
    Returns: `slot_mapping`. Awaited before `paged_attention` over the same pool, it says that the tokens are
    there.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also a slot that the pool
        does not have, or that two tokens share, within a call or across the callers of a batch: nothing of
        theirs is written. FormatError, which is both, with a reason code: codes and scales do not fit, a
        scale is zero, negative or NaN, the pool was written in another format.
        KernelExecutionError: a kernel raised; what it wrote is unknown.
    Source: arXiv 2309.06180, section 4.3; the places are what vLLM and SGLang call slot mapping.
    """
    raise NotImplementedError


def check(args: Args) -> CallSpec:
    """Validate a call, without reading data, and describe it; see `append_kv` for the arguments."""
    call = AppendArgs._make(args)
    k, v, k_cache, v_cache, slot_mapping, layout = call[:6]
    checks.need_choice("layout", layout, paged.LAYOUTS)
    checks.need_tensor("k", k, rank=3)
    checks.need_tensor("v", v, rank=3)
    checks.need_like("v", "tokens and heads {}", tuple(v.shape[:2]), tuple(k.shape[:2]), "k")
    kv_formats.need_same_dtype("v", v, "k", k)
    checks.need_index("slot_mapping", slot_mapping, rank=1)
    if slot_mapping.shape[0] != k.shape[0]:
        raise ValueError(
            f"slot_mapping needs {k.shape[0]} places like k's tokens, got {slot_mapping.shape[0]}"
        )
    checks.need_same_device("k", k, v=v, slot_mapping=slot_mapping)
    tokens, heads = page_axes(layout)
    for name, pool, rows in (("k", k_cache, k), ("v", v_cache, v)):
        paged.check_cache(f"{name}_cache", pool, k, 4)
        if (pool.shape[heads], pool.shape[3]) != tuple(rows.shape[1:]):
            raise ValueError(
                f"{name}_cache needs heads and head size {tuple(rows.shape[1:])} like {name}, got "
                f"{(pool.shape[heads], pool.shape[3])} in layout {layout}"
            )
        _need_own_memory(f"{name}_cache", pool)
    paged.check_pair(k_cache, v_cache)
    features = paged.cache_features(k, k_cache, v_cache)
    features |= kv_formats.check_scales(call, kv_formats.POOLS, heads)
    if "kv_scale_per_token" in features:
        _need_own_memory("k_scale", call.k_scale)
        _need_own_memory("v_scale", call.v_scale)
    dims = dict(zip(("T", "Hk", "D"), k.shape, strict=True))
    dims |= {"Dv": v.shape[2], "N": k_cache.shape[0], "P": k_cache.shape[tokens]}
    return describe("append_kv", [k, v], dims, features, layout=layout, typed=(k, slot_mapping))


def _need_own_memory(name: str, written: Any) -> None:
    if torch._debug_has_internal_overlap(written) == 1:  # pyright: ignore[reportPrivateImportUsage]
        raise ValueError(f"{name} needs memory of its own for every element, got an expanded view")


def validate_values(args: Args) -> Args:
    """Slots that the pool has, none twice, as a copy."""
    k, v, k_cache, v_cache, slot_mapping, layout, k_scale, v_scale = args
    slot_count = k_cache.shape[0] * k_cache.shape[page_axes(layout)[0]]  # tokens that it has room for
    private_slots: Tensor | None = checks.native_check("places_below", slot_mapping, slot_count)
    if private_slots is None:
        if not checks.can_read_values(slot_mapping):
            return args
        private_slots = checks.private_copy(slot_mapping)
        slot_ids = private_slots.tolist()
        if (wrong := checks.wrong_place(slot_ids, slot_count)) is not None:
            place, earlier = wrong
            needs = f"places in [0, {slot_count})" if earlier is None else "each place once"
            where = place if earlier is None else f"{earlier} and {place}"
            raise ValueError(f"slot_mapping needs {needs}, got {slot_ids[place]} at {where}")
    if k_scale is not None:
        if k_scale is v_scale and k_scale.dim() > 1:
            raise ValueError("v_scale needs memory of its own, for it is written, got k_scale")
        paged.validate_codes(AppendArgs._make(args))
    return k, v, k_cache, v_cache, private_slots, layout, k_scale, v_scale


def copy_if_aliased(rows: Tensor, *pools: Tensor) -> Tensor:
    """`rows`, copied where they are in a pool's memory: an earlier token may be written over a later one."""
    where = rows.untyped_storage().data_ptr()
    return rows.clone() if any(pool.untyped_storage().data_ptr() == where for pool in pools) else rows


def append_kv_reference(*args: Any, **named: Any) -> Tensor:
    """The op in plain torch: one indexed write a pool; slot_mapping are looked at before the first.

    Args: those of `AppendArgs`.
    """
    call = AppendArgs(*args, **named)
    validate_values(call)
    k, v, k_cache, v_cache, slot_mapping, layout, k_scale, v_scale = call
    tokens = page_axes(layout)[0]
    slot_ids = slot_mapping.long()
    page, token = slot_ids // k_cache.shape[tokens], slot_ids % k_cache.shape[tokens]
    k, v = copy_if_aliased(k, k_cache, v_cache), copy_if_aliased(v, k_cache, v_cache)
    for pool, rows, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        by_token = pool if tokens == 1 else pool.transpose(1, 2)
        if scale is None:
            by_token[page, token] = rows.to(pool.dtype)
            continue
        codes, row_scale = kv_formats.encode_rows(rows, pool.dtype, scale if scale.dim() < 2 else None)
        by_token.view(torch.uint8)[page, token] = codes.view(torch.uint8)
        if row_scale is not None:
            (scale if tokens == 1 else scale.transpose(1, 2))[page, token] = row_scale.to(scale.dtype)
        kv_formats.note_format(pool, scale)
    return slot_mapping


def empty(args: Args) -> Tensor | None:
    """The result of a call without tokens."""
    return args[4] if args[4].shape[0] == 0 else None


def work(spec: CallSpec) -> WorkEstimate:
    """Every row read once and written once."""
    elements = spec.dim("T") * spec.dim("Hk") * (spec.dim("D") + spec.dim("Dv"))
    each = checks.dtype_bytes(spec.dtype) + kv_formats.code_bytes(spec)
    return WorkEstimate(0.0, float(elements * each))


@dataclass(frozen=True, slots=True)
class AppendBatching(TokenBatching):
    """Appends to one pool: rows and slot_mapping are joined; each caller gets its own slot_mapping back.

    `ids` are the positions of what has a number for each token, slot_mapping last.
    """

    tensors: int = 2
    ids: tuple[int, ...] = (4,)

    rowwise: ClassVar[bool] = True  # rows do not touch each other

    @property
    def concat_positions(self) -> Container[int]:
        """Rows and slot_mapping; never the pools."""
        return (*range(self.tensors), *self.ids)

    def run(self, calls: Sequence[Args], launch: LaunchFunction) -> list[Any]:
        """One write of everybody's tokens; callers that claim the same place are refused, all of them."""
        rejected = slot_conflicts([args[self.ids[-1]] for args in calls])
        accepted = [args for caller, args in enumerate(calls) if caller not in rejected]
        merged = list(calls[0])
        if accepted:
            for row in range(self.tensors):
                merged[row] = concat_rows([args[row] for args in accepted])
            for ids in self.ids:
                merged[ids] = concat_index_rows([args[ids] for args in accepted])
        outs = iter(self.results(accepted, launch(tuple(merged))) if accepted else ())
        return [rejected[caller] if caller in rejected else next(outs) for caller in range(len(calls))]

    def results(self, calls: Sequence[Args], out: Any) -> list[Any]:
        """What each call gets of a launch for all."""
        return [args[self.ids[-1]] for args in calls]


def slot_conflicts(mappings: Sequence[Tensor]) -> dict[int, RejectedCall]:
    """The callers whose slot_mapping names a place another's names too; read on the CPU only."""
    if mappings[0].device.type != "cpu":
        return {}
    slots_by_caller = [slot_mapping.tolist() for slot_mapping in mappings]
    if len(set().union(*slots_by_caller)) == sum(map(len, slots_by_caller)):
        return {}
    owner: dict[int, int] = {}
    rejected: dict[int, RejectedCall] = {}
    for caller, caller_slots in enumerate(slots_by_caller):
        for slot in caller_slots:
            other = owner.setdefault(slot, caller)
            if other != caller:
                message = f"slot_mapping needs places of the caller's own, got {slot}, which two callers name"
                rejected |= {each: RejectedCall(ValueError(message)) for each in (caller, other)}
    return rejected


APPEND_KV = define_op(
    build=append_kv,
    check=check,
    reference=append_kv_reference,
    outputs=output_like(4),
    work=work,
    operands=(0, 1),
    exact_dims=frozenset({"Hk", "D", "Dv", "P"}),
    empty=empty,
    validate_values=validate_values,
    pure=False,
    writes=(2, 3, 6, 7),
    differentiable=False,
    wide_outputs=frozenset({0}),
    batching=AppendBatching(),
)

"""Writing new keys and values into a pool of pages: the op that changes what it is given."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from layerzero.ops import checks, kv_formats
from layerzero.ops.attention.arguments import AppendArgs
from layerzero.ops.batching import concat_rows
from layerzero.ops.describe import describe
from layerzero.ops.op import Args, Batching, LaunchFunction, RejectedCall, define_op, output_like
from layerzero.ops.paged.batching import concat_index_rows
from layerzero.ops.paged.checks import (
    LAYOUTS,
    cache_features,
    check_cache,
    check_pair,
    page_axes,
    validate_codes,
)
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
    checks.need_choice("layout", layout, LAYOUTS)
    checks.need_tensor("k", k, rank=3)
    checks.need_tensor("v", v, rank=3)
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v needs the tokens and heads of k, {tuple(k.shape[:2])}, got {tuple(v.shape[:2])}")
    if v.dtype != k.dtype:
        expected_dtype, got = checks.dtype_name(k.dtype), checks.dtype_name(v.dtype)
        raise TypeError(f"v needs dtype {expected_dtype} like k, got {got}")
    checks.need_index("slot_mapping", slot_mapping, rank=1)
    if slot_mapping.shape[0] != k.shape[0]:
        raise ValueError(
            f"slot_mapping needs {k.shape[0]} places like k's tokens, got {slot_mapping.shape[0]}"
        )
    checks.need_same_device("k", k, v=v, slot_mapping=slot_mapping)
    tokens, heads = page_axes(layout)
    for name, pool, rows in (("k", k_cache, k), ("v", v_cache, v)):
        check_cache(f"{name}_cache", pool, k, 4)
        if (pool.shape[heads], pool.shape[3]) != tuple(rows.shape[1:]):
            raise ValueError(
                f"{name}_cache needs heads and head size {tuple(rows.shape[1:])} like {name}, got "
                f"{(pool.shape[heads], pool.shape[3])} in layout {layout}"
            )
        _need_own_memory(f"{name}_cache", pool)
    check_pair(k_cache, v_cache)
    features = cache_features(k, k_cache, v_cache) | kv_formats.check_scales(
        ("k_scale", "v_scale"), call[6:8], (k_cache, v_cache), heads, ("k_cache", "v_cache")
    )
    if "kv_scale_per_token" in features:
        _need_own_memory("k_scale", call.k_scale)
        _need_own_memory("v_scale", call.v_scale)
    return describe(
        "append_kv",
        [k, v],
        dict(zip(("T", "Hk", "D"), k.shape, strict=True))
        | {"Dv": v.shape[2], "N": k_cache.shape[0], "P": k_cache.shape[tokens]},
        features,
        layout=layout,
        typed=(k, slot_mapping),
    )


def _need_own_memory(name: str, written: Any) -> None:
    if torch._debug_has_internal_overlap(written) == 1:  # pyright: ignore[reportPrivateImportUsage]
        raise ValueError(f"{name} needs memory of its own for every element, got an expanded view")


def validate_values(args: Args) -> Args:
    """Slots that the pool has, none twice, as a copy."""
    k, v, k_cache, v_cache, slot_mapping, layout, k_scale, v_scale = args
    slot_count = slot_count_of(args)
    private_slots: Tensor | None = checks.native_check("places_below", slot_mapping, slot_count)
    if private_slots is None:
        if not checks.can_read_values(slot_mapping):
            return args
        private_slots = checks.private_copy(slot_mapping)
        slot_ids = private_slots.tolist()
        if slot_ids and (
            min(slot_ids) < 0 or max(slot_ids) >= slot_count or len(set(slot_ids)) != len(slot_ids)
        ):
            _name_wrong_slot(slot_ids, slot_count)
    if k_scale is not None:
        if k_scale is v_scale and k_scale.dim() > 1:
            raise ValueError("v_scale needs memory of its own, for it is written, got k_scale")
        validate_codes(("k_scale", "v_scale"), (k_scale, v_scale), ("k_cache", "v_cache"), (k_cache, v_cache))
    return k, v, k_cache, v_cache, private_slots, layout, k_scale, v_scale


def slot_count_of(args: Args) -> int:
    """The tokens that the pool has room for."""
    return int(args[2].shape[0] * args[2].shape[page_axes(args[5])[0]])


def _name_wrong_slot(slot_ids: list[int], slot_count: int) -> None:
    seen: dict[int, int] = {}
    for index, slot in enumerate(slot_ids):
        if not 0 <= slot < slot_count:
            raise ValueError(f"slot_mapping needs places in [0, {slot_count}), got {slot} at {index}")
        if slot in seen:
            raise ValueError(f"slot_mapping needs each place once, got {slot} at {seen[slot]} and {index}")
        seen[slot] = index


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
class AppendBatching(Batching):
    """Appends to one pool: rows and slot_mapping are concatenated; each caller gets its own
    slot_mapping back.

    `rows` are the positions of what has rows of tokens, `ids` of what has a number for each, slot_mapping
    last.
    """

    rows: tuple[int, ...] = (0, 1)
    ids: tuple[int, ...] = (4,)

    rowwise: ClassVar[bool] = True  # rows do not touch each other

    @property
    def concat_positions(self) -> Container[int]:
        """Rows and slot_mapping; never the pools."""
        return (*self.rows, *self.ids)

    def compatibility(self, args: Args) -> Hashable | None:
        """Dtype, device and shape of the rows."""
        return tuple((args[row].dtype, args[row].device, args[row].shape[1:]) for row in self.rows)

    def batch_cost(self, args: Args) -> tuple[int, int]:
        """Tokens, and the bytes of their rows."""
        return args[0].shape[0], sum(args[row].numel() * args[row].element_size() for row in self.rows)

    def run(self, calls: Sequence[Args], launch: LaunchFunction) -> list[Any]:
        """One write of everybody's tokens; callers that claim the same place are refused, all of them."""
        rejected = slot_conflicts([args[self.ids[-1]] for args in calls])
        accepted = [args for caller, args in enumerate(calls) if caller not in rejected]
        merged = list(calls[0])
        if accepted:
            for row in self.rows:
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

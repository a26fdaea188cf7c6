"""Writing new keys and values into a pool of pages: the op that changes what it is given."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.batching import Rule, join_rows
from layerzero.ops.op import NO_SHAPE, Args, Call, Launch, Op, Refused, register
from layerzero.ops.paged.batching import join_rows_of_any
from layerzero.ops.paged.checks import LAYOUTS, check_pool, dtypes_of, page_axes, pool_features
from layerzero.spec.call_spec import OutSpec, Request, Work


def append_kv(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, *, layout: str = "NHD"
) -> Call:
    """Write new tokens' keys and values, of any number of sequences, into their places in a pool of pages.

    Args: k (T, Hk, D) and v (T, Hk, Dv), of one dtype. k_pages (N, P, Hk, D) and v_pages (N, P, Hk, Dv), or
        heads before tokens with `layout="HND"`, are changed; a pool of another dtype takes the numbers
        rounded to it. slots (T,), int32 or int64, is each token's place: page * P + its position in the page.
    Returns: `slots`. Awaited before `paged_attention` over the same pool, it says that the tokens are there.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also a slot that the pool
        does not have, or that two tokens share, within a call or across the callers of a batch: nothing of
        theirs is written. KernelExecutionError: a kernel raised; what it wrote is unknown.
    Source: arXiv 2309.06180, section 4.3; the places are what vLLM and SGLang call slot mapping.
    """
    args = (k, v, k_pages, v_pages, slots, layout)
    try:
        return (
            "append_kv", k.shape, k.stride(), k.dtype, k.device, k.requires_grad,
            v.shape, v.stride(), v.dtype, v.device, v.requires_grad,
            k_pages.shape, k_pages.stride(), k_pages.dtype, k_pages.device, k_pages.requires_grad,
            v_pages.shape, v_pages.stride(), v_pages.dtype, v_pages.device, v_pages.requires_grad,
            slots.shape, slots.stride(), slots.dtype, slots.device, layout,
        ), args  # fmt: skip
    except NO_SHAPE:
        check(args)  # names the operand that is no tensor
        raise


def check(args: Args) -> Request:
    """Validate a call, without reading data, and describe it; see `append_kv` for the arguments."""
    k, v, k_pages, v_pages, slots, layout = args
    checks.need_choice("layout", layout, LAYOUTS)
    checks.need_tensor("k", k, rank=3)
    checks.need_tensor("v", v, rank=3)
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v needs the tokens and heads of k, {tuple(k.shape[:2])}, got {tuple(v.shape[:2])}")
    if v.dtype != k.dtype:
        wanted, got = checks.dtype_name(k.dtype), checks.dtype_name(v.dtype)
        raise TypeError(f"v needs dtype {wanted} like k, got {got}")
    checks.need_index("slots", slots, rank=1)
    if slots.shape[0] != k.shape[0]:
        raise ValueError(f"slots needs {k.shape[0]} places like k's tokens, got {slots.shape[0]}")
    checks.need_same_device("k", k, v=v, slots=slots)
    tokens, heads = page_axes(layout)
    for name, pool, rows in (("k", k_pages, k), ("v", v_pages, v)):
        check_pool(f"{name}_pages", pool, k, 4)
        if (pool.shape[heads], pool.shape[3]) != tuple(rows.shape[1:]):
            raise ValueError(
                f"{name}_pages needs heads and head size {tuple(rows.shape[1:])} like {name}, got "
                f"{(pool.shape[heads], pool.shape[3])} in layout {layout}"
            )
        if torch._debug_has_internal_overlap(pool) == 1:  # pyright: ignore[reportPrivateImportUsage]
            raise ValueError(f"{name}_pages needs memory of its own for every element, got an expanded view")
    if v_pages.shape[:3] != k_pages.shape[:3]:
        raise ValueError(
            f"v_pages needs the pages, tokens and heads of k_pages, {tuple(k_pages.shape[:3])}, got "
            f"{tuple(v_pages.shape[:3])}"
        )
    if v_pages.dtype != k_pages.dtype:
        wanted, got = checks.dtype_name(k_pages.dtype), checks.dtype_name(v_pages.dtype)
        raise TypeError(f"v_pages needs dtype {wanted} like k_pages, got {got}")
    asked = pool_features(k, k_pages, v_pages)
    return Request(
        op="append_kv",
        platform=k.device.type,
        device=str(k.device),
        dtype=checks.dtype_name(k.dtype),
        dtypes=dtypes_of(args, (0, 4)),
        dims={
            "T": k.shape[0], "Hk": k.shape[1], "D": k.shape[2], "Dv": v.shape[2], "N": k_pages.shape[0],
            "P": k_pages.shape[tokens],
        },
        features=frozenset(name for name, wanted in asked.items() if wanted),
        layout=layout,
        contiguous=checks.is_plain_contiguous([k, v]),
        last_stride1=checks.last_stride_is_one([k, v]),
        alignment=checks.alignment_of([k, v]),
    )  # fmt: skip


def guard(args: Args) -> Args:
    """Slots that the pool has, none twice, as a copy."""
    k, v, k_pages, v_pages, slots, layout = args
    count = places_of(args)
    own: Tensor | None = checks.compiled("places_below", slots, count)
    if own is None:
        if not checks.readable(slots):
            return args
        own = checks.held(slots)
        places = own.tolist()
        if places and (min(places) < 0 or max(places) >= count or len(set(places)) != len(places)):
            _name_wrong_slot(places, count)
    return k, v, k_pages, v_pages, own, layout


def places_of(args: Args) -> int:
    """The tokens that the pool has room for."""
    return int(args[2].shape[0] * args[2].shape[page_axes(args[5])[0]])


def _name_wrong_slot(places: list[int], count: int) -> None:
    seen: dict[int, int] = {}
    for at, place in enumerate(places):
        if not 0 <= place < count:
            raise ValueError(f"slots needs places in [0, {count}), got {place} at {at}")
        if place in seen:
            raise ValueError(f"slots needs each place once, got {place} at {seen[place]} and {at}")
        seen[place] = at


def apart(rows: Tensor, *pools: Tensor) -> Tensor:
    """`rows`, copied where they lie in a pool's memory: an earlier token may be written over a later one."""
    where = rows.untyped_storage().data_ptr()
    return rows.clone() if any(pool.untyped_storage().data_ptr() == where for pool in pools) else rows


def append_kv_reference(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, layout: str = "NHD"
) -> Tensor:
    """The op in plain torch: one indexed write a pool; slots are looked at before the first."""
    guard((k, v, k_pages, v_pages, slots, layout))
    tokens = page_axes(layout)[0]
    places = slots.long()
    page, token = places // k_pages.shape[tokens], places % k_pages.shape[tokens]
    k, v = apart(k, k_pages, v_pages), apart(v, k_pages, v_pages)
    for pool, rows in ((k_pages, k), (v_pages, v)):
        by_token = pool if tokens == 1 else pool.transpose(1, 2)
        by_token[page, token] = rows.to(pool.dtype)
    return slots


def outputs(args: Args) -> tuple[OutSpec, ...]:
    """The slots (T,) in their own dtype."""
    slots: Tensor = args[4]
    return (OutSpec(tuple(slots.shape), checks.dtype_name(slots.dtype)),)


def empty(args: Args) -> Tensor | None:
    """The result of a call without tokens."""
    return args[4] if args[4].shape[0] == 0 else None


def work(request: Request) -> Work:
    """Every row read once and written once."""
    elements = request.dim("T") * request.dim("Hk") * (request.dim("D") + request.dim("Dv"))
    return Work(0.0, 2.0 * elements * checks.dtype_bytes(request.dtype))


@dataclass(frozen=True, slots=True)
class IntoOnePool(Rule):
    """Appends to one pool: rows and slots stand behind each other; each caller gets its own slots back."""

    @property
    def rowwise(self) -> bool:
        """Every token goes to a place of its own."""
        return True

    @property
    def joined(self) -> Container[int]:
        """Rows and slots; never the pools."""
        return (0, 1, 4)

    def alike(self, args: Args) -> Hashable | None:
        """Dtype, device and shape of the rows."""
        k, v = args[:2]
        return k.dtype, k.device, k.shape[1:], v.shape[1:]

    def size(self, args: Args) -> tuple[int, int]:
        """Tokens, and the bytes of their keys and values."""
        k, v = args[:2]
        return k.shape[0], (k.numel() + v.numel()) * k.element_size()

    def run(self, calls: Sequence[Args], launch: Launch) -> list[Any]:
        """One write of everybody's tokens; callers that claim the same place are refused, all of them."""
        refused = contested(calls)
        going = [args for at, args in enumerate(calls) if at not in refused]
        if len(going) == 1:
            launch(going[0])
        elif going:
            k, v = (join_rows([args[i] for args in going]) for i in (0, 1))
            slots = join_rows_of_any([args[4] for args in going])
            launch((k, v, *going[0][2:4], slots, going[0][5]))
        return [refused.get(at, args[4]) for at, args in enumerate(calls)]


def contested(calls: Sequence[Args]) -> dict[int, Refused]:
    """The calls that name a place another call names too; read on the CPU only."""
    if calls[0][4].device.type != "cpu":
        return {}
    places = [args[4].tolist() for args in calls]
    if len(set().union(*places)) == sum(map(len, places)):
        return {}
    owner: dict[int, int] = {}
    refused: dict[int, Refused] = {}
    for at, own in enumerate(places):
        for place in own:
            other = owner.setdefault(place, at)
            if other != at:
                message = f"slots needs places of the caller's own, got {place}, which two callers name"
                refused[at], refused[other] = Refused(ValueError(message)), Refused(ValueError(message))
    return refused


APPEND_KV = register(
    Op(
        name="append_kv",
        build=append_kv,
        check=check,
        reference=append_kv_reference,
        outputs=outputs,
        work=work,
        operands=(0, 1),
        exact=frozenset({"Hk", "D", "Dv", "P"}),
        empty=empty,
        guard=guard,
        pure=False,
        writes=(2, 3),
        differentiable=False,
        wide_outputs=frozenset({0}),
        batching=IntoOnePool(),
    )
)

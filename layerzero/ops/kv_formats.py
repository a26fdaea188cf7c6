"""Keys and values in eight bits: which codes and scales attention and `append_kv` take, and what is checked.

A code times its scale is the number, in float32. The dtype of the codes is the format: float8_e4m3fn,
float8_e5m2 or int8. Scales are float32; their shape says what shares one: () the whole tensor, (heads,) a
head, the codes' shape without its last axis a token's head. Source: arXiv 2306.05836 for scales beside the
codes; torch.finfo for the formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from layerzero._util import foreign
from layerzero.formats.elements import ELEMENTS, Element, encode_values
from layerzero.formats.errors import FormatError
from layerzero.formats.rounding import SMALLEST_SCALE
from layerzero.ops import checks
from layerzero.ops.signature import value_key
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.reasons import Reason

ELEMENT_OF: Mapping[torch.dtype, Element] = MappingProxyType(
    {ELEMENTS[name].storage: ELEMENTS[name] for name in ("int8", "e4m3", "e5m2")}
)
CODE_DTYPES = tuple(ELEMENT_OF)
CODE_NAMES = frozenset(map(checks.dtype_name, CODE_DTYPES))
# What a request says of coded keys and values, beside their scales' granularity: a feature for each format.
CODE_FEATURES: Mapping[str, torch.dtype] = MappingProxyType(
    {f"kv_{checks.dtype_name(dtype)}": dtype for dtype in CODE_DTYPES}
)
GRANULARITIES = ("tensor", "head", "token")
SCALE_FEATURES = tuple(f"kv_scale_per_{granularity}" for granularity in GRANULARITIES)
# The names of two arguments with scales, each with that of its codes.
Pairs = tuple[tuple[str, str], tuple[str, str]]
POOLS: Pairs = (("k_scale", "k_cache"), ("v_scale", "v_cache"))


def is_coded(tensor: Tensor) -> bool:
    """Whether its elements are codes that mean nothing without a scale."""
    return tensor.dtype in ELEMENT_OF


def scale_shape(shape: tuple[int, ...], heads: int | None, granularity: str) -> tuple[int, ...]:
    """The shape of the scales of codes of `shape`, whose heads are at axis `heads` (None: they have none)."""
    if granularity == "tensor":
        return ()
    if granularity == "token":
        return tuple(shape[:-1])
    if heads is None:
        raise ValueError("granularity needs tensor or token where there are no heads, got 'head'")
    return (shape[heads],)


def scale_steps(scale: Tensor, token: int, head: int) -> tuple[int, int, int]:
    """The steps of a pool's scales by page, token of a page and head; the last two are axes of the pool."""
    if scale.dim() == 3:
        return scale.stride(0), scale.stride(token), scale.stride(head)
    return 0, 0, scale.stride(0) if scale.dim() else 0


def granularity_of(scale: Tensor) -> str:
    """What shares one of the scales, by the number of their axes."""
    return GRANULARITIES[min(scale.dim(), 2)]


def check_scale(name: str, scale: Any, codes_name: str, codes: Tensor, heads: int | None) -> str:
    """The granularity of `scale` beside `codes`; empty where the codes are numbers themselves.

    Raises: FormatError: a scale without codes or codes without a scale, another dtype than float32, a shape
        that is none of the granularities'. ValueError: another device.
    """
    stored = checks.dtype_name(codes.dtype)
    if not is_coded(codes):
        if scale is not None:
            needs = f"None beside {codes_name} of {stored}, which holds numbers"
            raise FormatError(name, needs, "a scale", Reason.SCALE_LAYOUT_MISMATCH)
        return ""
    if not isinstance(scale, Tensor):
        needs, got = f"a float32 tensor of scales beside {codes_name} of {stored}", type(scale).__name__
        raise FormatError(name, needs, got, Reason.SCALE_LAYOUT_MISMATCH, kind=TypeError)
    if scale.dtype != torch.float32:
        got = checks.dtype_name(scale.dtype)
        raise FormatError(name, "dtype float32", got, Reason.SCALE_DTYPE_MISMATCH, kind=TypeError)
    shapes = {
        granularity: scale_shape(tuple(codes.shape), heads, granularity)
        for granularity in GRANULARITIES
        if heads is not None or granularity != "head"
    }
    granularity = next((each for each, shape in shapes.items() if tuple(scale.shape) == shape), "")
    if not granularity:
        needs = "one of the shapes " + ", ".join(f"{shape} by {each}" for each, shape in shapes.items())
        raise FormatError(name, needs, tuple(scale.shape), Reason.SCALE_SHAPE_MISMATCH)
    checks.need_same_device(codes_name, codes, **{name: scale})
    return granularity


def check_scales(call: Any, pairs: Pairs, heads: int | None) -> dict[str, bool]:
    """The feature of the scales of both codes of a call; none where they hold numbers.

    Raises: FormatError: see `check_scale`; the two have other granularities.
    """
    first, second = (
        check_scale(scale, getattr(call, scale), codes, getattr(call, codes), heads) for scale, codes in pairs
    )
    if first != second:
        needs = f"scales by {first or 'nothing'} like {pairs[0][0]}"
        got = f"scales by {second or 'nothing'}"
        raise FormatError(pairs[1][0], needs, got, Reason.SCALE_LAYOUT_MISMATCH)
    return {f"kv_scale_per_{first}": True} if first else {}


def need_valid_scale(name: str, scale: Tensor | None) -> None:
    """Refuse scales of a tensor or of heads that are zero, negative, infinite or NaN; those of CPUs alone.

    A token's scale is not looked at: it follows from the token's numbers, of which one may be NaN.
    Raises: FormatError: the first wrong one is named.
    """
    if scale is None or scale.dim() > 1 or not checks.can_read_values(scale):
        return
    values: list[float] = scale.flatten().tolist()
    for position, value in enumerate(values):
        if not (value > 0.0 and math.isfinite(value)):
            reason = Reason.SCALE_NOT_POSITIVE if value <= 0.0 else Reason.SCALE_NOT_FINITE
            where = f" at {position}" if scale.dim() else ""
            raise FormatError(name, "finite scales above 0", f"{value}{where}", reason)


def need_same_dtype(name: str, pool: Tensor, like: str, first: Tensor) -> None:
    """Refuse a pool of another dtype than the one beside it.

    Raises: FormatError, which is a TypeError.
    """
    if pool.dtype != first.dtype:
        needs, got = checks.dtype_name(first.dtype), checks.dtype_name(pool.dtype)
        reason = Reason.KV_DTYPE_MISMATCH
        raise FormatError(name, f"dtype {needs} like {like}", got, reason, kind=TypeError)


def broadcast_scale(scale: Tensor, rank: int, heads: int | None) -> Tensor:
    """`scale` so that it multiplies codes of `rank` axes, heads at axis `heads`."""
    if scale.dim() == 0:
        return scale
    if scale.dim() > 1:
        return scale.unsqueeze(-1)
    return scale.view(*(-1 if axis == heads else 1 for axis in range(rank)))


def decode(
    codes: Tensor, scale: Tensor | None, heads: int | None, dtype: torch.dtype | None = None
) -> Tensor:
    """The numbers, multiplied in float32 at least; what has no scale stays as it is."""
    if scale is None:
        return codes
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = codes.to(wide) * broadcast_scale(scale.to(wide), codes.dim(), heads)
    return numbers if dtype is None else numbers.to(dtype)


def encode_rows(rows: Tensor, codes: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows (T, H, D) as codes, with the scales (T, H) that were taken from them, or None.

    scale () or (H,) is used as given; with None each row's largest magnitude becomes the format's.
    """
    element, wide = ELEMENT_OF[codes], rows.float()
    if scale is not None:
        return encode_values(wide / broadcast_scale(scale, 3, 1), element), None
    # By a tensor: a GPU multiplies by the reciprocal of a number, and the scales would be others.
    largest = torch.full((), element.max_value, device=rows.device)
    row_scale = (wide.abs().amax(-1) / largest).clamp_min(SMALLEST_SCALE)
    return encode_values(wide / row_scale.unsqueeze(-1), element), row_scale


def code_bytes(spec: CallSpec) -> int:
    """Bytes of one element of the keys and values of a request: those of its dtype where it names none."""
    named = [f.removeprefix("kv_") for f in spec.features if f.removeprefix("kv_") in _FLOATS]
    if spec.dtype in CODE_NAMES or any(feature in spec.features for feature in CODE_FEATURES):
        return 1
    return checks.dtype_bytes(named[0] if named else spec.dtype)


_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})

# By the address where a pool begins: its memory, the dtype and the granularity that it was written in.
_WRITTEN: dict[int, tuple[StorageWeakRef, torch.dtype, str]] = {}
_MOST_WRITTEN = 4096


def note_format(codes: Tensor, scale: Tensor | None) -> None:
    """Remember in which format a pool was written, the last one; nothing to do for one that holds numbers."""
    if scale is None or not foreign.has_memory(codes):
        return
    form = (codes.dtype, granularity_of(scale))
    if _written_format(codes) == form:
        return
    if len(_WRITTEN) >= _MOST_WRITTEN:
        for address, entry in list(_WRITTEN.items()):  # other threads note theirs meanwhile
            if entry[0].expired():
                _WRITTEN.pop(address, None)
    _WRITTEN[codes.data_ptr()] = (StorageWeakRef(codes.untyped_storage()), *form)


def need_format(name: str, codes: Tensor, scale: Tensor) -> None:
    """Refuse a pool that was written in another format or with scales of another granularity.

    What other code wrote is not known, and read as it is given.
    Raises: FormatError: both formats are named.
    """
    if not _WRITTEN or not foreign.has_memory(codes):
        return
    written = _written_format(codes)
    granularity = granularity_of(scale)
    if written is not None and (codes.dtype, granularity) != written:
        needs = f"{checks.dtype_name(written[0])} with scales by {written[1]}, as it was written"
        got = f"{checks.dtype_name(codes.dtype)} with scales by {granularity}"
        raise FormatError(name, needs, got, Reason.KV_DTYPE_MISMATCH)


def _written_format(codes: Tensor) -> tuple[torch.dtype, str] | None:
    """The dtype and granularity that the memory of `codes` was written in; None where that is not known."""
    entry = _WRITTEN.get(codes.data_ptr())
    # The weak reference keeps the identity of the memory from being given to another one.
    if entry is None or entry[0].cdata != codes.untyped_storage()._cdata:
        return None
    return entry[1:]


# -- queries, keys and values that lie behind each other --------------------------------------------------

OPERAND_SCALES = ("q_scale", "k_scale", "v_scale")


def holds_codes(value: Any) -> bool:
    """`is_coded` of what may be no tensor."""
    return isinstance(value, Tensor) and is_coded(value)


def scales_key(q_scale: Any, k_scale: Any, v_scale: Any) -> tuple[Any, ...]:
    """What a signature holds of the scales of operands of which some are codes."""
    return tuple(value_key(scale) for scale in (q_scale, k_scale, v_scale))


def number_dtype(q: Tensor) -> torch.dtype:
    """The dtype of attention's result: that of the queries, bfloat16 where they are codes."""
    return torch.bfloat16 if is_coded(q) else q.dtype


def check_operand_scales(call: Any, heads: int) -> dict[str, bool]:
    """What a call asks of a kernel whose q, k and v, heads at axis `heads`, may be codes; empty without any.

    Raises: FormatError: keys, values and queries of several formats, scales that do not fit (`check_scale`).
    """
    q, k, v = call.q, call.k, call.v
    has_scale = any(getattr(call, name) is not None for name in OPERAND_SCALES)
    if not has_scale and not any(map(is_coded, (q, k, v))):
        return {}
    stored = checks.dtype_name(k.dtype)
    for name, operand in (("v", v), *((("q", q),) if is_coded(q) else ())):
        if operand.dtype != k.dtype and (is_coded(operand) or is_coded(k)):
            needs = f"{'codes of' if is_coded(k) else 'dtype'} {stored} like k"
            got = checks.dtype_name(operand.dtype)
            raise FormatError(name, needs, got, Reason.KV_DTYPE_MISMATCH, kind=TypeError)
    features = check_scales(call, (("k_scale", "k"), ("v_scale", "v")), heads)
    granularity = check_scale("q_scale", call.q_scale, "q", q, heads)
    if not granularity:
        return features | {f"kv_{stored}": True}
    if f"kv_scale_per_{granularity}" not in features:
        raise FormatError(
            "q_scale", "the granularity of k_scale", f"scales by {granularity}", Reason.SCALE_LAYOUT_MISMATCH
        )
    return features  # the dtype of the request is that of all three


def need_valid_operand_scales(scales: Sequence[Any]) -> None:
    """`need_valid_scale` of all three."""
    for name, scale in zip(OPERAND_SCALES, scales, strict=True):
        need_valid_scale(name, scale)


def decoded_operands(call: Any, heads: int, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The fields of a call that its codes change: numbers in float32, float64 beside q of it, or `dtype`."""
    if call.k_scale is None:
        return {}
    wide = dtype or (torch.float64 if call.q.dtype == torch.float64 else torch.float32)
    numbers = {
        name: decode(getattr(call, name), getattr(call, scale), heads, wide)
        for name, scale in zip(("q", "k", "v"), OPERAND_SCALES, strict=True)
    }
    return numbers | dict.fromkeys(OPERAND_SCALES)

"""Argument checks that every op shares: each error names the argument, what it needs, what it got."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero._util import foreign
from layerzero._util.strict_yaml import quote
from layerzero.formats.elements import dtype_name as dtype_name
from layerzero.formats.errors import FormatError
from layerzero.native import FAST_PATH
from layerzero.spec.reasons import Reason

MAX_ALIGNMENT = 64


def dtype_bytes(name: str) -> int:
    """Bytes of one element: 2 for `"bfloat16"`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype.itemsize


def need_tensor(
    name: str, value: Any, *, rank: int | tuple[int, ...] | None = None, floating: bool = True
) -> Tensor:
    """`value` as a tensor of the given rank(s); floating point unless stated otherwise."""
    if not isinstance(value, Tensor):
        remote_hint = getattr(value, "advice", None)  # a handle of another process's tensor says what to do
        got = remote_hint if isinstance(remote_hint, str) else quote(value)
        raise TypeError(f"{name} needs a torch.Tensor, got {type(value).__name__}: {got}")
    if value.is_nested:
        raise ValueError(
            f"{name} needs a plain tensor, got a nested one: its jagged values() are rows, and "
            "ragged_attention takes them with its offsets()"
        )
    if rank is not None:
        ranks = (rank,) if isinstance(rank, int) else rank
        if value.dim() not in ranks:
            allowed_ranks = " or ".join(str(r) for r in ranks)
            raise ValueError(
                f"{name} needs {allowed_ranks} dimensions, got {value.dim()}: shape {tuple(value.shape)}"
            )
    if floating and not value.dtype.is_floating_point:
        raise TypeError(f"{name} needs a floating point dtype, got {dtype_name(value.dtype)}")
    if value.layout is not torch.strided:
        raise ValueError(f"{name} needs a strided tensor, got layout {value.layout}")
    return value


def need_rows(name: str, value: Any, *, rank: int | None = None) -> Tensor:
    """`value` as floating point rows (..., C) with C of at least 1."""
    tensor = need_tensor(name, value, rank=rank)
    if tensor.dim() == 0 or tensor.shape[-1] == 0:
        raise ValueError(f"{name} needs a last axis of at least 1, got shape {tuple(tensor.shape)}")
    return tensor


def need_weight(name: str, value: Any, *, rank: int) -> Tensor:
    """`value` as a tensor of that rank whose elements are numbers by themselves, as float8's are not."""
    tensor = need_tensor(name, value, rank=rank)
    if tensor.dtype.itemsize == 1:
        needs = "numbers, not codes without scales; quantized_linear and fused_experts take codes with theirs"
        raise FormatError(name, needs, dtype_name(tensor.dtype), Reason.SCALE_LAYOUT_MISMATCH, kind=TypeError)
    return tensor


def need_vector(name: str, value: Any, size: int, why: str) -> None:
    """`value` as a weight (size,), or None; `why` says what the size follows from."""
    if value is not None and need_weight(name, value, rank=1).shape[0] != size:
        raise ValueError(f"{name} needs {size} elements like {why}, got {value.shape[0]}")


def need_product(x: Tensor, weight: Any, bias: Any, axes: str, rows: int = 0) -> tuple[int, int]:
    """The sizes of a weight (C, K) of at least so many `rows`, beside x (..., K) and a bias (C,) or None.

    Raises: ValueError, TypeError: by name, and by what the weight's `axes` are called.
    """
    need_weight("weight", weight, rank=2)
    width, inner = weight.shape
    if width < rows:
        raise ValueError(f"weight needs at least {rows} row, got shape {tuple(weight.shape)}")
    need_like("x", "a last axis of {}", x.shape[-1], inner, f"weight's {axes}")
    need_vector("bias", bias, width, "weight's rows")
    need_same_device("x", x, weight=weight, bias=bias)
    return width, inner


def need_shape(name: str, tensor: Tensor, shape: tuple[int, ...], why: str = "") -> None:
    """`tensor` has that shape; `why` says what it follows from."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} needs shape {tuple(shape)}{why}, got {tuple(tensor.shape)}")


def need_like(name: str, needs: str, got: object, expected: object, like: str) -> None:
    """An argument has the size that another one has, `like`; `needs` is the text around it, as "{} rows"."""
    if got != expected:
        raise ValueError(f"{name} needs {needs.format(expected)} like {like}, got {got}")


def need_index(name: str, value: Any, *, rank: int | tuple[int, ...] | None = None) -> Tensor:
    """`value` as a tensor of int32 or int64."""
    tensor = need_tensor(name, value, rank=rank, floating=False)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} needs dtype int32 or int64, got {dtype_name(tensor.dtype)}")
    return tensor


_transforms = torch._C._functorch.maybe_current_level  # pyright: ignore[reportAttributeAccessIssue]
_dispatch_modes = torch._C._len_torch_dispatch_stack
_PLAIN: Any = Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]


def can_read_values(tensor: Tensor) -> bool:
    """Whether a tensor's values may be read here: it is on the CPU, where that waits for nothing.

    Not where a mode follows what is done with it (a dispatch mode, a functorch transform), and not where a
    subclass (a fake tensor, a distributed one) answers for itself.
    """
    return (
        tensor.is_cpu
        and type(tensor).__torch_dispatch__ is _PLAIN  # pyright: ignore[reportAttributeAccessIssue]
        and not _dispatch_modes()
        and _transforms() is None
    )


def private_copy(tensor: Tensor) -> Tensor:
    """A dense copy of a readable tensor: what is checked in it stays true, whatever its owner does."""
    return tensor.clone(memory_format=torch.contiguous_format)


def native_check(check: str, *args: Any) -> Any:
    """What a function of native/indices.h gives; None where Python has to look: its tensors may not fit."""
    if FAST_PATH.module is None:
        return None
    result = getattr(FAST_PATH.module, check)(*args)
    return None if result is NotImplemented else result


def ids_in_range(name: str, ids: Tensor, limit: int, what: str, *, ignore: int | None = None) -> Tensor:
    """A copy of `ids`, each in [0, limit) or `ignore`; `ids` where they are not read (`can_read_values`).

    Raises: ValueError: an id is out of range; its position is named.
    """
    private_ids: Tensor | None = native_check("ids_below", ids, limit, ignore)
    if private_ids is not None:
        return private_ids
    if not can_read_values(ids):
        return ids
    private_ids = private_copy(ids)
    if private_ids.numel() == 0:
        return private_ids
    low, high = torch.aminmax(private_ids)
    if int(low) >= 0 and int(high) < limit:
        return private_ids
    wrong = (private_ids < 0) | (private_ids >= limit)
    if ignore is not None:
        wrong &= private_ids != ignore
    places = wrong.nonzero()
    if places.shape[0]:
        place = tuple(places[0].tolist())
        where = f" at position {place[0] if len(place) == 1 else place}" if place else ""
        raise ValueError(f"{name} needs ids in [0, {limit}) ({what}), got {int(private_ids[place])}{where}")
    return private_ids


def wrong_place(values: Sequence[int], limit: int) -> tuple[int, int | None] | None:
    """The first place of a number outside [0, limit), or of one that was there, with its place; or None."""
    if not values or (min(values) >= 0 and max(values) < limit and len(set(values)) == len(values)):
        return None
    seen: dict[int, int] = {}
    for place, value in enumerate(values):
        if not 0 <= value < limit or value in seen:
            return place, seen.get(value)
        seen[value] = place
    return None


def need_same_device(first_name: str, first: Tensor, **others: Tensor | None) -> None:
    """Every given tensor is on `first`'s device."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != first.device:
            raise ValueError(f"{name} needs to be on {first.device} like {first_name}, got {tensor.device}")


def need_number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    needs: str = "",
) -> float:
    """`value` as a finite number within [low, high] and greater than `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} needs a number, got {type(value).__name__}: {quote(value)}")
    is_finite = isinstance(value, int) or math.isfinite(value)  # an int may be larger than any float
    if not is_finite or not low <= value <= high or value <= above:
        bounds = f"a finite number in [{low}, {high}]" if above == -math.inf else f"a number > {above:g}"
        raise ValueError(f"{name} needs {needs or bounds}, got {quote(value)}")
    _need_64_bits(name, value)
    return float(value)


def need_int(name: str, value: Any, *, low: int | None = None, high: int | None = None) -> int:
    """`value` as an integer within [low, high]."""
    whole = need_any_int(name, value)
    if (low is not None and whole < low) or (high is not None and whole > high):
        span = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} needs an int {span}, got {quote(whole)}")
    _need_64_bits(name, whole)
    return whole


def need_each_row(
    name: str, value: Any, rows: Tensor, *, low: float = -math.inf, high: float = math.inf
) -> None:
    """`value` as a finite number within [low, high], or a floating point tensor (B,) beside logits (B, V)."""
    if isinstance(value, Tensor):
        need_vector(name, value, rows.shape[0], "logits' rows")
        need_same_device("logits", rows, **{name: value})
    else:
        need_number(name, value, low=low, high=high)


def need_count(
    name: str, value: Any, rows: Tensor, span: tuple[int, int | None] | None = None, beside: str = "logits"
) -> None:
    """`value` as an int in `span`, or any without one, or an index tensor with an element a row beside."""
    if isinstance(value, Tensor):
        need_index(name, value, rank=1)
        if value.shape[0] != (count := rows.shape[0]):
            raise ValueError(f"{name} needs {count} elements like {beside}' rows, got {value.shape[0]}")
        need_same_device(beside, rows, **{name: value})
    elif span is None:
        need_any_int(name, value)
    else:
        need_int(name, value, low=span[0], high=span[1])


def need_any_int(name: str, value: Any) -> int:
    """`value` as an integer of any size."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} needs an int, got {type(value).__name__}: {quote(value)}")
    return value


def _need_64_bits(name: str, value: float) -> None:
    """Refuse an int that no tensor holds: a kernel would raise, and be blamed for it."""
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{name} needs an int of 64 bits, got {quote(value)}")


def need_bool(name: str, value: Any) -> bool:
    """`value` as a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} needs a bool, got {type(value).__name__}: {quote(value)}")
    return value


def need_bools(call: Any, *names: str) -> None:
    """These fields of a record of arguments as bools."""
    for name in names:
        need_bool(name, getattr(call, name))


def need_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """`value` as one of `choices`."""
    allowed = tuple(choices)
    if not isinstance(value, str):
        raise TypeError(
            f"{name} needs one of {', '.join(allowed)}, got {type(value).__name__}: {quote(value)}"
        )
    if value not in allowed:
        raise ValueError(f"{name} needs one of {', '.join(allowed)}, got {value!r}")
    return value


def last_stride_is_one(tensors: Iterable[Tensor]) -> bool:
    """Whether every tensor's last axis is dense, and no two rows overlap: copies of such are laid out anyhow.

    An axis of stride 0 repeats rows, and overlaps nothing.
    """
    return all(
        t.is_contiguous() or ((t.size(-1) <= 1 or t.stride(-1) == 1) and not overlaps(t)) for t in tensors
    )


def overlaps(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory, other than by an axis of stride 0."""
    reach = 1  # what the axes of smaller strides cover
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step:
            if step < reach:
                return True
            reach += step * (size - 1)
    return False


def address_of(tensor: Tensor) -> int:
    """Where a tensor's data starts; 0 for one that a functorch transform wraps, which has none itself."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def alignment_of(tensors: Iterable[Tensor]) -> int:
    """The largest power of two, at most 64, that divides every tensor's address (64 for what has none).

    Of a tensor with gaps it divides the address of every row, too.
    """
    address_bits = MAX_ALIGNMENT
    for tensor in tensors:
        if not foreign.has_memory(tensor) or tensor.numel() == 0:
            continue
        address_bits |= address_of(tensor)
        if not tensor.is_contiguous():
            sizes, steps = tensor.shape[:-1], tensor.stride()
            for size, step in zip(sizes, steps, strict=False):
                address_bits |= step * tensor.element_size() if size > 1 else 0
    return address_bits & -address_bits

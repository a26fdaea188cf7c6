"""What a batched function is made of, and what its calls carry: looked at from outside, before any run."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Hashable, Iterator, MutableMapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from layerzero.native import FAST_PATH
from layerzero.ops.batching import concat_rows, split_pieces

Args = tuple[Any, ...]
W = TypeVar("W")
_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def unbound(fn: Any) -> Any:
    """A method's function; anything else as it is."""
    return fn.__func__ if isinstance(fn, MethodType) else fn


def takes_counts(fn: Any) -> bool:
    """Whether `fn` names a keyword `counts`; functions of C may have no signature to read."""
    try:
        parameters = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters
    except ValueError:
        return False
    counts = parameters.get("counts")
    return counts is not None and counts.kind in (counts.POSITIONAL_OR_KEYWORD, counts.KEYWORD_ONLY)


class BatchedFunctionCache(Generic[W]):
    """The wrappings of functions, by identity: equal objects may compute other things.

    Those of a method are remembered as long as its object lives, and must not hold it. A function made
    inside another, and an object that is called, live as long as their wrapping is referenced; it holds them,
    so that no table may hold it.
    """

    def __init__(self) -> None:
        self._lasting: MutableMapping[Any, dict[Hashable, W]] = WeakIdKeyDictionary()
        self._passing: MutableMapping[Any, WeakValueDictionary[Hashable, W]] = WeakIdKeyDictionary()

    def of(self, fn: Any, name: str) -> MutableMapping[Hashable, W]:
        """Those of `fn`. Raises: TypeError: its holder takes no weak reference."""
        holder = fn.__self__ if isinstance(fn, MethodType) else fn
        try:
            if isinstance(fn, MethodType) or (isinstance(fn, FunctionType) and "<l" not in name):
                return self._lasting.setdefault(holder, {})
            return self._passing.setdefault(holder, WeakValueDictionary())
        except TypeError:
            raise TypeError(
                f"fn needs an object with a weak reference (`__weakref__` among its `__slots__`), got {name} "
                f"of {type(holder).__name__}"
            ) from None


class BatchedMethod:
    """A batched function of a method beside the method's object, which it keeps.

    The function itself is remembered as long as that object lives, and must not keep it; all the rest is its
    own.
    """

    def __init__(self, function: Any, owner: object) -> None:
        self.__dict__.update(_function=function, _owner=owner, __doc__=function.__doc__)

    def __call__(self, *args: Any, **options: Any) -> Coroutine[Any, Any, Any]:
        """As the function's; what is awaited keeps the object."""
        call: Any = self._call(args, options)
        call.__qualname__ = self._function.name
        return call  # type: ignore[no-any-return]

    async def _call(self, args: Args, options: dict[str, Any]) -> Any:
        return await self._function(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_function"), name)  # None while it is being copied

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._function, name, value)

    def __repr__(self) -> str:
        return repr(self._function)


_EMPTY = CellType()


def captured_values(fn: Any) -> Iterator[Any]:
    """What `fn` computes with beside its arguments, as far as one can see from outside."""
    yield fn
    owner = getattr(fn, "__self__", None)
    yield owner
    yield from getattr(owner, "__dict__", {}).values()
    if isinstance(fn, partial):
        yield from (*fn.args, *fn.keywords.values(), *captured_values(fn.func))
    plain = inspect.unwrap(unbound(fn))
    if isinstance(plain, FunctionType):
        cells = plain.__closure__ or ()
        yield from (cell.cell_contents for cell in cells if cell != _EMPTY)
        yield from (plain.__globals__.get(name) for name in plain.__code__.co_names)


def has_trainable_tensor(value: Any) -> bool:
    """Whether a tensor, or a parameter of a module, wants a gradient."""
    if isinstance(value, torch.nn.Module):
        is_whole = hasattr(value, "_modules")  # and not one that is being copied
        return is_whole and any(parameter.requires_grad for parameter in value.parameters())
    return isinstance(value, Tensor) and value.requires_grad


def describe_rows(name: str, args: Args) -> tuple[int, int, torch.device | None, Hashable]:
    """Rows and bytes of one call's tensors, the first one's device, and what tells kinds of calls apart."""
    rows, size, where = -1, 0, None
    kinds: list[Hashable] = []
    for position, value in enumerate(args):
        if not isinstance(value, Tensor):
            kinds.append(value.__class__)
            continue
        if value.is_nested or value.layout is not torch.strided:
            got = "a nested one" if value.is_nested else f"layout {value.layout}"
            raise ValueError(f"{name} needs a strided tensor in argument {position}, got {got}")
        shape = value.shape
        if not shape:
            raise ValueError(
                f"{name} needs rows along the first axis of argument {position}, got a scalar tensor"
            )
        if rows != shape[0]:
            if rows >= 0:
                raise ValueError(f"{name} needs {rows} rows in argument {position}, got {shape[0]}")
            rows = shape[0]
        device = value.device
        where = where or device
        size += value.nbytes
        kinds.append((value.__class__, value.dtype, device, shape[1:]))
    # Of one row and of none a batch could not tell rows from callers.
    kinds.append(rows == 0)
    return (1 if rows < 0 else rows), size, where, tuple(kinds)


def as_columns(calls: Sequence[Args]) -> tuple[list[int], Sequence[Any]]:
    """The rows of each call, and the calls' arguments as columns."""
    columns = NotImplemented if FAST_PATH.module is None else FAST_PATH.module.columns(calls)
    if columns is not NotImplemented:
        counts_and_columns: tuple[list[int], Sequence[Any]] = columns
        return counts_and_columns
    return [_rows(args) for args in calls], [_column(values) for values in zip(*calls, strict=True)]


def _rows(args: Args) -> int:
    """Rows of one call whose tensors were seen to agree."""
    for value in args:
        if isinstance(value, Tensor):
            return value.shape[0]
    return 1


def _column(values: tuple[Any, ...]) -> Any:
    return concat_rows(values) if isinstance(values[0], Tensor) else list(values)


def has_graph(out: Any) -> bool:
    """Whether a result has a graph, or a part of it."""
    if isinstance(out, tuple | list):
        return any(has_graph(part) for part in out)
    return isinstance(out, Tensor) and out.requires_grad


def needs_grad(args: Args) -> bool:
    """Whether a gradient is on that one of the arguments wants."""
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)


def has_own_rows(args: Args) -> bool:
    """Whether a tensor holds more than its rows, which those of others have not: a scale of its own (torch's
    quantized dtypes), or what a subclass keeps beside them."""
    return any(isinstance(a, Tensor) and (a.is_quantized or a.__class__ not in _PLAIN) for a in args)


def split_rows(name: str, out: Any, counts: list[int]) -> list[Any]:
    """The result of each caller out of what the function `name` returned for `counts` rows of each.

    Raises: ValueError: it has neither that many rows nor one row or result a caller.
    """
    if isinstance(out, tuple) and out:
        parts = [split_rows(name, part, counts) for part in out]
        return list(zip(*parts, strict=True))
    if isinstance(out, Tensor) and out.dim() > 0:
        rows = out.shape[0]
        if rows != sum(counts) and rows == len(counts):
            counts = [1] * rows
        if rows == sum(counts):
            # Rows that are one in memory (`expand`) would be everybody's.
            return split_pieces(out.contiguous() if rows > 1 and out.stride(0) == 0 else out, counts)
    if isinstance(out, list) and len(out) == len(counts):
        return out
    got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"{type(out).__name__}"
    raise ValueError(
        f"{name} needs to return tensors of {sum(counts)} rows or of {len(counts)}, one a caller, "
        f"or a list of {len(counts)} results, got {got}"
    )

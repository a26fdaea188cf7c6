"""What torch does around a call for other code: transforms, traces, modes and hooks of the caller's.

A transformed or traced call has no memory that a kernel may read: plain torch computes it. Whatever is
raised in such surroundings, or by them, says nothing about a kernel.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor

_PLAIN: Final[frozenset[type]] = frozenset({Tensor, torch.nn.Parameter})
_C: Any = torch._C
_level = _C._functorch.maybe_current_level
_tracing = _C._get_tracing_state
_count_dispatch_modes = _C._len_torch_dispatch_stack
_count_function_modes = _C._len_torch_function_stack
_is_wrapped = _C._functorch.is_functorch_wrapped_tensor
# Where the classes of fake and functional tensors are defined.
_TRACING: Final[frozenset[str]] = frozenset(
    {"torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor"}
)
_PYTHON: Any = _C.DispatchKey.Python
_OPERATOR: Final[CodeType] = torch._ops.OpOverload.__call__.__code__


def has_transformed(values: Iterable[Any]) -> bool:
    """Whether a call on `values` is under a functorch transform or a trace, or has an operand without memory.

    Operands without memory are fake, functional and wrapped tensors, and those of subclasses with
    `__torch_dispatch__`.
    """
    return is_traced() or any(isinstance(value, Tensor) and not has_memory(value) for value in values)


def is_traced() -> bool:
    """Whether what happens here is transformed by functorch, or recorded by a mode of torch's own."""
    if _level() is not None or _tracing() is not None:
        return True
    # torch's own modes of tracing have a key each; those of users have none.
    return bool(_count_dispatch_modes()) and any(
        getattr(mode, "_mode_key", None) is not None for mode in _dispatch_modes()
    )


def in_transform() -> bool:
    """Whether a functorch transform (grad, jvp, vmap) is in force."""
    return _level() is not None


def has_subclass(values: Iterable[Any]) -> bool:
    """Whether an operand is of a subclass that answers for itself, and is none of torch's own for tracing."""
    return any(
        isinstance(value, Tensor)
        and value.__class__ not in _PLAIN
        and _C._dispatch_keys(value).has(_PYTHON)
        and value.__class__.__module__ not in _TRACING
        for value in values
    )


def may_be_foreign(value: Any) -> bool:
    """Whether `has_transformed` needs to be asked about a call on `value`: the cheap part of it."""
    return (
        value.__class__ not in _PLAIN
        or bool(_count_dispatch_modes())
        or _level() is not None
        or _tracing() is not None
    )


def has_tangents(values: Iterable[Any]) -> bool:
    """Whether an operand carries a tangent, which a kernel of ours would drop and many of torch's refuse."""
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    return any(isinstance(value, Tensor) and unpack(value).tangent is not None for value in values)


def has_memory(tensor: Tensor) -> bool:
    """Whether the tensor's own memory holds its values, so that a kernel may read it."""
    if tensor.is_meta:
        return False
    if tensor.__class__ in _PLAIN:
        return not _is_wrapped(tensor) and not torch._is_functional_tensor(tensor)  # pyright: ignore[reportPrivateImportUsage]
    return not _C._dispatch_keys(tensor).has(_PYTHON)


def in_foreign_mode() -> bool:
    """Whether a mode or a hook of the caller's sees what kernels do, and may raise in the midst of them."""
    return bool(_count_dispatch_modes()) or _pack_hook() is not None or bool(_function_modes())


def is_raised_outside(error: BaseException) -> bool:
    """Whether an exception is control flow, or was raised by a mode or hook around the call."""
    if isinstance(error, StopIteration | StopAsyncIteration | concurrent.futures.CancelledError):
        return True
    if type(error).__module__ == "torch.utils.checkpoint":  # how a recomputation ends early
        return True
    if not in_foreign_mode():
        return False
    codes, theirs = _codes(), False
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        # What a mode passes on goes through an operator's own frame, and may fail there like anywhere.
        theirs = code in codes or (theirs and code is not _OPERATOR)
        trace = trace.tb_next
    return theirs


def _codes() -> set[CodeType]:
    """The code of the modes and hooks in force here, torch's own tracing modes left out."""
    handlers: list[Any] = [type(mode).__torch_function__ for mode in _function_modes()]
    for mode in _dispatch_modes():
        if getattr(mode, "_mode_key", None) is None:
            handlers.append(type(mode).__torch_dispatch__)
    handlers.append(_pack_hook())
    codes: set[CodeType] = set()
    for handler in handlers:
        while (inner := getattr(handler, "__wrapped__", None)) is not None:
            handler = inner
        handler = getattr(handler, "__func__", handler)
        code = getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
        if code is not None:
            codes.add(code)
    return codes


def _dispatch_modes() -> list[Any]:
    return [_C._get_dispatch_stack_at(i) for i in range(_count_dispatch_modes())]


def _function_modes() -> list[Any]:
    """The function modes in force, without a default device, which only says where new tensors go."""
    count = _count_function_modes()
    if not count:
        return []
    from torch.utils._device import DeviceContext

    modes = [_C._get_function_stack_at(i) for i in range(count)]
    return [mode for mode in modes if not isinstance(mode, DeviceContext)]


def _pack_hook() -> Any:
    """What is called with each tensor that is saved for a backward pass, or None."""
    hooks = _C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


@contextmanager
def outside() -> Iterator[None]:
    """Run a block outside every transform, mode and trace of this thread: what it makes outlives them."""
    with ExitStack() as stack:
        if _level() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        if _count_dispatch_modes():
            from torch.utils._python_dispatch import _disable_current_modes

            stack.enter_context(_disable_current_modes())
        if _count_function_modes():
            stack.enter_context(_C.DisableTorchFunction())
        yield

"""torch's modes around a call: captured when it is submitted, in force while its batch runs.

Modes belong to threads, coroutines do not: two requests under different modes share a thread, and a batch
may run on another one. So the modes are a value of the call and part of its group. Equal modes are one
object, which makes comparing and hashing them as cheap as a pointer.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any, Final

import torch

from layerzero.selection.modes import AUTOCAST, DETERMINISTIC, GRAD
from layerzero.spec.errors import ModeChangedError

_GRAD: Final = 1
_INFERENCE: Final = 2
_DETERMINISTIC: Final = 4

Autocast = tuple[tuple[str, torch.dtype], ...]
Stream = tuple[int, int, int]


class Modes:
    """Grad, inference, deterministic algorithms, autocast as (device type, dtype) pairs, and the CUDA stream.

    Made by `capture` only, one object for each combination; `stream` is (id, device index, device type), or
    None where the call is not on CUDA.
    """

    __slots__ = ("autocast", "bits", "grad", "inference", "mask", "stream", "without_stream")

    def __init__(self, mask: int, autocast: Autocast = (), stream: Stream | None = None) -> None:
        self.mask = mask
        self.grad = bool(mask & _GRAD)
        self.inference = bool(mask & _INFERENCE)
        self.autocast = autocast
        self.stream = stream
        # What of this a table of plans distinguishes; `dispatch.mode()` reads the same from torch.
        self.bits = (
            (GRAD if self.grad else 0)
            | (DETERMINISTIC if self.deterministic else 0)
            | (AUTOCAST if autocast else 0)
        )
        # The same on no stream in particular: callers of several streams share batches.
        self.without_stream: Modes = self if stream is None else with_stream(self, None)

    @property
    def deterministic(self) -> bool:
        return bool(self.mask & _DETERMINISTIC)

    def __repr__(self) -> str:
        parts = [f"{name}={value}" for name, value in _facts(self).items()]
        return f"Modes({', '.join(parts)})"


_PLAIN: Final = tuple(Modes(mask) for mask in range(8))
_interned: dict[tuple[int, Autocast, Stream | None], Modes] = {}

_grad_enabled = torch.is_grad_enabled
_inference_enabled = torch.is_inference_mode_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_deterministic_enabled = torch._C._get_deterministic_algorithms


def capture(cuda: int | None = None) -> Modes:
    """The modes of this thread now; with the current stream of CUDA device `cuda` where that is given."""
    mask = (
        (_GRAD if _grad_enabled() else 0)
        | (_INFERENCE if _inference_enabled() else 0)
        | (_DETERMINISTIC if _deterministic_enabled() else 0)
    )
    if cuda is None and not _any_autocast():
        return _PLAIN[mask]
    stream: Stream | None = None if cuda is None else torch._C._cuda_getCurrentStream(cuda)
    key = (mask, _autocast() if _any_autocast() else (), stream)
    modes = _interned.get(key)
    # setdefault: of two threads that make the same modes at once, both get one object.
    return modes if modes is not None else _interned.setdefault(key, Modes(*key))


def with_stream(modes: Modes, stream: Stream | None) -> Modes:
    """The same modes on another stream."""
    if stream is None and not modes.autocast:
        return _PLAIN[modes.mask]
    key = (modes.mask, modes.autocast, stream)
    on_other_stream = _interned.get(key)
    return on_other_stream if on_other_stream is not None else _interned.setdefault(key, Modes(*key))


def without_gradient(modes: Modes) -> Modes:
    """The same modes in inference mode: what a runtime that never differentiates runs its batches under."""
    mask = (modes.mask | _INFERENCE) & ~_GRAD
    if modes.stream is None and not modes.autocast:
        return _PLAIN[mask]
    key = (mask, modes.autocast, modes.stream)
    without_grad = _interned.get(key)
    return without_grad if without_grad is not None else _interned.setdefault(key, Modes(*key))


def _autocast() -> Autocast:
    devices = torch._C._autocast_supported_devices()
    return tuple((d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d))


class apply_modes:
    """Run a block under `modes`, on whatever thread; nothing is touched where they are in force already.

    The deterministic flag belongs to the process: where it differs it is set for the block, for all threads.
    """

    __slots__ = ("_modes", "_stack")

    def __init__(self, modes: Modes) -> None:
        self._modes = modes
        self._stack: Any = None

    def __enter__(self) -> None:
        modes = self._modes
        current = capture(None if modes.stream is None else modes.stream[1])
        if current is modes:
            return
        if _only_inference(modes, current):  # by far the most frequent: what a worker's thread lacks
            self._stack = torch._C._InferenceMode(True)
            self._stack.__enter__()
            return
        with ExitStack() as stack:
            _enter(stack, modes, current)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        if self._stack is not None:
            self._stack.__exit__(*error)
            self._stack = None


def _only_inference(modes: Modes, current: Modes) -> bool:
    """Whether entering inference mode makes `modes` of `now`."""
    return (
        modes.inference
        and not modes.grad
        and not current.inference
        and modes.deterministic == current.deterministic
        and modes.autocast == current.autocast
        and modes.stream == current.stream
    )


def _enter(stack: ExitStack, modes: Modes, current: Modes) -> None:
    if modes.inference != current.inference:
        stack.enter_context(torch.inference_mode(modes.inference))
    if modes.grad != torch.is_grad_enabled():
        stack.enter_context(torch.set_grad_enabled(modes.grad))
    autocast = dict(modes.autocast)
    for device in autocast.keys() | dict(current.autocast).keys():
        stack.enter_context(torch.autocast(device, dtype=autocast.get(device), enabled=device in autocast))
    if modes.deterministic != current.deterministic:
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        stack.callback(torch.use_deterministic_algorithms, current.deterministic, warn_only=warn_only)
        torch.use_deterministic_algorithms(modes.deterministic, warn_only=warn_only)
    if modes.stream is not None and modes.stream != current.stream:
        number, device_index, device_type = modes.stream
        stream: Any = torch.cuda.Stream  # its constructor has no annotations
        stream = stream(stream_id=number, device_index=device_index, device_type=device_type)
        stack.enter_context(torch.cuda.stream(stream))


def check_unchanged(before: Modes) -> None:
    """Compare this thread's modes with those captured before an await.

    Raises: ModeChangedError: one differs; the message names it. Another coroutine that awaits inside
        `with torch.no_grad():` or the like does that to its neighbours.
    """
    after = capture(None if before.stream is None else before.stream[1])
    if after is before:
        return
    old, new = _facts(before), _facts(after)
    changed = next(name for name in old if old[name] != new[name])
    raise ModeChangedError(
        f"{changed} was {old[changed]} before the await and is {new[changed]} after it: a mode entered "
        "around an await reaches every coroutine of the thread; enter it inside one step, or set it for the "
        "runtime (Settings(inference=True))",
        mode=changed,
    )


def restore(before: Modes) -> None:
    """Put the grad mode captured before an await back in force; every other mode must be as it was.

    The grad mode can be set from outside of the block that chose it, so a neighbour's `with torch.no_grad():`
    around an await does no harm. Inference mode, autocast and the stream cannot.

    Raises: ModeChangedError: one of those differs; the message names it.
    """
    after = capture(None if before.stream is None else before.stream[1])
    if after is before:
        return
    if after.grad != before.grad and after.inference == before.inference:
        torch._C._set_grad_enabled(before.grad)
    check_unchanged(before)


def _facts(modes: Modes) -> dict[str, Any]:
    return {
        "grad mode": modes.grad,
        "inference mode": modes.inference,
        "deterministic algorithms": modes.deterministic,
        "autocast": modes.autocast,
        "the CUDA stream": modes.stream,
    }


_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore[reportAttributeAccessIssue]
_forward = sys.modules["torch.autograd.forward_ad"]  # torch has imported it
_functorch_level = torch._C._functorch.maybe_current_level  # pyright: ignore[reportAttributeAccessIssue]


def must_run_inline() -> str | None:
    """What in force here makes a call run at once, on this thread; None where it may queue.

    A dispatch or function mode sees every operation of its thread and a functorch transform wraps tensors
    for its own level; neither may leave the block that entered it, nor may what hooks of saved tensors are to
    see. Tangents of forward-mode differentiation belong to a level too, and no view that a batch is put
    together from has them. A default device alone bars nothing: only a function that makes tensors needs it,
    see `default_device`.
    """
    if _functorch_level() is not None:
        return "a functorch transform"
    if _forward._current_level >= 0:
        return "a level of forward-mode differentiation"
    if _dispatch_modes():
        return "a torch dispatch mode"
    if _grad_enabled() and _hooks(True) is not None:
        return "hooks of saved tensors"
    if _function_modes():
        return _function_mode()
    return None


def default_device() -> torch.device | None:
    """Where this thread makes tensors, if a block or `torch.set_default_device` says so."""
    return _function_modes_here()[1] if _function_modes() else None


def _function_mode() -> str | None:
    mode = _function_modes_here()[0]
    return f"the torch function mode {type(mode).__name__}" if mode is not None else None


def _function_modes_here() -> tuple[Any, torch.device | None]:
    """The innermost function mode that is no default device, and the innermost default device."""
    from torch import overrides
    from torch.utils._device import DeviceContext

    stack: Any = overrides._get_current_function_mode_stack
    mode = device = None
    for each in stack():
        if isinstance(each, DeviceContext):
            device = each.device
        else:
            mode = each
    return mode, device

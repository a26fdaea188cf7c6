"""torch's modes belong to the task that entered them: each has them to itself, from its creation on.

torch keeps modes (grad, inference, autocast, function and dispatch modes, hooks of saved tensors) by thread,
and all tasks of a loop share one: a mode that a task has in force where it waits reaches the task after it,
and a child that begins later finds whatever is in force then. So the tasks of a loop that a runtime serves
are made by a factory (`scheduler/loop_drivers.py`) which wraps their coroutines: a step runs under what the
task was created with, or had in force when it last waited, and leaves the thread as it found it. What a task
sets and does not take back before it ends (`torch.set_grad_enabled(False)` in a start-up handler) stays in
force for the thread, as without this.

A task that was made before has no modes of its own: what it awaits of ours is minded by
`scheduler/modes/streams.py`. The profiler, a functorch transform and torch's compiler keep to their thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _pop_mode, _push_mode

from layerzero.native import FAST_PATH

_CAST_ON: Final = ("cpu", "cuda")  # what a runtime opens
_C: Any = torch._C


class _IsolatedSteps(threading.local):
    """How many steps of carried coroutines this thread is inside of."""

    steps = 0


_ISOLATED_STEPS: Final = _IsolatedSteps()


def _facts() -> tuple[Any, ...]:
    """The modes of this thread that are no more than a value."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    casts = tuple((torch.is_autocast_enabled(on), torch.get_autocast_dtype(on)) for on in _CAST_ON)
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _C._is_fwd_grad_enabled(),
        _C._is_multithreading_enabled(), casts, torch.is_autocast_cache_enabled(), nesting,
    )  # fmt: skip


def _hooks() -> Any:
    return _C._autograd._top_saved_tensors_default_hooks(True)


def _stacked() -> bool:
    """Whether modes or hooks are on a stack of this thread."""
    return bool(_C._len_torch_function_stack() or _C._len_torch_dispatch_stack()) or _hooks() is not None


def _unstack() -> tuple[list[Any], list[Any], list[Any]]:
    """Empty this thread's stacks of function modes, dispatch modes and hooks; what was there, last first."""
    functions = [_C._pop_torch_function_stack() for _ in range(_C._len_torch_function_stack())]
    dispatches = [_pop_mode() for _ in range(_C._len_torch_dispatch_stack())]
    hooks = []
    while (pair := _hooks()) is not None:
        hooks.append(pair)
        _C._autograd._pop_saved_tensors_default_hooks()
    return functions, dispatches, hooks


def _stack(functions: list[Any], dispatches: list[Any], hooks: list[Any]) -> None:
    for mode in reversed(functions):
        _C._push_on_torch_function_stack(mode)
    for mode in reversed(dispatches):
        _push_mode(mode)
    for pair in reversed(hooks):
        _C._autograd._push_saved_tensors_default_hooks(*pair)


class TorchState:
    """torch's state of this thread as it is now, to be entered once, or dropped by `drop`."""

    __slots__ = ("_guard", "_stacks", "facts")

    def __init__(self) -> None:
        self.facts = _facts()
        self._stacks = _unstack() if _stacked() else None
        grad, inference, forward, threads, *_ = self.facts
        # Leaving it puts back all that autograd and the dispatcher had when it was entered.
        self._guard = _C._InferenceMode(inference)
        self._guard.__enter__()
        _C._set_grad_enabled(grad)
        _C._set_fwd_grad_enabled(forward)
        _C._set_multithreading_enabled(threads)
        if self._stacks is not None:
            _stack(*self._stacks)

    def matches(self, facts: tuple[Any, ...]) -> bool:
        """Whether `facts` of a thread without stacks are these."""
        return self._stacks is None and self.facts == facts

    def enter(self) -> None:
        """Put it in force in place of what is."""
        _unstack()
        *_, nesting = _facts()
        self._guard.__exit__(None, None, None)
        for device, (_, dtype) in zip(_CAST_ON, self.facts[4], strict=True):
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.facts[5])
        for _ in range(nesting, self.facts[6]):
            torch.autocast_increment_nesting()
        for _ in range(self.facts[6], nesting):
            torch.autocast_decrement_nesting()
        if self._stacks is not None:
            _stack(*self._stacks)

    def drop(self) -> None:
        """Let go of it, where it will not be entered: its guard may not end by itself."""
        current = TorchState()
        self._guard.__exit__(None, None, None)
        current.enter()


class IsolatedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine whose steps have torch's modes to themselves; the compiled twin has the same methods."""

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner: Any = inner
        self._state = TorchState()
        self._facts_at_creation = self._state.facts
        self._ended = False

    def _step(self, step: Callable[..., Any], *step_args: Any) -> Any:
        state, facts = self._state, _facts()
        if _C._functorch.maybe_current_level() is not None:
            return step(*step_args)
        unchanged = state.matches(facts) and not _stacked()
        before = state if unchanged else TorchState()
        if not unchanged:
            state.enter()
        _ISOLATED_STEPS.steps += 1
        try:
            value = step(*step_args)
        except BaseException:
            self._ended = True
            raise
        finally:
            _ISOLATED_STEPS.steps -= 1
            self._restore_thread(before, entered=not unchanged)
        return value

    def _restore_thread(self, before: TorchState, *, entered: bool) -> None:
        """Note what is in force now as the coroutine's own, and put `before` back."""
        facts, has_stacks = _facts(), _stacked()
        if self._ended and facts != self._facts_at_creation and not has_stacks:
            before.drop()
        elif self._ended:
            before.enter()
        elif entered or has_stacks or not before.matches(facts):
            self._state = TorchState()
            before.enter()

    def send(self, value: Any) -> Any:
        """Continue with it."""
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        """Raise an error where it waits."""
        return self._step(self._inner.throw, *error)

    def close(self) -> None:
        """End it."""
        if not self._ended:
            self._step(self._close_inner)

    def _close_inner(self) -> None:
        self._inner.close()
        self._ended = True

    def __await__(self) -> Any:
        return self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def __getattr__(self, name: str) -> Any:
        # cr_frame, __qualname__ and the like: what people and debuggers ask a coroutine for.
        if name.startswith("_") and not name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __del__(self) -> None:
        if not self.__dict__.get("_ended", True):
            if self._inner.cr_frame is None or self._inner.cr_frame.f_lasti < 0:
                self._ended = True
                self._state.drop()
            else:
                self.close()


class TaskModes:
    """`isolate` wraps a coroutine; `is_isolated` says whether the one that runs here is wrapped."""

    __slots__ = ("is_isolated", "isolate")

    def __init__(self) -> None:
        self.install(None)

    def install(self, module: Any) -> None:
        """Take up the compiled twin for coroutines that come, or with None the Python class."""
        self.isolate: Callable[[Any], Any] = IsolatedCoroutine if module is None else module.IsolatedCoroutine
        self.is_isolated: Callable[[], bool] = (
            _in_python_step if module is None else partial(_in_any_step, module.carries)
        )


def _in_python_step() -> bool:
    return _ISOLATED_STEPS.steps > 0


def _in_any_step(carries: Callable[[], bool]) -> bool:
    return carries() or _ISOLATED_STEPS.steps > 0


TASK_MODES: Final = TaskModes()
FAST_PATH.on_ready(TASK_MODES.install)

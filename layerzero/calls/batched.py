"""`batched`: any function over rows becomes an awaitable whose concurrent calls share one run.

Ops are one granularity; a layer or a whole step of a model is another. A batched function goes through the
same batcher: it coalesces across callers, obeys priorities and deadlines, is cancelled alike, and one bad
caller fails alone.
"""

from __future__ import annotations

import copy
import inspect
import time
import weakref
from collections.abc import Awaitable, Callable, Hashable, MutableMapping, Sequence
from contextlib import nullcontext
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar, cast, overload

import torch
from torch import Tensor

from layerzero._util import log
from layerzero.calls.await_path import NewCall, awaitable_call
from layerzero.calls.awaited import BatchKey
from layerzero.calls.blocking import LAST, context_runtime
from layerzero.calls.call_cache import find_nothing
from layerzero.calls.functions import (
    Args,
    BatchedFunctionCache,
    BatchedMethod,
    as_columns,
    captured_values,
    describe_rows,
    has_graph,
    has_own_rows,
    has_trainable_tensor,
    needs_grad,
    split_rows,
    takes_counts,
    unbound,
)
from layerzero.calls.scope import SCOPE, Scope
from layerzero.native import FAST_PATH
from layerzero.ops.checks import need_choice
from layerzero.runtime import ACTIVE
from layerzero.scheduler.core.pending_call import PENDING_CALL, PendingCall
from layerzero.scheduler.modes.torch_modes import default_device, restore
from layerzero.selection.transform import without_graph
from layerzero.spec.settings import BATCHING

R = TypeVar("R")
T = TypeVar("T")
_NEWEST = 0.25
_MAX_BATCH_KEYS = 1024
RUNS_ALONE = "batched.runs_alone"


class Batched(Generic[R]):
    """A function over rows, awaited; what `batched` returns.

    It has the interface that a batcher expects of an op: `name`, `pure`, `run`. `expected_us` is learned from
    its own batches, microseconds a row.
    """

    call = None  # `__call__` asks the compiled cache itself

    def __init__(self, fn: Callable[..., Any], *, pure: bool, name: str, device: torch.device | None) -> None:
        owner = fn.__self__ if isinstance(fn, MethodType) else None
        self._owner = weakref.ref(owner) if owner is not None else None
        self._function: Callable[..., Any] = unbound(fn)
        self._method: weakref.ref[BatchedMethod] | None = None
        self._wants_counts = takes_counts(fn)
        self._device = device
        self.name = name
        self.__doc__ = fn.__doc__
        self.pure = pure
        self.us_per_row = float("inf")
        # Whether results want a gradient that no argument shows: of weights. Each run says so again.
        self._weights_need_grad = any(map(has_trainable_tensor, captured_values(fn)))
        self._warned_alone = False
        self._batch_keys: dict[Hashable, BatchKey] = {}
        self._scoped: MutableMapping[Hashable, _Scoped] = weakref.WeakValueDictionary()
        self.entries: Any = None  # the compiled cache of its calls
        self._await, self._follow = awaitable_call(self, self)
        self.install_cache(FAST_PATH.module)
        _ALL.add(self)

    def __get__(self, instance: object, owner: type | None = None) -> Batched[R]:
        """The method of an object whose class wraps the function; anything else binds to nothing."""
        if instance is None or self._owner is not None or not isinstance(self._function, FunctionType):
            return self
        method = MethodType(self._function, instance)
        return cast("Batched[R]", batched(method, pure=self.pure, key=self.name, device=self._device))

    def of_object(self, owner: object) -> Any:
        """This function of a method with the object that it belongs to; one while it is referenced."""
        method = self._method and self._method()
        if method is None:
            method = BatchedMethod(self, owner)
            self._method = weakref.ref(method)
        return method

    def install_cache(self, module: Any) -> None:
        """Remember kinds of calls in the compiled twin, or with None go without."""
        self.entries = (
            None if module is None else module.FunctionCache(self, ACTIVE, SCOPE, LAST, restore, self._follow)
        )
        self.find = find_nothing if self.entries is None else self.entries.find

    def clear_cache(self) -> None:
        """Keep nothing alive that belonged to a runtime which is gone."""
        if self.entries is not None:
            self.entries.forget()

    def __call__(
        self,
        *args: Any,
        priority: int = 1,
        timeout: float | None = None,
        batching: str | None = None,
    ) -> Awaitable[R]:
        """Run for this caller's rows, together with the rows of calls made at the same time; a coroutine.

        Tensors carry rows along their first axis, the same number in each; every other argument reaches
        the function as a list with one entry a caller. `priority`, `timeout` and `batching` as
        for ops; a function over rows joins under "rows" and "all".
        Raises, when it is awaited: ValueError: tensors with different numbers of rows. What the function
            raises.
        """
        if self.entries is None or priority != 1 or timeout is not None or batching is not None:
            return self._await(*args, priority=priority, timeout=timeout, batching=batching)
        call: Awaitable[R] = self.entries.call(args)
        return call

    # -- on the await path -------------------------------------------------------------------------

    def describe(
        self, args: Args, kwargs: dict[str, Any], backend: str | None, batching: str | None
    ) -> NewCall:
        """A call with its rows, its bytes, where its tensors are and what tells kinds of calls apart.

        Raises: ValueError: tensors with different numbers of rows, without rows, or not strided.
        """
        if batching is not None:
            need_choice("batching", batching, BATCHING)
        rows, _, where, _ = kind = describe_rows(self.name, args)
        device = None if where is None or SCOPE.get() is not None else ACTIVE.devices.get(where)
        if device is None:
            device = context_runtime().device(where or self._device)
        return NewCall(device, device.loop_drivers.current(), args, self.us_per_row * rows, kind=kind)

    def new_call(
        self, call: NewCall, args: Args, kwargs: dict[str, Any], backend: str | None, batching: str | None
    ) -> PendingCall:
        """The pending call; its batch key is None where it must run alone."""
        device, (rows, size, where, kinds) = call.device, call.kind
        modes = device.capture_modes()
        # Of callers that shared a run the first to go backward would free the others' graph.
        differentiates = modes.grad and not device.settings.inference
        for_weights = differentiates and self._weights_need_grad
        if for_weights:
            self._warn_runs_alone()
        off = (batching or device.settings.batching) == "off"
        apart = for_weights or off or (differentiates and needs_grad(call.args)) or has_own_rows(call.args)
        # Only a call outside of every scope and default device is the function's own: the others' runs enter
        # theirs.
        scope, place = SCOPE.get(), default_device()
        around = (scope and scope.key, place) if scope or place else None
        batch_key = None if apart else self._batch_key((modes.without_stream, where, kinds, around))
        op = self if around is None else self._in_scope(scope, place, around)
        pending: PendingCall = PENDING_CALL.cls(
            op, call.args, batch_key, call.expected_us, rows, size, 1, None, modes
        )
        pending.device = device
        if batching is None and not device.kernel_calls.traces_each:
            self._remember(pending)
        return pending

    def _remember(self, pending: PendingCall) -> None:
        """Let the compiled twin answer for such calls, where only the process's runtime governs them."""
        if self.entries is None or pending.batch_key is None or SCOPE.get() is not None:
            return
        device = ACTIVE.devices.get(pending.device.device)
        if device is None or device is not pending.device:
            return
        if device.device.type == "cpu" or any(isinstance(value, Tensor) for value in pending.args):
            home = (ACTIVE.devices, device, device.loop_drivers.by_loop)
            self.entries.remember(pending.args, home, pending.batch_key, pending.modes)

    def run_inline(self, call: NewCall | PendingCall) -> Any:
        """Run one call on this thread."""
        LAST.plan = None
        device, args = call.device, call.args
        run = without_graph(self.run) if device.settings.inference else self.run
        if device.spans is not None:
            with device.spans.alone(self.name):
                return run([args])[0]
        return run([args])[0]

    def _batch_key(self, key: Hashable) -> BatchKey:
        """The compatibility class of calls of one kind: one object, so that batchers compare a pointer."""
        batch_key = self._batch_keys.get(key)
        if batch_key is None:
            if len(self._batch_keys) >= _MAX_BATCH_KEYS:
                self._batch_keys.clear()  # who waits under the old objects runs apart, nothing worse
                self.clear_cache()
            # A batcher keeps it: nothing of the function.
            batch_key = self._batch_keys[key] = BatchKey((self.name, key))
        return batch_key

    def _in_scope(self, scope: Scope | None, place: torch.device | None, key: Hashable) -> _Scoped:
        """This function under a scope and a default device: one object for all of one key while a batcher
        holds it."""
        scoped = self._scoped.get(key)
        if scoped is None:
            scoped = self._scoped[key] = _Scoped(self, scope, place)
        return scoped

    def run(self, calls: Sequence[Args]) -> list[Any]:
        """Call the function once for the rows of all callers; one result a caller."""
        function = self._function
        if self._owner is not None:
            owner = self._owner()
            if owner is None:
                raise ReferenceError(f"the object that {self.name} belongs to is gone")
            function = MethodType(function, owner)
        counts, columns = as_columns(calls)
        started = time.perf_counter()
        out = function(*columns, counts=counts) if self._wants_counts else function(*columns)
        self._update_us_per_row((time.perf_counter() - started) * 1e6 / max(1, sum(counts)))
        if torch.is_grad_enabled() and not any(needs_grad(args) for args in calls):
            self._note_gradient(has_graph(out))
        return split_rows(self.name, out, counts)

    def _note_gradient(self, has_gradient: bool) -> None:
        """Note what a run under a gradient gave; kinds that were known before would still join."""
        if has_gradient and not self._weights_need_grad:
            self.clear_cache()
        self._weights_need_grad = has_gradient

    def _warn_runs_alone(self) -> None:
        """Log once that nothing is shared: a server that forgot `no_grad` would only be slow."""
        if not self._warned_alone:
            self._warned_alone = True
            why = "results want a gradient; under torch.no_grad(), or with frozen weights, calls share runs"
            log.warning(RUNS_ALONE, function=self.name, why=why)

    def _update_us_per_row(self, us_per_row: float) -> None:
        first = self.us_per_row == float("inf")
        self.us_per_row = us_per_row if first else self.us_per_row + _NEWEST * (us_per_row - self.us_per_row)

    def __deepcopy__(self, memo: dict[int, Any]) -> Batched[R]:
        """The method of the copied object, as Python copies bound methods; of a function, this very one."""
        owner, function = self._owner and self._owner(), self._function
        copied = copy.deepcopy(function if owner is None else MethodType(function, owner), memo)
        if copied is function:
            return self
        wrapped: Batched[Any] = batched(copied, pure=self.pure, key=self.name, device=self._device)
        wrapped._weights_need_grad = self._weights_need_grad
        return wrapped

    def __repr__(self) -> str:
        return f"<batched {self.name}>"


class _Scoped:
    """A batched function for callers inside a scope or a block of a default device: its runs, which are in no
    caller's context, enter them."""

    __slots__ = ("__weakref__", "_function", "_place", "_scope", "name", "pure")

    def __init__(self, function: Batched[Any], scope: Scope | None, place: torch.device | None) -> None:
        self._function = function
        self._scope = scope
        self._place = place
        self.name = function.name
        self.pure = function.pure

    def run(self, calls: Sequence[Args]) -> list[Any]:
        """Call the function once for all callers, under their policy, in their runtime, on their device."""
        token = SCOPE.set(self._scope)
        try:
            with self._place or nullcontext():
                return self._function.run(calls)
        finally:
            SCOPE.reset(token)


_FUNCTIONS: BatchedFunctionCache[Batched[Any]] = BatchedFunctionCache()
_ALL: weakref.WeakSet[Batched[Any]] = weakref.WeakSet()  # those of rank groups too


def _install(module: Any) -> None:
    for function in list(_ALL):
        function.install_cache(module)


def _clear() -> None:
    for function in list(_ALL):
        function.clear_cache()


FAST_PATH.on_ready(_install)
ACTIVE.on_change(_clear)


@overload
def batched(
    fn: Callable[..., Tensor],
    *,
    pure: bool = False,
    key: str | None = None,
    device: str | torch.device | None = None,
) -> Batched[Tensor]: ...
@overload
def batched(
    fn: Callable[..., tuple[Tensor, Tensor]],
    *,
    pure: bool = False,
    key: str | None = None,
    device: str | torch.device | None = None,
) -> Batched[tuple[Tensor, Tensor]]: ...
@overload
def batched(
    fn: Callable[..., list[T]],
    *,
    pure: bool = False,
    key: str | None = None,
    device: str | torch.device | None = None,
) -> Batched[T]: ...
@overload
def batched(
    fn: Callable[..., Any],
    *,
    pure: bool = False,
    key: str | None = None,
    device: str | torch.device | None = None,
) -> Batched[Any]: ...
def batched(
    fn: Callable[..., Any],
    *,
    pure: bool = False,
    key: str | None = None,
    device: str | torch.device | None = None,
) -> Batched[Any]:
    """An awaitable of `fn` whose concurrent calls, from any number of tasks, run as one.

    `fn` gets the tensors of all callers with their rows behind each other (no copy where they are
    adjacent already), every other argument as a list with one entry a caller, and, where it takes a keyword
    `counts`, the rows of each caller. It returns tensors with as many rows, or with one row a caller, or a
    list with one result a caller, or a tuple of those. Where results want a gradient, of an argument or of
    weights that `fn` holds, calls run alone, as those of ops do. The same function, or the same method of
    the same object, is one batcher entry wherever it is wrapped. A lambda, a function made inside another and
    an object that is called are remembered as long as their wrapping is kept: wrap them once. A wrapping
    keeps the object of its method; in a class body `@lz.batched` wraps the method of each object. `pure=True`
    allows the batcher to run a failed batch again in halves to find the caller at fault; leave it False for a
    function that writes a KV cache.

    Raises: TypeError: `fn` is no function, is a coroutine function, or is a lambda or a function made
        inside another without a `key`, which says that it is not made anew for each call: every one of
        them is a group of its own.

    Example:
        >>> import asyncio, torch, layerzero as lz
        >>> double = lz.batched(lambda x: x * 2, key="double")
        >>> async def main():
        ...     async with lz.start(scoped=True):
        ...         return await asyncio.gather(double(torch.ones(1, 2)), double(torch.ones(2, 2)))
        >>> [tuple(rows.shape) for rows in asyncio.run(main())]
        [(1, 2), (2, 2)]
    """
    if not callable(fn):
        raise TypeError(f"fn needs a function, got {type(fn).__name__}")
    if isinstance(fn, Batched | BatchedMethod):
        return cast("Batched[Any]", fn)
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004
        called = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"fn needs a plain function, since a batcher runs it, got the coroutine function {called}"
        )
    plain = unbound(fn)
    name = getattr(plain, "__qualname__", type(fn).__name__)
    if key is None and "<l" in name:  # <lambda>, <locals>
        raise TypeError(f"fn needs a name that outlives one call, or key=..., got {name}")
    if key is not None and not isinstance(key, str):
        raise TypeError(f"key needs a text, got {type(key).__name__}")
    try:
        where = torch.device(device) if device is not None else None
    except RuntimeError as error:
        raise ValueError(f"device needs one of torch's, got {device!r:.80}") from error
    # A method's own function too: an object may have several of one name, one after another or at once.
    entry = (id(plain) if isinstance(fn, MethodType) else 0, key or name, pure, where)
    entries = _FUNCTIONS.of(fn, name)
    wrapped = entries.get(entry)
    if wrapped is None:
        wrapped = entries[entry] = Batched(fn, pure=pure, name=key or name, device=where)
    return wrapped.of_object(fn.__self__) if isinstance(fn, MethodType) else wrapped

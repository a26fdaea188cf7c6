"""`batched`: any function over rows becomes an awaitable whose concurrent calls share one run.

Ops are one granularity; a layer or a whole step of a model is another. A batched function goes through the
same lane: it coalesces across callers, obeys priorities and deadlines, is cancelled alike, and one bad
caller fails alone.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Awaitable, Callable, Hashable, MutableMapping, Sequence
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from layerzero._util import log
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.awaited import Group, away, hurry, parts
from layerzero.calls.blocking import LAST, runtime_here
from layerzero.calls.functions import (
    Args,
    as_columns,
    held_by,
    kind_of,
    needs_grad,
    takes_counts,
    trains,
    unbound,
    wants_gradient,
)
from layerzero.calls.scope import SCOPE, Scope
from layerzero.native import HOT
from layerzero.ops.checks import need_choice, need_number
from layerzero.runtime import ACTIVE
from layerzero.scheduler.core.pending_call import TICKETS, Ticket
from layerzero.scheduler.loop_driver import QUEUE, Front
from layerzero.scheduler.streams import come_back, leave
from layerzero.scheduler.torch_modes import Modes, bars_queueing, restore
from layerzero.selection.transform import without_graph
from layerzero.spec.settings import BATCHING

R = TypeVar("R")
T = TypeVar("T")
_NEWEST = 0.25
_MAX_KINDS = 1024
RUNS_ALONE = "batched.runs_alone"


class Batched(Generic[R]):
    """A function over rows, awaited; what `batched` returns.

    It stands in a lane where an op stands: `name`, `pure`, `run`. `expected_us` is learned from its own
    batches, microseconds a row.
    """

    def __init__(self, fn: Callable[..., Any], *, pure: bool, name: str, device: torch.device | None) -> None:
        owner = fn.__self__ if isinstance(fn, MethodType) else None
        self._owner = weakref.ref(owner) if owner is not None else None
        self._function: Callable[..., Any] = unbound(fn)
        self._wants_counts = takes_counts(fn)
        self._device = device
        self.name = name
        self.pure = pure
        self.us_per_row = float("inf")
        # Whether results want a gradient that no argument shows: of weights. Each run says so again.
        self._weights_want = any(map(trains, held_by(fn)))
        self._said_alone = False
        self._groups: dict[Hashable, Group] = {}
        self._scoped: MutableMapping[Hashable, _Scoped] = weakref.WeakValueDictionary()
        self._kinds: Any = None
        self.adopt(HOT.module)

    def adopt(self, module: Any) -> None:
        """Remember kinds of calls in the compiled twin, or with None go without."""
        self._kinds = None if module is None else module.Kinds(self, ACTIVE, SCOPE, LAST, restore)

    def forget(self) -> None:
        """Keep nothing alive that belonged to a runtime which is gone."""
        if self._kinds is not None:
            self._kinds.forget()

    def __call__(
        self,
        *args: Any,
        priority: int = 1,
        timeout: float | None = None,
        batching: str | None = None,
    ) -> Awaitable[R]:
        """Run for this caller's rows, together with whoever calls at the same time; a coroutine.

        Tensors carry rows along their first axis, the same number in each; every other argument reaches
        the function as a list with one entry a caller. `priority`, `timeout` and `batching` as
        for ops; a function over rows joins under "rows" and "all".
        Raises, when it is awaited: ValueError: tensors with different numbers of rows. What the function
            raises.
        """
        if self._kinds is None or priority != 1 or timeout is not None or batching is not None:
            return self._asked(args, priority, timeout, batching)
        call: Awaitable[R] = self._kinds.call(args)
        return call

    async def _asked(
        self,
        args: Args,
        priority: int = 1,
        timeout: float | None = None,  # noqa: ASYNC109  the lane cancels queued calls by it
        batching: str | None = None,
    ) -> Any:
        """A call as Python makes it: alone, of a new kind, or with something that concerns its waiting."""
        kinds = self._kinds
        ticket = None if kinds is None or batching is not None else kinds.find(args, self.us_per_row)
        if ticket is None:
            return await self._unknown(args, priority, timeout, batching)
        front = ticket.front
        if (
            front.alone is not None
            and ticket.expected_us < front.inline_limit_us
            and (front.may_inline() or await front.rested())
        ):
            front.charge(ticket.expected_us)
            LAST.plan = None
            return self._alone(ticket.plan, args)
        if priority != 1 or timeout is not None:
            hurry(ticket, priority, timeout)
        if not QUEUE.known(front, ticket):
            front.submit(ticket)
        modes = ticket.modes[0]
        if parts(modes, front):
            return await away(ticket, modes, front)
        result, LAST.plan = await ticket
        if not ticket.unchanged():
            restore(modes)
        return result

    async def _unknown(
        self,
        args: Args,
        priority: int,
        timeout: float | None,  # noqa: ASYNC109
        batching: str | None,
    ) -> Any:
        """A call of a kind that the compiled twin does not know: every step in Python."""
        if batching is not None:
            need_choice("batching", batching, BATCHING)
        rows, size, where, kinds = kind_of(self.name, args)
        device = None if where is None or SCOPE.get() is not None else ACTIVE.devices.get(where)
        if device is None:
            device = runtime_here().device(where or self._device)
        front = device.fronts.current()
        expected_us = self.us_per_row * rows
        if expected_us < device.inline_limit_us and (front.may_inline() or await front.rested()):
            front.charge(expected_us)
            LAST.plan = None
            return self._alone(device, args)
        if bars_queueing() is not None:
            return self._alone(device, args)
        modes = device.capture()
        # Of callers that shared a run the first to go backward would free the others' graph.
        differentiates = modes.grad and not device.settings.inference
        for_weights = differentiates and self._weights_want
        if for_weights:
            self._say_alone()
        off = (batching or device.settings.batching) == "off"
        apart = for_weights or off or (differentiates and needs_grad(args))
        # Only a call outside of every scope is the function's own: the others' runs enter theirs.
        scope = SCOPE.get()
        around = None if scope is None else scope.key
        group = None if apart else self._group((modes.anywhere, where, kinds, around))
        op = self if scope is None else self._within(scope, around)
        ticket = TICKETS.kind(op, args, group, expected_us, rows, size, priority, None, (modes, None))
        if group is not None and batching is None and device.spans is None:
            self._remember(args, device, group, ticket.modes)
        if timeout is not None:
            ticket.deadline = front.loop.time() + need_number("timeout", timeout, low=0.0)
        if device.spans is None:
            return await self._queued(ticket, modes, front)
        with device.spans.waiting(self.name, args):
            return await self._queued(ticket, modes, front)

    async def _queued(self, ticket: Ticket, modes: Modes, front: Front) -> Any:
        front.submit(ticket)
        leaves = modes.stream != front.ambient_stream or parts(modes, front)
        if leaves:
            leave(modes, front)
        try:
            result, LAST.plan = await ticket
        finally:
            if leaves:
                come_back(modes, front)
        restore(modes)
        return result

    def _alone(self, device: LocalDevice, args: Args) -> Any:
        """Run one call on this thread."""
        run = without_graph(self.run) if device.settings.inference else self.run
        if device.spans is not None:
            with device.spans.batch(self.name, [args], inside=True):
                return run([args])[0]
        return run([args])[0]

    def _remember(self, args: Args, device: LocalDevice, group: Group, modes: Any) -> None:
        """Let the compiled twin answer for such calls, where only the process's runtime governs them."""
        if self._kinds is None or SCOPE.get() is not None or ACTIVE.devices.get(device.device) is not device:
            return
        self._kinds.remember(args, (ACTIVE.devices, device, device.fronts.by_loop), group, modes)

    def _group(self, key: Hashable) -> Group:
        """The compatibility class of calls of one kind: one object, so that lanes compare a pointer."""
        found = self._groups.get(key)
        if found is None:
            if len(self._groups) >= _MAX_KINDS:
                self._groups.clear()  # who waits under the old objects runs apart, nothing worse
                self.forget()
            found = self._groups[key] = Group((self.name, key))  # a lane keeps it: nothing of the function
        return found

    def _within(self, scope: Scope, key: Hashable) -> _Scoped:
        """This function under a scope: one object for all scopes of one key while a lane holds it."""
        found = self._scoped.get(key)
        if found is None:
            found = self._scoped[key] = _Scoped(self, scope)
        return found

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
        self._learn((time.perf_counter() - started) * 1e6 / max(1, sum(counts)))
        if torch.is_grad_enabled() and not any(needs_grad(args) for args in calls):
            self._see_gradient(wants_gradient(out))
        return self._split(out, counts)

    def _see_gradient(self, wanted: bool) -> None:
        """Note what a run under a gradient gave; kinds that were known before would still join."""
        if wanted and not self._weights_want:
            self.forget()
        self._weights_want = wanted

    def _say_alone(self) -> None:
        """Log once that nothing is shared: a server that forgot `no_grad` would only be slow."""
        if not self._said_alone:
            self._said_alone = True
            why = "results want a gradient; under torch.no_grad(), or with frozen weights, calls share runs"
            log.warning(RUNS_ALONE, function=self.name, why=why)

    def _learn(self, us_per_row: float) -> None:
        known = self.us_per_row
        self.us_per_row = us_per_row if known == float("inf") else known + _NEWEST * (us_per_row - known)

    def _split(self, out: Any, counts: list[int]) -> list[Any]:
        if isinstance(out, tuple) and out:
            parts = [self._split(part, counts) for part in out]
            return list(zip(*parts, strict=True))
        if isinstance(out, Tensor) and out.dim() > 0:
            rows = out.shape[0]
            if rows != sum(counts) and rows == len(counts):
                counts = [1] * rows
            if rows == sum(counts):
                pieces = NotImplemented if HOT.module is None else HOT.module.split(out, counts, False)
                return list(out.split_with_sizes(counts)) if pieces is NotImplemented else pieces
        if isinstance(out, list) and len(out) == len(counts):
            return out
        got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"{type(out).__name__}"
        raise ValueError(
            f"{self.name} needs to return tensors of {sum(counts)} rows or of {len(counts)}, one a caller, "
            f"or a list of {len(counts)} results, got {got}"
        )

    def __repr__(self) -> str:
        return f"<batched {self.name}>"


class _Scoped:
    """A batched function for callers inside a scope: its runs, which are in no caller's context, enter it."""

    __slots__ = ("__weakref__", "_function", "_scope", "name", "pure")

    def __init__(self, function: Batched[Any], scope: Scope) -> None:
        self._function = function
        self._scope = scope
        self.name = function.name
        self.pure = function.pure

    def run(self, calls: Sequence[Args]) -> list[Any]:
        """Call the function once for all callers, under their policy and in their runtime."""
        token = SCOPE.set(self._scope)
        try:
            return self._function.run(calls)
        finally:
            SCOPE.reset(token)


# By identity: equal objects may compute other things. A function made inside another, and an object that is
# called, live as long as somebody keeps their wrapping; it holds them, so that this table must not hold it.
_FUNCTIONS: MutableMapping[Any, dict[Hashable, Batched[Any]]] = WeakIdKeyDictionary()
_PASSING: MutableMapping[Any, weakref.WeakValueDictionary[Hashable, Batched[Any]]] = WeakIdKeyDictionary()


def _entries(fn: Any, name: str) -> MutableMapping[Hashable, Batched[Any]]:
    """Where the wrappings of `fn` stand.

    Raises: TypeError: nothing can refer to what `fn` belongs to without keeping it alive.
    """
    holder = fn.__self__ if isinstance(fn, MethodType) else fn
    try:
        if isinstance(fn, MethodType) or (isinstance(fn, FunctionType) and "<l" not in name):
            return _FUNCTIONS.setdefault(holder, {})
        return _PASSING.setdefault(holder, weakref.WeakValueDictionary())
    except TypeError:
        raise TypeError(
            f"fn needs an object with a weak reference (`__weakref__` among its `__slots__`), got {name} of "
            f"{type(holder).__name__}"
        ) from None


def _every() -> list[Batched[Any]]:
    tables = [*list(_FUNCTIONS.values()), *list(_PASSING.values())]
    return [function for entries in tables for function in list(entries.values())]


def _adopt(module: Any) -> None:
    for function in _every():
        function.adopt(module)


def _forget() -> None:
    for function in _every():
        function.forget()


HOT.on_ready(_adopt)
ACTIVE.on_change(_forget)


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

    `fn` gets the tensors of all callers with their rows behind each other (no copy where they already
    stand so), every other argument as a list with one entry a caller, and, where it takes a keyword
    `counts`, the rows of each caller. It returns tensors with as many rows, or with one row a caller, or a
    list with one result a caller, or a tuple of those. Where results want a gradient, of an argument or of
    weights that `fn` holds, calls run alone, as those of ops do. The same function, or the same method of
    the same object, is one lane entry wherever it is wrapped. A lambda, a function made inside another and
    an object that is called are remembered as long as their wrapping is kept: wrap them once. `pure=True`
    allows the lane to run a failed batch again in halves to find the caller at fault; leave it False for a
    function that writes a KV cache.

    Raises: TypeError: `fn` is no function, is a coroutine function, or is a lambda or a function made
        inside another without a `key`, which says that it is not made anew for each call: every one of
        them is a group of its own.
    """
    if not callable(fn):
        raise TypeError(f"fn needs a function, got {type(fn).__name__}")
    if isinstance(fn, Batched):
        return fn
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004
        called = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"fn needs a plain function, since a lane runs it, got the coroutine function {called}"
        )
    plain = unbound(fn)
    name = getattr(plain, "__qualname__", type(fn).__name__)
    if key is None and "<l" in name:  # <lambda>, <locals>
        raise TypeError(f"fn needs a name that outlives one call, or key=..., got {name}")
    where = torch.device(device) if device is not None else None
    # A method's own function too: an object may have several of one name, one after another or at once.
    entry, entries = (
        (id(plain) if isinstance(fn, MethodType) else 0, key or name, pure, where),
        _entries(fn, name),
    )
    found = entries.get(entry)
    if found is None:
        found = entries[entry] = Batched(fn, pure=pure, name=key or name, device=where)
    return found

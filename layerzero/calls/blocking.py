"""Both surfaces of an op from its one signature: `blocking(op)` and `awaited(op)`.

The fast path is here in full and calls nothing of ours on a hit: build the signature, find the device,
the table and the plan, run it. Whatever is unusual (no plan yet, a scope, an error) leaves it at once.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero._util import foreign
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.call_cache import BlockingCallCache
from layerzero.calls.scope import ROOT, SCOPE, Scope
from layerzero.graphs.rehearsal import rehearsal
from layerzero.operators import Route, compose, front, install, run_operator
from layerzero.ops.op import Args, Op, Signature
from layerzero.runtime import ACTIVE, Runtime, current
from layerzero.scheduler.scheduled_device import ScheduledDevice
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.plan import Plan
from layerzero.selection.record import Selection


class _Last(threading.local):
    """The plan that ran last in this thread; read right after a call, nothing can have come between."""

    plan: Plan | None = None


LAST = _Last()


def last_selection() -> Selection | None:
    """The record of the last call in this thread: what was executed, batched and fallen back as it was.

    None before the first call of this thread.
    """
    plan = LAST.plan
    return None if plan is None else plan.selection_for_request()


def blocking(op: Op) -> Callable[..., Any]:
    """The op as a blocking function with the signature of `op.build`, plus `backend=`.

    torch's compiler sees a call of the op's operator, and so does everything else that transforms or traces.
    """
    call = with_signature_of(_routed(op, traced_route(op)), op, BLOCKING_DOC)
    call.__module__ = "layerzero.sync"  # where a pickled one is found again
    show_compiler(call, front(op))
    return call


def show_compiler(call: Callable[..., Any], instead: Callable[..., Any]) -> None:
    """Have torch's compiler read another function in the place of `call`, called or compiled itself.

    It finds it on the function, without torch's compiler having been imported; an eager call pays nothing.
    """
    call._torchdynamo_inline = instead  # type: ignore[attr-defined]
    call._torchdynamo_orig_callable = instead  # type: ignore[attr-defined]
    call._torchdynamo_wrapper_id = id(call)  # type: ignore[attr-defined]


def traced_route(op: Op) -> Route:
    """What a call on transformed or traced tensors is: a call of the op's operator."""
    operator, names = front(op), tuple(inspect.signature(op.build).parameters)

    def route(full: Args, backend: str | None) -> Any:
        if foreign.has_subclass(full):
            return compose(op, full, run_operator)
        return operator(**dict(zip(names, full, strict=True)), backend=backend)

    return route


def _routed(op: Op, route: Route, sharing: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The blocking call of an op; `route` answers calls on tensors that are transformed or traced.

    What `sharing`, another such call of the op, knows, it knows, too.
    """
    build, name, active, scoped, last = op.build, op.name, ACTIVE, SCOPE.get, LAST
    cache: BlockingCallCache = getattr(sharing, "cache", None) or BlockingCallCache(op, last, _recover)
    may_be_foreign = foreign.may_be_foreign
    counted = cache.count_known

    def call(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        if backend is None and cache.entries is not None:
            result = cache.entries.run(args, kwargs)
            if result is not NotImplemented:
                return result
        try:
            signature, full = build(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            return _first_call(op, route, args, kwargs, backend, error)
        if may_be_foreign(full[0]) and foreign.has_transformed(full):
            return route(full, backend)
        try:
            if backend is not None or scoped() is not None:
                return _run_uncached(op, signature, full, backend)
            device = active.devices[full[0].device]
            bits = device.mode()
            snapshot = device.snapshot
            plan = snapshot.tables[name].by_signature[bits][signature]
        except KeyError:  # built once: a seed is drawn in there
            return _run_uncached(op, signature, full, backend)
        except (AttributeError, TypeError) as error:
            return _first_call(op, route, args, kwargs, backend, error)
        counted()
        last.plan = plan
        cache.remember(args, kwargs, full, device, snapshot, plan)
        try:
            return plan.call(*full)
        except Exception as error:
            return _recover(device, plan, full, error, None)

    call.cache = cache  # type: ignore[attr-defined]
    return call


install(_routed, rehearsal)


BLOCKING_DOC = """    Choosing: backend is a kernel's id or a backend's name, for this call alone.
"""


def with_signature_of(call: Callable[..., Any], op: Op, extra_doc: str) -> Callable[..., Any]:
    """`call` under the op's name, with its documentation and signature, and `call`'s own parameters in both.

    `extra_doc` documents the keyword-only parameters that `call` itself names: those beside the op's own.
    """
    parameters_of_call = inspect.signature(call).parameters.values()
    signature = inspect.signature(op.build)
    extra = [p for p in parameters_of_call if p.kind is p.KEYWORD_ONLY]
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    call.__name__ = call.__qualname__ = op.name
    call.__doc__ = _with_doc(op.build.__doc__ or "", extra_doc)
    call.__module__ = "layerzero"
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*parameters, *extra], return_annotation=inspect.signature(op.reference).return_annotation
    )
    return call


def _with_doc(doc: str, extra_doc: str) -> str:
    """An op's docstring with the lines of `extra_doc` after those about its arguments."""
    head, returns, tail = doc.partition("    Returns:")
    return f"{head}{extra_doc}{returns}{tail}" if returns else f"{doc.rstrip()}\n{extra_doc}"


def _first_call(
    op: Op, route: Route, args: tuple[Any, ...], kwargs: dict[str, Any], backend: str | None, error: Exception
) -> Any:
    """A call whose plan is not there yet, or whose arguments are wrong."""
    signature, full = checked_build(op, args, kwargs, error)
    if foreign.has_transformed(full):
        return route(full, backend)
    return _run_uncached(op, signature, full, backend)


def checked_build(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None = None
) -> tuple[Signature, Args]:
    """`op.build` with its arguments explained where it cannot take them.

    Raises: TypeError: an argument is missing, unknown or no tensor, by name.
    """
    try:
        inspect.signature(op.build).bind(*args, **kwargs)
    except TypeError as wrong:
        raise TypeError(f"{op.name}(): {wrong}") from None
    try:
        signature, full = op.build(*args, **kwargs)
    except (AttributeError, TypeError) as wrong:
        raise _argument_error(op, args, kwargs, wrong) from error
    try:
        hash(signature)
    except TypeError as wrong:
        op.check(full)
        if foreign.has_transformed(full):  # the sizes of a trace have no hash, and need none
            return signature, full
        raise TypeError(f"{op.name}() needs hashable flags and numbers: {wrong}") from None
    return signature, full


def _argument_error(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], wrong: Exception) -> Exception:
    bound = inspect.signature(op.build).bind(*args, **kwargs)
    bound.apply_defaults()
    for parameter in inspect.signature(op.build).parameters.values():
        value = bound.arguments.get(parameter.name)
        takes_tensor = "Tensor" in str(parameter.annotation)
        optional = "None" in str(parameter.annotation)
        if takes_tensor and not isinstance(value, Tensor) and not (optional and value is None):
            elsewhere = getattr(value, "advice", None)  # a handle of another process's tensor
            advice = f": {elsewhere}" if isinstance(elsewhere, str) else ""
            return TypeError(f"{parameter.name} needs a torch.Tensor, got {type(value).__name__}{advice}")
    return wrong


def context_runtime() -> Runtime:
    """The runtime of the calling context: a scoped one, else the process's."""
    scope = SCOPE.get()
    return scope.runtime if scope is not None and scope.runtime is not None else current()


def device_of(args: Args) -> torch.device:
    """The device a call runs on: its first argument's.

    Raises: TypeError: the first argument is no tensor.
    """
    first = args[0]
    if not isinstance(first, Tensor):
        raise TypeError(f"the first argument needs a torch.Tensor, got {type(first).__name__}")
    return first.device


def context_device(args: Args) -> ScheduledDevice:
    """The device of a call's tensors, in the calling context's runtime."""
    return context_runtime().device(device_of(args))


def context_snapshot(device: LocalDevice, op: str, backend: str | None) -> DispatchState:
    """The snapshot that governs a call in the calling context."""
    return snapshot_in(SCOPE.get(), device, op, backend)


def snapshot_in(scope: Scope | None, device: LocalDevice, op: str, backend: str | None) -> DispatchState:
    """The snapshot that governs a call in a scope, or outside of any."""
    if scope is None:
        return device.snapshot if backend is None else ROOT.snapshot(device, op, backend)
    return scope.snapshot(device, op, backend)


def _run_uncached(op: Op, signature: Signature, args: Args, backend: str | None) -> Any:
    """Plan and run a call in full: scopes, first uses, everything."""
    device = context_device(args)
    snapshot = context_snapshot(device, op.name, backend)
    plan = device.plan(op, signature, args, device.mode(), snapshot)
    LAST.plan = plan
    try:
        return plan.call(*args)
    except Exception as error:
        return _recover(device, plan, args, error, snapshot)


def _recover(
    device: LocalDevice, plan: Plan, args: Args, error: Exception, snapshot: DispatchState | None
) -> Any:
    result, LAST.plan = device.recover(plan, args, error, snapshot)
    return result

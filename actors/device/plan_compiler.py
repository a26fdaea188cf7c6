"""PlanCompiler: from a selection to a plan that is ready to run, with what wraps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from layerzero._util import foreign
from layerzero.actors.device.kernel_calls import KernelCalls
from layerzero.actors.device.loading import KernelLoader
from layerzero.actors.device.recovery import Recovery, with_guard
from layerzero.health import Health
from layerzero.observe.counters import Counters
from layerzero.observe.selection_events import SelectionEvents
from layerzero.ops.op import Op
from layerzero.selection.context import KernelLoadError
from layerzero.selection.modes import REHEARSAL
from layerzero.selection.plan import Plan
from layerzero.selection.recent import RecentCache
from layerzero.selection.record import Selection
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import KernelStillLoadingError, NoKernelFoundError

_GUARDED = 256  # so many guarded callables are shared between plans


class PlanMiddleware(Protocol):
    """What sees the calls of a device: a recorder, a guard of numerics; without one nothing is paid.

    One that only times calls and `reads_arguments` never watches transformed ones, too.
    """

    reads_arguments: bool

    def wrap(self, op: Op, selection: Selection, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, watched; `call` itself where there is nothing to see."""
        ...


@dataclass(eq=False)
class PlanCompiler:
    """Compiles the plans of one device; `middlewares` wrap every plan, `on_decided` gets each call's spec."""

    _calls: KernelCalls
    _health: Health
    _loader: KernelLoader
    _recovery: Recovery
    _counters: Counters
    middlewares: tuple[PlanMiddleware, ...] = ()
    on_decided: Callable[[CallSpec], object] | None = None

    def __post_init__(self) -> None:
        self.events = SelectionEvents(self._counters)
        self._guarded: RecentCache[tuple[str, int], Callable[..., Any]] = RecentCache(_GUARDED)

    def compile(self, op: Op, selection: Selection) -> Plan:
        """The plan of a selection; loads the kernel if it is not, and starts what is chosen when warm.

        Raises: KernelLoadError: it does not load. NoKernelFoundError: it was removed meanwhile.
        """
        calls = self._calls
        self._counters.add("selections", op=op.name)
        kernel = calls.registry.get(selection.kernel)
        # Another thread removed it between the decision and here.
        if kernel is None:
            message = f"{selection.kernel} was removed while it was being chosen; call again"
            raise NoKernelFoundError(message, trace=selection.trace, op=op.name, request=selection.request)
        if selection.table_miss is not None:
            self._counters.add("dispatch_table_misses", op=op.name)
        if self.on_decided is not None:
            self.on_decided(selection.request)
        if REHEARSAL.on and not REHEARSAL.waits:
            self._refuse_to_wait(selection)
        try:
            call = calls.callable_for(op, selection, kernel.id)
        except Exception as error:
            if (why := calls.registry.blocked().get(kernel.id)) is None:
                raise
            self._loader.tell_failure(kernel.id, error)
            raise KernelLoadError(kernel.id, why) from error
        for middleware in self.middlewares:
            wrapped = middleware.wrap(op, selection, call)
            call = unless_foreign(wrapped, call) if middleware.reads_arguments else wrapped
        # Outermost, so that a probe's outcome is that of the call as its caller meets it.
        if kernel.id in self._health.probing_kernels():
            call = self._recovery.probe(op, kernel.id, call, selection)
        if selection.when_warm is not None and calls.settings.warm != "off":
            self._loader.load_later(selection.when_warm, selection.request)
        return Plan(op, self._behind_guard(op, call), selection, selection.request)

    def _behind_guard(self, op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` behind the op's guard, one for all plans that run it."""
        key = op.name, id(call)
        guarded = self._guarded.get(key)
        if guarded is None:
            guarded = with_guard(self._calls.device, op, call)
            if guarded is not call:
                self._guarded.put(key, guarded)  # it holds `call`: nothing else has that id
        return guarded

    def _refuse_to_wait(self, selection: Selection) -> None:
        """Load a cold kernel behind the call. Raises: KernelStillLoadingError: it loads."""
        accepted = selection.candidate(selection.kernel).accepted
        if accepted is None or accepted.ready or self._calls.settings.warm == "off":
            return
        for kernel_id in selection.order:  # the first of them that is there is captured until better ones are
            self._loader.load_later(kernel_id, selection.request)
        raise KernelStillLoadingError(
            f"{selection.op} under graph capture needs {selection.kernel}, which is being loaded",
            op=selection.op,
            request=selection.request,
        )

    def compile_agreed(self, op: Op, selection: Selection) -> Plan:
        """The plan of a selection that every rank of a group makes: loaded before, without middlewares."""
        self._counters.add("selections", op=op.name)
        call = self._calls.callable_for(op, selection, selection.kernel)
        return Plan(op, self._behind_guard(op, call), selection, selection.request)


def unless_foreign(wrapped: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """`wrapped`; `call` itself where the caller's transforms, modes or hooks would be observed with it."""
    if wrapped is call:
        return call

    def either(*args: Any) -> Any:
        return (call if foreign.in_foreign_mode() or foreign.has_transformed(args) else wrapped)(*args)

    return either

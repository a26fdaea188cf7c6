"""Kernels of torch in compiled graphs that choose at run time, under a guard that ends with the choice.

torch's compiler checks a graph's guard before each run. While everything that a graph holds is still chosen,
its function runs that graph; else the one of the same sizes whose operators choose when it runs. A function
has at most these two for its sizes, however often the choice moves.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, _guards

from layerzero._util import log
from layerzero.calls.blocking import context_device
from layerzero.calls.inlining import CompiledChoices, torchs_kernel
from layerzero.calls.scope import SCOPE
from layerzero.operators.choice import CHOICE, GUARDED, Guards
from layerzero.ops import table as ops_table
from layerzero.ops.attention.checks import switched_off
from layerzero.ops.op import Args, Op
from layerzero.runtime import ACTIVE, current
from layerzero.scheduler.scheduled_device import ScheduledDevice
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.record import Selection
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import LayerZeroError

# Whose kernels of torch take every size, and that one is right for all where it is for one.
_OF_ANY_SIZE = frozenset(
    {
        "add_layer_norm", "add_rms_norm", "cross_entropy", "layer_norm", "linear_cross_entropy", "rms_norm",
        "rope",
    }
)  # fmt: skip
# Whose kernels of torch read no number out of a tensor, draw none and write nothing that they are given.
_TRACEABLE = _OF_ANY_SIZE | {"attention", "embedding", "linear", "mlp"}
# Of one function, for so many sizes: another choice doubles them, and torch's limit is 8.
_MAX_GRAPHS = 3
_compiling: Any = _guards.CompileContext
_MOVED = "compile.choice_moved"
_UNGUARDED = "compile.unguarded"
_SERIAL = count()


class _Held(NamedTuple):
    """A call in a graph: the kernel in it, what the choice followed from, and whether it is for all sizes."""

    op: str
    request: CallSpec
    kernel: str
    fingerprint: Any
    any_size: bool


class _Seen(NamedTuple):
    """Whether everything held was chosen, in these versions of the devices of a runtime."""

    devices: Any
    versions: tuple[tuple[ScheduledDevice, DispatchState], ...]
    holds: bool


class FunctionChoices:
    """What the graphs of one compiled function hold."""

    __slots__ = ("__weakref__", "_held", "_seen", "_switched", "graphs")

    def __init__(self) -> None:
        self.graphs = 0  # that hold something
        self._held: list[_Held] = []
        self._seen: _Seen | None = None
        self._switched = False  # whether torch's switches for attention count

    def hold(self, op: Op, selection: Selection, kernel: str, any_size: bool) -> None:
        """Add a call that a graph holds, of these sizes or of any."""
        request = selection.request
        table = current().device(request.device).table(op)
        table.may_be_captured = True  # its kernel is no call of ours in a graph of torch's
        call = _Held(op.name, request, kernel, table.fingerprint, any_size)
        if call not in self._held:  # as many layers make the same one
            self._held.append(call)
        self._switched = self._switched or "attention" in op.name
        self._seen = None

    def holds(self) -> bool:
        """Whether all that is held is what a call would choose now."""
        if SCOPE.get() is not None or (self._switched and switched_off()):
            return False
        before = self._seen
        if before is None or before.devices is not ACTIVE.devices:
            return self._reconsider()
        for device, version in before.versions:
            if device.snapshot is not version:
                return self._reconsider()
        return before.holds

    def _reconsider(self) -> bool:
        calls = list(self._held)
        try:
            runtime = current()
            devices = [runtime.device(name) for name in {call.request.device for call in calls}]
            versions = tuple((device, device.snapshot) for device in devices)
            moved = next((pair for call in calls if (pair := _moved(call)) is not None), None)
        except (LayerZeroError, ValueError) as error:  # no kernel, no device, a runtime that closes
            log.info(_MOVED, op="", kernel="", chosen=str(error).partition("\n")[0])
            return False
        if moved is not None and (self._seen is None or self._seen.holds):
            call, chosen = moved
            current().counters.add("compiled_choices_moved", op=call.op, kernel=call.kernel)
            log.info(_MOVED, op=call.op, kernel=call.kernel, chosen=chosen)
        self._seen = _Seen(runtime.devices, versions, moved is None)
        return moved is None


def _moved(call: _Held) -> tuple[_Held, str] | None:
    """A held call whose kernel would be another one, with that; None where it would be the same."""
    op = ops_table.get(call.op)
    device = current().device(call.request.device)
    if _is_watched(device):
        return call, "every call is watched"
    if call.any_size and not _suits_all_sizes(op, device):
        return call, "a rule asks for the size"
    table = device.table(op)
    table.may_be_captured = True
    if table.fingerprint == call.fingerprint:
        return None
    selection = table.recompute(call.request)
    kernel = torchs_kernel(op, selection)[0]
    return None if kernel is not None and kernel.id == call.kernel else (call, selection.kernel)


def _is_watched(device: ScheduledDevice) -> bool:
    """Whether what is in force needs every call at hand: checks, times, traces, processes of backends."""
    settings = device.settings
    return bool(
        device.compiler.middlewares or settings.check_rate or settings.drift_rate or settings.kernel_times
        or settings.spans or settings.call_spans or settings.timeline or settings.isolate
        or not settings.max_keys
        or settings.inference is not None or settings.determinism == "strict" or settings.graph_strict
    )  # fmt: skip


def _suits_all_sizes(op: Op, device: ScheduledDevice) -> bool:
    """Whether one kernel of torch may serve a graph of every size: no rule of a policy asks for the size."""
    return op.name in _OF_ANY_SIZE and not device.snapshot.policy.conditions(op.name)


class GraphGuard:
    """The guard of one graph, which torch's compiler calls; `mark` names the graph in its operators.

    With `inlines` the graph runs while its function's choices hold, else while they do not.
    """

    def __init__(self, function: FunctionChoices, inlines: bool) -> None:
        self.inlines = inlines
        self.mark = f"{GUARDED}{os.getpid()}:{next(_SERIAL)}"
        self._function = function
        self._compile_id = _compile_id()
        self._choices = CompiledChoices()
        self._holds = False  # whether the graph holds a call

    def __call__(self) -> bool:
        if self.inlines and CHOICE.mark is not None:
            return False
        if self.inlines and not self._holds:
            return True
        # A graph is guarded when it is made, whatever has moved while it was.
        return self._function.holds() is self.inlines or _compile_id() == self._compile_id

    def inline(self, op: Op, full: Args) -> Any:
        """The call in torch's operators, where nothing else watches it, by the kernel that is chosen.

        Sizes that are symbols must not decide: what is chosen for those of now is in the graph for all.
        """
        if op.name not in _TRACEABLE or _drops(op, full):
            return NotImplemented
        device, any_size = context_device(full), _has_symbols(full)
        if _is_watched(device) or (any_size and not _suits_all_sizes(op, device)):
            return NotImplemented
        inlined = self._choices.inline(op, full)
        if inlined.selection is not None:
            self._hold(op, inlined.selection, inlined.kernel, any_size)
        return inlined.result

    def _hold(self, op: Op, selection: Selection, kernel: str, any_size: bool) -> None:
        """Have the guard end with this choice."""
        self._function.hold(op, selection, kernel, any_size)
        if not self._holds:
            self._holds = True
            self._function.graphs += 1
        current().counters.add("compiled_calls_inlined", op=op.name, kernel=kernel)


_FUNCTIONS: WeakValueDictionary[int, FunctionChoices] = WeakValueDictionary()
_OPEN: WeakValueDictionary[str, GraphGuard] = WeakValueDictionary()


def _open_guard() -> str | None:
    """The mark of the graph that torch's compiler traces now; None where its operators choose at run time."""
    try:  # another torch may have what it needs elsewhere
        return _opened()
    except (AttributeError, ImportError, TypeError) as error:
        _say_unguarded(f"{type(error).__name__}: {error}")
        return None


@cache
def _say_unguarded(error: str) -> None:
    """Say once why graphs hold no kernels."""
    log.warning(_UNGUARDED, error=error)


def _opened() -> str | None:
    compile_id = _compile_id()
    if compile_id is None:
        return None
    from torch._dynamo import config, symbolic_convert

    tracer = getattr(symbolic_convert.tls, "current_tx", None)
    if tracer is None:  # behind the trace, where what it recorded is lowered
        return None
    output: Any = tracer.output
    if hasattr(output, "_layerzero_guard"):
        guard = output._layerzero_guard
    else:
        # What is made for other processes chooses there.
        leaves = output.export or config.caching_precompile or _is_ahead_of_time(output)
        frame = None if leaves else compile_id.frame_id
        guard = None if frame is None else _guard_of(frame, compile_id.frame_compile_id == 0)
        output._layerzero_guard = guard
        if guard is not None:
            _install(output, guard)
    return guard.mark if guard is not None and guard.inlines else None


def _is_ahead_of_time(output: Any) -> bool:
    """Whether a graph is captured to be stored: `aot_compile` compiles by a function of torch's own."""
    return getattr(output.compiler_fn, "__name__", "") == "fullgraph_compiler"


def _guard_of(frame: int, is_first: bool) -> GraphGuard | None:
    function = _FUNCTIONS.get(frame)
    if function is None or is_first:  # torch.compiler.reset() gives the numbers again
        function = _FUNCTIONS[frame] = FunctionChoices()
    holds = function.holds()
    if holds and function.graphs >= _MAX_GRAPHS:
        return None
    guard = GraphGuard(function, holds)
    _OPEN[guard.mark] = guard
    return guard


def _install(output: Any, guard: GraphGuard) -> None:
    """Have torch's compiler call the guard before each run of the graph, which keeps it alive."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import CallFunctionNoArgsSource, GlobalSource

    name = output.install_global_by_id("__layerzero_guard", guard)
    install_guard(CallFunctionNoArgsSource(GlobalSource(name)).make_guard(GuardBuilder.CONSTANT_MATCH))


def _inliner_of(mark: str) -> Callable[[Op, Args], Any]:
    """What inlines the calls of a graph; nothing in one that another process has made."""
    guard = _OPEN.get(mark)
    return (lambda op, full: NotImplemented) if guard is None else guard.inline


def _compile_id() -> Any:
    return _compiling.current_compile_id()


def _drops(op: Op, full: Args) -> bool:
    names = list(inspect.signature(op.build).parameters)
    return "dropout_p" in names and full[names.index("dropout_p")] != 0


def _has_symbols(full: Args) -> bool:
    kinds = torch.SymInt, torch.SymFloat, torch.SymBool
    return any(
        isinstance(value, kinds)
        or (isinstance(value, Tensor) and any(isinstance(n, kinds) for n in (*value.shape, *value.stride())))
        for value in full
    )


CHOICE.guards = Guards(_open_guard, _inliner_of)

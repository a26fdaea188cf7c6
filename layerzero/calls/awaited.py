"""The awaitable ops: run at once for a lone caller, through the device's batcher for everybody else."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor

from layerzero._util import foreign, log
from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.await_path import NewCall, awaitable_call
from layerzero.calls.blocking import (
    LAST,
    checked_build,
    context_device,
    context_snapshot,
    traced_route,
    with_signature_of,
)
from layerzero.calls.call_cache import AwaitedCallCache
from layerzero.calls.scope import SCOPE
from layerzero.ops.checks import need_choice
from layerzero.ops.op import Args, Op, Signature
from layerzero.runtime import ACTIVE
from layerzero.scheduler.core.pending_call import PENDING_CALL, PendingCall
from layerzero.scheduler.modes.torch_modes import Modes
from layerzero.scheduler.scheduled_device import ScheduledDevice
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.modes import CAPTURE
from layerzero.selection.plan import BatchFacts, Plan
from layerzero.spec.settings import BATCHING


def awaitable(op: Op) -> Callable[..., Any]:
    """The op as a coroutine function with the signature of `op.build`, plus what concerns its waiting.

    `backend=` as in the blocking op; `priority=` 0 (first) to 2; `timeout=` seconds until it must have
    started, else DeadlineExceededError; `batching=` "off", "rows" or "all" in place of the settings' own.
    """
    target = AwaitedOp(op)
    validate = None if op.validate_values_per_batch else op.validate_values
    call, follow = awaitable_call(target, target.cache, validate)
    target.cache.serve(LAST, follow, validate)
    return with_signature_of(call, op, WAITING_DOC)


WAITING_DOC = """    Waiting: backend is a kernel's id or a backend's name, for this call alone.
        priority is 0 (first), 1 or 2 (last). timeout is the number of seconds within which the call must have
        started, else DeadlineExceededError. batching "off", "rows" or "all" goes before the settings' own.
"""
_FORWARD: Any = torch.autograd.forward_ad


class AwaitedOp:
    """An op on the await path."""

    __slots__ = ("_op", "_route", "cache", "name")

    def __init__(self, op: Op) -> None:
        self._op = op
        self._route = traced_route(op)
        self.name = op.name
        self.cache = AwaitedCallCache(op)

    def describe(
        self, args: Args, kwargs: dict[str, Any], backend: str | None, batching: str | None
    ) -> NewCall:
        """A call with its plan, by its signature alone where only the process's policy governs it."""
        op, built = self._op, None
        if backend is None and batching is None and SCOPE.get() is None and _FORWARD._current_level < 0:
            try:
                signature, full = built = op.build(*args, **kwargs)
                if foreign.may_be_foreign(full[0]) and foreign.has_transformed(full):
                    return _traced(full, backend)
                device = ACTIVE.devices[full[0].device]
                modes = device.capture_modes()
                bits = modes.bits & device.mode_mask if device.capturing is None else device.mode()
                plan = device.snapshot.tables[self.name].by_signature[bits][signature]
            except KeyError:
                pass  # no plan yet; what is built stays, since a seed is drawn in there
            except (AttributeError, TypeError):
                built = None  # a wrong argument: below it is named
            else:
                self.cache.count_known()
                driver = None if bits & CAPTURE else device.loop_drivers.current()
                return NewCall(device, driver, full, plan.expected_us, plan, modes)
        if batching is not None:
            need_choice("batching", batching, BATCHING)
        signature, full = built or checked_build(op, args, kwargs)
        if foreign.has_transformed(full):
            return _traced(full, backend)
        device, snapshot, plan = _plan_in_full(op, signature, full, backend)
        driver = None if "capture" in plan.request.modes else device.loop_drivers.current()
        return NewCall(device, driver, full, plan.expected_us, plan, device.capture_modes(), snapshot)

    def new_call(
        self, call: NewCall, args: Args, kwargs: dict[str, Any], backend: str | None, batching: str | None
    ) -> PendingCall:
        """The pending call; its batch key is None where it must run alone."""
        op, plan, modes, full, snapshot = self._op, call.plan, call.modes, call.args, call.snapshot
        assert plan is not None and modes is not None
        facts = plan.batch_facts
        if facts is None:
            facts = plan.batch_facts = _batch_facts(op, full)
        if op.validate_values is not None and not op.validate_values_per_batch:
            full = op.validate_values(full)
        batch_key = None
        may_batch = plan.can_batch and op.batching is not None and call.device.batches(op, batching)
        if may_batch and _is_plain_strided(full):
            batch_key = _key_of(op, facts, full, modes.without_stream, snapshot)
        pending: PendingCall = PENDING_CALL.cls(
            op, full, batch_key, plan.expected_us, facts.tokens, facts.size_bytes, 1, None, modes, snapshot
        )  # fmt: skip
        pending.plan, pending.device = plan, call.device
        _warn_runs_alone(call.device, pending, plan)
        if (
            self.cache.entries is not None
            and backend is None
            and batching is None
            and not call.device.kernel_calls.traces_each
        ):
            self.cache.remember(args, kwargs, call.args, call.device, plan, pending)
        return pending

    def run_inline(self, call: NewCall | PendingCall) -> Any:
        """Run the call's plan on this thread, the next kernels in its order where it fails."""
        plan = call.plan
        if plan is None:
            assert isinstance(call, NewCall)
            return self._route(call.args, *call.kind)
        LAST.plan = plan
        try:
            return plan.call(*call.args)
        except Exception as error:
            result, LAST.plan = call.device.recover(plan, call.args, error, call.snapshot)
            return result


RUNS_ALONE = "op.runs_alone"
WHY_ALONE = (
    "weights require a gradient, so that no call shares a launch: await it under torch.no_grad(), or freeze "
    "them with requires_grad_(False), or open the runtime with Settings(inference=True)"
)
_WARNED_ALONE: WeakSet[LocalDevice] = WeakSet()  # once each: a server would only be slow


def _warn_runs_alone(device: LocalDevice, pending: PendingCall, plan: Plan) -> None:
    """Log once where a call runs alone for the gradient of its weights, while its rows want none."""
    if pending.batch_key is not None or "grad" not in plan.request.modes or device in _WARNED_ALONE:
        return
    rows = pending.args[0]
    if isinstance(rows, Tensor) and not rows.requires_grad:
        _WARNED_ALONE.add(device)
        log.warning(RUNS_ALONE, op=plan.op.name, why=WHY_ALONE)


def _traced(full: Args, backend: str | None) -> NewCall:
    """A call on transformed or traced tensors: it does not wait, and is the op's operator."""
    nowhere: Any = None
    return NewCall(nowhere, None, full, 0.0, kind=(backend,))


def _plan_in_full(
    op: Op, signature: Signature, full: Args, backend: str | None
) -> tuple[ScheduledDevice, DispatchState | None, Plan]:
    """Device, governing snapshot (None: the current one) and plan of an unusual call."""
    device = context_device(full)
    current = device.snapshot
    snapshot = context_snapshot(device, op.name, backend)
    # Asked before planning: a generation that begins meanwhile does not make this caller's policy its own.
    shared = snapshot is current or snapshot is device.snapshot
    plan = device.plan(op, signature, full, device.mode(), snapshot)
    return device, None if shared else snapshot, plan


def _key_of(
    op: Op, facts: BatchFacts, args: Args, modes: Modes, snapshot: DispatchState | None
) -> Hashable | None:
    """The batch key of a call, remembered by the addresses of the operands that a batch shares."""
    shared = facts.shared_positions
    if shared is None:
        return _batch_key(op, args, modes, snapshot)
    addresses: Hashable
    if len(shared) == 1:
        addresses = (modes, args[shared[0]].data_ptr())
    else:
        addresses = (modes, *[args[position].data_ptr() for position in shared])
    # A plan outlives the snapshots that found it, so it knows nothing of them.
    known = facts.batch_keys if snapshot is None else snapshot.batch_keys.setdefault(facts, {})
    batch_key: Hashable | None = known.get(addresses, _UNKNOWN)
    if batch_key is _UNKNOWN:
        if len(known) >= _MAX_REMEMBERED:
            known.clear()
        batch_key = known[addresses] = _batch_key(op, args, modes, snapshot)
    return batch_key


_PLAIN: Final[frozenset[type]] = frozenset({Tensor, torch.nn.Parameter})


def _is_plain_strided(args: Args) -> bool:
    """Whether address, shape and strides say what each tensor holds, so that rows of others may join it.

    A subclass may hold its values elsewhere, and would make its neighbours' outputs its own kind; a negative
    view shares its memory with what it negates.
    """
    for value in args:
        if isinstance(value, Tensor) and (value.__class__ not in _PLAIN or value.is_neg()):
            return False
    return True


class BatchKey:
    """A compatibility class of calls, one object each, so that batchers compare and hash it as a pointer.

    `family` is that of all calls which differ from these in their weights alone; None where there is none.
    """

    __slots__ = ("family", "key")

    def __init__(self, key: Hashable, family: BatchKey | None = None) -> None:
        self.key = key
        self.family = family

    def __repr__(self) -> str:
        return f"BatchKey({self.key!r})"


_BATCH_KEYS: dict[Hashable, BatchKey] = {}
_MAX_BATCH_KEYS = 65_536
_MAX_REMEMBERED = 1024
_UNKNOWN: Any = object()


def _batch_key(op: Op, args: Args, modes: Modes, snapshot: DispatchState | None) -> Hashable | None:
    assert op.batching is not None
    rule = op.batching.batch_key(args)
    if rule is None:
        return None
    key = (op.name, rule, modes)
    known: dict[Any, Any] = _BATCH_KEYS if snapshot is None else snapshot.batch_keys.setdefault(None, {})
    if len(known) >= _MAX_BATCH_KEYS:
        known.clear()  # calls that wait under the old objects run apart from later ones, nothing worse
    batch_key: BatchKey | None = known.get(key)
    if batch_key is None:
        rule, family = op.batching.family_key(args), None
        if rule is not None:
            any_weights = (op.name, rule, modes, "any weights")
            family = known.setdefault(any_weights, BatchKey(any_weights))
        batch_key = known.setdefault(key, BatchKey(key, family))
    return batch_key


def _batch_facts(op: Op, args: Args) -> BatchFacts:
    batching = op.batching
    if batching is None:
        return BatchFacts(1, 0, None)
    return BatchFacts(*batching.batch_cost(args), batching.shared_operands(args))

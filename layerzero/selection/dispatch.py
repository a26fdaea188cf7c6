"""The hot path. Read this first.

One call: `op.build` makes a signature; the device's `DispatchState` holds one `PlanTable` per op; the table
maps the signature to a plan; the plan is called. A hit is two attribute loads and two dict lookups: no lock,
no clock, no log. Who looks up counts it. Everything below `PlanTable.resolve` is the cold path.

A state is never changed, only inserted into and dropped whole: a policy change, a breaker or a newly
loaded kernel makes the next version, which shares the tables whose verdicts cannot have changed. A miss
publishes into the table it started from, so that a slow computation never reaches a newer version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec
from torch import Tensor

from layerzero._util import foreign, log
from layerzero.ops.op import Args, Op, Signature, with_zero_gradient
from layerzero.selection.context import AgreedState, CostModel, KernelLoadError, SelectionContext
from layerzero.selection.decide import decide, decide_ahead
from layerzero.selection.key import GRID_VERSION, KeyBuilder
from layerzero.selection.modes import AUTOCAST, CAPTURE, DETERMINISTIC, FORWARD, GRAD, MODE_COUNT, REHEARSAL
from layerzero.selection.plan import Plan, reference_plan
from layerzero.selection.policy.policy import Policy
from layerzero.selection.recent import RecentCache
from layerzero.selection.record import Selection, empty_selection
from layerzero.sharing.work import digest_of
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import (
    CudaGraphUnsafeError,
    KernelStillLoadingError,
    NoKernelFoundError,
    SelectionTimeoutError,
)
from layerzero.spec.kernel import Kernel
from layerzero.spec.reasons import Rejected


@dataclass(eq=False, slots=True)
class _PendingSelection:
    """One computation in progress, for those who want its result."""

    done: threading.Event = field(default_factory=threading.Event)
    owner: int = field(default_factory=threading.get_ident)
    plan: Plan | None = None
    error: BaseException | None = None


# The selection of a request, by the digest of all it follows from: another process's, or made by the last.
Chooser = Callable[[str, CallSpec, Callable[[], Selection]], Selection]
# So many plans for captures are kept where no others are.
_CAPTURED = 4096
# Plans for captures by mode and signature, with their kernels: what a new version is handed.
RehearsedPlans = Mapping[tuple[int, Signature], tuple[Plan, Kernel]]
_EMPTY: Mapping[Any, Any] = MappingProxyType({})


class PlanTable:
    """The plans of one op in one version: `by_signature[mode bits]`, and `by_key` for reduced requests.

    At most `max_keys` are remembered by either, those that were used last; with 0 every call is decided anew,
    but for those of a graph capture, which must find what was rehearsed.
    """

    __slots__ = (
        "_chooser", "_compile", "_context", "_context_digest", "_cost", "_key_maker", "_lock", "_max_keys",
        "_pending", "_recent", "_rehearsed_before", "_timeout_s", "by_key", "by_signature", "computed",
        "fingerprint", "may_be_captured", "op", "version",
    )  # fmt: skip

    def __init__(
        self,
        op: Op,
        context: SelectionContext,
        compile_plan: Callable[[Op, Selection], Plan],
        *,
        version: int,
        max_keys: int,
        cost: CostModel,
        timeout_s: float = 60.0,
        rehearsed: RehearsedPlans = _EMPTY,
        chooser: Chooser | None = None,
    ) -> None:
        self.op = op
        self._chooser = chooser
        self._context_digest = ""
        self._rehearsed_before = rehearsed
        self._recent: list[RecentCache[Signature, Plan]] = [
            RecentCache(max_keys or (_CAPTURED if bits & CAPTURE else 0)) for bits in range(2 * MODE_COUNT)
        ]
        self.by_signature = [recent.newer for recent in self._recent]
        self.by_key: RecentCache[Hashable, Plan] = RecentCache(max_keys or _CAPTURED)
        self.version = version
        self.fingerprint = context.fingerprint(op.name)
        self.may_be_captured = bool(rehearsed)  # whether graphs may hold its choices, or wait for one
        self.computed = 0
        self._context = context
        self._compile = compile_plan
        self._cost = cost
        self._key_maker = KeyBuilder(op, context.kernels, context.policy.conditions(op.name))
        self._max_keys = max_keys
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pending: dict[Hashable, _PendingSelection] = {}

    def resolve(self, signature: Signature, args: Args, bits: int) -> Plan:
        """The plan for a call whose signature is new: checked, described, decided once per key, remembered.

        Raises: ValueError, TypeError: an argument is wrong. NoKernelFoundError: no kernel may and can.
        """
        if bits & CAPTURE:
            self.may_be_captured = True
        if foreign.has_transformed(args):
            return reference_plan(self.op, self.describe(args, bits))  # not kept: it is no choice
        if bits & FORWARD:
            if foreign.has_tangents(args):
                return reference_plan(self.op, self.describe(args, bits))
            bits &= ~FORWARD
            return self.by_signature[bits].get(signature) or self.resolve(signature, args, bits)
        if (remembered := self._recent[bits].get(signature)) is not None:
            self.by_signature[bits] = self._recent[bits].newer
            return remembered
        request = self.describe(args, bits)
        empty = self.op.empty
        if empty is not None and empty(args) is not None:
            plan = Plan(
                self.op,
                lambda *full: with_zero_gradient(empty(full), full),
                empty_selection(request),
                request,
            )
        elif (rehearsed := self._rehearsed_plan(request, bits, signature)) is not None:
            return rehearsed  # and not remembered: the next rehearsal chooses among what is there then
        else:
            plan = (self._plan_under_capture(request, bits) or self.plan_for(request)).with_output_check(
                request
            )
        self._recent[bits].put(signature, plan)
        self.by_signature[bits] = self._recent[bits].newer
        return plan

    def _plan_under_capture(self, request: CallSpec, bits: int) -> Plan | None:
        """The plan for a call under graph capture, where nothing may be chosen or loaded; None elsewhere."""
        if not bits & CAPTURE:
            return None
        if not REHEARSAL.on:
            plan = self.by_key.get(self._key_maker.key(request))
            if plan is None:
                raise CudaGraphUnsafeError(
                    f"{self.op.name} under graph capture needs a plan from before it: run the step once "
                    "inside layerzero.rehearse_capture(), got a call that was not rehearsed",
                    request=request,
                )
            return plan
        try:
            return self.plan_for(request)
        except NoKernelFoundError as error:
            raise CudaGraphUnsafeError(
                f"{self.op.name} has no kernel that is safe under graph capture: {error}",
                trace=error.trace,
                request=request,
            ) from error

    def _rehearsed_plan(self, request: CallSpec, bits: int, signature: Signature) -> Plan | None:
        """The plan that an earlier version rehearsed for this very call, where its kernel may still run.

        A kernel that is loaded between rehearsal and capture must not leave the capture without a plan.
        """
        plan, kernel = self._rehearsed_before.get((bits, signature), (None, None))
        if plan is None or REHEARSAL.on or self._key_maker.key(request) in self.by_key:
            return None
        if not any(kernel is present for present in self._context.kernels):
            return None  # removed, or replaced by another of its name
        try:
            trace = self.recompute(request).trace
        except NoKernelFoundError:
            return None
        accepted_now = next((c.accepted for c in trace if c.kernel == plan.kernel and c.eligible), None)
        accepted_before = plan.selection.candidate(plan.kernel).accepted
        is_alike = accepted_now and accepted_before and accepted_now.transforms == accepted_before.transforms
        return plan if is_alike else None

    def rehearsed_plans(self) -> RehearsedPlans:
        """The plans for captures of this version and of those before."""
        limit = self._max_keys or _CAPTURED
        plans = dict(self._rehearsed_before) if len(self._rehearsed_before) < limit else {}
        kernels_by_id = {kernel.id: kernel for kernel in self._context.kernels}
        for bits in range(CAPTURE, MODE_COUNT):
            for signature, plan in self._recent[bits].items():
                if plan.kernel:
                    plans[bits, signature] = plan, kernels_by_id[plan.kernel]
        return plans

    def check_outputs_again(self) -> None:
        """Compare the outputs of every plan's next run with what they have to be."""
        for recent in self._recent:
            for plan in recent.values():
                plan.check_outputs_again()

    def describe(self, args: Args, bits: int) -> CallSpec:
        """The request of a call under the given modes."""
        request = self.op.check(args)
        modes = set(self._context.modes)
        if bits & GRAD and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            self.op.need_gradient(args)
            modes.add("grad")
        if bits & DETERMINISTIC:
            modes.add("deterministic")
        if bits & AUTOCAST:
            modes.add("autocast")
        if bits & CAPTURE:
            modes.add("capture")
        return request.replace(modes=frozenset(modes)) if modes else request

    def plan_for(self, request: CallSpec) -> Plan:
        """The plan for a request; one computation per key, however many threads ask at once."""
        key = self._key_maker.key(request)
        plan = self.by_key.newer.get(key)
        if plan is not None:
            return plan
        with self._lock:
            plan = self.by_key.get(key)
            if plan is not None:
                return plan
            pending = self._pending.get(key)
            is_owner = pending is None
            if pending is None:
                pending = self._pending[key] = _PendingSelection()
        if not is_owner and pending.owner != threading.get_ident():
            return self._wait_for(pending, request)
        return self._compute(key, pending, request)

    def _compute(self, key: Hashable, pending: _PendingSelection, request: CallSpec) -> Plan:
        try:
            plan = self._loaded(request)
        except BaseException as error:
            pending.error = error
            raise
        else:
            pending.plan = plan
            with self._lock:
                if self._max_keys or "capture" in request.modes:
                    self.by_key.put(key, plan)
            return plan
        finally:
            with self._lock:
                self._pending.pop(key, None)
                self.computed += 1
            pending.done.set()

    def _loaded(self, request: CallSpec) -> Plan:
        """The plan of the first kernel that loads; one that does not is out of service in this table."""
        while True:
            try:
                return self._compile(self.op, self._ahead(request) or self._choose(request))
            except KernelLoadError as failed:
                self._context = self._context.without(failed.kernel, failed.why)
                self._context_digest = ""

    def _wait_for(self, pending: _PendingSelection, request: CallSpec) -> Plan:
        if not pending.done.wait(self._timeout_s):
            raise SelectionTimeoutError(
                f"selection for {self.op.name} needs less than {self._timeout_s} s, and has not finished",
                request=request,
            )
        if isinstance(pending.error, KernelStillLoadingError) and REHEARSAL.waits:
            return self.plan_for(request)  # its owner does not wait for a kernel that loads; this thread does
        if pending.plan is None:
            assert pending.error is not None
            raise pending.error
        return pending.plan

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """What may be chosen from."""
        return self._context.kernels

    @property
    def policy(self) -> Policy:
        """The policy that governs its choices."""
        return self._context.policy

    def bucket(self, request: CallSpec) -> CallSpec:
        """The request with its sizes on the grid, as costs are estimated for it."""
        return self._key_maker.bucket(request)

    def _ahead(self, request: CallSpec) -> Selection | None:
        """The decision of the dispatch table in force; None where every kernel has to be judged."""
        context = self._context
        if context.dispatch_table is None:
            return None
        entry = context.dispatch_table.lookup(request, context.policy)
        if entry is None or isinstance(entry, Rejected):
            return None
        bucketed = self._key_maker.bucket(request)
        selection = decide_ahead(self.op, request, context, bucketed=bucketed, entry=entry)
        return None if selection is None else msgspec.structs.replace(selection, version=self.version)

    def _choose(self, request: CallSpec) -> Selection:
        """The decision for a request: made here, or by another process under the same circumstances."""
        if self._chooser is None or "capture" in request.modes:
            return self.recompute(request)
        if not self._context_digest:
            self._context_digest = self._context.digest(self.op.name)
        anywhere = request.replace(device=request.platform)
        key = digest_of(self._context_digest, GRID_VERSION, repr(self._key_maker.key(anywhere)))
        selection = self._chooser(key, request, lambda: self.recompute(request))
        return msgspec.structs.replace(selection, request=request, version=self.version)

    def recompute(
        self, request: CallSpec, *, use_dispatch_table: bool = True, cost: CostModel | None = None
    ) -> Selection:
        """The decision for a request with the verdict on every kernel, whatever the table remembers.

        Without `use_dispatch_table` no decision made ahead counts; `cost` prices kernels instead. Where no
        kernel has what a mode of `droppable_modes` asks for, the choice is made without it, with a warning.
        """
        dropped_modes = request.modes & self._context.droppable_modes
        try:
            return self._decide(request, use_dispatch_table, cost)
        except NoKernelFoundError:
            if not dropped_modes:
                raise
        fewer = request.replace(modes=request.modes - dropped_modes)
        selection = self._decide(fewer, use_dispatch_table, cost)
        log.warning(
            "selection.without_mode", op=self.op.name, modes=sorted(dropped_modes), kernel=selection.kernel
        )
        return selection

    def _decide(self, request: CallSpec, use_dispatch_table: bool, cost: CostModel | None) -> Selection:
        context, bucketed = self._context, self._key_maker.bucket(request)
        dispatch_table = context.dispatch_table if use_dispatch_table else None
        entry = dispatch_table.lookup(request, context.policy) if dispatch_table is not None else None
        prices = cost or self._cost
        selection = decide(self.op, request, context, bucketed=bucketed, cost=prices, table_entry=entry)
        return msgspec.structs.replace(selection, version=self.version)


class DispatchState:
    """One version of a device's tables, filled op by op as they are first used.

    `agreed_terms` are those of a rank group whose state this is; `rehearsed_plans` are for captures of ops
    whose table an earlier version had; `batch_keys` are those of awaited calls under this policy, by owner:
    those of plans end with this state, those without an owner (None) are the next one's too. `captures` is
    the version in which a choice for captures may last have changed.
    """

    __slots__ = ("agreed_terms", "batch_keys", "captures", "policy", "rehearsed_plans", "tables", "version")

    def __init__(
        self,
        version: int,
        policy: Policy,
        tables: dict[str, PlanTable] | None = None,
        *,
        agreed_terms: AgreedState | None = None,
        rehearsed_plans: Mapping[str, RehearsedPlans] = _EMPTY,
        captures: int | None = None,
    ) -> None:
        self.agreed_terms = agreed_terms
        self.batch_keys: dict[Hashable, dict[Hashable, Hashable | None]] = {}
        self.rehearsed_plans = rehearsed_plans
        self.version = version
        self.captures = version if captures is None else captures
        self.policy = policy
        self.tables: dict[str, PlanTable] = tables if tables is not None else {}

    @property
    def may_be_captured(self) -> bool:
        """Whether graphs may hold a choice of it."""
        return any(table.may_be_captured for table in list(self.tables.values()))

    def successor(
        self, version: int, policy: Policy, context: Callable[[str, Policy], SelectionContext] | None
    ) -> DispatchState:
        """The next version: tables whose `context` (of an op under a policy) cannot have changed stay."""
        tables: dict[str, PlanTable] = {}
        rehearsed = dict(self.rehearsed_plans)
        tables_before = list(self.tables.items())  # another thread may ask for an op for the first time
        for name, table in tables_before:
            if context is not None and context(name, policy).fingerprint(name) == table.fingerprint:
                tables[name] = table
            rehearsed[name] = table.rehearsed_plans()
        state = DispatchState(version, policy, tables, rehearsed_plans=rehearsed)
        if all(name in tables or not table.may_be_captured for name, table in tables_before):
            state.captures = self.captures
        if policy is self.policy:
            state.batch_keys[None] = self.batch_keys.setdefault(None, {})
        return state

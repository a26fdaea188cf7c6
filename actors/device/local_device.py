"""LocalDevice: one device of this process, with its kernels, health, plans and snapshot of tables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from layerzero._util.clock import Clock, MonotonicClock, Timer
from layerzero.actors.device.loading import KernelLoader, dispatch_table_for
from layerzero.actors.device.memory import WorkspaceBudget
from layerzero.actors.device.placement import on_owning_device
from layerzero.actors.device.recovery import Recovery, validated_args, with_guard
from layerzero.actors.device.registry import Registry
from layerzero.actors.device.watching import unless_foreign
from layerzero.actors.device.worker import Worker
from layerzero.health import Health, QuarantineStore, Transition
from layerzero.observe.counters import Counters
from layerzero.ops.op import Args, Op, Signature
from layerzero.selection.context import (
    AgreedTerms,
    CostModel,
    KernelStatus,
    SelectionContext,
    SelectionOptions,
)
from layerzero.selection.decide import roofline_cost
from layerzero.selection.dispatch import DispatchState, PlanTable
from layerzero.selection.modes import (
    GRAD,
    capturing_mode_bits,
    capturing_mode_bits_without_grad,
    mode_bits,
    mode_bits_without_grad,
)
from layerzero.selection.plan import Plan, signature_of
from layerzero.selection.policy.policy import EMPTY, Policy
from layerzero.selection.record import Selection
from layerzero.selection.transform import compile_transforms, keep_aligned, with_memory, without_graph
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import KernelExecutionError, NoKernelFoundError, RuntimeClosedError
from layerzero.spec.hardware import Hardware, device_class, initialize_vector_math, probe
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings

if TYPE_CHECKING:  # what only some deployments use is imported where they ask for it
    from layerzero.actors.device.numerics_guard import NumericsGuard
    from layerzero.actors.device.running_kernels import RunningKernelLog
    from layerzero.actors.device.watching import PlanMiddleware
    from layerzero.graphs.proof import Proofs
    from layerzero.measure.drift import DriftWatch
    from layerzero.observe.spans import Spans
    from layerzero.perfdb import Measurement
    from layerzero.selection.dispatch_table import ActiveDispatchTable

_MAX_POLICY_STATES = 64
# Backends whose kernels are torch's operators: those ask a tensor's class themselves.
_DISPATCHED = frozenset({"reference", "torch"})


class LocalDevice:
    """One device: reads of its snapshot need no lock; every change makes the next generation.

    `snapshot` is for the process-wide policy; `view(policy)` gives the snapshot of a context's own policy.
    `fronts` (one batcher for each event loop) and `capture` (torch's modes of a caller) belong to what stands
    above this class; the runtime sets them. `journal`, where there is one, notes each kernel while it runs;
    `noted` is told each request that was decided here.
    """

    def __init__(
        self,
        device: torch.device | str,
        settings: Settings,
        registry: Registry,
        *,
        policy: Policy = EMPTY,
        store: QuarantineStore | None = None,
        counters: Counters | None = None,
        clock: Clock | None = None,
        hardware: Hardware | None = None,
        cost: CostModel = roofline_cost,
    ) -> None:
        self._lock = threading.RLock()
        self.device = torch.device(device)
        self.settings = settings
        self.snapshot = DispatchState(1, policy)
        self.registry = registry
        self.hardware = hardware or probe(self.device)
        if self.device.type == "cpu":
            initialize_vector_math()
        self.clock: Clock = clock or MonotonicClock()
        self._proofs: Proofs | None = None
        self.counters = counters if counters is not None else Counters()
        self.loop_drivers: Any = None
        self.capture_modes: Any = None
        self.running_log: RunningKernelLog | None = None
        self.on_decided: Callable[[CallSpec], object] | None = None
        self._apply_settings()
        self.worker = Worker(f"layerzero-{self.device}")
        self.event_thread = Worker(f"layerzero-reap-{self.device}")
        self._loader = KernelLoader(self)
        self._cost = cost
        self._costs_loading: threading.Event | None = None  # of what is read last
        self._middlewares: tuple[PlanMiddleware, ...] = ()
        self._live_checks: tuple[NumericsGuard | DriftWatch | Spans, ...] = ()
        self.spans: Spans | None = None
        self.dispatch_table = dispatch_table_for(self, settings)  # the dispatch table, where there is one
        self._ops_with_workspace: dict[str, bool] = {}
        self.workspace_budget = WorkspaceBudget(self.device, self.hardware, self.clock.now)
        self._make_live_checks()
        self.measured: tuple[Measurement, ...] = ()  # what was tuned here and no file holds
        self._timer: Timer | None = None
        self._policy_states: dict[str, DispatchState] = {}
        self._recovery = Recovery(self)
        self.closed = False
        self._opened = False
        self.health = Health(
            settings,
            self.clock.now,
            store=store,
            device=str(self.device),
            environment=device_class(self.hardware),
            changed=self._health_changed,
        )
        self._opened = True

    def _health_changed(self, transition: Transition) -> None:
        if self._opened:  # stored quarantines arrive while the board is being made; nothing is planned yet
            self.refresh()

    def _apply_settings(self) -> None:
        """What follows from the settings: how modes are read, what may run on the caller's thread."""
        cuda = self.device.type == "cuda"
        if self.settings.inference:
            self.mode: Callable[[], int] = (
                capturing_mode_bits_without_grad if cuda else mode_bits_without_grad
            )
        else:
            self.mode = capturing_mode_bits if cuda else mode_bits
        # For who holds the captured modes already: their bits that count here, and what else adds one.
        self.mode_mask = ~GRAD if self.settings.inference else -1
        self.capturing: Callable[[], bool] | None = torch.cuda.is_current_stream_capturing if cuda else None
        self.inline_limit_us = float("inf") if cuda else self.settings.inline_limit_us

    def set_settings(self, settings: Settings, dispatch_table: ActiveDispatchTable | None = None) -> None:
        """Put other settings in force, and `solved`, what `dispatch_table_for` made of them."""
        self.settings = settings
        self.health.set_settings(settings)
        self._apply_settings()
        self._make_live_checks()
        self.dispatch_table = dispatch_table
        self._refresh_workspace_budget()
        self.refresh()

    def _refresh_workspace_budget(self) -> None:
        """Choose anew where the room for workspaces has changed."""

        def refresh_budget() -> None:
            if not self.closed and self.workspace_budget.refresh(self.settings):
                self.refresh()

        if self.workspace_budget.reads_quickly:
            refresh_budget()
        else:
            self._loader.submit(refresh_budget)

    def _make_live_checks(self) -> None:
        """Have sampled calls checked or timed, or no longer, as the settings say."""
        before = self._live_checks
        for sampler in before:
            sampler.close()
        self._live_checks = ()
        settings = self.settings
        if settings.check_rate or settings.drift_rate or settings.spans or self.spans is not None:
            from layerzero.actors.device.live_checks import make_live_checks

            self._live_checks = make_live_checks(self)
        self._middlewares = (*(w for w in self._middlewares if w not in before), *self._live_checks)

    # -- generations ------------------------------------------------------------------------------

    @property
    def proofs(self) -> Proofs:
        """What is proved about captures here; without any, every kernel has what it declares."""
        if self._proofs is None:
            from layerzero.graphs.proof import Proofs, ProofStore

            folder = self.settings.state_dir
            self._proofs = Proofs(self.hardware, ProofStore.within(folder))
        return self._proofs

    @property
    def dispatch_version(self) -> int:
        """The number of the current generation."""
        return self.snapshot.version

    def set_policy(self, policy: Policy) -> None:
        """Put another process-wide policy in force; calls that started before finish under the old one."""
        self._advance(policy)

    def refresh(self) -> None:
        """Make the next generation after kernels or their health have changed."""
        self._advance(self.snapshot.policy)

    def _advance(self, policy: Policy) -> None:
        with self._lock:
            before = self.snapshot
            generation = before.version + 1
            self.snapshot = self._successor(before, policy, generation)
            self._policy_states = {
                digest: self._successor(view, view.policy, generation)
                for digest, view in self._policy_states.items()
            }
        self._arm_probe_timer()

    def _successor(self, before: DispatchState, policy: Policy, generation: int) -> DispatchState:
        tables: dict[str, PlanTable] = {}
        rehearsed = dict(before.rehearsed_plans)
        for name, table in list(before.tables.items()):
            if self._rules(name, policy).fingerprint(name) == table.fingerprint:
                tables[name] = table
            rehearsed[name] = table.rehearsed_plans()
        return DispatchState(generation, policy, tables, rehearsed_plans=rehearsed)

    def state_for_policy(self, policy: Policy) -> DispatchState:
        """The snapshot of a context's own policy, kept while its generation lasts."""
        digest = policy.digest
        state = self._policy_states.get(digest)
        if state is not None:
            return state
        with self._lock:
            if len(self._policy_states) >= _MAX_POLICY_STATES:
                self._policy_states = {}
            return self._policy_states.setdefault(digest, DispatchState(self.snapshot.version, policy))

    def reset_after_fork(self) -> None:
        """Start anew in a forked child: fresh locks, no timers or threads, an empty snapshot."""
        self._lock = threading.RLock()
        self._timer = None
        self._loader.reset_after_fork()
        self._costs_loading = None
        self._policy_states = {}
        self.snapshot = DispatchState(self.snapshot.version + 1, self.snapshot.policy)

    # -- finding a plan ---------------------------------------------------------------------------

    def plan(
        self, op: Op, signature: Signature, args: Args, bits: int, snapshot: DispatchState | None = None
    ) -> Plan:
        """The plan for a call, remembered or made now.

        Raises: ValueError, TypeError: an argument is wrong, by name. NoKernelFoundError: nobody may and can.
        """
        if self.closed:
            raise RuntimeClosedError(f"device {self.device} is closed")
        if (
            (snapshot is None or snapshot.agreed_terms is None)
            and self._states_workspace(op.name)
            and self.workspace_budget.refresh_due()
        ):
            current = snapshot is self.snapshot
            self._refresh_workspace_budget()
            snapshot = None if current else snapshot
        table = self.table(op, snapshot)
        try:
            plan = table.by_signature[bits].get(signature)
        except TypeError:  # a trace's sizes have no hash
            plan = None
        plan = plan or table.resolve(signature, args, bits)
        if snapshot is not None and snapshot.agreed_terms is not None:
            snapshot.agreed_terms.record_call(plan.kernel)
        return plan

    def _states_workspace(self, op: str) -> bool:
        """Whether a kernel of the op states a workspace, so that free memory bears on the choice."""
        sized = self._ops_with_workspace.get(op)
        if sized is None:
            workspaces_stated = (kernel.workspace_bytes is not None for kernel in self.registry.for_op(op))
            sized = self._ops_with_workspace[op] = any(workspaces_stated)
        return sized

    def table(self, op: Op, snapshot: DispatchState | None = None) -> PlanTable:
        """The table of an op in a snapshot (the current one by default), made on first use."""
        state = snapshot or self.snapshot
        table = state.tables.get(op.name)
        if table is None:
            new_table = PlanTable(
                op,
                self._rules(op.name, state.policy, state.agreed_terms),
                self._compile
                if state.agreed_terms is None
                else partial(self._compile_agreed, state.agreed_terms),
                version=state.version,
                max_keys=self.settings.max_keys,
                cost=self._cost if state.agreed_terms is None else state.agreed_terms.cost or roofline_cost,
                rehearsed=state.rehearsed_plans.get(op.name, {}),
            )
            table = state.tables.setdefault(op.name, new_table)
        return table

    def agreed_snapshot(self, policy: Policy, terms: AgreedTerms) -> DispatchState:
        """The snapshot of a rank group's plan: it outlives changes of this device and makes no choice."""
        return DispatchState(self.snapshot.version, policy, agreed_terms=terms)

    def _rules(self, op: str, policy: Policy, terms: AgreedTerms | None = None) -> SelectionContext:
        settings = self.settings
        kernels = self.registry.for_op(op)
        if self._proofs is not None or settings.graph_strict or settings.state_dir is not None:
            kernels = self.proofs.apply(kernels, strict=settings.graph_strict)
        if terms is not None:
            return SelectionContext(
                kernels=tuple(kernel for kernel in kernels if kernel.id in terms.kernels),
                hardware=self.hardware,
                policy=policy,
                status=KernelStatus(),
                options=terms.options,
                modes=terms.modes,
                droppable_modes=frozenset() if terms.options.strict else terms.modes,
            )
        blocked = {**self.registry.blocked(), **self.health.blocked_kernels()}
        budget_bytes = None
        if any(kernel.workspace_bytes for kernel in kernels):
            available_bytes = self.workspace_budget.bytes  # None before the first look
            budget_bytes = settings.workspace_limit_bytes if available_bytes is None else available_bytes
        return SelectionContext(
            kernels=kernels,
            hardware=self.hardware,
            policy=policy,
            status=KernelStatus(
                blocked, self.registry.unready(), self.health.probing_kernels(), self._compiled_units()
            ),
            options=self.registry.with_overlay(
                SelectionOptions(settings.strict, settings.tie_band, settings.default_gain, budget_bytes)
            ),
            modes=frozenset({"batch_invariant"}) if settings.determinism == "strict" else frozenset(),
            cost_fingerprint=fingerprint(op)
            if (fingerprint := getattr(self._cost, "fingerprint", None))
            else None,
            # What a table remembers, and what `_compile` makes of a selection, follows from these, too.
            compile_fingerprint=(
                settings.max_keys,
                settings.inference,
                settings.warm,
                *map(id, self._middlewares),
            ),
            dispatch_table=self.dispatch_table,
        )

    def _compiled_units(self) -> frozenset[tuple[str, str]] | None:
        """What is compiled; None where a call is to wait for what it needs rather than take the next best."""
        return None if self.settings.warm == "eager" else self.registry.compiled_units()

    def add_middleware(self, middleware: PlanMiddleware) -> None:
        """Let `watcher` stand around every plan made from now on; what was planned before is planned anew."""
        self._middlewares = (*self._middlewares, middleware)
        self.refresh()

    def remove_middleware(self, middleware: PlanMiddleware) -> None:
        """Plan without `watcher` again."""
        self._middlewares = tuple(w for w in self._middlewares if w is not middleware)
        self.refresh()

    def load_costs(self, build: Callable[[], CostModel], *, at_once: bool) -> None:
        """Price with what `build()` gives, read on the background thread unless `at_once`.

        Calls do not wait for it; who asks for an explanation does (`expected`).
        """
        if at_once:
            self.set_costs(build())
        else:
            self._costs_loading = self._loader.run_later(lambda: self.set_costs(build()))

    def wait_for_costs(self, timeout_s: float = 5.0) -> None:
        """Wait until the measurements on file are read, if they are being read."""
        if self._costs_loading is not None:
            self._costs_loading.wait(timeout_s)

    def set_costs(self, cost: CostModel) -> None:
        """Price with other expectations from now on; tables of ops that they do not touch are kept."""
        self._cost = cost
        self.refresh()

    @property
    def costs(self) -> CostModel:
        """What choices are priced with now."""
        return self._cost

    def _compile_agreed(self, terms: AgreedTerms, op: Op, selection: Selection) -> Plan:
        """The plan of a selection that every rank of a rank group makes: loaded before, watched by nobody."""
        self.counters.add("selections", op=op.name)
        call = with_guard(self.device, op, self.callable_for(op, selection, selection.kernel))
        return Plan(op, call, selection, selection.request)

    def _compile(self, op: Op, selection: Selection) -> Plan:
        """The plan of a selection; loads the kernel if it is not, and starts what is chosen when warm."""
        self.counters.add("selections", op=op.name)
        kernel = self.registry.get(selection.kernel)
        if kernel is None:
            message = f"{selection.kernel} was removed while it was being chosen; call again"
            raise NoKernelFoundError(message, trace=selection.trace, op=op.name, request=selection.request)
        if selection.table_miss is not None:
            self.counters.add("dispatch_table_misses", op=op.name)
        if self.on_decided is not None:
            self.on_decided(selection.request)
        call = self.callable_for(op, selection, kernel.id)
        for watcher in self._middlewares:
            wrapped = watcher.wrap(op, selection, call)
            call = wrapped if watcher is self.spans else unless_foreign(wrapped, call)
        if kernel.id in self.health.probing_kernels():
            call = self._recovery.probe(op, kernel.id, call, selection)
        if selection.when_warm is not None and self.settings.warm != "off":
            self._loader.load_later(selection.when_warm, selection.request)
        return Plan(op, with_guard(self.device, op, call), selection, selection.request)

    # -- running ----------------------------------------------------------------------------------

    def launch(self, op: Op, args: Args, snapshot: DispatchState | None = None) -> Any:
        """Select for exactly these arguments and run; the way a merged batch runs."""
        return self.launch_planned(op, args, snapshot)[0]

    def launch_planned(
        self, op: Op, args: Args, snapshot: DispatchState | None = None, *, guarded: bool = False
    ) -> tuple[Any, Plan]:
        """`launch`, with the plan that ran; `guarded` says that the op's guard has given the arguments."""
        bits = self.mode()
        plan = self.plan(op, signature_of(op, args), args, bits, snapshot)
        call = getattr(plan.call, "behind", plan.call) if guarded else plan.call
        try:
            return call(*args), plan
        except Exception as error:
            return self.recover(plan, args, error, snapshot)

    def recover(
        self, plan: Plan, args: Args, error: Exception, snapshot: DispatchState | None = None
    ) -> tuple[Any, Plan]:
        """The result of the next kernel that can answer, after `plan`'s kernel raised; and the plan of that.

        Raises: ValueError: the data was wrong. KernelExecutionError: nobody could answer.
        """
        args = validated_args(plan.op, args, error)
        if snapshot is not None and snapshot.agreed_terms is not None:
            self.counters.add("failures", kernel=plan.kernel)
            raised = f"{plan.kernel} raised {type(error).__name__}: {error}"
            message = f"{raised}; no rank of a rank group falls back alone"
            raise KernelExecutionError(message, kernel=plan.kernel) from error
        return self._recovery.recover(plan, args, error, snapshot)

    def callable_for(self, op: Op, selection: Selection, kernel_id: str) -> Callable[..., Any]:
        """`kernel_id`'s callable with the transforms that `selection`'s trace gives it."""
        accepted = selection.candidate(kernel_id).accepted
        transforms = accepted.transforms if accepted is not None else ()
        run = self.registry.callable_of(kernel_id)
        if self.running_log is not None:
            run = self.running_log.wrap(kernel_id, run)
        kernel = self.registry.get(kernel_id)
        if kernel is not None:
            run = keep_aligned(op, kernel.capability.alignment, run)
            if self.device.type == "cuda" and kernel.backend not in _DISPATCHED:
                run = with_memory(op, run)
        call = compile_transforms(op, transforms, on_owning_device(self.device, run))
        return without_graph(call) if self.settings.inference else call

    # -- readiness and health ---------------------------------------------------------------------

    def load_later(self, load: Callable[[], object]) -> None:
        """Run `load` on the thread that loads kernels, when the call that asked has had time to end."""
        self._loader.run_later(load)

    def stop_loading(self, timeout_s: float) -> None:
        """Begin no more background loads, and wait for the one that runs."""
        self._loader.close(timeout_s)

    def warm(self, kernel_ids: Sequence[str], request: CallSpec | None = None) -> None:
        """Load kernels now, in this thread, and compile what `request` needs; failures block them."""
        for kernel_id in kernel_ids:
            self._loader.load_now(kernel_id, request)

    def batches(self, op: Op, mode: str | None = None) -> bool:
        """Whether calls of `op` may share launches: as a call wants it, else as the settings say."""
        mode = mode or self.settings.batching
        return mode == "all" or (mode == "rows" and op.rowwise)

    def _arm_probe_timer(self) -> None:
        """One timer for the next breaker that will want a probe."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            due = self.health.next_change()
            if due is not None and not self.closed:
                delay = max(0.0, due - self.clock.now())
                self._timer = self.clock.call_later(delay, self._on_probe_timer)

    def _on_probe_timer(self) -> None:
        self.health.tick()
        self._arm_probe_timer()

    # -- closing ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the threads and timers; every later call raises RuntimeClosedError."""
        self._loader.stop()
        with self._lock:
            self.closed = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self.snapshot = DispatchState(self.snapshot.version + 1, self.snapshot.policy)
        for sampler in self._live_checks:
            sampler.close()
        self.worker.close()
        self.event_thread.close()
        self._loader.close()

    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel registered on this device."""
        return self.registry.all()

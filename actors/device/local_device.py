"""LocalDevice: one device of this process, with its kernels, health, plans and snapshot of tables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from layerzero._util.clock import Clock, MonotonicClock
from layerzero._util.clock_timer import ClockTimer
from layerzero.actors.device.kernel_calls import KernelCalls
from layerzero.actors.device.live_checks import LiveChecks
from layerzero.actors.device.loading import KernelLoader
from layerzero.actors.device.memory import WorkspaceBudget
from layerzero.actors.device.plan_compiler import PlanCompiler
from layerzero.actors.device.recovery import Recovery, validated_args
from layerzero.actors.device.registry import Registry
from layerzero.actors.device.tables.selection_inputs import SelectionInputs
from layerzero.actors.device.tables.updater import TableUpdater
from layerzero.actors.device.worker import Worker
from layerzero.health import Health, QuarantineStore, Transition
from layerzero.observe.counters import Counters
from layerzero.ops.op import Args, Op, Signature
from layerzero.selection.context import AgreedState, CostModel, SelectionContext
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
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import KernelExecutionError, RuntimeClosedError
from layerzero.spec.hardware import Hardware, device_class, initialize_vector_math, probe
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings

if TYPE_CHECKING:  # what only some deployments use is imported where they ask for it
    from layerzero.actors.device.plan_compiler import PlanMiddleware
    from layerzero.graphs.proof import Proofs
    from layerzero.observe.spans import Spans
    from layerzero.perfdb import Measurement
    from layerzero.selection.active_table import ActiveDispatchTable

_MAX_POLICY_STATES = 64


class LocalDevice:
    """One device: reads of its snapshot need no lock; every change makes the next version.

    `snapshot` is for the process-wide policy; `state_for_policy` returns that of a context's own policy.
    `kernel_calls` and `compiler` make plans ready to run, `loader` works in the background, `table_updater`
    has what is decided ahead. A runtime opens it as a `ScheduledDevice`, which adds the batchers.
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
        self.counters = counters if counters is not None else Counters()
        self.measured: tuple[Measurement, ...] = ()  # what was tuned here and no file holds
        self.spans: Spans | None = None
        self.closed = False
        self._policy_states: dict[str, DispatchState] = {}
        self._costs_loading: threading.Event | None = None  # of what is read last
        self._opened = False
        self._apply_settings()
        self.health = Health(
            settings, self.clock.now, store=store, device=str(self.device),
            environment=device_class(self.hardware), changed=self._health_changed,
        )  # fmt: skip
        self.worker = Worker(f"layerzero-{self.device}")
        self.event_thread = Worker(f"layerzero-reap-{self.device}")
        self._wire(cost)
        self.table_updater.open(self.hardware, policy)
        if self.device.type == "cpu":  # a look later, behind the first calls, would drop what they decided
            self.workspace_budget.refresh(settings)
        self.spans = self.kernel_calls.spans = self._live_checks.apply_settings(self)
        self._expiry.arm()
        self._opened = True

    def _wire(self, cost: CostModel) -> None:
        """Make the parts of this device; each gets what it uses, none the device."""
        now, registry, counters = self.clock.now, self.registry, self.counters
        parts = registry, self.health, WorkspaceBudget(self.device, self.hardware, now), cost, counters
        self._inputs = SelectionInputs(self.settings, self.hardware, *parts)
        settings = partial(getattr, self, "settings")
        self.loader = KernelLoader(self.hardware, registry, counters, now, self.refresh, settings)
        self.table_updater = TableUpdater(self._inputs, self.registry, self.loader, self.refresh)
        self.kernel_calls = KernelCalls(self.device, self.registry, self.settings)
        asked = self._refresh_budget_now, self._reconsidered
        self.recovery = Recovery(self.kernel_calls, self.health, counters, self.hardware, *asked)
        self.compiler = PlanCompiler(self.kernel_calls, self.health, self.loader, self.recovery, counters)
        self._live_checks = LiveChecks(self.compiler, self._states, self.clock)
        self._probe_timer = ClockTimer(self.clock, self.health.next_change, self.health.tick)
        self._expiry = ClockTimer(self.clock, self._plans_expire_at, self._drop_plans)

    def _states(self) -> list[DispatchState]:
        return [self.snapshot, *self._policy_states.values()]

    def _reconsidered(self, plan: Plan, snapshot: DispatchState | None) -> Selection:
        return self.table(plan.op, snapshot).recompute(plan.request)

    def _health_changed(self, transition: Transition) -> None:
        if self._opened:  # stored quarantines arrive while the board is being made; nothing is planned yet
            self.refresh()

    def _apply_settings(self) -> None:
        """What follows from the settings: how modes are read."""
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

    def set_settings(self, settings: Settings, dispatch_table: ActiveDispatchTable | None = None) -> None:
        """Put other settings in force, and the dispatch table that `dispatch_table_for` made of them."""
        self.settings = self._inputs.settings = self.kernel_calls.settings = settings
        self.health.set_settings(settings)
        self._apply_settings()
        self.spans = self.kernel_calls.spans = self._live_checks.apply_settings(self)
        self.table_updater.put(dispatch_table, self.snapshot.policy)
        self._refresh_workspace_budget()
        self._expiry.arm()
        self.refresh()

    def _refresh_workspace_budget(self) -> None:
        """Choose anew where the budget for workspaces has changed; elsewhere where looking is slow."""
        if self.workspace_budget.reads_quickly:
            self._refresh_budget_now()
        else:
            self.loader.submit(self._refresh_budget_now)

    def _refresh_budget_now(self) -> None:
        if not self.closed and self.workspace_budget.refresh(self.settings):
            self.refresh()

    # -- versions ---------------------------------------------------------------------------------

    @property
    def proofs(self) -> Proofs:
        """What is proved about captures here; without any, every kernel has what it declares."""
        return self._inputs.proofs

    @property
    def workspace_budget(self) -> WorkspaceBudget:
        """The memory that kernels' workspaces may take here."""
        return self._inputs.budget

    @property
    def dispatch_table(self) -> ActiveDispatchTable | None:
        """The dispatch table in force, where there is one."""
        return self._inputs.dispatch_table

    @property
    def dispatch_version(self) -> int:
        """The number of the current snapshot; every change makes the next one."""
        return self.snapshot.version

    @property
    def captures_version(self) -> int:
        """The number of the last snapshot in which a choice for graph captures may have changed."""
        return max([state.captures for state in self._states()])

    def set_policy(self, policy: Policy) -> None:
        """Put another process-wide policy in force; calls that started before finish under the old one."""
        self.table_updater.follow(policy)
        self._advance(policy)

    def refresh(self) -> None:
        """Make the next snapshot after kernels or their health have changed."""
        self._advance(self.snapshot.policy)

    def _plans_expire_at(self) -> float | None:
        return None if self.settings.plan_ttl_s is None else self.clock.now() + self.settings.plan_ttl_s

    def _drop_plans(self) -> None:
        """Make the next snapshot with nothing remembered but what was rehearsed for captures."""
        self._advance(self.snapshot.policy, keep=False)
        self.snapshot.captures = self.snapshot.version

    def _advance(self, policy: Policy, keep: bool = True) -> None:
        with self._lock:
            version = self.snapshot.version + 1
            context = self._rules if keep else None
            states = self._policy_states.items()  # first: the next snapshot is kept with what is found here
            self._policy_states = {d: s.successor(version, s.policy, context) for d, s in states}
            self.snapshot = self.snapshot.successor(version, policy, context)
        self._probe_timer.arm()

    def state_for_policy(self, policy: Policy) -> DispatchState:
        """The snapshot of a context's own policy, stored until the next change."""
        digest = policy.digest
        if (state := self._policy_states.get(digest)) is not None:
            return state
        with self._lock:
            if len(self._policy_states) >= _MAX_POLICY_STATES:
                states, self._policy_states = self._policy_states.values(), {}
                if any(s.may_be_captured for s in states):  # its changes would not be counted
                    self._drop_plans()
            new_state = DispatchState(self.snapshot.version, policy, captures=0)
            return self._policy_states.setdefault(digest, new_state)

    def reset_after_fork(self) -> None:
        """Start anew in a forked child: fresh locks, timers and threads of its own, an empty snapshot."""
        self._lock = threading.RLock()
        waiting = self._probe_timer, self._expiry, self.loader, self.table_updater, self._live_checks.outputs
        for part in waiting:
            part.reset_after_fork()
        loading, self._costs_loading = self._costs_loading, None
        self._policy_states = {}
        self.snapshot = DispatchState(self.snapshot.version + 1, self.snapshot.policy)
        if loading is not None and not loading.is_set():  # the thread that read them is not there
            self.load_costs(self._read_costs, at_once=False)

    # -- finding a plan ---------------------------------------------------------------------------

    def plan(
        self, op: Op, signature: Signature, args: Args, bits: int, snapshot: DispatchState | None = None
    ) -> Plan:
        """The plan for a call, remembered or made now.

        Raises: ValueError, TypeError: an argument is wrong. NoKernelFoundError: no kernel may and can.
        """
        if self.closed:
            raise RuntimeClosedError(f"device {self.device} is closed")
        if (
            (snapshot is None or snapshot.agreed_terms is None)
            and self._inputs.states_workspace(op.name)
            and self._inputs.budget.refresh_due()
        ):
            current = snapshot is self.snapshot
            self._refresh_workspace_budget()
            snapshot = None if current else snapshot
        table = self.table(op, snapshot)
        try:
            plan = table.by_signature[bits].get(signature)
        except TypeError:  # a trace's sizes have no hash
            plan = None
        if plan is None:
            plan = self.compiler.events.resolve(table, signature, args, bits)
            self.table_updater.note_miss(self, plan, args)
        if snapshot is not None and snapshot.agreed_terms is not None:
            snapshot.agreed_terms.record_call(plan.kernel)
        return plan

    def table(self, op: Op, snapshot: DispatchState | None = None) -> PlanTable:
        """The table of an op in a snapshot (the current one by default), made on first use."""
        state = snapshot or self.snapshot
        if (table := state.tables.get(op.name)) is None:
            new_table = PlanTable(
                op,
                self._rules(op.name, state.policy, state.agreed_terms),
                self.compiler.compile if state.agreed_terms is None else self.compiler.compile_agreed,
                version=state.version,
                max_keys=self.settings.max_keys,
                cost=self.costs if state.agreed_terms is None else state.agreed_terms.cost or roofline_cost,
                rehearsed=state.rehearsed_plans.get(op.name, {}),
                chooser=self._inputs.chooser if state.agreed_terms is None else None,
            )
            table = state.tables.setdefault(op.name, new_table)
        return table

    def agreed_snapshot(self, policy: Policy, terms: AgreedState) -> DispatchState:
        """The snapshot of a rank group's plan: it outlives changes of this device and makes no choice."""
        return DispatchState(self.snapshot.version, policy, agreed_terms=terms)

    def _rules(self, op: str, policy: Policy, terms: AgreedState | None = None) -> SelectionContext:
        return self._inputs.context(op, policy, terms, self.compiler.middlewares)

    def add_middleware(self, middleware: PlanMiddleware) -> None:
        """Let `middleware` wrap every plan from now on; what was planned before is planned anew."""
        self.compiler.middlewares = (*self.compiler.middlewares, middleware)
        self.refresh()

    def remove_middleware(self, middleware: PlanMiddleware) -> None:
        """Plan without `middleware` again."""
        self.compiler.middlewares = tuple(m for m in self.compiler.middlewares if m is not middleware)
        self.refresh()

    def load_costs(self, build: Callable[[], CostModel], *, at_once: bool) -> None:
        """Price with what `build()` gives, read on the background thread unless `at_once`.

        Calls do not wait for it; a caller that wants an explanation does (`wait_for_costs`).
        """
        if at_once:
            self.set_costs(build())
        else:
            self._read_costs = build
            self._costs_loading = self.loader.run_later(lambda: self.set_costs(build()))

    def wait_for_costs(self, timeout_s: float = 5.0) -> None:
        """Wait until the measurements on file are read, if they are being read."""
        if self._costs_loading is not None:
            self._costs_loading.wait(timeout_s)

    def set_costs(self, cost: CostModel) -> None:
        """Price with other expectations from now on; tables of ops that they do not touch are kept."""
        self._inputs.cost = cost
        self.refresh()

    @property
    def costs(self) -> CostModel:
        """What choices are priced with now."""
        return self._inputs.cost

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

        Raises: ValueError: the data was wrong. KernelExecutionError: no kernel could answer.
        """
        args = validated_args(plan.op, args, error)
        if snapshot is not None and snapshot.agreed_terms is not None:
            self.counters.add("failures", kernel=plan.kernel)
            why = f"raised {type(error).__name__}: {error}; no rank of a rank group falls back alone"
            raise KernelExecutionError(f"{plan.kernel} {why}", kernel=plan.kernel) from error
        return self.recovery.recover(plan, args, error, snapshot)

    def callable_for(self, op: Op, selection: Selection, kernel_id: str) -> Callable[..., Any]:
        """`kernel_id`'s callable with the transforms that `selection`'s trace gives it."""
        return self.kernel_calls.callable_for(op, selection, kernel_id)

    # -- readiness and health ---------------------------------------------------------------------

    def warm(self, kernel_ids: Sequence[str], request: CallSpec | None = None) -> None:
        """Load kernels in this thread, and compile what `request` needs; failures block them."""
        for kernel_id in kernel_ids:
            self.loader.load_now(kernel_id, request)

    def batches(self, op: Op, mode: str | None = None) -> bool:
        """Whether calls of `op` may share launches: as a call wants it, else as the settings say."""
        mode = mode or self.settings.batching
        return mode == "all" or (mode == "rows" and op.rowwise)

    # -- closing ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the threads and timers; every later call raises RuntimeClosedError."""
        for waiting in (self.loader, self._probe_timer, self._expiry, self.table_updater):
            waiting.stop()
        with self._lock:
            self.closed = True
            self.snapshot = DispatchState(self.snapshot.version + 1, self.snapshot.policy)
        for part in (self._live_checks, self.worker, self.event_thread, self.loader):
            part.close()

    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel registered on this device."""
        return self.registry.all()

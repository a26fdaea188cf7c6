"""LocalDevice: one device of this process, with its kernels, health, plans and snapshot of tables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from layerzero._util.clock import Clock, MonotonicClock, Timer
from layerzero.actors.device.loading import Loading, solved_under
from layerzero.actors.device.memory import Room
from layerzero.actors.device.placement import placed
from layerzero.actors.device.recovery import Recovery, blamed, guarded_on
from layerzero.actors.device.registry import Registry
from layerzero.actors.device.watching import unless_foreign
from layerzero.actors.device.worker import Worker
from layerzero.health import Health, Store, Transition
from layerzero.observe.counters import Counters
from layerzero.ops.op import Args, Op, Signature
from layerzero.selection.agreed_terms import Terms
from layerzero.selection.decide import CostModel, Knobs, Standing, roofline
from layerzero.selection.dispatch import (
    GRAD,
    Plan,
    Rules,
    Snapshot,
    Table,
    capturing_mode,
    capturing_mode_without_grad,
    mode,
    mode_without_grad,
    positional,
)
from layerzero.selection.policy.policy import EMPTY, Policy
from layerzero.selection.record import Selection
from layerzero.selection.transform import compile_transforms, keep_aligned, with_memory, without_graph
from layerzero.spec.call_spec import Request
from layerzero.spec.errors import KernelExecutionError, NoKernelFoundError, RuntimeClosedError
from layerzero.spec.hardware import Hardware, kind_of, probe, settle_vector_math
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings

if TYPE_CHECKING:  # what only some deployments use is imported where they ask for it
    from layerzero.actors.device.numerics_guard import NumericsGuard
    from layerzero.actors.device.running_kernels import Journal
    from layerzero.actors.device.watching import Watcher
    from layerzero.graphs.proof import Proofs
    from layerzero.measure.drift import DriftWatch
    from layerzero.observe.spans import Spans
    from layerzero.perfdb import Measurement
    from layerzero.selection.dispatch_table import Solved

_MAX_VIEWS = 64
# Backends whose kernels are torch's operators: those ask a tensor's class themselves.
_DISPATCHED = frozenset({"reference", "torch"})


class LocalDevice:
    """One device: reads of its snapshot need no lock; every change makes the next generation.

    `snapshot` is for the process-wide policy; `view(policy)` gives the snapshot of a context's own policy.
    `fronts` (one lane for each event loop) and `capture` (torch's modes of a caller) belong to what stands
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
        store: Store | None = None,
        counters: Counters | None = None,
        clock: Clock | None = None,
        hardware: Hardware | None = None,
        cost: CostModel = roofline,
    ) -> None:
        self._lock = threading.RLock()
        self.device = torch.device(device)
        self.settings = settings
        self.snapshot = Snapshot(1, policy)
        self.registry = registry
        self.hardware = hardware or probe(self.device)
        if self.device.type == "cpu":
            settle_vector_math()
        self.clock: Clock = clock or MonotonicClock()
        self._proofs: Proofs | None = None
        self.counters = counters if counters is not None else Counters()
        self.fronts: Any = None
        self.capture: Any = None
        self.journal: Journal | None = None
        self.noted: Callable[[Request], object] | None = None
        self._settle()
        self.worker = Worker(f"layerzero-{self.device}")
        self.reaper = Worker(f"layerzero-reap-{self.device}")
        self._loading = Loading(self)
        self._cost = cost
        self._expected: threading.Event | None = None  # of what is read last
        self._watchers: tuple[Watcher, ...] = ()
        self._samplers: tuple[NumericsGuard | DriftWatch | Spans, ...] = ()
        self.spans: Spans | None = None
        self.solved = solved_under(self, settings)  # the dispatch table, where there is one
        self._sized: dict[str, bool] = {}
        self.room = Room(self.device, self.hardware, self.clock.now)
        self._sample()
        self.measured: tuple[Measurement, ...] = ()  # what was tuned here and no file holds
        self._timer: Timer | None = None
        self._views: dict[str, Snapshot] = {}
        self._recovery = Recovery(self)
        self.closed = False
        self._opened = False
        self.health = Health(
            settings,
            self.clock.now,
            store=store,
            device=str(self.device),
            environment=kind_of(self.hardware),
            changed=self._health_changed,
        )
        self._opened = True

    def _health_changed(self, transition: Transition) -> None:
        if self._opened:  # stored quarantines arrive while the board is being made; nothing is planned yet
            self.refresh()

    def _settle(self) -> None:
        """What follows from the settings: how modes are read, what may run on the caller's thread."""
        cuda = self.device.type == "cuda"
        if self.settings.inference:
            self.mode: Callable[[], int] = capturing_mode_without_grad if cuda else mode_without_grad
        else:
            self.mode = capturing_mode if cuda else mode
        # For who holds the captured modes already: their bits that count here, and what else adds one.
        self.counted = ~GRAD if self.settings.inference else -1
        self.capturing: Callable[[], bool] | None = torch.cuda.is_current_stream_capturing if cuda else None
        self.inline_limit_us = float("inf") if cuda else self.settings.inline_limit_us

    def set_settings(self, settings: Settings, solved: Solved | None = None) -> None:
        """Put other settings in force, and `solved`, what `solved_under` made of them."""
        self.settings = settings
        self.health.set_settings(settings)
        self._settle()
        self._sample()
        self.solved = solved
        self._look_at_memory()
        self.refresh()

    def _look_at_memory(self) -> None:
        """Choose anew where the room for workspaces has changed."""

        def look() -> None:
            if not self.closed and self.room.moved(self.settings):
                self.refresh()

        if self.room.quick:
            look()
        else:
            self._loading.submit(look)

    def _sample(self) -> None:
        """Have sampled calls checked or timed, or no longer, as the settings say."""
        before = self._samplers
        for sampler in before:
            sampler.close()
        self._samplers = ()
        settings = self.settings
        if settings.check_rate or settings.drift_rate or settings.spans or self.spans is not None:
            from layerzero.actors.device.live_checks import sampling

            self._samplers = sampling(self)
        self._watchers = (*(w for w in self._watchers if w not in before), *self._samplers)

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
    def generation(self) -> int:
        """The number of the current generation."""
        return self.snapshot.generation

    def set_policy(self, policy: Policy) -> None:
        """Put another process-wide policy in force; calls that started before finish under the old one."""
        self._advance(policy)

    def refresh(self) -> None:
        """Make the next generation after kernels or their health have changed."""
        self._advance(self.snapshot.policy)

    def _advance(self, policy: Policy) -> None:
        with self._lock:
            before = self.snapshot
            generation = before.generation + 1
            self.snapshot = self._successor(before, policy, generation)
            self._views = {
                digest: self._successor(view, view.policy, generation) for digest, view in self._views.items()
            }
        self._arm()

    def _successor(self, before: Snapshot, policy: Policy, generation: int) -> Snapshot:
        kept: dict[str, Table] = {}
        rehearsed = dict(before.rehearsed)
        for name, table in list(before.tables.items()):
            if self._rules(name, policy).fingerprint(name) == table.fingerprint:
                kept[name] = table
            rehearsed[name] = table.rehearsed()
        return Snapshot(generation, policy, kept, rehearsed=rehearsed)

    def view(self, policy: Policy) -> Snapshot:
        """The snapshot of a context's own policy, kept while its generation lasts."""
        digest = policy.digest
        found = self._views.get(digest)
        if found is not None:
            return found
        with self._lock:
            if len(self._views) >= _MAX_VIEWS:
                self._views = {}
            return self._views.setdefault(digest, Snapshot(self.snapshot.generation, policy))

    def reset_after_fork(self) -> None:
        """Start anew in a forked child: fresh locks, no timers or threads, an empty snapshot."""
        self._lock = threading.RLock()
        self._timer = None
        self._loading.reset_after_fork()
        self._expected = None
        self._views = {}
        self.snapshot = Snapshot(self.snapshot.generation + 1, self.snapshot.policy)

    # -- finding a plan ---------------------------------------------------------------------------

    def plan(
        self, op: Op, signature: Signature, args: Args, bits: int, snapshot: Snapshot | None = None
    ) -> Plan:
        """The plan for a call, remembered or made now.

        Raises: ValueError, TypeError: an argument is wrong, by name. NoKernelFoundError: nobody may and can.
        """
        if self.closed:
            raise RuntimeClosedError(f"device {self.device} is closed")
        if (snapshot is None or snapshot.terms is None) and self._sized_here(op.name) and self.room.due():
            current = snapshot is self.snapshot
            self._look_at_memory()
            snapshot = None if current else snapshot
        table = self.table(op, snapshot)
        try:
            plan = table.hot[bits].get(signature)
        except TypeError:  # a trace's sizes have no hash
            plan = None
        plan = plan or table.miss(signature, args, bits)
        if snapshot is not None and snapshot.terms is not None:
            snapshot.terms.note(plan.kernel)
        return plan

    def _sized_here(self, op: str) -> bool:
        """Whether a kernel of the op states a workspace, so that free memory bears on the choice."""
        known = self._sized.get(op)
        if known is None:
            stated = (kernel.workspace_bytes is not None for kernel in self.registry.for_op(op))
            known = self._sized[op] = any(stated)
        return known

    def table(self, op: Op, snapshot: Snapshot | None = None) -> Table:
        """The table of an op in a snapshot (the current one by default), made on first use."""
        now = snapshot or self.snapshot
        table = now.tables.get(op.name)
        if table is None:
            made = Table(
                op,
                self._rules(op.name, now.policy, now.terms),
                self._compile if now.terms is None else partial(self._compile_agreed, now.terms),
                generation=now.generation,
                max_keys=self.settings.max_keys,
                cost=self._cost if now.terms is None else now.terms.cost or roofline,
                rehearsed=now.rehearsed.get(op.name, {}),
            )
            table = now.tables.setdefault(op.name, made)
        return table

    def agreed_snapshot(self, policy: Policy, terms: Terms) -> Snapshot:
        """The snapshot of a gang's plan: it outlives changes of this device and makes no choice."""
        return Snapshot(self.snapshot.generation, policy, terms=terms)

    def _rules(self, op: str, policy: Policy, terms: Terms | None = None) -> Rules:
        settings = self.settings
        kernels = self.registry.for_op(op)
        if self._proofs is not None or settings.graph_strict or settings.state_dir is not None:
            kernels = self.proofs.applied(kernels, strict=settings.graph_strict)
        if terms is not None:
            return Rules(
                kernels=tuple(kernel for kernel in kernels if kernel.id in terms.kernels),
                hardware=self.hardware,
                policy=policy,
                standing=Standing(),
                knobs=terms.knobs,
                modes=terms.modes,
                yields=frozenset() if terms.knobs.strict else terms.modes,
            )
        blocked = {**self.registry.blocked(), **self.health.blocked()}
        room = None
        if any(kernel.workspace_bytes for kernel in kernels):
            known = self.room.bytes  # None before the first look
            room = settings.workspace_limit_bytes if known is None else known
        return Rules(
            kernels=kernels,
            hardware=self.hardware,
            policy=policy,
            standing=Standing(blocked, self.registry.unready(), self.health.probing(), self._built()),
            knobs=self.registry.under(Knobs(settings.strict, settings.tie_band, settings.default_gain, room)),
            modes=frozenset({"batch_invariant"}) if settings.determinism == "strict" else frozenset(),
            costs=fingerprint(op) if (fingerprint := getattr(self._cost, "fingerprint", None)) else None,
            # What a table remembers, and what `_compile` makes of a selection, follows from these, too.
            watched=(settings.max_keys, settings.inference, settings.warm, *map(id, self._watchers)),
            solved=self.solved,
        )

    def _built(self) -> frozenset[tuple[str, str]] | None:
        """What is compiled; None where a call is to wait for what it needs rather than take the next best."""
        return None if self.settings.warm == "eager" else self.registry.built()

    def watch(self, watcher: Watcher) -> None:
        """Let `watcher` stand around every plan made from now on; what was planned before is planned anew."""
        self._watchers = (*self._watchers, watcher)
        self.refresh()

    def unwatch(self, watcher: Watcher) -> None:
        """Plan without `watcher` again."""
        self._watchers = tuple(w for w in self._watchers if w is not watcher)
        self.refresh()

    def expect(self, build: Callable[[], CostModel], *, at_once: bool) -> None:
        """Price with what `build()` gives, read on the background thread unless `at_once`.

        Calls do not wait for it; who asks for an explanation does (`expected`).
        """
        if at_once:
            self.set_costs(build())
        else:
            self._expected = self._loading.behind(lambda: self.set_costs(build()))

    def expected(self, timeout_s: float = 5.0) -> None:
        """Wait until the measurements on file are read, if they are being read."""
        if self._expected is not None:
            self._expected.wait(timeout_s)

    def set_costs(self, cost: CostModel) -> None:
        """Price with other expectations from now on; tables of ops that they do not touch are kept."""
        self._cost = cost
        self.refresh()

    @property
    def costs(self) -> CostModel:
        """What choices are priced with now."""
        return self._cost

    def _compile_agreed(self, terms: Terms, op: Op, selection: Selection) -> Plan:
        """The plan of a selection that every rank of a gang makes: loaded before, watched by nobody."""
        self.counters.add("selections", op=op.name)
        call = guarded_on(self.device, op, self.callable_for(op, selection, selection.kernel))
        return Plan(op, call, selection, selection.request)

    def _compile(self, op: Op, selection: Selection) -> Plan:
        """The plan of a selection; loads the kernel if it is not, and starts what is chosen when warm."""
        self.counters.add("selections", op=op.name)
        kernel = self.registry.get(selection.kernel)
        if kernel is None:
            message = f"{selection.kernel} was removed while it was being chosen; call again"
            raise NoKernelFoundError(message, trace=selection.trace, op=op.name, request=selection.request)
        if selection.plan_miss is not None:
            self.counters.add("plan_bucket_misses", op=op.name)
        if self.noted is not None:
            self.noted(selection.request)
        call = self.callable_for(op, selection, kernel.id)
        for watcher in self._watchers:
            watched = watcher.around(op, selection, call)
            call = watched if watcher is self.spans else unless_foreign(watched, call)
        if kernel.id in self.health.probing():
            call = self._recovery.probe(op, kernel.id, call, selection)
        if selection.when_warm is not None and self.settings.warm != "off":
            self._loading.soon(selection.when_warm, selection.request)
        return Plan(op, guarded_on(self.device, op, call), selection, selection.request)

    # -- running ----------------------------------------------------------------------------------

    def launch(self, op: Op, args: Args, snapshot: Snapshot | None = None) -> Any:
        """Select for exactly these arguments and run; the way a merged batch runs."""
        return self.launch_planned(op, args, snapshot)[0]

    def launch_planned(
        self, op: Op, args: Args, snapshot: Snapshot | None = None, *, guarded: bool = False
    ) -> tuple[Any, Plan]:
        """`launch`, with the plan that ran; `guarded` says that the op's guard has given the arguments."""
        bits = self.mode()
        plan = self.plan(op, positional(op, args), args, bits, snapshot)
        call = getattr(plan.call, "behind", plan.call) if guarded else plan.call
        try:
            return call(*args), plan
        except Exception as error:
            return self.recover(plan, args, error, snapshot)

    def recover(
        self, plan: Plan, args: Args, error: Exception, snapshot: Snapshot | None = None
    ) -> tuple[Any, Plan]:
        """The result of the next kernel that can answer, after `plan`'s kernel raised; and the plan of that.

        Raises: ValueError: the data was wrong. KernelExecutionError: nobody could answer.
        """
        args = blamed(plan.op, args, error)
        if snapshot is not None and snapshot.terms is not None:
            self.counters.add("failures", kernel=plan.kernel)
            message = (
                f"{plan.kernel} raised {type(error).__name__}: {error}; no rank of a gang falls back alone"
            )
            raise KernelExecutionError(message, kernel=plan.kernel) from error
        return self._recovery.recover(plan, args, error, snapshot)

    def callable_for(self, op: Op, selection: Selection, kernel_id: str) -> Callable[..., Any]:
        """`kernel_id`'s callable with the transforms that `selection`'s trace gives it."""
        accepted = selection.candidate(kernel_id).accepted
        transforms = accepted.transforms if accepted is not None else ()
        run = self.registry.callable_of(kernel_id)
        if self.journal is not None:
            run = self.journal.watched(kernel_id, run)
        kernel = self.registry.get(kernel_id)
        if kernel is not None:
            run = keep_aligned(op, kernel.capability.alignment, run)
            if self.device.type == "cuda" and kernel.backend not in _DISPATCHED:
                run = with_memory(op, run)
        call = compile_transforms(op, transforms, placed(self.device, run))
        return without_graph(call) if self.settings.inference else call

    # -- readiness and health ---------------------------------------------------------------------

    def load_behind(self, load: Callable[[], object]) -> None:
        """Run `load` on the thread that loads kernels, when the call that asked has had time to end."""
        self._loading.behind(load)

    def stop_loading(self, timeout_s: float) -> None:
        """Begin no more background loads, and wait for the one that runs."""
        self._loading.close(timeout_s)

    def warm(self, kernel_ids: Sequence[str], request: Request | None = None) -> None:
        """Load kernels now, in this thread, and compile what `request` needs; failures block them."""
        for kernel_id in kernel_ids:
            self._loading.now(kernel_id, request)

    def batches(self, op: Op, wanted: str | None = None) -> bool:
        """Whether calls of `op` may share launches: as a call wants it, else as the settings say."""
        wanted = wanted or self.settings.batching
        return wanted == "all" or (wanted == "rows" and op.rowwise)

    def _arm(self) -> None:
        """One timer for the next breaker that will want a probe."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            due = self.health.next_change()
            if due is not None and not self.closed:
                delay = max(0.0, due - self.clock.now())
                self._timer = self.clock.call_later(delay, self._tick)

    def _tick(self) -> None:
        self.health.tick()
        self._arm()

    # -- closing ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the threads and timers; every later call raises RuntimeClosedError."""
        self._loading.stop()
        with self._lock:
            self.closed = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self.snapshot = Snapshot(self.snapshot.generation + 1, self.snapshot.policy)
        for sampler in self._samplers:
            sampler.close()
        self.worker.close()
        self.reaper.close()
        self._loading.close()

    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel registered on this device."""
        return self.registry.all()

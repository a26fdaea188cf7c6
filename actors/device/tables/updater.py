"""TableUpdater: the dispatch table of one device under the policy of now, solved again where needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerzero.actors.device.loading import KernelLoader, dispatch_table_for
from layerzero.actors.device.registry import Registry
from layerzero.actors.device.tables.selection_inputs import SelectionInputs
from layerzero.ops.op import Args
from layerzero.selection.context import SelectionOptions
from layerzero.selection.policy.policy import Policy
from layerzero.spec.hardware import Hardware

if TYPE_CHECKING:
    from layerzero.actors.device.local_device import LocalDevice
    from layerzero.actors.device.tables.misses import TableMisses
    from layerzero.selection.active_table import ActiveDispatchTable
    from layerzero.selection.plan import Plan


@dataclass(eq=False)
class TableUpdater:
    """Keeps `inputs.dispatch_table`: the file's own where it holds, else what is solved again of it.

    `changed()` is called from the background thread when a table solved again came in force.
    """

    _inputs: SelectionInputs
    _registry: Registry
    _loader: KernelLoader
    _changed: Callable[[], object]

    def __post_init__(self) -> None:
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Nothing is being solved in a forked child."""
        self._lock = threading.Lock()
        self._policy: Policy | None = None
        self._solving: threading.Event | None = None
        self._misses: TableMisses | None = None

    def open(self, hardware: Hardware, policy: Policy) -> None:
        """Put the table of the settings in force, refused where it does not hold for the device.

        Raises: ConfigurationError: it does not, and the settings are strict.
        """
        self.put(dispatch_table_for(self._inputs.settings, self._registry, hardware), policy)

    def put(self, table: ActiveDispatchTable | None, policy: Policy) -> None:
        """Put another table in force."""
        with self._lock:
            self._inputs.dispatch_table = table
        self.follow(policy)

    def follow(self, policy: Policy) -> None:
        """Have the table hold under a process's policy: at once where it does, else soon."""
        with self._lock:
            self._policy = policy  # what is being solved for another one comes too late
            table = self._inputs.dispatch_table
            if table is None or table.refusal or table.is_solved_under(policy):
                return
            if table.original.is_solved_under(policy):
                self._inputs.dispatch_table = table.original
                return
        self._solving = self._loader.run_later(lambda: self._solve_again(policy))

    def wait(self, timeout_s: float = 5.0) -> None:
        """Wait for the table that is being solved again, if one is."""
        if self._solving is not None:
            self._solving.wait(timeout_s)

    def _solve_again(self, policy: Policy) -> None:
        """Decide the ranges of the table under `policy`; nothing where another one came meanwhile."""
        before = self._inputs.dispatch_table
        if before is None or before.refusal or policy is not self._policy or before.is_solved_under(policy):
            return
        settings = self._inputs.settings
        options = SelectionOptions(settings.strict, settings.tie_band, settings.default_gain)
        kernels = {kernel.id: kernel for kernel in self._registry.all()}
        after = before.under(policy, kernels, options)
        self.replace(before, after, policy)

    def replace(
        self, before: ActiveDispatchTable, after: ActiveDispatchTable, policy: Policy | None = None
    ) -> bool:
        """Put `after` in the place of `before`; False where another table, or `policy`, came meanwhile."""
        with self._lock:
            if self._inputs.dispatch_table is not before or policy not in (None, self._policy):
                return False
            self._inputs.dispatch_table = after
        self._changed()
        return True

    def note_miss(self, device: LocalDevice, plan: Plan, args: Args) -> None:
        """Keep a call that the table missed, where such are measured and folded in."""
        if plan.selection.table_miss is None or self._inputs.settings.next_dispatch_table is None:
            return
        from layerzero.actors.device.tables.misses import TableMisses  # few deployments measure

        with self._lock:
            if self._misses is None:
                self._misses = TableMisses(device)
        self._misses.note(plan, args)

    def stop(self) -> None:
        """Measure nothing more."""
        if self._misses is not None:
            self._misses.stop()

"""What a decision tells an operator: a histogram of how long it took, and a debug event of what it was.

Only calls that are not remembered come here, so a remembered call pays nothing. Events are sampled by rate:
at most `MAX_PER_S` in a second, the others are counted.
"""

from __future__ import annotations

from time import monotonic, perf_counter_ns
from typing import Any, Final, Protocol

from layerzero._util import log
from layerzero.observe.counters import Counters
from layerzero.selection.plan import Plan

SELECTION_SECONDS: Final = "selection_seconds"
SELECTION_MADE: Final = "selection.made"
MAX_PER_S: Final = 50


class PlanResolver(Protocol):
    """A table that finds or makes the plan of a call."""

    def resolve(self, signature: Any, args: Any, bits: int) -> Plan: ...


class SelectionEvents:
    """Observes decisions of one device."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._second = 0
        self._told = 0

    def resolve(self, table: PlanResolver, signature: Any, args: Any, bits: int) -> Plan:
        """The table's plan, with the decision observed.

        Raises: what the table raises; that is observed as well.
        """
        begin_ns = perf_counter_ns()
        plan: Plan | None = None
        try:
            plan = table.resolve(signature, args, bits)
            return plan
        finally:
            took_s = (perf_counter_ns() - begin_ns) * 1e-9
            op = getattr(getattr(table, "op", None), "name", "")
            self._counters.histograms.series(SELECTION_SECONDS, op=op).observe(took_s)
            if plan is not None and self._may_tell():
                self._tell(plan, took_s)

    def _may_tell(self) -> bool:
        second = int(monotonic())
        if second != self._second:
            self._second, self._told = second, 0
        self._told += 1
        if self._told <= MAX_PER_S:
            return True
        self._counters.add("selection_events_dropped")
        return False

    def _tell(self, plan: Plan, took_s: float) -> None:
        """The record in short: kernel, why, costs, transforms, refusals by code, policy, where from."""
        selection = plan.selection
        accepted = next((c.accepted for c in selection.trace if c.kernel == selection.kernel), None)
        refusals = {c.kernel: [r.reason.value for r in c.rejected] for c in selection.trace if c.rejected}
        log.debug(
            SELECTION_MADE,
            op=selection.op,
            kernel=selection.kernel,
            why=selection.why,
            expected_us=round(selection.expected_us, 3),
            transform_us=round(accepted.transform_us, 3) if accepted is not None else 0.0,
            transforms=[str(each) for each in selection.transforms],
            priced_by=accepted.source if accepted is not None else "",
            refused=refusals,
            policy=selection.policy[:12],
            table_miss=selection.table_miss.reason.value if selection.table_miss is not None else "",
            took_us=round(took_s * 1e6, 1),
        )

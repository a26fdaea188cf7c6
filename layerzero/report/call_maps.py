"""Heat maps: measured calls by kernel, who would be taken on each, and every kernel's verdict on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from layerzero.actors.device.local_device import LocalDevice
from layerzero.backends import load_builtin
from layerzero.ops import table as ops_table
from layerzero.perfdb.record import BenchmarkCase, Environment, Launch, Measurement, implausible_reason
from layerzero.perfdb.shipped import ShippedTable, condense, fitting_tables, read_table
from layerzero.perfdb.store import read_rows
from layerzero.report.document import CallMap, MeasuredCall, StoredVerdict, StringTable, TimedKernel
from layerzero.selection.context import CostModel, SelectionContext
from layerzero.selection.cost.cost_model import TABLES, perfdb_path
from layerzero.selection.cost.measured import MeasuredCosts, SourcedMeasurement, request_of
from layerzero.selection.cost.roofline import SHIPPED
from layerzero.selection.decide import decide
from layerzero.selection.key import KeyBuilder
from layerzero.selection.policy.policy import Policy
from layerzero.selection.record import Candidate, Selection, fold_other_platforms
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import NoKernelFoundError, UnknownOpError
from layerzero.spec.hardware import Hardware, hypothetical_gpu, probe
from layerzero.spec.kernel import Kernel

OWN = "this machine's measurements"
NOBODY = "no kernel takes the call"
_Key = tuple[BenchmarkCase, Launch]


class MachineSelector:
    """Decides measured calls as one machine would."""

    def __init__(self, device: LocalDevice) -> None:
        self._device = device
        self.hardware = device.hardware

    def choose(self, request: CallSpec) -> Selection:
        """The device's own decision, with its health, policy and measurements.

        Raises: NoKernelFoundError: no kernel takes the call.
        """
        return self._device.table(ops_table.get(request.op)).recompute(request)


class FreshSelector(MachineSelector):
    """Decides as a machine with every library installed would, by what calls are said to cost there."""

    def __init__(self, hardware: Hardware, costs: CostModel, policy: Policy) -> None:
        self.hardware = hardware
        self._costs = costs
        self._policy = policy
        self._kernels: dict[str, tuple[Kernel, ...]] = {}
        for kernel in load_builtin():
            self._kernels[kernel.op] = (*self._kernels.get(kernel.op, ()), kernel)

    @classmethod
    def of_table(cls, table: ShippedTable, policy: Policy) -> FreshSelector:
        """A machine of a table's class."""
        hardware = hardware_of(table.provenance.environment)
        rows = [SourcedMeasurement(row, SHIPPED) for row in table.rows]
        kernels = {kernel.id: kernel for kernel in load_builtin()}
        return cls(hardware, MeasuredCosts(rows, kernels, hardware), policy)

    def choose(self, request: CallSpec) -> Selection:
        """As a device fresh from installation.

        Raises: NoKernelFoundError: no kernel takes the call.
        """
        op, kernels = ops_table.get(request.op), self._kernels.get(request.op, ())
        context = SelectionContext(kernels, self.hardware, self._policy)
        return decide(op, request, context, bucketed=self._bucket(request), cost=self._costs)

    def prices(self, request: CallSpec) -> dict[str, tuple[float, str]]:
        """Every kernel's microseconds for a call, whether it takes it or not, and where they come from."""
        bucketed = self._bucket(request)
        work = ops_table.get(request.op).work(bucketed)
        kernels = self._kernels.get(request.op, ())
        return {kernel.id: self._costs(kernel, work, bucketed, self.hardware) for kernel in kernels}

    def _bucket(self, request: CallSpec) -> CallSpec:
        op = ops_table.get(request.op)
        return KeyBuilder(op, self._kernels.get(request.op, ()), ()).bucket(request)


def hardware_of(environment: Environment) -> Hardware:
    """The machine that a table was measured on, as far as prices know it."""
    base = probe("cpu") if environment.sm is None else hypothetical_gpu(environment.sm)
    isa = frozenset(environment.isa) if environment.sm is None else base.isa
    return msgspec.structs.replace(
        base, name=environment.device, vendor=environment.vendor, isa=isa, threads=environment.threads
    )


def map_of_device(device: LocalDevice) -> CallMap:
    """The device's own measurements; a map without calls where there are none."""
    device.wait_for_costs()
    path = perfdb_path(device.settings)
    rows = read_rows(path, Environment.of_hardware(device.hardware)) if path and path.is_file() else []
    return _map_of(OWN, True, rows, MachineSelector(device))


def map_of_table(table: ShippedTable, name: str, policy: Policy) -> CallMap:
    """The measurements of a shipped table, chosen over as its machine would."""
    return _map_of(f"table {name}", False, table.rows, FreshSelector.of_table(table, policy))


def tables_for(hardware: Hardware, every: bool) -> list[tuple[str, ShippedTable]]:
    """The shipped tables of the package by name: all, or the one that decides on `hardware`."""
    if every:
        return [(path.stem, read_table(path)) for path in sorted(Path(TABLES).glob("*.json"))]
    fitting = fitting_tables(hardware, TABLES)[:1]
    names = {read_table(p).content: p.stem for p in Path(TABLES).glob(f"{hardware.platform}_*.json")}
    return [(names[table.content], table) for table in fitting]


def _map_of(source: str, is_own: bool, rows: Iterable[Measurement], chooser: MachineSelector) -> CallMap:
    kernels, texts = StringTable(), StringTable()
    calls = [
        _measured_call(case, launch, timed, chooser, kernels, texts)
        for (case, launch), timed in _by_call(rows).items()
    ]
    calls.sort(key=lambda call: (call.op, call.launch))
    hardware = chooser.hardware
    units = "threads" if hardware.sm is None else "multiprocessors"
    machine = f"{hardware.name}, {hardware.platform}, {hardware.threads} {units}"
    return CallMap(source, machine, is_own, tuple(kernels), tuple(texts), tuple(calls))


def _by_call(rows: Iterable[Measurement]) -> dict[_Key, dict[str, Measurement]]:
    """The rows that count, by call and kernel; in order of op and sizes."""
    calls: dict[_Key, dict[str, Measurement]] = {}
    counted = [row for row in condense(rows) if not implausible_reason(row)]
    counted.sort(key=lambda row: (row.case.op, row.case.dtype, row.case.features, row.case.dims))
    for row in counted:
        calls.setdefault((row.case, row.launch), {})[row.kernel] = row
    return calls


def _measured_call(
    case: BenchmarkCase, launch: Launch, rows: Mapping[str, Measurement], chooser: MachineSelector,
    kernels: StringTable, texts: StringTable,
) -> MeasuredCall:  # fmt: skip
    request = request_of(case, chooser.hardware)
    if launch == "graph":
        request = request.replace(modes=frozenset({"capture"}))
    elsewhere = -1
    try:
        selection = chooser.choose(request)
    except (NoKernelFoundError, UnknownOpError) as error:
        candidates, chosen, why = list(getattr(error, "trace", ())), "", NOBODY
    else:
        candidates, others = fold_other_platforms(selection)
        chosen, why = _steady_choice(selection)
        elsewhere = texts.place(others) if others else -1
    changes = {c.kernel: c.accepted.transform_us for c in candidates if c.eligible and c.accepted is not None}
    totals = {name: rows[name].median_us + us for name, us in changes.items() if name in rows}
    times = {
        name: (row.median_us, math.sqrt(row.variance), changes.get(name, 0.0)) for name, row in rows.items()
    }
    return MeasuredCall(
        op=case.op,
        call=call_text(case),
        launch=launch,
        times=tuple(TimedKernel(kernels.place(name), *map(_short, us)) for name, us in times.items()),
        chosen=kernels.place(chosen) if chosen else -1,
        why=texts.place(why),
        regret=round(totals[chosen] / min(totals.values()), 4) if chosen in totals else None,
        verdicts=tuple(_verdict(candidate, kernels, texts) for candidate in candidates),
        elsewhere=elsewhere,
    )


def _steady_choice(selection: Selection) -> tuple[str, str]:
    """The kernel of a process that has run for a while, and why: this one has loaded next to nothing."""
    if selection.when_warm is None:
        return selection.kernel, selection.why
    return selection.when_warm, f"once it is loaded; until then {selection.kernel}: {selection.why}"


def call_text(case: BenchmarkCase) -> str:
    """The call in a line: dtype, sizes by axis, what it asks for."""
    sizes = " ".join(f"{name}={size}" for name, size in case.dims)
    asks = f" {'+'.join(case.features)}" if case.features else ""
    strided = "" if case.contiguous else " strided"
    return f"{case.dtype} {sizes}{asks}{' ' + case.layout if case.layout else ''}{strided}"


def _verdict(candidate: Candidate, kernels: StringTable, texts: StringTable) -> StoredVerdict:
    accepted = candidate.accepted
    if candidate.rejected or accepted is None:
        sentences = [
            str(reason) + (f" (accepted if {reason.counterfactual})" if reason.counterfactual else "")
            for reason in candidate.rejected
        ]
        return StoredVerdict(kernels.place(candidate.kernel), None, tuple(map(texts.place, sentences)))
    sentences = [f"by {accepted.source}"]
    if accepted.transforms:
        changes = ", ".join(map(str, accepted.transforms))
        sentences.append(f"+ {accepted.transform_us:.1f} us for {changes}")
    if abs(accepted.total_us - accepted.kernel_us - accepted.transform_us) > 1e-9:
        sentences.append("the policy weighs it")
    if accepted.note:
        sentences.append(accepted.note)
    return StoredVerdict(
        kernels.place(candidate.kernel), _short(accepted.total_us), tuple(map(texts.place, sentences))
    )


def _short(us: float) -> float:
    """Four digits: what a page shows, and less than what a measurement knows."""
    return float(f"{us:.4g}")

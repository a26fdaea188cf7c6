"""What a batcher runs a batch with: the callers' modes, selection for the merged call, one outcome a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from layerzero.actors.device.local_device import LocalDevice
from layerzero.native import FAST_PATH
from layerzero.ops.batching import NO_LEADS, RowBatching
from layerzero.ops.op import Args, Batching, Op, RejectedCall
from layerzero.scheduler.core.pending_call import Failure
from layerzero.scheduler.modes.streams import CrossStreamModes, DeviceStreams
from layerzero.scheduler.modes.torch_modes import Modes, apply_modes, without_gradient
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.plan import Plan, signature_of
from layerzero.spec.errors import NoKernelFoundError

if TYPE_CHECKING:
    from layerzero.observe.spans import Spans


class BatchedFunction(Protocol):
    """What a batcher runs beside ops: a function over the rows of several callers."""

    name: str
    pure: bool

    def run(self, calls: Sequence[Args]) -> list[Any]: ...


class BatchExecutor:
    """Runs batches on one device; what a loop driver calls, inline or on the device's thread."""

    __slots__ = ("_device", "_merged")

    def __init__(self, device: LocalDevice) -> None:
        self._device = device
        self._merged: dict[Op, MergedCalls | None] = {}  # None: batches of the op are Python's

    @property
    def spans(self) -> Spans | None:
        """Of its device: what each batch is reported to."""
        return self._device.spans

    def execute(
        self, op: Op | BatchedFunction, calls: Sequence[Args], modes: Modes, snapshot: DispatchState | None
    ) -> list[Any]:
        """One outcome a call: (value, its plan), or Failure; a failed batch fails every call alike."""
        if self._device.settings.inference:
            # The caller's own modes stay on its pending call: they are what is compared when it resumes.
            modes = without_gradient(modes)
        merged: MergedCalls | None = None
        try:
            if isinstance(op, Op) and snapshot is None and len(calls) > 1:
                merged = self._merged_calls(op)
                outcomes = None if merged is None else merged.run(calls, modes)
                if outcomes is not None:
                    return outcomes
            with apply_modes(modes):
                if not isinstance(op, Op):
                    return _pair_with_plan(op.run(calls), None)
                launch = _BatchLauncher(self._device, op, snapshot)
                if op.batching is None or len(calls) == 1:
                    values = [launch(args) for args in calls]
                else:
                    generation = self._device.snapshot
                    values = _run_batched(op.batching, calls, launch)
                    if merged is not None:
                        merged.remember(launch, generation)
        except Exception as error:
            failed = Failure(error)
            return [failed] * len(calls)
        launched = launch.launches
        if not op.pure:
            return [_outcome(value, launched) for value in values]
        if len(launched) == 1:
            return _pair_with_plan(values, launched[0][1])
        return [(value, _plan_that_made(value, launched)) for value in values]

    def _merged_calls(self, op: Op) -> MergedCalls | None:
        """What the compiled twin knows of batches of `op`; None where it knows nothing."""
        native = FAST_PATH.module
        if native is None:
            return None
        known = self._merged.get(op)
        if (known is None and op not in self._merged) or (known is not None and known.native is not native):
            batching, known = op.batching, None
            if isinstance(batching, RowBatching) and op.pure and op.validate_values is None:
                known = MergedCalls(self._device, native, batching)
            self._merged[op] = known
        return known


class MergedCalls:
    """Merged calls of one op on one device, by all that can change their plan: the compiled twin runs a batch
    of them in one step."""

    __slots__ = ("_batching", "_device", "_plans", "native")

    def __init__(self, device: LocalDevice, native: Any, batching: RowBatching) -> None:
        self._device = device
        self._batching = batching
        self.native = native
        operands = tuple(batching.trailing_axes_of.items())
        self._plans = native.BatchPlans(
            device, LocalDevice.recover, operands, device.recovery.several_weights_failed
        )

    def run(self, calls: Sequence[Args], modes: Modes) -> list[Any] | None:
        """The outcomes of a known batch, or None where nothing has run."""
        if modes.stream is not None or modes.autocast:
            return None
        found: Any = self._plans.run(calls, modes.mask)
        if found is NotImplemented:
            return None
        if isinstance(found, list):
            return found
        out, counts, plan = found
        return _pair_with_plan(self._batching.split(out, counts, NO_LEADS), plan)

    def remember(self, launch: _BatchLauncher, generation: DispatchState) -> None:
        """Know from now on each call that a batch became, unless not its plan's kernel answered."""
        device = self._device
        for args, (_, plan) in zip(launch.calls, launch.launches, strict=True):
            op = plan.op
            if device.plan(op, signature_of(op, args), args, device.mode()) is plan:
                self._plans.remember(args, generation, plan)


class StreamExecutor(BatchExecutor):
    """Runs batches on a CUDA device, also those whose callers are on several streams."""

    __slots__ = ("_streams",)

    def __init__(self, device: LocalDevice, streams: DeviceStreams) -> None:
        super().__init__(device)
        self._streams = streams

    def execute(
        self,
        op: Op | BatchedFunction,
        calls: Sequence[Args],
        modes: Modes | CrossStreamModes,
        snapshot: DispatchState | None,
    ) -> list[Any]:
        """As on one stream; between the callers' streams and back where there are several."""
        if not isinstance(modes, CrossStreamModes):
            return super().execute(op, calls, modes, snapshot)
        with self._streams.across_streams(modes) as modes_on_stream:
            outcomes = super().execute(op, calls, modes_on_stream, snapshot)
            self._streams.record_streams(outcomes, modes)
        return outcomes


class _BatchLauncher:
    """A launch that notes each result with the plan that made it."""

    __slots__ = ("_device", "_op", "_snapshot", "_validates", "calls", "launches")

    def __init__(self, device: LocalDevice, op: Op, snapshot: DispatchState | None) -> None:
        self._device = device
        self._op = op
        self._snapshot = snapshot
        self._validates = not op.validate_values_per_batch  # else the calls were, each when it was made
        self.launches: list[tuple[Any, Plan]] = []
        self.calls: list[Args] = []  # that gave them

    @property
    def is_unconstrained(self) -> bool:
        settings = self._device.settings
        if settings.strict or settings.determinism == "strict":
            return False
        rules = (self._snapshot or self._device.snapshot).policy.rules
        return not any(rule.concerns(self._op.name) for rule in rules)

    def __call__(self, args: Args, op: Op | None = None) -> Any:
        result = self._device.launch_planned(op or self._op, args, self._snapshot, guarded=self._validates)
        self.calls.append(args)
        self.launches.append(result)
        return result[0]

    def expected_us(self, args: Args, op: Op | None = None) -> float:
        launch_op = op or self._op
        device = self._device
        try:
            plan = device.plan(launch_op, signature_of(launch_op, args), args, device.mode(), self._snapshot)
        except NoKernelFoundError:
            return float("inf")
        return plan.expected_us


def _pair_with_plan(values: list[Any], plan: Plan | None) -> list[Any]:
    """An outcome for each value."""
    native = FAST_PATH.module
    pairs = native.paired(values, plan) if native is not None else NotImplemented
    return [(value, plan) for value in values] if pairs is NotImplemented else pairs


def _run_batched(batching: Batching, calls: Sequence[Args], launch: _BatchLauncher) -> list[Any]:
    """One value a call; calls whose operands no longer share the memory that brought them together run apart.

    `weight.data = other` changes where a weight lies while a call with it waits, and what stood there may
    have come back as another tensor's.
    """
    shared = batching.shared_operands(calls[0]) or ()
    if _share_memory(calls, shared):
        return batching.run(calls, launch)
    by_address: dict[tuple[int, ...], list[int]] = {}
    for index, args in enumerate(calls):
        by_address.setdefault(tuple(args[position].data_ptr() for position in shared), []).append(index)
    values: list[Any] = [None] * len(calls)
    for indices in by_address.values():
        part_values = batching.run([calls[index] for index in indices], launch)
        for index, value in zip(indices, part_values, strict=True):
            values[index] = value
    return values


def _share_memory(calls: Sequence[Args], shared: tuple[int, ...]) -> bool:
    for position in shared:
        first = calls[0][position]
        for args in calls:
            if args[position] is not first and args[position].data_ptr() != first.data_ptr():
                return False
    return True


def _outcome(value: Any, launched: list[tuple[Any, Plan]]) -> Any:
    """A call's share of a batch in which a rule may have refused some."""
    return Failure(value.error) if isinstance(value, RejectedCall) else (value, launched[-1][1])


def _plan_that_made(value: Any, launched: list[tuple[Any, Plan]]) -> Plan:
    """The plan of the launch whose output `value` is a piece of."""
    where = _storage(value)
    for result, plan in launched:
        if _storage(result) == where:
            return plan
    return launched[-1][1]


def _storage(value: Any) -> int:
    first = value[0] if isinstance(value, tuple) else value
    return first.untyped_storage().data_ptr() if isinstance(first, Tensor) else 0

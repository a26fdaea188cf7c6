"""What looks at a device's calls while they run: sampled calls checked or timed, outputs looked at, spans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from layerzero._util.clock import Clock
from layerzero._util.clock_timer import ClockTimer
from layerzero.actors.device.plan_compiler import PlanCompiler
from layerzero.selection.dispatch import DispatchState

if TYPE_CHECKING:
    from layerzero.actors.device.local_device import LocalDevice
    from layerzero.actors.device.numerics_guard import NumericsGuard
    from layerzero.measure.drift import DriftWatch
    from layerzero.observe.kernel_times import KernelTimes
    from layerzero.observe.spans import Spans


PLUGIN_CHECK_S = 10.0  # how often outputs are looked at where strangers' kernels run


class LiveChecks:
    """The middlewares of a device's compiler that its settings switch on; what is off is not imported."""

    def __init__(
        self, compiler: PlanCompiler, states: Callable[[], Iterable[DispatchState]], clock: Clock
    ) -> None:
        self._compiler = compiler
        self.outputs = OutputChecks(states, clock)
        self._checks: tuple[NumericsGuard | DriftWatch | KernelTimes | Spans, ...] = ()

    def apply_settings(self, device: LocalDevice) -> Spans | None:
        """Replace the checks by those of the settings of `device`; the spans among them.

        Raises: ConfigurationError: spans are requested without opentelemetry.
        """
        before, settings = self._checks, device.settings
        self.close()
        checks: list[NumericsGuard | DriftWatch | KernelTimes | Spans] = []
        spans = None
        if settings.check_rate > 0:
            from layerzero.actors.device.numerics_guard import NumericsGuard

            checks.append(NumericsGuard(device.device, device.health, device.counters, settings.check_rate))
        if settings.drift_rate > 0:
            from layerzero.measure.drift import DriftWatch

            checks.append(DriftWatch(device, settings.drift_rate))
        if settings.kernel_times:
            from layerzero.observe.kernel_times import KernelTimes

            checks.append(KernelTimes(device.counters))
        if settings.spans or settings.call_spans:
            from layerzero.observe.spans import Spans

            spans = Spans(calls=settings.call_spans)
            checks.append(spans)
        self._checks = tuple(checks)
        period_s = settings.output_check_s
        self.outputs.start(period_s if period_s is not None else PLUGIN_CHECK_S * bool(settings.plugins))
        # Recorders that users added stay where they are.
        others = (each for each in self._compiler.middlewares if each not in before)
        self._compiler.middlewares = (*others, *checks)
        return spans

    def close(self) -> None:
        """End the checks; a second call does nothing."""
        self.outputs.start(0.0)
        for check in self._checks:
            check.close()
        self._checks = ()


class OutputChecks:
    """Every `period_s` seconds each plan of `states()` is checked at its next run; other hits pay nothing."""

    def __init__(self, states: Callable[[], Iterable[DispatchState]], clock: Clock) -> None:
        self._states = states
        self._clock = clock
        self._period_s = 0.0
        self._timer = ClockTimer(clock, self._due_at, self._check)

    def _due_at(self) -> float | None:
        return self._clock.now() + self._period_s if self._period_s > 0 else None

    def _check(self) -> None:
        for state in self._states():
            for table in list(state.tables.values()):
                table.check_outputs_again()

    def start(self, period_s: float) -> None:
        """Check so often from now on; 0 never."""
        self._period_s = period_s
        self._timer.arm()

    def reset_after_fork(self) -> None:
        """A forked child has no timer; it begins one of its own."""
        self._timer.reset_after_fork()

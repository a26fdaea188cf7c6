"""The watchers that a device's settings ask for: sampled calls checked or timed, and spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerzero.actors.device.local_device import LocalDevice
    from layerzero.actors.device.numerics_guard import NumericsGuard
    from layerzero.measure.drift import DriftWatch
    from layerzero.observe.spans import Spans


def make_live_checks(device: LocalDevice) -> tuple[NumericsGuard | DriftWatch | Spans, ...]:
    """One watcher for each kind that is switched on; what is off is not even imported.

    Raises: ConfigurationError: spans are asked for without opentelemetry.
    """
    settings = device.settings
    live_checks: list[NumericsGuard | DriftWatch | Spans] = []
    if settings.check_rate > 0:
        from layerzero.actors.device.numerics_guard import NumericsGuard

        live_checks.append(NumericsGuard(device, settings.check_rate))
    if settings.drift_rate > 0:
        from layerzero.measure.drift import DriftWatch

        live_checks.append(DriftWatch(device, settings.drift_rate))
    device.spans = None
    if settings.spans:
        from layerzero.observe.spans import Spans

        device.spans = Spans()
        live_checks.append(device.spans)
    return tuple(live_checks)

"""The watchers that a device's settings ask for: sampled calls checked against the reference, or timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerzero.actors.guard import NumericsGuard
    from layerzero.actors.local import LocalDevice
    from layerzero.tuning.drift import DriftWatch


def sampling(device: LocalDevice) -> tuple[NumericsGuard | DriftWatch, ...]:
    """One watcher for each kind of sampling that is switched on; what is off is not even imported."""
    settings = device.settings
    found: list[NumericsGuard | DriftWatch] = []
    if settings.check_rate > 0:
        from layerzero.actors.guard import NumericsGuard

        found.append(NumericsGuard(device, settings.check_rate))
    if settings.drift_rate > 0:
        from layerzero.tuning.drift import DriftWatch

        found.append(DriftWatch(device, settings.drift_rate))
    return tuple(found)

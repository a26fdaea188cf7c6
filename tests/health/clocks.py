"""A clock that moves when told to, and the settings that the health tests share."""

from __future__ import annotations

from layerzero.spec.settings import Settings

SETTINGS = Settings(
    failures_to_open=3, window_s=10.0, cooldown_s=4.0, cooldown_max_s=16.0, probes=2, probe_timeout_s=5.0
)


class Clock:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

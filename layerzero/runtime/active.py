"""ActiveRuntime: which runtime serves the process, and who is notified when that changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from layerzero.runtime.runtime import Runtime
    from layerzero.scheduler.scheduled_device import ScheduledDevice


class ActiveRuntime:
    """The process's runtime, one attribute load away; `devices` is its map, empty when there is none."""

    __slots__ = ("_on_change", "devices", "lock", "runtime")

    def __init__(self) -> None:
        self._on_change: list[Callable[[], object]] = []
        self.runtime: Runtime | None = None
        self.devices: dict[torch.device, ScheduledDevice] = {}
        self.lock = threading.RLock()

    def put(self, runtime: Runtime | None) -> None:
        """Make `runtime` the process's, or none."""
        self.runtime = runtime
        self.devices = runtime.devices if runtime is not None else {}
        self.changed()

    def changed(self) -> None:
        """Notify whatever remembers what holds for this runtime alone."""
        for notify in self._on_change:
            notify()

    def on_change(self, notify: Callable[[], object]) -> None:
        """Call `notify()` after every change of runtime."""
        self._on_change.append(notify)


ACTIVE = ActiveRuntime()

"""ScheduledDevice: a local device with its batchers, one for each event loop that uses it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.device.registry import Registry
from layerzero.scheduler.batch_executor import BatchExecutor, StreamExecutor
from layerzero.scheduler.loop_drivers import LoopDrivers
from layerzero.scheduler.modes.readback import Readback
from layerzero.scheduler.modes.streams import DeviceStreams
from layerzero.scheduler.modes.torch_modes import Modes, capture
from layerzero.spec.settings import Settings

if TYPE_CHECKING:
    from layerzero.selection.active_table import ActiveDispatchTable


class ScheduledDevice(LocalDevice):
    """What a runtime opens: `loop_drivers` queue awaited calls, `capture_modes()` reads their torch modes.

    `parts` go to LocalDevice. On CUDA a launch does not compute on the calling thread, so batches are
    launched on the loop's thread, callers of several streams share them, and results are read back by copies.
    """

    def __init__(
        self, device: torch.device | str, settings: Settings, registry: Registry, **parts: Any
    ) -> None:
        super().__init__(device, settings, registry, **parts)
        cuda = self.device.index if self.device.type == "cuda" else None
        self.loop_drivers = self._make_loop_drivers(cuda)
        self.capture_modes: Callable[[], Modes] = capture if cuda is None else partial(capture, cuda)

    def _make_loop_drivers(self, cuda: int | None) -> LoopDrivers:
        if cuda is None:
            return LoopDrivers(BatchExecutor(self), self.worker, self.settings)
        streams = DeviceStreams(cuda, self.event_thread, self.settings.completion)
        return LoopDrivers(
            StreamExecutor(self, streams),
            self.worker,
            self.settings,
            always_inline=True,
            streams=streams,
            make_reader=lambda driver: Readback(driver, self.event_thread),
        )

    def set_settings(self, settings: Settings, dispatch_table: ActiveDispatchTable | None = None) -> None:
        """Put other settings in force, here and in the queues."""
        super().set_settings(settings, dispatch_table)
        self.loop_drivers.set_settings(settings)

    def reset_after_fork(self) -> None:
        """Start anew in a forked child, without the parent's loops."""
        super().reset_after_fork()
        self.loop_drivers.after_fork()

    def close(self) -> None:
        """Stop the queues, then the threads and timers; every later call raises RuntimeClosedError."""
        self.loop_drivers.close()
        super().close()

"""The room that kernels' workspaces have on one device: looked at on misses, at most once a second."""

from __future__ import annotations

from collections.abc import Callable

import torch

from layerzero.selection.workspace import workspace_budget
from layerzero.spec.hardware import Hardware, free_memory
from layerzero.spec.settings import Settings

REFRESH_EVERY_S = 1.0


class WorkspaceBudget:
    """`bytes` is what one workspace may take; it moves in steps, so that choices seldom are made anew."""

    def __init__(
        self,
        device: torch.device,
        hardware: Hardware,
        clock: Callable[[], float],
        free: Callable[[torch.device], int] = free_memory,
    ) -> None:
        self._device = device
        self._total = hardware.memory_bytes
        self._clock = clock
        self._free = free
        self._refreshed_at: float | None = None
        self.bytes: int | None = None
        # The system's free memory is in a file, which is not read on an event loop's thread.
        self.reads_quickly = free is not free_memory or device.type == "cuda"

    def refresh_due(self) -> bool:
        """Whether the last look was long enough ago; the caller that gets True looks."""
        now_s = self._clock()
        if self._refreshed_at is not None and now_s - self._refreshed_at < REFRESH_EVERY_S:
            return False
        # Noted before the look, so that of many threads one looks.
        self._refreshed_at = now_s
        return True

    def refresh(self, settings: Settings) -> bool:
        """Look, and say whether the room is another than before."""
        self._refreshed_at = self._clock()
        before, self.bytes = self.bytes, self.current_bytes(settings, self.bytes)
        return self.bytes != before

    def current_bytes(self, settings: Settings, before: int | None = None) -> int | None:
        """The room of this moment, `before` while free memory is near it; None where it is unknown."""
        free, limit = self._free(self._device), settings.workspace_limit_bytes
        if free <= 0:
            return limit
        return workspace_budget(free, self._total, settings.memory_headroom, limit, before)

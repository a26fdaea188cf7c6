"""What a loop driver is given that is made above it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from layerzero.scheduler.core.pending_call import PendingCall
from layerzero.scheduler.modes.torch_modes import Stream


class HostReader(Protocol):
    """What copies results of one device to the host for one event loop."""

    def start(self, tensor: Tensor, stream: Stream) -> PendingCall:
        """Copy `tensor`, which `stream` writes; await what comes back for the copy, or what it raised."""
        ...

    def flush(self, launches: int | None = None) -> None:
        """Launch the copies that were started and are not launched yet, behind so many batches or all."""
        ...

    def lose(self, error: Exception | None) -> None:
        """Fail every read that is waited for, and later ones until `lose(None)`."""
        ...

"""What a loop driver is given that is made above it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from layerzero.scheduler.torch_modes import Stream


class HostReader(Protocol):
    """What copies results of one device to the host for one event loop."""

    async def read(self, tensor: Tensor, stream: Stream) -> Tensor:
        """The host copy of `tensor`, which `stream` writes.

        Raises: what the copy raised.
        """
        ...

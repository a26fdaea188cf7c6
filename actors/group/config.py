"""GroupConfig: what one rank of a group is configured with, from the public call down to the channel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from layerzero.spec.errors import ConfigurationError

Mode = Literal["inference", "training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """One rank's configuration; equal on all ranks but for `rank`, `host` and `on_failure`.

    `epoch` counts the incarnations of the group: its ranks restart together, under the next one. In `mode`
    "training" ranks with other versions or policies are refused, in "inference" they are logged. `host` is
    where the other ranks reach rank 0. `timeout_s` bounds every wait for another rank, in seconds.
    `on_failure(reason)` is called once, on the thread that noticed. `token` is what followers authenticate
    with and what signs values in the store, 32 bytes; empty, rank 0 makes one and publishes it in the store,
    which then is trusted.

    Raises: ConfigurationError: `rank`, `ranks` or `mode` is out of range.
    """

    rank: int
    ranks: int
    epoch: int = 0
    mode: Mode = "inference"
    tp_invariant: bool = False
    host: str = "127.0.0.1"
    timeout_s: float = 30.0
    on_failure: Callable[[str], None] | None = None
    token: bytes = b""

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 0 <= self.rank < self.ranks:
            raise ConfigurationError(f"rank needs 0 to {self.ranks - 1}, got {self.rank}")
        if self.mode not in ("inference", "training"):
            raise ConfigurationError(f"mode needs 'inference' or 'training', got {self.mode!r}")

"""Limits of a lane and what it counts."""

from __future__ import annotations

from layerzero.spec.settings import Settings


class Caps:
    """Limits of one lane: of a batch, of the queue, of what it remembers.

    `ageing_s` lifts a waiting ticket by one priority class; `ahead` is how many batches may be in flight;
    `slots` how many places of the models' programs are remembered. `reject` refuses tickets at a full
    queue, which otherwise wait in order for room. `hold_s` is how long a call waits at most, after the device
    has run, for callers that are expected to call beside it.
    """

    __slots__ = (
        "ageing_s", "ahead", "hold_s", "items", "max_bytes", "queue_bytes", "queue_items", "reject", "slots",
        "tokens",
    )  # fmt: skip

    def __init__(
        self,
        *,
        items: int = 256,
        tokens: int = 65_536,
        max_bytes: int = 1 << 30,
        queue_items: int = 16_384,
        queue_bytes: int = 4 << 30,
        ageing_s: float = 0.05,
        ahead: int = 1,
        slots: int = 8192,
        reject: bool = False,
        hold_s: float = 0.01,
    ) -> None:
        self.items = items
        self.tokens = tokens
        self.max_bytes = max_bytes
        self.queue_items = queue_items
        self.queue_bytes = queue_bytes
        self.ageing_s = ageing_s
        self.ahead = ahead
        self.slots = slots
        self.reject = reject
        self.hold_s = hold_s

    @classmethod
    def of(cls, settings: Settings) -> Caps:
        """A lane's limits as the settings name them."""
        caps = cls()
        caps.follow(settings)
        return caps

    def follow(self, settings: Settings) -> None:
        """Go by other settings from now on."""
        self.items = settings.max_items
        self.tokens = settings.max_tokens
        self.max_bytes = settings.max_bytes
        self.queue_items = settings.queue_items
        self.queue_bytes = settings.queue_bytes
        self.ageing_s = settings.ageing_ms * 1e-3
        self.reject = settings.overload == "reject"


class Stats:
    """Counters of one lane; `submitted == done + failed + cancelled + expired + rejected + lane.live`."""

    __slots__ = (
        "batches", "cancelled", "detached", "done", "expired", "failed", "rejected", "sizes", "submitted",
        "sweeps", "tokens", "wait_max_s", "wait_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.submitted = self.done = self.failed = 0
        self.cancelled = self.expired = self.rejected = 0
        self.detached = self.batches = self.sweeps = self.tokens = 0
        self.wait_s = self.wait_max_s = 0.0
        self.sizes: dict[int, int] = {}

    @property
    def ended(self) -> int:
        return self.done + self.failed + self.cancelled + self.expired + self.rejected

    @property
    def mean_batch(self) -> float:
        calls = sum(size * count for size, count in self.sizes.items())
        return calls / self.batches if self.batches else 0.0

    def add(self, other: Stats) -> None:
        """Count what another lane counted."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wait_max_s = max(self.wait_max_s, other.wait_max_s)
        for size, count in other.sizes.items():
            self.sizes[size] = self.sizes.get(size, 0) + count


_SUMS = tuple(name for name in Stats.__slots__ if name not in ("sizes", "wait_max_s"))

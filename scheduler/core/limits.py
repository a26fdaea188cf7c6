"""Limits of a batcher and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

from layerzero.spec.settings import Settings


@dataclass(slots=True, kw_only=True, eq=False)
class BatchLimits:
    """Limits of one batcher: of a batch, of the queue, of what it remembers.

    `priority_aging_s` lifts a waiting pending call by one priority class; `ahead` is how many batches may be
    in flight; `slots` how many places of the models' programs are remembered. `reject` refuses pending calls
    at a full queue, which otherwise wait in order for room. `max_defer_s` is how long a call waits at most,
    after the device has run, for callers that are expected to call beside it.
    """

    max_batch_size: int = 256
    max_num_batched_tokens: int = 65_536
    max_batch_bytes: int = 1 << 30
    max_queue_size: int = 16_384
    max_queue_bytes: int = 4 << 30
    priority_aging_s: float = 0.05
    max_inflight_batches: int = 1
    max_program_points: int = 8192
    reject_when_full: bool = False
    max_defer_s: float = 0.01

    @classmethod
    def from_settings(cls, settings: Settings) -> BatchLimits:
        """A batcher's limits as the settings name them."""
        limits = cls()
        limits.update(settings)
        return limits

    def update(self, settings: Settings) -> None:
        """Go by other settings from now on."""
        self.max_batch_size = settings.max_batch_size
        self.max_num_batched_tokens = settings.max_num_batched_tokens
        self.max_batch_bytes = settings.max_batch_bytes
        self.max_queue_size = settings.max_queue_size
        self.max_queue_bytes = settings.max_queue_bytes
        self.priority_aging_s = settings.priority_aging_ms * 1e-3
        self.reject_when_full = settings.queue_full_policy == "reject"


class BatcherStats:
    """Counters of one batcher; `submitted == done + failed + cancelled + expired + rejected + lane.live`."""

    __slots__ = (
        "at_once", "batches", "cancelled", "detached", "done", "expired", "failed", "held_s", "holds",
        "reasons", "rejected", "sizes", "submitted", "tokens", "wait_max_s", "wait_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.submitted = self.done = self.failed = 0
        self.cancelled = self.expired = self.rejected = 0
        self.detached = self.batches = self.tokens = 0
        self.at_once = 0  # calls that were never queued, beside those counted as submitted
        self.wait_s = self.wait_max_s = 0.0
        self.sizes: dict[int, int] = {}
        self.reasons: dict[str, int] = {}  # batches by why they were launched
        self.holds: dict[str, int] = {}  # batches that were held back for callers, by what for
        self.held_s: dict[str, float] = {}  # and how long, together

    @property
    def ended(self) -> int:
        return self.done + self.failed + self.cancelled + self.expired + self.rejected

    @property
    def mean_batch(self) -> float:
        calls = sum(size * count for size, count in self.sizes.items())
        return calls / self.batches if self.batches else 0.0

    def add(self, other: BatcherStats) -> None:
        """Count what another batcher counted."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wait_max_s = max(self.wait_max_s, other.wait_max_s)
        for name in _BY_KIND:
            counts = getattr(self, name)
            for kind, count in getattr(other, name).copy().items():  # its thread continues
                counts[kind] = counts.get(kind, 0) + count

    def count_launch(self, reason: str, hold: tuple[str, float] | None, now_s: float) -> None:
        """Count a batch by why it is launched, and the `hold` before it: what for, and since when."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if hold is not None:
            cause, since_s = hold
            self.holds[cause] = self.holds.get(cause, 0) + 1
            self.held_s[cause] = self.held_s.get(cause, 0.0) + now_s - since_s


_BY_KIND = ("held_s", "holds", "reasons", "sizes")
_SUMS = tuple(name for name in BatcherStats.__slots__ if name not in (*_BY_KIND, "wait_max_s"))

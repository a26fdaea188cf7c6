"""Quarantine between processes: unreadable never means free, so a lost record covers every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from layerzero._util.record_store import RecordStore


class QuarantineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that must not run on a device in an environment; "*" stands for all of them.

    `timestamp` is wall-clock time in seconds since 1970.
    """

    kernel: str
    device: str = "*"
    environment: str = "*"
    why: str = ""
    timestamp: float = 0.0


class QuarantineStore(Protocol):
    """Where quarantine is kept between processes."""

    def load(self) -> Sequence[QuarantineRecord]: ...

    def save(self, record: QuarantineRecord) -> None: ...

    def forget(self, record: QuarantineRecord) -> None: ...


class JsonQuarantineStore(RecordStore[QuarantineRecord]):
    """Quarantines as files, one for each kernel, device and environment.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = JsonQuarantineStore(folder)
        ...     store.save(QuarantineRecord(kernel="torch.rms_norm", why="wrong numbers"))
        ...     [record.why for record in store.load()]
        ['wrong numbers']
    """

    kind = QuarantineRecord
    name = "quarantine"

    def key(self, record: QuarantineRecord) -> tuple[str, str]:
        """One record for each kernel, device and environment."""
        return record.kernel, f"{record.device}\0{record.environment}"

    def lost(self, kernel: str, why: str) -> QuarantineRecord:
        """The kernel stays out of service everywhere."""
        return QuarantineRecord(kernel=kernel, why=why)

    newer = lost

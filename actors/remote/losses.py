"""What a call without a device of its own has lost, and whether it may continue. Imports no ray."""

from __future__ import annotations

from typing import Any

import anyio

from layerzero._util import log
from layerzero.spec.errors import DeviceLostError

# Incarnations of devices that one call may begin in and lose. Two crashes take a kernel out: the third may
# answer.
MAX_BEGUN = 3


class LostIncarnations:
    """The losses of one call: `begun` are incarnations that were lost after it had begun in them.

    `again` says whether it may begin once more then. `patience_s` is how long it may still wait for a device.
    """

    def __init__(self, may_repeat: bool, patience_s: float, timeout_s: float | None) -> None:
        self.may_repeat = may_repeat
        self.patience_s = patience_s
        self.deadline = None if timeout_s is None else anyio.current_time() + timeout_s
        self.begun = 0
        self.tried: set[str] = set()
        self.last: DeviceLostError | None = None

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, or None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - anyio.current_time())

    def add(self, error: DeviceLostError, device: str) -> None:
        """Note a loss.

        Raises: DeviceLostError: `error`, where the call may not continue; an error of the hosted code's own
            is no loss of the device.
        """
        if "hosted_on" in error.context:
            raise error
        # Not retryable means that it had begun, and may have had effects.
        if not error.retryable:
            self.begun += 1
            if not self.may_repeat:
                raise error
            if self.begun >= MAX_BEGUN:
                raise self.gave_up_error(error) from error
        self.tried.add(device)
        self.last = error
        log.warning("device_pool.moved", device=device, why=str(error)[:200])

    def gave_up_error(self, last: Any) -> DeviceLostError:
        """The error of a call that had begun and may not begin again."""
        lost = f"the call lost {self.begun} incarnations of devices after it had begun"
        what = f"{lost}, so it is not run again"
        return DeviceLostError(f"{what}: {last}", retryable=False)

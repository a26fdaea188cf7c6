"""What a call without a device of its own has lost on its way, and whether it may go on. Imports no ray."""

from __future__ import annotations

from typing import Any

import anyio

from layerzero._util import log
from layerzero.spec.errors import DeviceLostError

# Lives of devices that one call may begin in and lose. Two deaths take a kernel out: the third may answer.
MAX_BEGUN = 3


class Losses:
    """The losses of one call: `begun` are lives that were lost after it had begun in them.

    `again` says whether it may begin once more then. `patience_s` is how long it may still wait for a device.
    """

    def __init__(self, again: bool, patience_s: float, timeout_s: float | None) -> None:
        self.again = again
        self.patience_s = patience_s
        self.deadline = None if timeout_s is None else anyio.current_time() + timeout_s
        self.begun = 0
        self.tried: set[str] = set()
        self.last: DeviceLostError | None = None

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline, or None without one."""
        return None if self.deadline is None else max(0.0, self.deadline - anyio.current_time())

    def add(self, error: DeviceLostError, device: str) -> None:
        """Note a loss.

        Raises: DeviceLostError: `error`, where the call may not go on; an error of the hosted code's own is
            no loss of the device.
        """
        if "hosted_on" in error.context:
            raise error
        if not error.retryable:
            self.begun += 1
            if not self.again:
                raise error
            if self.begun >= MAX_BEGUN:
                raise self.gave_up(error) from error
        self.tried.add(device)
        self.last = error
        log.warning("fleet.moved", device=device, why=str(error)[:200])

    def gave_up(self, last: Any) -> DeviceLostError:
        """What the caller of a call is told that had begun and may not begin again."""
        what = f"the call lost {self.begun} lives of devices after it had begun, so it is not run again"
        return DeviceLostError(f"{what}: {last}", retryable=False)

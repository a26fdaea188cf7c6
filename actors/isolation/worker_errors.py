"""What a worker's process answers where it could not do as asked, as an error of its caller."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from layerzero._util.files import decode_packed
from layerzero.actors.isolation import frames
from layerzero.health.device_faults import lost_device
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.reasons import Reason

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, IndexError, KeyError, MemoryError, ImportError, OSError,
                 ModuleNotFoundError, NotImplementedError, ArithmeticError, torch.OutOfMemoryError)
}  # fmt: skip


class WorkerError(RuntimeError):
    """A worker gave no answer; `reason` says why in one code, `status` how its process ended, where it has.

    `said` is the end of what it printed, with the traceback of every thread after a crash.
    """

    def __init__(self, message: str, reason: Reason, status: int | None = None, last_words: str = "") -> None:
        super().__init__(f"{message} ({reason.value})")
        self.reason = reason
        self.status = status
        self.said = last_words
        if last_words:
            self.add_note(f"the worker said:\n{last_words}")


def fault_error(
    name: str, reply: bytes, unavailable: Callable[[str, Reason], BackendNotAvailableError]
) -> Exception:
    """The error that an answer of the worker `name` tells, with the worker's traceback as a note."""
    try:
        fault = decode_packed(reply[1:], frames.Fault)
    except msgspec.MsgspecError as error:
        return WorkerError(f"the process of {name!r} answered with {error}", Reason.WORKER_FAILED)
    if fault.kind == BackendNotAvailableError.__name__:
        reason = Reason.__members__.get(fault.reason, Reason.WORKER_FAILED)
        raised: Exception = unavailable(fault.message, reason)
    else:
        raised = _KINDS.get(fault.kind, RuntimeError)(fault.message)
    if lost_device(raised):  # its process would have ended: its word does not lose the caller's card
        raised = WorkerError(f"the process of {name!r} answered {fault.kind}", Reason.WORKER_FAILED)
    raised.add_note(f"in the process of {name!r}:\n{fault.traceback}")
    return raised

"""Who broke the batch: run a failed batch again in halves until the culprits are alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from layerzero.scheduler.core.pending_call import Failure
from layerzero.spec.errors import DeviceLostError

Calls = Sequence[tuple[Any, ...]]
Run = Callable[[Calls], list[Any]]


class Executor(Protocol):
    """Who runs a batch: one outcome a call, its value or `Failure`; a batch that fails as a whole gives every
    call `Failure` with the same error. `op.pure` says whether calls may run again to find the culprit.
    `spans`, where there are some, get each batch."""

    @property
    def spans(self) -> Any: ...

    def execute(self, op: Any, calls: Calls, modes: Any, snapshot: Any) -> list[Any]: ...


# Errors of the device, which no caller's arguments cause; running the halves would only repeat them.
_DEVICE_ERRORS = (DeviceLostError, MemoryError)


def bisect_failed_batch(run: Run, calls: Calls, *, pure: bool) -> list[Any]:
    """Run `calls` as one batch; where a pure batch fails as a whole, bisect it until the culprits fail alone.

    `run` returns one outcome a call: its value, or `Failure`. A batch has failed as a whole when every call
    failed with the same error object; outcomes that differ are final. One culprit among n costs at most
    2 log2(n) further runs. `pure=False` never runs anything twice.
    """
    outcomes = _attempt(run, calls)
    if not pure or len(calls) < 2 or not _failed_as_one(outcomes):
        return outcomes
    half = len(calls) // 2
    return [
        *bisect_failed_batch(run, calls[:half], pure=pure),
        *bisect_failed_batch(run, calls[half:], pure=pure),
    ]


def _attempt(run: Run, calls: Calls) -> list[Any]:
    """Outcomes of one run; an executor that raises, or returns too few, has failed every call."""
    try:
        outcomes = run(calls)
        if len(outcomes) == len(calls):
            return outcomes
        error: Exception = RuntimeError(f"a batch of {len(calls)} calls returned {len(outcomes)} outcomes")
    except Exception as raised:
        error = raised
    failed = Failure(error)
    return [failed] * len(calls)


def _failed_as_one(outcomes: list[Any]) -> bool:
    first = outcomes[0]
    if first.__class__ is not Failure or isinstance(first.error, _DEVICE_ERRORS):
        return False
    error = first.error
    return all(outcome.__class__ is Failure and outcome.error is error for outcome in outcomes)

"""Every error that leaves the library, in one tree.

LayerZeroError
├─ NoKernelFoundError        no kernel accepts the request            .trace
│    (NoKernelAvailableError is the same class under its older name)
├─ UnknownOpError            no op has that name; also a ValueError
├─ BlockError                a block of ops cannot be planned; also a ValueError   .problem
├─ KernelExecutionError      a kernel failed and nothing could take over   .kernel, __cause__
├─ BackendNotAvailableError  a named backend is missing or broken     .backend
├─ CudaGraphUnsafeError      a call under capture has no ready, capture-safe plan
├─ KernelStillLoadingError   a rehearsal that does not wait met a kernel that is not loaded
├─ ConfigurationError        a setting, environment variable or call of the configuration surface
│  └─ PolicyValidationError  a policy that contradicts the schema or the registry
│     └─ PolicyLoadError     a policy file that cannot be read        .path .line
├─ TokenizerMismatchError    another tokenizer than a cache, a server or a model means   .problem
├─ ChatTemplateError         no prompt for these messages; also a ValueError
├─ GrammarLimitError         a grammar takes more work than its library does; also a RuntimeError
├─ SelectionTimeoutError     a selection or a lock took longer than allowed
├─ CacheCorruptionError      a stored file does not decode to what was written   .path
├─ FileRefusedError          a file is not used at all               .path .problems
│  ├─ BundleRefusedError     a warm-up bundle: nothing of it was written
│  ├─ PlanRefusedError       a file of plans
│  └─ ReportRefusedError     a file that is no report to work with
├─ OverloadedError           the queue is full                         .retry_after
├─ DeadlineExceededError     a call's deadline passed before it ran
├─ ModeChangedError          torch's modes differ across an await
├─ DeviceLostError           the device or its process is gone        .retryable
├─ ConsistencyError          ranks decided differently                .votes
└─ RuntimeClosedError        used after close

Wrong arguments are `ValueError` and `TypeError`; cancellation passes through untouched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

from layerzero.spec.reasons import Reason, Rejected


class LayerZeroError(Exception):
    """An error of this library; `context` holds the facts behind the message."""

    def __init__(self, message: str, **context: Any) -> None:
        super().__init__(message)
        self.context: Mapping[str, Any] = context

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the class with the message alone, and most of these need a keyword.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[LayerZeroError], args: tuple[Any, ...], state: dict[str, Any]) -> LayerZeroError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class NoKernelFoundError(LayerZeroError):
    """No registered kernel accepts the request; `trace` holds every verdict."""

    def __init__(self, message: str, *, trace: tuple[Any, ...] = (), **context: Any) -> None:
        super().__init__(message, **context)
        self.trace = trace


NoKernelAvailableError = NoKernelFoundError


class UnknownOpError(LayerZeroError, ValueError):
    """No op has the name that was given; the message lists the ops, nearest names first."""


class BlockError(LayerZeroError, ValueError):
    """A block of ops cannot be planned; `problem` is a `Rejected` with its reason code."""

    def __init__(self, message: str, *, problem: Rejected, **context: Any) -> None:
        super().__init__(message, problem=problem, **context)
        self.problem = problem


class KernelExecutionError(LayerZeroError):
    """A kernel raised and no other kernel could answer; the cause is chained."""

    def __init__(self, message: str, *, kernel: str, **context: Any) -> None:
        super().__init__(message, kernel=kernel, **context)
        self.kernel = kernel


class BackendNotAvailableError(LayerZeroError):
    """A backend that was named cannot be used here; the message names what to install."""

    def __init__(self, message: str, *, backend: str, **context: Any) -> None:
        super().__init__(message, backend=backend, **context)
        self.backend = backend


class CudaGraphUnsafeError(LayerZeroError):
    """A call under CUDA graph capture needs a plan that is ready and proved capture-safe."""


class KernelStillLoadingError(LayerZeroError):
    """The only kernels for a call load behind it, and its caller said that it does not wait."""


class ConfigurationError(LayerZeroError):
    """A setting, an environment variable or a configuration call is wrong."""


class PolicyValidationError(ConfigurationError):
    """A policy contradicts its schema or names what does not exist."""


class PolicyLoadError(PolicyValidationError):
    """A policy file cannot be read; `line` is 1-based, or None where no line applies."""

    def __init__(
        self, message: str, *, path: str | None = None, line: int | None = None, **context: Any
    ) -> None:
        super().__init__(message, path=path, line=line, **context)
        self.path = path
        self.line = line


class TokenizerMismatchError(LayerZeroError):
    """A tokenizer is not the one that a cache, a server or a model means; `problem` is a `Rejected`."""

    def __init__(self, message: str, *, problem: Rejected, **context: Any) -> None:
        super().__init__(message, problem=problem, **context)
        self.problem = problem


class ChatTemplateError(LayerZeroError, ValueError):
    """A chat template cannot be read or is missing, or has no prompt for the messages and says why."""


class GrammarLimitError(LayerZeroError, RuntimeError):
    """A text cannot be continued: its grammar takes more work than the limits of its library allow."""


class SelectionTimeoutError(LayerZeroError):
    """A selection, or a lock on its way, took longer than its limit."""


class CacheCorruptionError(LayerZeroError):
    """A stored file does not decode to what was written; it was set aside, not overwritten."""

    def __init__(self, message: str, *, path: str | None = None, **context: Any) -> None:
        super().__init__(message, path=path, **context)
        self.path = path


class FileRefusedError(LayerZeroError):
    """A file that a user named is not used at all.

    `problems` are `Rejected`, each with its reason code, the field, what it needs and what it got.
    """

    def __init__(self, message: str, *, path: str, problems: tuple[Rejected, ...], **context: Any) -> None:
        super().__init__(message, path=path, problems=problems, **context)
        self.path = path
        self.problems = problems

    @classmethod
    def of(cls, path: str | os.PathLike[str], *problems: Rejected) -> Self:
        """The error whose message names the file and every problem."""
        name = os.fspath(path)
        return cls(f"{name}: {'; '.join(map(str, problems))}", path=name, problems=problems)

    @classmethod
    def because(
        cls, path: str | os.PathLike[str], reason: Reason, field: str, needs: str, got: str, cure: str = ""
    ) -> Self:
        """The error of one problem, which says at most 200 characters of what it `got`."""
        return cls.of(path, Rejected(reason, field, needs, got[:200], cure or None))


class BundleRefusedError(FileRefusedError):
    """A warm-up bundle is damaged, unsafe, untrusted or of another environment; nothing was written."""


class PlanRefusedError(FileRefusedError):
    """A file of plans is old, damaged, or of another machine, block or policy; nothing of it is used."""


class ReportRefusedError(FileRefusedError):
    """A file is no report, one of another format, or cut off."""


class OverloadedError(LayerZeroError):
    """The batcher is full; try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float, **context: Any) -> None:
        super().__init__(message, retry_after=retry_after, **context)
        self.retry_after = retry_after


class DeadlineExceededError(LayerZeroError, TimeoutError):
    """The deadline passed while the call was still queued; nothing ran."""


class ModeChangedError(LayerZeroError):
    """Grad, inference, autocast or the stream differed after an await from before it."""


class DeviceLostError(LayerZeroError):
    """The device, or the process that owns it, is gone; `retryable` says whether nothing had started."""

    def __init__(self, message: str, *, retryable: bool, **context: Any) -> None:
        super().__init__(message, retryable=retryable, **{"reason": Reason.DEVICE_LOST, **context})
        self.retryable = retryable


class ConsistencyError(LayerZeroError):
    """Ranks that must decide alike did not; `votes` maps rank to digest."""

    def __init__(self, message: str, *, votes: Mapping[int, str] | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.votes = dict(votes or {})


class RuntimeClosedError(LayerZeroError):
    """The runtime was closed; open another with `layerzero.start`."""

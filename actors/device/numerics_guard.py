"""The guard of numerics: sampled live calls are run again on the reference, away from the caller.

A sampled call pays for copies of its operands and outputs, since the caller may change either; one whose
operands are changed while it runs, as by a caller that was cancelled, is let go. The comparison happens on
the guard's thread. A kernel that misses is asked about again in float64, so that the reference's own rounding
convicts no kernel, and then quarantined with the evidence, in later processes too.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero._util import log
from layerzero.actors.device.worker import Worker
from layerzero.health import Health
from layerzero.measure.correctness import Mismatch, clone_tensors, find_mismatch
from layerzero.observe.counters import Counters
from layerzero.ops.op import Args, Op
from layerzero.selection.record import Selection

KERNEL_WRONG = "kernel.found_wrong"
CHECK_FAILED = "numerics.check_failed"
# At most so many copies wait for the reference; a sample beyond that is counted and let go.
MAX_WAITING = 4
MAX_BYTES = 256 << 20
_NOT_CHECKED = frozenset({"grad", "autocast", "capture"})


class NumericsGuard:
    """Checks one call in `round(1 / rate)` of every plan on `device`."""

    reads_arguments = True

    def __init__(self, device: torch.device, health: Health, counters: Counters, rate: float) -> None:
        self._health = health
        self._counters = counters
        self._period = max(1, round(1 / rate))
        self._worker = Worker(f"layerzero-numerics-{device}")
        self._lock = threading.Lock()
        self._waiting = 0

    def wrap(self, op: Op, selection: Selection, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, now and then remembered for checking; ops that draw or write in place are left alone."""
        reference = selection.kernel.startswith("reference.")
        if reference or op.stochastic or not op.pure or selection.request.modes & _NOT_CHECKED:
            return call
        turns, period, kernel = itertools.count(), self._period, selection.kernel

        def guarded(*args: Any) -> Any:
            # Counted, not drawn: the share is exact, and a test can foresee which call is looked at.
            if next(turns) % period:
                return call(*args)
            byte_count = _bytes(args)
            if not self._admit(byte_count):
                self._counters.add("numerics_skipped", kernel=kernel)
                return call(*args)
            try:
                versions, copies = _versions(args), clone_tensors(args)
                result = call(*args)
                if not _unchanged(args, copies, versions):
                    self._counters.add("numerics_skipped", kernel=kernel)
                    self._done()
                    return result
                is_tuple = isinstance(result, tuple)
                outputs = clone_tensors(result) if is_tuple else result.detach().clone()
                event = _recorded(args[0])
                self._worker.submit(lambda: self._check(op, kernel, copies, outputs, event))
            # A call that raises must give its place back, or the guard would end after a few of them.
            except BaseException:
                self._done()
                raise
            return result

        return guarded

    def close(self) -> None:
        """Check no more."""
        self._worker.close()

    def _admit(self, byte_count: int) -> bool:
        with self._lock:
            if byte_count > MAX_BYTES or self._waiting >= MAX_WAITING:
                return False
            self._waiting += 1
            return True

    def _done(self) -> None:
        with self._lock:
            self._waiting -= 1

    def _check(self, op: Op, kernel: str, args: Args, outputs: Any, event: Any) -> None:
        try:
            with torch.no_grad(), _after(event, args[0]):
                mismatch = self._compare(op, args, outputs)
        except Exception as error:
            log.warning(CHECK_FAILED, kernel=kernel, error=f"{type(error).__name__}: {error}"[:200])
        else:
            self._counters.add("numerics_checked", kernel=kernel)
            if mismatch is not None:
                self._quarantine(op, kernel, args, mismatch)
        finally:
            self._done()

    def _compare(self, op: Op, args: Args, outputs: Any) -> Mismatch | None:
        mismatch = find_mismatch(op, args, outputs, op.reference(*args))
        if mismatch is None:
            return None
        # The reference rounds in the operands' dtype, too: only a miss against the exact result counts.
        wide = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
        return find_mismatch(op, args, outputs, op.reference(*wide))

    def _quarantine(self, op: Op, kernel: str, args: Args, mismatch: Mismatch) -> None:
        request = op.check(args)
        sizes = " ".join(f"{name}={size}" for name, size in request.dims.items())
        asks = " ".join(sorted(request.features))
        why = f"wrong numbers: {mismatch} ({request.dtype} {sizes}{' ' + asks if asks else ''})"
        # Kept out before anything reports it, so that a reader of the counter may rely on it; reported even
        # when the quarantine cannot be written.
        try:
            self._health.quarantine(kernel, why)
        finally:
            self._counters.add("numerics_failures", kernel=kernel)
            log.error(
                KERNEL_WRONG, kernel=kernel, op=op.name, error=mismatch.error, limit=mismatch.limit, why=why
            )


def _bytes(args: Args) -> int:
    return sum(a.nbytes for a in args if isinstance(a, Tensor))


def _versions(args: Args) -> list[int | None]:
    """How often each tensor has been changed; None for one that does not count."""
    return [a._version if isinstance(a, Tensor) and not a.is_inference() else None for a in args]


def _unchanged(args: Args, copies: Args, versions: list[int | None]) -> bool:
    """Whether tensors are what was copied of them; those of a GPU change in their stream's order alone."""
    if _versions(args) != versions:
        return False
    return all(
        torch.equal(_bytes_of(original), _bytes_of(copy))
        for original, copy, version in zip(args, copies, versions, strict=True)
        if version is None and isinstance(original, Tensor) and original.is_cpu
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    """Its elements as bytes, so that NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _recorded(first: Tensor) -> Any:
    """An event behind the copies, on a GPU: the guard's stream waits for it."""
    if not first.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _after(event: Any, first: Tensor) -> Any:
    """The guard's own stream, behind `event`."""
    if event is None:
        return torch.inference_mode(False)
    stream = torch.cuda.Stream(first.device)
    stream.wait_event(event)
    return torch.cuda.stream(stream)

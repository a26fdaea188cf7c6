"""Planning for a capture before it begins, since nothing may be chosen, loaded or waited for inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from layerzero.selection.modes import REHEARSAL


@contextmanager
def rehearsal(waits: bool = True) -> Iterator[None]:
    """Inside, calls on a CUDA device of this thread choose as they will while a graph is captured.

    Run the step once here, on the stream that will capture it: each call's kernel is chosen among those
    that are safe under capture, loaded, and run. The capture then finds every plan ready. Unless it `waits`,
    a call for which only kernels will do that are not loaded raises KernelStillLoadingError, and they load
    behind it.
    """
    before = REHEARSAL.on, REHEARSAL.waits
    REHEARSAL.on, REHEARSAL.waits = True, waits
    try:
        yield
    finally:
        REHEARSAL.on, REHEARSAL.waits = before

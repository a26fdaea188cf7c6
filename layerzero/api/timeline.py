"""Recording what this process runs, and for whom, as a trace that Perfetto opens."""

from __future__ import annotations

import os

from layerzero.observe.timeline import MAX_EVENTS, Timeline
from layerzero.runtime import ACTIVE, open_devices
from layerzero.spec.settings import Settings


def timeline(
    path: str | os.PathLike[str],
    *,
    kernels: bool = True,
    nvtx: bool | None = None,
    max_events: int = MAX_EVENTS,
) -> Timeline:
    """Record every batch, kernel and caller of this process during the block, into a Chrome trace at `path`.

    `with lz.timeline("trace.json"): ...` or `async with`, which writes the file beside the event loop. It
    sees all devices of all runtimes, also those that open meanwhile; one timeline at a time. `{pid}` and
    `{rank}` in `path` stand for this process's numbers. `kernels=False` leaves single kernels out; `nvtx`
    (default: the setting) marks batches and kernels as NVTX ranges where CUDA is there. At most `max_events`
    events are kept; the oldest are dropped, and the trace says how many.

    Raises: ConfigurationError: no trace can be written at `path`, where something else than a trace may
        be; on entry also: a timeline runs already. ValueError, TypeError: max_events is too small, or no
        whole number.
    """
    if nvtx is None:
        runtime = ACTIVE.runtime
        nvtx = (runtime.settings if runtime is not None else Settings.load()).nvtx
    return Timeline(path, open_devices, kernels=kernels, nvtx=nvtx, max_events=max_events)

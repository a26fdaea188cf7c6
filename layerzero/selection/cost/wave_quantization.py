"""A kernel's work for a call at full speed: the roofline's time, tiles in waves, copies of its own.

A kernel's latency model is fitted over this time instead of the roofline's alone, so that what its source
says is not left to interpolation: how rows are cut into blocks, that the last wave of blocks takes as long as
a full one, that operands are copied where a batch is joined.
"""

from __future__ import annotations

import math

from layerzero.spec.call_spec import CallSpec
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel, Tiling

# The share of the bandwidth that a copy into another order of axes reaches, as kernels that need one were
# slower by on an H200: set by leaving out one measured bucket in turn.
_COPYING = 0.4


def kernel_work_us(kernel: Kernel, request: CallSpec, hardware: Hardware, ideal_us: float) -> float:
    """Microseconds at full speed of what `kernel` makes of a call for which the roofline needs `ideal_us`."""
    us = ideal_us
    if kernel.tiling is not None:
        us = tile_waves_us(kernel.tiling, request, hardware, ideal_us)
    if kernel.copied_bytes is not None:
        # Read once and written once.
        us += 2e6 * kernel.copied_bytes(request) / (_COPYING * hardware.bandwidth)
    return us


def tile_waves_us(tiling: Tiling, request: CallSpec, hardware: Hardware, ideal_us: float = 0.0) -> float:
    """Microseconds until the last block of attention is done, each at one multiprocessor's share of the peak.

    A block takes its time whole, however few of its rows are asked for, and blocks of equal length run in
    waves: a full one needs its share of `ideal_us`, the last one no less than a block alone. Under a causal
    mask blocks differ and the longest start first, so that many of them end together. Only `ideal_us` where
    waves are not known: a window, a head size beyond the tiling, an unknown number of multiprocessors.
    """
    dims, tile = request.dims, next((r for size, r in tiling.rows if request.dims["D"] <= size), 0)
    if not tile or hardware.threads <= 1 or "window" in request.features:
        return ideal_us
    heads, rows = (dims["Hk"], dims["Sq"] * dims["G"]) if tiling.packed else (dims["Hq"], dims["Sq"])
    blocks = dims["B"] * heads * math.ceil(rows / tile)
    peak = hardware.peak_flops.get(request.dtype) or min(hardware.peak_flops.values(), default=1e9)
    longest = 2.0 * tile * dims["Sk"] * (dims["D"] + dims["Dv"]) * hardware.threads / peak * 1e6
    masked = "causal" in request.features and dims["Sq"] > 1
    # The keys that the mean row sees; the last row sees them all.
    share = 1.0 - dims["Sq"] / (2.0 * max(dims["Sk"], dims["Sq"])) if masked else 1.0
    waves = blocks * share / hardware.threads
    if waves < 1.0:
        return max(ideal_us, longest * (waves if tiling.splits else 1.0))
    if masked:
        return max(ideal_us, longest * waves)
    full, last = divmod(blocks, hardware.threads)
    full_us = full * max(longest, ideal_us * hardware.threads / blocks)
    return full_us + (max(longest, ideal_us * last / blocks) if last else 0.0)

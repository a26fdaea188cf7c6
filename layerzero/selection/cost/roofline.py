"""Expected microseconds of a kernel for a request: a roofline estimate over the device's two roofs."""

from __future__ import annotations

from layerzero.spec.call_spec import CallSpec, WorkEstimate
from layerzero.spec.gpu_map import efficiency_on
from layerzero.spec.hardware import Hardware
from layerzero.spec.kernel import Kernel

ROOFLINE = "roofline"
MEASURED = "measured"
SHIPPED = "shipped table"
# What an estimate has to gain before it is believed: efficiency values miss by about this.
ESTIMATE_MARGIN = 1.3
# Prices that were timed at the very size; all others are inferred.
TIMED = frozenset({MEASURED, SHIPPED})


def ideal_us(work: WorkEstimate, request: CallSpec, hardware: Hardware) -> float:
    """What the roofs alone would need, in microseconds, at full speed and without a launch."""
    peak = hardware.peak_flops.get(request.dtype) or min(hardware.peak_flops.values(), default=1e9)
    return max(work.flops / peak, work.bytes / hardware.bandwidth, 1e-9) * 1e6


def roofline_us(kernel: Kernel, work: WorkEstimate, request: CallSpec, hardware: Hardware) -> float:
    """The longer of computing and moving, at the kernel's stated efficiency, plus one launch."""
    published = efficiency_on(kernel.id, hardware.sm) if hardware.sm is not None else None
    efficiency = published or kernel.efficiency
    peak = hardware.peak_flops.get(request.dtype) or min(hardware.peak_flops.values(), default=1e9)
    compute = work.flops / (peak * efficiency.flops)
    memory = work.bytes / (hardware.bandwidth * efficiency.bandwidth)
    return efficiency.launch_us + max(compute, memory) * 1e6

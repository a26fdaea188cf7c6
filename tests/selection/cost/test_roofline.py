"""A kernel's expected time by the device's two roofs."""

from __future__ import annotations

import pytest
import torch

from layerzero.ops.linear.linear import LINEAR
from layerzero.selection.cost.roofline import ideal_us, roofline_us
from layerzero.spec.call_spec import WorkEstimate
from layerzero.spec.hardware import Hardware
from tests.kernels import kernel

MACHINE = Hardware(
    platform="cpu", device="cpu", name="one", vendor="none", peak_flops={"float32": 1e9}, bandwidth=1e9
)
REQUEST = LINEAR.check(LINEAR.build(torch.ones(4, 8), torch.ones(3, 8))[1])


@pytest.mark.parametrize(("flops", "moved", "ideal"), [(1e6, 3e6, 3000.0), (5e6, 3e6, 5000.0)])
def test_a_call_takes_the_longer_of_computing_and_moving(flops: float, moved: float, ideal: float) -> None:
    """Both go on side by side; a kernel reaches its share of either, and pays for its launch."""
    work, half = WorkEstimate(flops=flops, bytes=moved), kernel("half.linear", launch_us=7.0)
    assert ideal_us(work, REQUEST, MACHINE) == pytest.approx(ideal)
    assert roofline_us(half, work, REQUEST, MACHINE) == pytest.approx(7.0 + ideal / 0.5)
    # A dtype without a roof of its own has the lowest of all.
    other = REQUEST.replace(dtype="float64")
    assert roofline_us(half, work, other, MACHINE) == pytest.approx(7.0 + ideal / 0.5)

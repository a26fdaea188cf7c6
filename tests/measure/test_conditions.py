"""What a machine was like while it was measured: buckets, and nothing invented where nobody can tell."""

from __future__ import annotations

import ctypes

import pytest
import torch

from layerzero.measure import conditions
from layerzero.measure.conditions import Conditions, read_conditions


def _absent() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return True
    return False


def test_the_cpu_has_free_memory_and_no_sensors() -> None:
    """Free bytes are a power of two that is free; temperature and power are unknown, not zero."""
    found = read_conditions(torch.device("cpu"))
    assert found.temperature_c is None and found.power_w is None
    assert found.free_bytes is not None and found.free_bytes & (found.free_bytes - 1) == 0


@pytest.mark.skipif(not _absent(), reason="NVIDIA's management library is installed here")
def test_a_missing_library_says_nothing() -> None:
    """Where the library cannot be loaded, the sensors are None and nothing raises."""
    assert conditions._nvml() is None
    assert conditions._sensors(0) == (None, None)


@pytest.mark.parametrize(
    ("celsius", "watts", "bucket"), [(39, 349, (35, 300)), (40, 350, (40, 350)), (0, 49, (0, 0))]
)
def test_sensors_are_kept_in_buckets(
    celsius: int, watts: int, bucket: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Degrees in steps of 5, watts in steps of 50, rounded down."""
    monkeypatch.setattr(conditions, "_sensors", lambda index: (celsius, watts))
    monkeypatch.setattr(conditions, "free_memory", lambda device: 5 << 30)
    assert read_conditions(torch.device("cuda:0")) == Conditions(*bucket, 4 << 30)

"""What the machine was like while it was measured: temperature, power and free memory, in buckets.

NVIDIA's management library is asked directly, so that no package has to be installed; where it is missing,
and on the CPU, temperature and power are unknown, not zero.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import msgspec
import torch

from layerzero.spec.hardware import free_memory

_TEMPERATURE_STEP_C = 5
_POWER_STEP_W = 50


class Conditions(msgspec.Struct, frozen=True):
    """Buckets: degrees to 5, watts to 50, free bytes to a power of two below."""

    temperature_c: int | None = None
    power_w: int | None = None
    free_bytes: int | None = None


def read_conditions(device: torch.device) -> Conditions:
    """The state of a device."""
    free = free_memory(device)
    bucket = 1 << (free.bit_length() - 1) if free else None
    if device.type != "cuda":
        return Conditions(free_bytes=bucket)
    temperature, power = _sensors(device.index or 0)
    return Conditions(
        _round_down(temperature, _TEMPERATURE_STEP_C), _round_down(power, _POWER_STEP_W), bucket
    )


def _round_down(value: int | None, step: int) -> int | None:
    return None if value is None else value // step * step


def _sensors(index: int) -> tuple[int | None, int | None]:
    """Degrees and watts of a GPU; None where the library does not say."""
    library = _nvml()
    if library is None:
        return None, None
    handle, number = ctypes.c_void_p(), ctypes.c_uint()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    name = f"GPU-{uuid}".encode() if uuid is not None else b""
    if library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
        return None, None
    temperature = None if library.nvmlDeviceGetTemperature(handle, 0, ctypes.byref(number)) else number.value
    power = None if library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(number)) else number.value // 1000
    return temperature, power


@functools.cache
def _nvml() -> Any:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return None if library.nvmlInit_v2() else library

"""CUDA C++ of this package, compiled by NVRTC when a kernel is first loaded, for the device that it runs on.

torch brings NVRTC and finds it (`torch.cuda._compile_kernel`): no compiler has to be installed.

Every function here is launched so that it may begin while the one before it on the stream ends: it waits by
itself before it reads what others wrote (`wait_for_previous` in common.cuh). So a chain of short kernels has
no gaps. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FOLDER = Path(__file__).parent
_COMPILING = threading.Lock()
HALF = {torch.float16: 0, torch.bfloat16: 1}


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`: a number that says which, and a union of 64 bytes."""

    _fields_ = (("which", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Launch(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 6), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


_MAY_BEGIN_EARLY = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))


class CudaFunction:
    """A function on a device. `shared` are the bytes of shared memory that a block has, beside its own."""

    def __init__(self, kernel: Any, device: torch.device, shared: int) -> None:
        kernel.set_shared_memory_config(shared)
        self._kernel, self._device, self._shared = kernel, device, shared
        self._begins_early = torch.cuda.get_device_capability(device) >= (9, 0)
        self._driver = torch.cuda._utils._get_gpu_runtime_library()

    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[Tensor | int | float]
    ) -> None:
        """Launch on the current stream. Tensors go as pointers, whole numbers as `int`, others as `double`.

        Raises: RuntimeError: the driver refuses.
        """
        values = [arg.data_ptr() if isinstance(arg, Tensor) else _bits(arg) for arg in args]
        slots = (ctypes.c_longlong * len(values))(*values)
        first = ctypes.addressof(slots)
        places = (ctypes.c_void_p * len(values))(*range(first, first + 8 * len(values), 8))
        stream = torch.cuda.current_stream(self._device).cuda_stream
        launch = _Launch(
            (*grid, *block), self._shared, stream, ctypes.pointer(_MAY_BEGIN_EARLY), int(self._begins_early)
        )
        torch.cuda._utils._check_cuda(
            self._driver.cuLaunchKernelEx(ctypes.byref(launch), self._kernel.func, places, None)
        )


def _bits(number: float) -> int:
    """A number as it lies in eight bytes: an `int` in the lower four, a `double` in all."""
    return number if isinstance(number, int) else struct.unpack("=q", struct.pack("=d", number))[0]


@functools.cache
def _source(name: str) -> str:
    return (_FOLDER / name).read_text()


@functools.cache
def _function(device: int, files: tuple[str, ...], name: str, shared: int, defines: Any) -> CudaFunction:
    text = "".join(f"#define {key} {value}\n" for key, value in defines)
    with torch.cuda.device(device):
        # A thread that has not called the driver has no context, and NVRTC's module needs one.
        torch.cuda.mem_get_info(device)
        major, minor = torch.cuda.get_device_capability(device)
        # With an "a" come the instructions that this generation alone has.
        kernel = torch.cuda._compile_kernel(
            text + "".join(map(_source, files)), name, compute_capability=f"{major}{minor}a"
        )
        return CudaFunction(kernel, torch.device("cuda", device), shared)


def function(
    device: torch.device, files: tuple[str, ...], name: str, shared: int = 0, **defines: int | str
) -> CudaFunction:
    """The function `name` of files behind common.cuh, with macros set, loaded on a device; compiled once.

    `shared` are the bytes of shared memory that a block has, beside its own.
    Raises: RuntimeError: NVRTC refuses.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with _COMPILING:
        return _function(index, ("common.cuh", *files), name, shared, tuple(sorted(defines.items())))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def or_any(operand: Tensor | None, other: Tensor) -> Tensor:
    """`operand`, or another tensor where a function takes a pointer that it does not follow."""
    return other if operand is None else operand

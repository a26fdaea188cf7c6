"""CUDA C++ of this package, compiled by NVRTC when a kernel is first loaded, for the device that it runs on.

torch brings NVRTC and finds it (`torch.cuda._compile_kernel`): no compiler has to be installed.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FOLDER = Path(__file__).parent
_COMPILING = threading.Lock()
HALF = {torch.float16: 0, torch.bfloat16: 1}


@functools.cache
def _source(name: str) -> str:
    return (_FOLDER / name).read_text()


@functools.cache
def _function(device: int, files: tuple[str, ...], name: str, shared: int, defines: Any) -> Any:
    text = "".join(f"#define {key} {value}\n" for key, value in defines)
    with torch.cuda.device(device):
        # A thread that has not called the driver has no context, and NVRTC's module needs one.
        torch.cuda.mem_get_info(device)
        major, minor = torch.cuda.get_device_capability(device)
        # With an "a" come the instructions that this generation alone has.
        kernel = torch.cuda._compile_kernel(
            text + "".join(map(_source, files)), name, compute_capability=f"{major}{minor}a"
        )
        kernel.set_shared_memory_config(shared)
    return kernel


def function(
    device: torch.device, files: tuple[str, ...], name: str, shared: int = 0, **defines: int | str
) -> Any:
    """The function `name` of files behind common.cuh, with macros set, loaded on a device; compiled once.

    `shared` are its bytes of shared memory that are given at launch. Raises: RuntimeError: NVRTC refuses.
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

"""Flex attention out of torch on the CPU: windows, soft caps, ALiBi, block-sparse masks in one compiled loop.

Only blocks of 128 by 128 scores in which a query sees a key are computed, and no bias is written out. torch
compiles one C++ program for each shape, which takes seconds, so the kernel is ready by shape and takes few
lengths. On the CPU torch 2.13 has neither a gradient nor a log-sum-exp for it, and compiled for sizes that
change its programs do not always build (a symbol's name is replaced inside longer ones: `ks1` in `ks15`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel

# Points of the grid that keys keep sizes on: there one key is one shape, and a plan whose program is compiled
# is never given a shape whose program is not. They also bound how many programs there can be.
LENGTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def _programs() -> Any:
    """The module that compiles; torch's part of it is imported with the first program."""
    return importlib.import_module("layerzero.backends.torch_kernels.flex_programs")


def _attention() -> Callable[..., Any]:
    importlib.import_module("torch.nn.attention.flex_attention")
    return _programs().attention  # type: ignore[no-any-return]


def _unit(request: CallSpec) -> str:
    sizes = "x".join(str(request.dim(name)) for name in ("B", "Hq", "Hk", "Sq", "Sk", "D"))
    return " ".join([sizes, *sorted(request.features & {"softcap", "mask_bool", "block_mask"})])


def _mask_bytes(request: CallSpec) -> int:
    """The mask for every head, and which of its blocks are seen."""
    is_masked = bool(request.features & {"mask_bool", "block_mask"})
    return 2 * is_masked * math.prod(request.dim(name) for name in ("B", "Hq", "Sq", "Sk"))


KERNELS: tuple[Kernel, ...] = (
    Kernel.of(
        "torch.attention.flex",
        _attention,
        (0.22, 0.5, 400.0),
        "benchmarks/results/flex_cpu.json: causal 1024 beside sdpa_flash_cpu; the launch is an estimate",
        source="torch 2.13, _inductor/kernel/flex/flex_cpu.py; run against float64 on torch 2.13 CPU",
        platforms="cpu",
        isa="avx2",
        torch_min="2.13",
        dtypes="float32",
        features="causal scale scale_not_positive gqa window softcap alibi mask_bool mask_and_causal "
        "empty_rows block_mask",
        layouts="BHSD",
        contiguous=True,
        limits=(
            f"B in {list(BATCHES)}",
            f"Sq in {list(LENGTHS)}",
            f"Sk in {list(LENGTHS)}",
            "D == Dv else HEAD_DIMS_DIFFER",
        ),
        gradient=False,
        autocast=False,
        workspace_bytes=_mask_bytes,
        tie_break_order=48,
        slow_import=True,
        compile_key=_unit,
        compile=lambda request: _programs().build(request),
    ),
)

"""What the generations have in common: index tensors, flags and head sizes as they take them, one mould."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.attention.arguments import AttentionArgs, PagedArgs, RaggedArgs
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import SDPA_FLASH
from layerzero.spec.kernel import Kernel

FEATURES = f"causal scale gqa window softcap {SDPA_FLASH}"
SAME_HEAD_SIZES = "D == Dv else HEAD_DIMS_DIFFER"
HEAD_SIZES = (
    "D <= 256 else HEAD_DIM_TOO_LARGE",
    "D % 8 == 0 else HEAD_DIM_ALIGNMENT",
    SAME_HEAD_SIZES,
)
THIRD: dict[str, Any] = {
    "efficiency": (0.6, 0.8, 20.0),
    "measured": "an estimate, from FlashInfer's FA3 template",
}


def flags(call: AttentionArgs | RaggedArgs | PagedArgs) -> dict[str, Any]:
    """The keyword arguments of the second and the third generation."""
    return {
        "softmax_scale": call.scale, "causal": call.is_causal, "window_size": call.window or (-1, -1),
        "softcap": call.softcap or 0.0,
    }  # fmt: skip


def both(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The op's pair; a row that saw nothing has -inf, which the second generation marks with +inf."""
    return out, lse.masked_fill(lse == torch.inf, -torch.inf)


def workspace_bytes(request: CallSpec) -> int:
    """The log-sum-exp in float32, and what keys split between blocks leave to be joined.

    Splits stop where the device is full: at most two blocks of 64 rows and 256 columns in float32 for each of
    some 150 multiprocessors.
    """
    rows = request.dim("T") or request.dim("B") * request.dim("Sq")
    return 4 * request.dim("Hq") * (rows + 127) + 150 * 2 * 64 * 257 * 4


_kernel = functools.partial(
    Kernel.of,
    platforms="cuda",
    last_stride1=True,
    alignment=16,
    gradient=False,
    slow_import=True,  # importing loads or compiles machine code
    workspace_bytes=workspace_bytes,
)
ampere = functools.partial(_kernel, sm_min=80, sm_max=121)
# What the kernels of the third and the fourth generation exist for; other families have other limits.
hopper = functools.partial(
    _kernel,
    sm_min=90,
    sm_max=90,
    dtypes="float16 bfloat16",
    limits=HEAD_SIZES,
)

"""What the generations have in common: index tensors, flags and head sizes as they take them, one mould."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from layerzero.ops.attention.arguments import AttentionArgs, PagedArgs, RaggedArgs
from layerzero.ops.host_copies import max_seqlen
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel

FEATURES = "causal scale gqa window softcap"
SAME_HEAD_SIZES = "D == Dv else HEAD_DIMS_DIFFER"
HEAD_SIZES = (
    "D <= 256 else HEAD_DIM_TOO_LARGE",
    "D % 8 == 0 else HEAD_DIM_ALIGNMENT",
    SAME_HEAD_SIZES,
)
Window = tuple[int, int] | None
Result = Tensor | tuple[Tensor, Tensor]
THIRD: dict[str, Any] = {
    "efficiency": (0.6, 0.8, 20.0),
    "measured": "an estimate, from FlashInfer's FA3 template",
}


DenseCall = AttentionArgs
PagedCall = PagedArgs


class RaggedCall(RaggedArgs):
    """A call of `ragged_attention` with what these libraries ask about its offsets."""

    @property
    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """Offsets of queries and of keys, and the longest of each."""
        longest_q = max_seqlen(self.cu_seqlens_q, self.q.shape[0])
        longest_k = max_seqlen(self.cu_seqlens_k, self.k.shape[0])
        return int32(self.cu_seqlens_q), int32(self.cu_seqlens_k), longest_q, longest_k


AttentionCall = DenseCall | RaggedCall | PagedCall
A = TypeVar("A", DenseCall, RaggedCall, PagedCall)


def takes(kind: type[A]) -> Callable[[Callable[[A], Result]], Callable[..., Result]]:
    """Make a function of one call into one of the op's positional arguments."""

    def of(run: Callable[[A], Result]) -> Callable[..., Result]:
        @functools.wraps(run)
        def call(*args: Any) -> Result:
            return run(kind._make(args))

        return call

    return of


def int32(values: Tensor) -> Tensor:
    """Index values as int32 one behind the other; a copy only where they are not."""
    return values.to(torch.int32).contiguous()


def flags(call: AttentionCall) -> dict[str, Any]:
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

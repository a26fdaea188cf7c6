"""What the generations have in common: index tensors, flags and head sizes as they take them, one mould."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.kernel import AtMost, Capability, Efficiency, Kernel, MultipleOf, SameAs
from layerzero.reasons import Reason

HALF = frozenset({"float16", "bfloat16"})
FEATURES = frozenset({"causal", "scale", "gqa", "window", "softcap"})
SAME_HEAD_SIZES = SameAs("D", "Dv", Reason.HEAD_DIMS_DIFFER)
# What the kernels of the third and the fourth generation exist for.
HEAD_SIZES = (
    AtMost("D", 256, Reason.HEAD_DIM_TOO_LARGE),
    MultipleOf("D", 8, Reason.HEAD_DIM_ALIGNMENT),
    SAME_HEAD_SIZES,
)
Window = tuple[int, int] | None
Result = Tensor | tuple[Tensor, Tensor]


def int32(values: Tensor) -> Tensor:
    """Index values as int32 one behind the other; a copy only where they are not."""
    return values.to(torch.int32).contiguous()


def flags(is_causal: bool, scale: float | None, window: Window, softcap: float | None) -> dict[str, Any]:
    """The keyword arguments of the second and the third generation."""
    return {
        "softmax_scale": scale, "causal": is_causal, "window_size": window or (-1, -1),
        "softcap": softcap or 0.0,
    }  # fmt: skip


def both(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The op's pair; a row that saw nothing has -inf, which the second generation marks with +inf."""
    return out, lse.masked_fill(lse == torch.inf, -torch.inf)


def kernel(
    generation: str, op: str, variant: str, load: Callable[[], Callable[..., Any]], capability: Capability,
    efficiency: Efficiency, rank: int, distribution: str,
) -> Kernel:  # fmt: skip
    """A cold kernel of one generation: importing loads or compiles machine code."""
    return Kernel(
        id=f"{generation}.{op}.{variant}",
        op=op,
        backend=generation,
        capability=capability,
        load=load,
        efficiency=efficiency,
        rank=rank,
        cold=True,
        distributions=(distribution,),
    )

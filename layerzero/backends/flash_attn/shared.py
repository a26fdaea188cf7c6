"""What the generations have in common: index tensors as they take them, windows, kernels from one mould."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.kernel import Capability, Efficiency, Kernel
from layerzero.ops import mirrors

HALF = frozenset({"float16", "bfloat16"})
Window = tuple[int, int] | None
Result = Tensor | tuple[Tensor, Tensor]


def int32(values: Tensor) -> Tensor:
    """Index values as int32 one behind the other; a copy only where they are not."""
    return values.to(torch.int32).contiguous()


def longest(cu_seqlens: Tensor, rows: int) -> int:
    """The longest sequence between offsets, or all rows where that would need asking the device.

    The kernels take any bound: blocks beyond a sequence's end leave at once. A graph that is being captured
    will be replayed over other lengths, so there it is all rows too.
    """
    found = mirrors.mirror(cu_seqlens)
    if found is None or torch.cuda.is_current_stream_capturing():
        return rows
    return int(found.values.diff().max())


def both(out: Tensor, lse: Tensor, return_lse: bool) -> Result:
    """The op's result; a row that saw nothing has -inf, which the second generation marks with +inf."""
    if not return_lse:
        return out
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

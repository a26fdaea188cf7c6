"""Whether a kernel's numbers agree with the reference's: asked before it is timed, and of live calls.

Largest errors alone pass wrong kernels, and in bfloat16 one part in a hundred hides inside rounding. Rounding
is random and averages out: what is compared is the relative L2 error, and the scale that fits best.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from layerzero.ops.op import Args, Op

# Relative L2 error that rounding in the dtype explains, with a margin of two to four over what was seen of
# right kernels (bf16 attention and MLP 2e-3 to 4e-3); a fit's scale is far steadier, so a quarter of it.
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 8e-3}
_SCALE_SHARE = 0.25
_MIN_ELEMENTS_FOR_SCALE = 64
# Draws from equal distributions may differ where two numbers tie; a wrong kernel differs everywhere.
_MAX_UNEQUAL = 0.01


class Mismatch(msgspec.Struct, frozen=True):
    """How an output misses the reference: which output, by how much, and in words."""

    output: int
    error: float
    limit: float
    why: str

    def __str__(self) -> str:
        return f"output {self.output}: {self.why}"


def find_mismatch(op: Op, args: Args, result: Any, reference: Any) -> Mismatch | None:
    """The first output of `result` that is not the reference's; None where all agree.

    Limits follow the widest rounding on the way: the coarser of operands and output.
    """
    outputs = result if isinstance(result, tuple) else (result,)
    expected = reference if isinstance(reference, tuple) else (reference,)
    floats = (a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point())
    coarse = max((LIMITS.get(dtype, 0.0) for dtype in floats), default=0.0)
    for index, (ours, theirs) in enumerate(zip(outputs, expected, strict=True)):
        if not isinstance(ours, Tensor) or ours.numel() == 0:
            continue
        if ours.dtype.is_floating_point and ours.dtype in LIMITS:
            mismatch = _compare_floats(index, ours, theirs, max(coarse, LIMITS[ours.dtype]))
        else:
            mismatch = None if op.stochastic else _compare_exactly(index, ours, theirs)
        if mismatch is not None:
            return mismatch
    return None


def _compare_floats(index: int, ours: Tensor, theirs: Tensor, limit: float) -> Mismatch | None:
    wide = torch.float64 if torch.float64 in (ours.dtype, theirs.dtype) else torch.float32
    a, b = ours.detach().to(wide).flatten(), theirs.detach().to(wide).flatten()
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite):
        places = int((torch.isfinite(a) != finite).sum())
        return Mismatch(index, float("inf"), limit, f"{places} elements are finite in one of the two only")
    a, b = torch.where(finite, a, 0), torch.where(finite, b, 0)
    size = float(b.norm())
    error = float((a - b).norm())
    if size == 0.0:
        return None if error <= limit * a.numel() ** 0.5 else Mismatch(index, error, limit, "is not zero")
    if error > limit * size:
        return Mismatch(
            index, error / size, limit, f"relative L2 error {error / size:.3g}, allowed {limit:.3g}"
        )
    scale = float((a @ b) / (b @ b)) - 1.0
    allowed = limit * _SCALE_SHARE
    if a.numel() >= _MIN_ELEMENTS_FOR_SCALE and abs(scale) > allowed:
        return Mismatch(index, abs(scale), allowed, f"scaled by 1{scale:+.3g}, allowed {allowed:.3g}")
    return None


def _compare_exactly(index: int, ours: Tensor, theirs: Tensor) -> Mismatch | None:
    share = float((ours != theirs.to(ours.dtype)).float().mean())
    if share <= _MAX_UNEQUAL:
        return None
    return Mismatch(index, share, _MAX_UNEQUAL, f"{share:.1%} of the elements differ")


def clone_tensors(args: Args) -> Args:
    """The arguments with tensors of their own, laid out as before."""
    return tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)


def poison(args: Args) -> None:
    """Fill memory that the next allocations will get with NaN, so that what a kernel does not write shows."""
    first = args[0]
    sizes = {a.numel() for a in args if isinstance(a, Tensor) and a.is_floating_point()}
    blocks = [torch.full((size,), torch.nan, dtype=first.dtype, device=first.device) for size in sizes
            if first.is_floating_point()]  # fmt: skip
    del blocks

"""How near a kernel has to come to the truth; `tests/bounds.py` has what tests alone compare by.

The truth is the op's reference in float64 on the operands as given, already rounded to their dtype. The
yardstick is plain torch in the operands' own dtype, the baseline: a kernel may err twice as much as it does.
Source: flash-attention's own tests for the factor and the rounding term; torch.finfo for the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR = 2.0
SOFTCAP_FACTOR = 3.0
# Sums in another order: float32 and float64 results may differ by this many units in the last place of the
# output's root mean square; half precision results by their own rounding alone.
ULPS = {torch.float32: 64.0, torch.float64: 64.0, torch.float16: 1.0, torch.bfloat16: 1.0}
TILE_ROWS = 128
# The relative L2 error of float32 results whose products have factors rounded to TF32, ten bits of mantissa.
# They are compared by this alone, where a caller has allowed them.
TF32 = 1e-2
# The parity ladder's largest absolute difference of a whole model's outputs in float32.
PARITY_LOGITS = 1e-3
# Of gradients after the first step of training, and of the embedding's.
PARITY_LATER_GRADIENT, PARITY_EMBEDDING_GRADIENT = 1e-3, 1e-2


def mismatches(
    out: Tensor, truth: Tensor, baseline: Tensor, *, softcap: bool = False, factor: float = FACTOR
) -> list[str]:
    """Why `out` is not good enough, in words; empty where it is.

    `truth` is float64, `out` and `baseline` are in the output's dtype, all of one shape. Checked are the
    places of NaN and infinity, the largest error, the relative L2 error of the whole and of each tile of
    128 rows, against `factor` times the same of the baseline, half as much again where scores were capped.
    """
    if out.shape != truth.shape:
        return [f"shape {tuple(out.shape)}, not {tuple(truth.shape)}"]
    if out.numel() == 0:
        return []
    problems = _special_values(out, truth.to(out.dtype))
    factor *= SOFTCAP_FACTOR / FACTOR if softcap else 1.0
    finite = torch.isfinite(truth.to(out.dtype)) & torch.isfinite(out)
    zero = torch.zeros((), dtype=torch.float64)
    exact = torch.where(finite, truth.double(), zero)
    wrong = torch.where(finite, out.double() - exact, zero)
    allowed = torch.where(finite & torch.isfinite(baseline), baseline.double() - exact, zero)
    worst, bound = wrong.abs().max().item(), factor * allowed.abs().max().item() + rounding(exact, out.dtype)
    if worst > bound:
        problems.append(f"largest error {worst:.3g} above {bound:.3g}")
    rows = [t.reshape(-1, t.shape[-1]) if t.dim() else t.reshape(1, 1) for t in (wrong, allowed, exact)]
    unit = ULPS[out.dtype] * torch.finfo(out.dtype).eps
    for start in range(0, rows[0].shape[0], TILE_ROWS):
        error, base, size = (t[start : start + TILE_ROWS].norm().item() for t in rows)
        if error > factor * base + unit * size + rounding(exact, out.dtype):
            problems.append(f"rows from {start}: L2 error {error:.3g}, baseline {base:.3g} of {size:.3g}")
            break
    return problems


def rounding(truth: Tensor, dtype: torch.dtype) -> float:
    """What the output's dtype alone costs: adding and taking 0.3, as flash-attention measures it."""
    rounded = truth.to(dtype)
    shift = (rounded + 0.3 - 0.3 - rounded).abs().max().item()
    scale = truth.square().mean().sqrt().item()
    return 2.0 * shift + ULPS[dtype] * torch.finfo(dtype).eps * scale


def _special_values(out: Tensor, truth: Tensor) -> list[str]:
    kinds = (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf))
    return [
        f"{name} at other places: {int(test(out).sum())}, not {int(test(truth).sum())}"
        for name, test in kinds
        if not torch.equal(test(out), test(truth))
    ]

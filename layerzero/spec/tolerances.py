"""How near a kernel has to come to the truth; every number of every numerics test is here.

The truth is the op's reference in float64 on the operands as given, already rounded to their dtype. The
yardstick is plain torch in the operands' own dtype, the baseline: a kernel may err twice as much as it does.
Source: flash-attention's own tests for the factor and the rounding term; torch.finfo for the rest.
"""

from __future__ import annotations

from types import MappingProxyType

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
# The parity ladder's largest absolute differences in float32: of one op and its gradients, of a layer and of
# each of its stages, of a whole model's outputs.
PARITY_KERNEL, PARITY_LAYER, PARITY_LOGITS = 1e-5, 1e-4, 1e-3
# How much the perplexity of the shipped text may grow where the shipped model's matrices are rounded to a
# format, each by its usual scales, and where its keys and values are kept in one, by token.
PERPLEXITY = {"int8": 1.005, "fp8_e4m3": 1.02, "int4": 1.08, "nf4": 1.06, "nvfp4": 1.05, "mxfp4": 1.06}
# The same where gptq rounds by the rest of that text, over all passages of the test together; and how much
# more than rounding to the nearest it may cost there, of formats that cost next to nothing.
PERPLEXITY_GPTQ = {"int8": 1.003, "fp8_e4m3": 1.005, "int4": 1.02, "nvfp4": 1.02, "mxfp4": 1.03}
PERPLEXITY_GPTQ_OVER_NEAREST = 1.002
PERPLEXITY_KV = {"int8": 1.005, "fp8_e4m3": 1.02, "fp8_e5m2": 1.03}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What the sources of this project's requirements allow, absolute and relative alike, by kind of op and dtype;
# never less than one unit in the last place of what is compared.
SOURCES: MappingProxyType[str, MappingProxyType[torch.dtype, float]] = MappingProxyType(
    {
        kind: MappingProxyType(dict(zip(_DTYPES, allowed, strict=True)))
        for kind, allowed in (
            ("attention", (1e-3, 1e-2, 1e-5)), ("norm", (1e-3, 1e-2, 1e-6)), ("linear", (1e-3, 1e-2, 1e-6)),
            ("rope", (1e-4, 1e-3, 1e-6)),
        )
    }
)  # fmt: skip
# Of training, after so many steps: of weights, and of the loss.
PARITY_TRAINING = MappingProxyType({1: (1e-5, 1e-5), 5: (1e-3, 1e-2), 20: (1e-2, 1e-1)})
# Of gradients in the first step, in later ones, and of the embedding's in later ones.
PARITY_TRAINING_GRADIENT, PARITY_LATER_GRADIENT, PARITY_EMBEDDING_GRADIENT = 1e-5, 1e-3, 1e-2
# Of how far a loss has fallen after a hundred steps, as a share of it.
PARITY_TREND = 0.1


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
    differences = []
    for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        if not torch.equal(test(out), test(truth)):
            differences.append(
                f"{name} at other places: {int(test(out).sum())}, not {int(test(truth).sum())}"
            )
    return differences

"""How far two results are apart, in the terms that reference tests report: errors, ratios, worst places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# (absolute, relative) by output dtype: the published suites' own table.
TOLERANCES = {
    "float32": (1e-5, 1e-5),
    "float16": (1e-3, 1e-3),
    "bfloat16": (8e-3, 1e-2),
    "float8_e4m3fn": (1e-1, 2e-1),
    "float4_e2m1fn_x2": (1e-1, 2e-1),
}
HIT_RATIO = 0.85
LOW_PRECISION = frozenset({"float8_e4m3fn", "float4_e2m1fn_x2"})


@dataclass(frozen=True)
class Errors:
    """Differences of one output; `worst` are (index, got, wanted) of the five largest."""

    max_abs: float
    mean_abs: float
    max_rel: float
    mean_rel: float
    mse: float
    cosine: float
    hit_ratio: float
    worst: tuple[tuple[tuple[int, ...], float, float], ...]


def errors(got: Tensor, wanted: Tensor, atol: float, rtol: float) -> Errors:
    """The differences of two tensors of one shape.

    Raises: AssertionError: the shapes differ.
    """
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    a, b = got.double().flatten(), wanted.double().flatten()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(math.inf, math.inf)
    relative = torch.where(same, 0.0, gap / b.abs().clamp_min(1e-12))
    top = gap.topk(min(5, len(gap))).indices.tolist()
    worst = tuple((_index(place, got.shape), a[place].item(), b[place].item()) for place in top if gap[place])
    finite = a.isfinite() & b.isfinite()
    norms = (a[finite].norm() * b[finite].norm()).item()
    hit = (gap <= atol + rtol * b.abs().nan_to_num()).double().mean().item()
    return Errors(
        gap.max().item(), gap.mean().item(), relative.max().item(), relative.mean().item(),
        gap.square().mean().item(), (a[finite] @ b[finite]).item() / norms if norms else 1.0, hit, worst,
    )  # fmt: skip


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tuple(shape)))


def check_close(
    got: Sequence[Tensor], wanted: Sequence[Tensor], names: Sequence[str], scale: float = 1.0
) -> None:
    """Assert that results agree by their dtypes' tolerances times `scale`, low precision by hit ratio.

    Raises: AssertionError: another number of results, shapes, or differences, with the worst places.
    """
    assert len(got) == len(wanted) == len(names), f"{len(got)} results, wanted {len(wanted)}: {names}"
    for name, one, other in zip(names, got, wanted, strict=True):
        dtype = str(other.dtype).removeprefix("torch.")
        if not other.is_floating_point():
            assert torch.equal(one.to(other.dtype), other), f"{name}: integers differ"
            continue
        atol, rtol = (t * scale for t in TOLERANCES[dtype])
        found = errors(one, other, atol, rtol)
        needs = HIT_RATIO if dtype in LOW_PRECISION else 1.0
        assert found.hit_ratio >= needs, (
            f"{name}: {found.hit_ratio:.2%} within {atol:g} + {rtol:g} * |wanted|, needs {needs:.0%}; "
            f"max {found.max_abs:.3g}, mean {found.mean_abs:.3g}, cosine {found.cosine:.6f}; "
            f"worst {', '.join(f'{i}: {a:.4g} for {b:.4g}' for i, a, b in found.worst)}"
        )

"""Operands whose rows overlap, repeat or have gaps, in every kernel of this CPU, against float64 in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.backends import availability, load_builtin

# All but the one that torch's compiler makes, which takes ten seconds.
HERE = [
    k
    for k in load_builtin()
    if "cpu" in k.capability.platforms and not availability(k) and "flex" not in k.id
]
# Relative to a result's root mean square.
NEAR = {torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
Made = Callable[..., Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def overlapping(*shape: int) -> Tensor:
    """Each row begins one number behind the one before, as in a window that slides over a signal."""
    steps = [math.prod(shape[axis + 1 : -1]) for axis in range(len(shape) - 1)]
    return drawn(math.prod(shape[:-1]) + shape[-1]).as_strided(shape, (*steps, 1))


def repeated(*shape: int) -> Tensor:
    """One row, many times."""
    return drawn(*shape[:-2], 1, shape[-1]).expand(shape)


def with_gaps(*shape: int) -> Tensor:
    """Every second number of a row."""
    return drawn(*shape[:-1], 2 * shape[-1])[..., ::2]


def _as(dtype: torch.dtype, made: Made, *shape: int) -> Tensor:
    """A tensor that lies as `made` lays it: a cast would lay it out anew."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return made(*shape)
    finally:
        torch.set_default_dtype(before)


def numbers(tensor: Tensor) -> Any:
    return tensor.double().numpy()


def attended(q: Any, k: Any, v: Any) -> Any:
    """Causal attention, aligned at the last query and the last key."""
    rows, keys = q.shape[-2], k.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    hidden = np.arange(keys)[None, :] > np.arange(rows)[:, None] + keys - rows
    weights = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, keepdims=True)))
    return weights / weights.sum(-1, keepdims=True) @ v


def turned(x: Any, cos: Any, sin: Any) -> Any:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([first * c - second * s, first * s + second * c, rest], -1)


def normed(x: Any, weight: Any, eps: float) -> Any:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def check(op: str, args: tuple[Any, ...], truth: list[Any], **options: Any) -> None:
    """Every kernel that takes the call, and the one that is chosen, gives the truth."""
    tried = 0
    for kernel in [None, *(kernel.id for kernel in HERE if kernel.op == op)]:
        try:
            out = getattr(lz.sync, op)(*args, backend=kernel, **options)
        except lz.NoKernelFoundError:
            continue
        tried += 1
        for part, exact in zip(out if isinstance(out, tuple) else (out,), truth, strict=True):
            wrong = np.abs(numbers(part) - exact).max()
            assert wrong <= NEAR[part.dtype] * (np.abs(exact).max() + 1e-30), (op, kernel, wrong)
    assert tried >= 2


@pytest.mark.parametrize("made", [overlapping, repeated, with_gaps])
@pytest.mark.parametrize("dtype", list(NEAR), ids=str)
def test_rows_may_lie_anyhow(made: Made, dtype: torch.dtype) -> None:
    """Each operand in turn, the others dense."""
    for place in range(3):
        q, k, v = (
            _as(dtype, made if place == at else drawn, 2, 2, rows, 16) for at, rows in enumerate((5, 7, 7))
        )
        check("attention", (q, k, v), [attended(*map(numbers, (q, k, v)))], is_causal=True)
    cos, sin, positions = drawn(9, 2), drawn(9, 2), torch.tensor([3, 8, 0])
    for first, second in ((made, drawn), (drawn, made)):
        q, k = _as(dtype, first, 3, 2, 6), _as(dtype, second, 3, 2, 6)
        angles = numbers(cos)[positions], numbers(sin)[positions]
        check("rope", (q, k, positions, cos, sin), [turned(numbers(q), *angles), turned(numbers(k), *angles)])
        x, weight = _as(dtype, first, 5, 24), _as(dtype, second, 8, 24)
        check("linear", (x, weight), [numbers(x) @ numbers(weight).T])
        check("rms_norm", (x, weight[0]), [normed(numbers(x), numbers(weight[0]), 1e-6)])


@pytest.mark.parametrize("eps", [0.0, 1e-60, 1e-5])
def test_a_norm_needs_no_eps(eps: float) -> None:
    """Zero, and what is zero in float32, are numbers like others."""
    x, residual, weight = drawn(6, 24), drawn(6, 24).flip(0), drawn(24)
    check("rms_norm", (x, weight), [normed(numbers(x), numbers(weight), eps)], eps=eps)
    total = numbers(x + residual)
    check("add_rms_norm", (x, residual, weight), [normed(total, numbers(weight), eps), total], eps=eps)

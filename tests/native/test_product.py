"""`product`: torch's linear over dense rows in one operator, and what it leaves to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from tests.native.twins import compiled as compiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16), (2, 1, 3, 16)])
def test_it_has_the_bits_of_torchs_linear(compiled: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """For weights that are dense, transposed, or a part of another."""
    x, wide = torch.randn(shape, dtype=dtype), torch.randn(40, 32, dtype=dtype)
    with torch.no_grad():
        for weight in (
            wide[:, :16].contiguous(),
            wide[5:21, 3:19].t(),
            wide[::2, 16:],
            torch.nn.Parameter(wide[:, 8:24]),
        ):
            out = compiled.product(x, weight)
            assert torch.equal(out, linear(x, weight)) and out.is_contiguous() and not out.requires_grad
    with torch.inference_mode():
        assert compiled.product(x, wide[:, :16]).is_inference()


def test_what_needs_more_is_torchs(compiled: Any) -> None:
    """A gradient, autocast, rows with gaps or none, other dtypes, what does not fit."""
    x, weight = torch.randn(3, 16), torch.randn(5, 16)
    assert compiled.product(x, weight) is not NotImplemented
    for rows, matrix in (
        (x, weight.clone().requires_grad_()),
        (x.clone().requires_grad_(), weight),
        (torch.randn(16, 3).t(), weight),
        (x[:0], weight),
        (x[0], weight),
        (x, weight[:0]),
        (x.double(), weight),
        (x, weight[:, :8]),
        (x, weight[0]),
        (x.to("meta"), weight),
        (x, None),
    ):
        assert compiled.product(rows, matrix) is NotImplemented
    with torch.autocast("cpu"):
        assert compiled.product(x, weight) is NotImplemented
    seen = []
    torch.vmap(lambda row: seen.append(compiled.product(row, weight)) or row)(x[None])  # type: ignore[func-returns-value]
    assert seen == [NotImplemented]
